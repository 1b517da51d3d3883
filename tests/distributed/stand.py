"""A receiver in a process of its own over tensors instead of an engine: what transports, failures and kills do is the same.

The stand-in commits by copying what was staged; a test can make it slow, or make it refuse.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from trainer_bridge.config import ReceiverConfig
from trainer_bridge.plan import Plan
from trainer_bridge.receiver import Receiver
from trainer_bridge.wire import Spec

PLAN = Plan(
    target=(
        Spec("embed", "float32", (50, 8)),
        Spec("layer.weight", "float32", (33, 17)),
        Spec("layer.bias", "float32", (17,)),
        Spec("norm", "bfloat16", (8,)),
        Spec("scale", "float32", ()),
    ),
    draft=(Spec("fc.weight", "float32", (8, 24)), Spec("d2t", "int64", (20,)), Spec("t2d", "bool", (50,))),
    ignored={"lm_head.weight": "tied"},
)
"""Names, types and shapes that exercise every path: odd sizes, no dimensions, 16 bit, integers, booleans."""


class TensorEngine:
    """Serves copies of what was staged."""

    def __init__(self, policy_version: int) -> None:
        self.policy_version, self.draft_version = policy_version, 0
        self.tensors: dict[str, bytes] = {}
        self.delay_s = 0.0
        self.refuse: str | None = None
        self.samples: list[tuple[dict[str, Any], bytes]] = []
        self.sample_delay_s = 0.0

    def commit(self, manifest: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> None:
        def work() -> None:
            time.sleep(self.delay_s)
            if self.refuse is not None:
                return done({"error": self.refuse})
            memory = np.memmap(manifest["path"], np.uint8, "r")
            for which in ("target", "draft"):
                for entry in manifest[which]:
                    width = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "bool": 1}[entry["dtype"]]
                    count = int(np.prod(entry["shape"], dtype=np.int64)) * width
                    data = bytes(memory[entry["offset"] : entry["offset"] + count])
                    self.tensors[f"{which}.{entry['name']}"] = data
            self.policy_version = manifest["version"]
            self.draft_version += bool(manifest["draft"])
            done({"policy_version": self.policy_version, "draft_version": self.draft_version, "report": {"stood": True}})

        threading.Thread(target=work, daemon=True).start()

    def take_sample(self, header: dict[str, Any], payload: bytes, done: Callable[[dict[str, Any]], None]) -> None:
        def work() -> None:
            time.sleep(self.sample_delay_s)
            self.samples.append((header, payload))
            done({"taken": True, "reason": ""})

        threading.Thread(target=work, daemon=True).start()


def _serve(pipe: Connection, config: ReceiverConfig, plan: Plan, policy_version: int) -> None:
    engine = TensorEngine(policy_version)
    receiver = Receiver(config, plan, engine)
    thread = threading.Thread(target=receiver.run)
    thread.start()
    pipe.send(receiver.endpoint)
    while (request := pipe.recv()) is not None:
        name, value = request
        if name == "set":
            for key, setting in value.items():
                setattr(engine, key, setting)
            pipe.send(None)
        elif name == "state":
            pipe.send(
                {
                    "policy_version": engine.policy_version,
                    "draft_version": engine.draft_version,
                    "tensors": dict(engine.tensors),
                    "counters": dict(receiver.counters),
                    "base_version": receiver.inbox.base_version,
                    "staging": str(receiver.inbox.staging.path),
                    "samples": list(engine.samples),
                    "thread": thread.is_alive(),
                }
            )
        elif name == "rss":
            pipe.send(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    receiver.stop()
    thread.join(10)
    pipe.send(thread.is_alive())


class Stand:
    """The test's handle on one such process."""

    def __init__(self, config: ReceiverConfig | None = None, plan: Plan = PLAN, policy_version: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, config or ReceiverConfig(silence_s=2.0), plan, policy_version), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self._pipe.poll(30), "the receiver did not start"
        self.endpoint: str = self._pipe.recv()

    def ask(self, name: str, value: Any = None) -> Any:
        self._pipe.send((name, value))
        assert self._pipe.poll(30), f"no answer to {name}"
        return self._pipe.recv()

    def set(self, **settings: Any) -> None:
        self.ask("set", settings)

    def state(self) -> dict[str, Any]:
        return self.ask("state")

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
            assert self._pipe.poll(30), "the receiver did not end"
            assert not self._pipe.recv(), "the receiver's loop did not end"
            self.process.join(10)


@contextmanager
def stands(count: int = 1, **options: Any) -> Iterator[list[Stand]]:
    """So many receivers, ended at the end whatever happened."""
    made: list[Stand] = []
    try:
        for _ in range(count):
            made.append(Stand(**options))
        yield made
    finally:
        for stand in made:
            try:
                stand.close()
            except (AssertionError, OSError, EOFError):
                stand.kill()


def staging_files(pid: int | None = None) -> set[str]:
    """Names of a process's staging files; of all of this host without one."""
    return {path.name for path in Path("/dev/shm").glob(f"specdraft-*-{pid}-*" if pid is not None else "specdraft-*")}
