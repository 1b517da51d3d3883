"""Hidden-state samples from a trainer to an engine's replay, over the bridge's control address.

The sender holds at most a window of unanswered bytes: an engine that is busy slows it down and loses nothing. Every sample is
answered: taken, or refused with the reason.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
import zmq

from trainer_bridge import wire
from trainer_bridge.config import BridgeConfig, make
from trainer_bridge.errors import DeadlineError, SampleError
from trainer_bridge.members import Member, resolve
from trainer_bridge.taps.sample import TapSample

logger = logging.getLogger(__name__)

TENSORS = ("token_ids", "positions", "loss_mask", "taps", "final")
_LARGEST_TOKENS = 1 << 20


class SampleStream:
    """Sends samples to one engine. Not for several threads at once."""

    def __init__(self, engine: str, **options: Any) -> None:
        """`engine`: its URL or sync address; `options`: fields of `BridgeConfig`. Raises as `trainer_bridge.connect` does."""
        self.config: BridgeConfig = make(BridgeConfig, options)
        self._context = zmq.Context()
        client = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._member = Member(self._context, resolve(engine, self.config.connect_timeout_s), self.config, client)
        welcome = self._member.greet(self.config.connect_timeout_s)
        self._window = min(self.config.sample_window_bytes, welcome.sample_window_bytes)
        self._pending: dict[int, int] = {}
        self._sequence = 0
        self.refused: Counter[str] = Counter()
        """Samples that the engine did not take, by its reason."""
        self.taken = 0
        """Samples in the engine's replay."""

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, sample: TapSample, *, timeout_s: float = 60.0) -> None:
        """Send one sample; waits while the window is full.

        Raises `SampleError` for one that breaks the contract or is larger than the window, `DeadlineError` when the engine
        answers nothing for `timeout_s`.
        """
        sample.validate()
        payload = b"".join(_bytes(getattr(sample, name)) for name in TENSORS)
        if len(payload) > self._window:
            raise SampleError(
                f"{sample.request_id}: {len(payload)} bytes, the window is {self._window}: cut it, or raise sample_window_bytes"
            )
        self._wait(self._window - len(payload), timeout_s)
        header = wire.Sample(
            sequence=self._sequence,
            request_id=sample.request_id,
            group_id=sample.group_id,
            policy_version=sample.policy_version,
            tap_layers=sample.tap_layers,
            final_is_normed=sample.final_is_normed,
            tensors=tuple(_spec(name, getattr(sample, name)) for name in TENSORS),
            digest=bytes.fromhex(sample.digest()),
        )
        self._member.send(header, payload, timeout_s=timeout_s)
        self._pending[self._sequence] = len(payload)
        self._sequence += 1

    def flush(self, *, timeout_s: float = 60.0) -> None:
        """Wait until every sample is answered. Raises `DeadlineError`."""
        self._wait(0, timeout_s)

    def close(self) -> None:
        """Let go of the engine; samples without an answer may or may not be taken."""
        self._member.close()
        self._context.destroy(linger=1000)

    def _wait(self, allowed_bytes: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while sum(self._pending.values()) > allowed_bytes:
            message = self._member.receive(deadline)
            if message is None:
                raise DeadlineError(
                    f"the engine at {self._member.endpoint} answered none of {len(self._pending)} samples in {timeout_s:g} s"
                )
            if isinstance(message, wire.SampleTaken) and self._pending.pop(message.sequence, None) is not None:
                self.taken += message.taken
                if not message.taken:
                    self.refused[message.reason] += 1
                    logger.warning("the engine did not take sample %d: %s", message.sequence, message.reason)
                deadline = time.monotonic() + timeout_s


def unpack(header: dict[str, Any], payload: bytes | bytearray) -> TapSample:
    """The sample behind a `wire.Sample` and its payload, digest and contract checked. Raises `SampleError`.

    Args:
        header: the fields of the message, ``tensors`` as lists of name, dtype, shape.
    """
    tensors: dict[str, torch.Tensor] = {}
    at, data = 0, bytearray(payload)
    for name, dtype, shape in header["tensors"]:
        found = getattr(torch, dtype, None)
        if name not in TENSORS or not isinstance(found, torch.dtype) or any(n < 0 or n > _LARGEST_TOKENS for n in shape):
            raise SampleError(f"{header['request_id']}: tensor {name} as {dtype} {shape} is none of a sample's")
        count = int(np.prod(shape, dtype=np.int64))
        end = at + count * found.itemsize
        if end > len(data) or not count:
            raise SampleError(f"{header['request_id']}: {name} needs bytes {at} to {end}, {len(data)} came")
        tensors[name] = torch.frombuffer(data, dtype=found, count=count, offset=at).reshape(shape).clone()
        at = end
    if at != len(data) or tensors.keys() != set(TENSORS):
        raise SampleError(
            f"{header['request_id']}: {len(data)} bytes and tensors {sorted(tensors)}, needs {at} and {sorted(TENSORS)}"
        )
    sample = TapSample(
        request_id=header["request_id"],
        group_id=header["group_id"],
        policy_version=header["policy_version"],
        tap_layers=tuple(header["tap_layers"]),
        final_is_normed=header["final_is_normed"],
        **tensors,
    ).validate()
    if sample.digest() != bytes(header["digest"]).hex():
        raise SampleError(f"{sample.request_id}: digest {sample.digest()} arrived, {bytes(header['digest']).hex()} was sent")
    return sample


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _spec(name: str, tensor: torch.Tensor) -> wire.Spec:
    return wire.Spec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
