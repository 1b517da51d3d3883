"""Trainers for the tests: one through the library, with short time-outs, and one that speaks the protocol by hand, also wrongly."""

from __future__ import annotations

from typing import Any

import torch
import zmq

from tests.distributed.stand import PLAN, Stand
from trainer_bridge import connect, wire
from trainer_bridge.carriers.sending import Item


def bridge(*made: Stand, **options: Any) -> Any:
    options = {
        "connect_timeout_s": 10,
        "offer_timeout_s": 10,
        "transfer_timeout_s": 30,
        "commit_timeout_s": 20,
        "heartbeat_s": 0.2,
        **options,
    }
    return connect([one.endpoint for one in made], **options)


class RawClient:
    """Speaks the protocol by hand, also wrongly."""

    def __init__(self, stand: Stand) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(stand.endpoint)

    def __enter__(self) -> RawClient:
        self.say(wire.Hello(protocol=wire.PROTOCOL, job="raw", client="raw", rank=0, world=1))
        assert isinstance(self.hear(), wire.Welcome)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def say(self, message: Any, *more: bytes) -> None:
        self.socket.send_multipart([wire.encode(message), *more])

    def hear(self, timeout_s: float = 5.0) -> Any:
        assert self.socket.poll(1e3 * timeout_s), "the receiver says nothing"
        return wire.decode_from_engine(self.socket.recv())


def offer(update: str, **changes: Any) -> wire.Offer:
    fields: dict[str, Any] = {
        "update": update, "version": 1, "base_version": None, "world": 1, "carrier": "zmq", "dtypes": ("plan", "plan"),
        "partial": False, "running": "recompute", "drain_timeout_s": 1.0, "deadline_s": 20.0,
    }  # fmt: skip
    return wire.Offer(**{**fields, **changes})


def messages_of(tensors: dict[str, torch.Tensor], update: str) -> list[tuple[wire.Data, bytes]]:
    made = []
    for index, spec in enumerate(PLAN.target):
        tensor = tensors[spec.name].contiguous()
        item = Item(model=0, tensor=index, start=(0,) * tensor.ndim, source=tensor, dtype=tensor.dtype)
        made.append((wire.Data(update=update, pieces=(item.piece(),)), item.wired().tobytes()))
    return made
