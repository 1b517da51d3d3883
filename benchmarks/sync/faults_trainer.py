"""A trainer that kills itself with SIGKILL at a chosen moment of an update: ``python -m benchmarks.sync.faults_trainer JSON``.

It prints the update's id as soon as the update is open, and never the end: that it comes to is a fault of the benchmark.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sync.weights import read, read_draft
from trainer_bridge import connect, wire
from trainer_bridge.publisher import Update
from trainer_bridge.session import UpdateState

OFFERED, STAGING, FINISHED, VERIFIED, COMMITTING, COMMITTED = MOMENTS = (
    "OFFERED", "STAGING", "FINISHED", "VERIFIED", "COMMITTING", "COMMITTED",
)  # fmt: skip
"""When a trainer dies. FINISHED: it has sent everything and does not know yet that it was verified; COMMITTING: it has said
`Commit` and has no answer."""
CARRIERS = ("shm", "tcp", "zmq")
EXIT_ALIVE = 3


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a trainer is to do."""

    engine: str
    """Its URL."""
    job: str
    target: str
    draft: str
    """Checkpoint directories whose weights it sends."""
    version: int
    carrier: str
    moment: str
    """One of `MOMENTS`."""
    delay_s: float
    """How long after the beginning of STAGING, FINISHED or COMMITTING, in seconds; the last tensor ends STAGING all the same."""

    def to_json(self) -> str:
        """The command line's one argument."""
        return json.dumps(asdict(self))


def die() -> None:
    """End at once: nothing is closed, nothing is said."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def main(argv: list[str]) -> int:
    """Open the update and die; returns only when the moment never came."""
    order = Order(**json.loads(argv[0]))
    target, draft = Path(order.target), Path(order.draft)
    weights, draft_weights = read(target, draft), read_draft(draft)
    bridge = connect(order.engine, job=order.job, carrier=order.carrier)
    update = bridge.update(version=order.version)
    bridge.on_state = lambda state: _came_to(state, order, update)
    for member in bridge.members:
        member.send = _watched(member.send, order)  # type: ignore[method-assign]
    with update:
        update.target(weights.items())
        update.draft(draft_weights.items())
        if order.moment == STAGING:
            die()
    return EXIT_ALIVE


def _came_to(state: UpdateState, order: Order, update: Update) -> None:
    if state is UpdateState.OFFERED:
        sys.stdout.write(json.dumps({"update": update.update}) + "\n")
        sys.stdout.flush()
    if state is UpdateState.STAGING and order.moment == STAGING:
        # From another thread: in the middle of whatever this one does.
        threading.Thread(target=_die_after, args=(order.delay_s,), daemon=True).start()
    elif state.value == order.moment:
        die()


def _watched(send: Callable[..., None], order: Order) -> Callable[..., None]:
    """`Member.send`, and death a while after the message that opens the moment."""
    deadly = {FINISHED: wire.Finish, COMMITTING: wire.Commit}.get(order.moment)

    def watched(message: wire.FromTrainer, *args: Any, **kwargs: Any) -> None:
        send(message, *args, **kwargs)
        if deadly is not None and isinstance(message, deadly):
            _die_after(order.delay_s)

    return watched


def _die_after(delay_s: float) -> None:
    time.sleep(delay_s)
    die()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
