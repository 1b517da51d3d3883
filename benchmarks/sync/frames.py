"""Updates by a client that speaks the protocol by hand, and has frames cut, doubled, swapped or held back on their way."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import zmq

from trainer_bridge import wire
from trainer_bridge.carriers.sending import TORCH_DTYPES, Item
from trainer_bridge.plan import Plan
from vllm_specdraft.demo.session import SessionError

TRUNCATED, DUPLICATED, REORDERED, DELAYED = FAULTS = ("truncated", "duplicated", "reordered", "delayed")
VARIANTS = 3
"""Ways to do each: to the data, to what ends it, to what commits it."""
JOB = "frames"
_DEADLINE_S, _SLOWEST_BYTES_S = 4.0, 1e8
"""Of an update, with so many bytes per second on top: one of which a frame never arrives ends by it."""
_WAIT_S = 60.0
_HELD_S = 1.0

Frames: TypeAlias = list[Any]
Step: TypeAlias = Callable[["RawTrainer"], None]


class RawTrainer:
    """One connection. Use as a context."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, int(1e3 * _WAIT_S))
        self._socket.connect(endpoint)
        self._client = f"frames-{secrets.token_hex(4)}"

    def __enter__(self) -> RawTrainer:
        self.send([wire.encode(wire.Hello(protocol=wire.PROTOCOL, job=JOB, client=self._client, rank=0, world=1))])
        welcome = self.hear(wire.Welcome)
        self.plan = Plan(target=welcome.target, draft=welcome.draft, ignored=welcome.ignored)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, frames: Frames) -> None:
        """One message, as it is."""
        self._socket.send_multipart(frames)

    def hear(self, kind: type[Any]) -> Any:
        """The next message of a kind."""
        ends = time.monotonic() + _WAIT_S
        while (left := ends - time.monotonic()) > 0 and self._socket.poll(int(1e3 * left)):
            message = wire.decode_from_engine(self._socket.recv())
            if isinstance(message, kind):
                return message
            if isinstance(message, wire.Refused):
                raise SessionError(f"the engine refuses: {message.reason}")
        raise SessionError(f"the receiver sent no {kind.__name__} in {_WAIT_S:.0f} s")

    def state(self, update: str) -> str:
        """Where an update is now."""
        self.send([wire.encode(wire.Query(update=update))])
        outcome = self.hear(wire.Outcome)
        # What was told before, without being asked, comes first.
        while self._socket.poll(100):
            message = wire.decode_from_engine(self._socket.recv())
            outcome = message if isinstance(message, wire.Outcome) else outcome
        return outcome.state

    def reach(self, update: str, states: frozenset[str]) -> str:
        """Wait until an update is in one of `states`."""
        ends = time.monotonic() + _WAIT_S
        while (state := self.state(update)) not in states:
            if time.monotonic() > ends:
                raise SessionError(f"update {update} stays {state} for {_WAIT_S:.0f} s")
            time.sleep(0.1)
        return state


_OVER = frozenset({"COMMITTED", "ABORTED", "UNKNOWN"})


def play(
    endpoint: str, models: Mapping[int, Mapping[str, torch.Tensor]], *, fault: str, variant: int, version: int, place: int
) -> tuple[str, str]:
    """One update of target (0) and draft (1) with one frame that is not as it should be; the update's id and its last state.

    Args:
        place: which frame of data it happens to, modulo their number.
    """
    update = f"{JOB}-{version}-{secrets.token_hex(6)}"
    nbytes = sum(tensor.nbytes for weights in models.values() for tensor in weights.values())
    with RawTrainer(endpoint) as trainer:
        offer = wire.Offer(
            update=update, version=version, base_version=None, world=1, carrier="zmq", dtypes=("plan", "plan"), partial=False,
            running="recompute", drain_timeout_s=1.0, deadline_s=_DEADLINE_S + nbytes / _SLOWEST_BYTES_S,
        )  # fmt: skip
        trainer.send([wire.encode(offer)])
        trainer.hear(wire.Accepted)
        data = data_of(update, trainer.plan, models)
        finish = [wire.encode(wire.Finish(update=update, rank=0, pieces=len(data)))]
        commit = [wire.encode(wire.Commit(update=update))]
        for step in script(fault, variant, update, data, finish, commit, place % len(data)):
            step(trainer)
        return update, trainer.reach(update, _OVER)


def data_of(update: str, plan: Plan, models: Mapping[int, Mapping[str, torch.Tensor]]) -> list[Frames]:
    """One message per tensor."""
    made = []
    for model, weights in models.items():
        for index, spec in enumerate(plan.specs(model)):
            tensor = weights[spec.name].contiguous()
            item = Item(model=model, tensor=index, start=(0,) * tensor.ndim, source=tensor, dtype=TORCH_DTYPES[spec.dtype])
            made.append([wire.encode(wire.Data(update=update, pieces=(item.piece(),))), item.wired()])
    return made


def script(fault: str, variant: int, update: str, data: list[Frames], finish: Frames, commit: Frames, place: int) -> list[Step]:
    """The steps of an update, one of them wrong. `place`: index of the message of data that it happens to."""
    sends: list[Step] = [_send(frames) for frames in data]
    verified, over = _reach(update, _OVER | {"VERIFIED"}), _reach(update, _OVER)
    header, payload = data[place]
    end = [_send(finish), verified, _send(commit)]
    if fault == TRUNCATED:
        cut = [[header, payload[: payload.size // 2]], [header[: len(header) // 2], payload], [header]][variant]
        return [*sends[:place], _send(cut), *sends[place + 1 :], *end]
    if fault == DUPLICATED:
        again = sends[place]
        return [
            [*sends[: place + 1], again, *sends[place + 1 :], *end],
            [*sends, _send(finish), *end],
            [*sends, *end, _send(commit)],
        ][variant]
    if fault == REORDERED:
        rest = [*sends[:place], *sends[place + 1 :]]
        return [
            [*rest, sends[place], *end],
            [*rest, _send(finish), sends[place], verified, _send(commit)],
            [*sends, _send(commit), _send(finish)],
        ][variant]
    return [
        [*sends[:place], _hold, *sends[place:], *end],
        [*sends, *end, sends[place]],
        [*sends, *end, over, sends[place]],
    ][variant]


def _send(frames: Frames) -> Step:
    return lambda trainer: trainer.send(frames)


def _reach(update: str, states: frozenset[str]) -> Step:
    def reach(trainer: RawTrainer) -> None:
        trainer.reach(update, states)

    return reach


def _hold(trainer: RawTrainer) -> None:
    time.sleep(_HELD_S)
