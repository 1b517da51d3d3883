"""The trainer's side of the carriers: how one bucket of pieces reaches one engine."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from trainer_bridge import wire
from trainer_bridge.carriers.base import HEADER, MAGIC
from trainer_bridge.digest import CHUNK_BYTES, Hasher, digest, view_of
from trainer_bridge.errors import UpdateError
from trainer_bridge.plan import Layout

TORCH_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
"""Dtypes of the wire by name."""


SAID_BYTES = 8 << 20
"""Bytes in shared memory after which the engine hears of them: it checks while more is written."""


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """``[bytes]`` uint8 over a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


@dataclass(kw_only=True)
class Item:
    """One piece on its way: a box of a tensor, in the trainer's dtype and on its device."""

    model: int
    tensor: int
    start: tuple[int, ...]
    source: torch.Tensor
    """The box's elements, of the box's shape."""
    dtype: torch.dtype
    """On the wire."""
    delta: bytes | None = None
    """Payload that changes the base version's box into this one."""
    digest: bytes | None = None
    """Of the elements in the wire dtype; filled in by whoever reads them first."""
    _wired: np.ndarray | None = field(default=None, repr=False)
    _owned: bool = field(default=False, repr=False)

    def own(self) -> None:
        """Read the source now, so that it may change; harmless when repeated."""
        if not self._owned:
            self.source = self.source.detach().to("cpu", self.dtype, copy=True).contiguous()
            self._wired, self._owned = None, True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole box on the wire."""
        return self.source.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the source's own memory is what the wire carries."""
        return self.source.dtype == self.dtype and self.source.device.type == "cpu" and self.source.is_contiguous()

    def wired(self) -> np.ndarray:
        """``[bytes]`` uint8 in the wire dtype, contiguous; the source's own memory where that is possible."""
        if self._wired is None:
            source = self.source.detach()
            self._wired = bytes_of(source if self.is_direct else source.to("cpu", self.dtype).contiguous())
        return self._wired

    def piece(self, *, as_delta: bool = False) -> wire.Piece:
        """Its header. Computes the digest when nobody has."""
        if self.digest is None:
            self.digest = digest(self.wired())
        payload = self.delta if as_delta else None
        return wire.Piece(
            model=self.model,  # type: ignore[arg-type]
            tensor=self.tensor,
            start=self.start,
            shape=tuple(self.source.shape),
            nbytes=len(payload) if payload is not None else self.nbytes,
            digest=self.digest,
            delta=payload is not None,
        )


class Sender(Protocol):
    """Brings buckets to one engine."""

    writes_at_once: bool
    """Whether what `send` was given is no longer read when it returns, and small buckets cost no more than large ones."""

    def send(self, items: Sequence[Item]) -> None:
        """Send a bucket; its memory may be read until the next `flush`. Raises `UpdateError` or `OSError`."""

    def flush(self) -> None:
        """Wait until nothing of what was sent is read any more."""

    def close(self) -> None:
        """Give up the connection; harmless when repeated."""


class NoSender:
    """For an engine that hears what is sent for all."""

    writes_at_once = False

    def send(self, items: Sequence[Item]) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class ShmSender:
    """Writes straight into the engine's staging memory: one copy, which also casts and fetches from a device."""

    writes_at_once = True

    def __init__(self, memory: np.ndarray, layout: Layout, update: str, control: Callable[[wire.FromTrainer], None]) -> None:
        self._memory, self._layout, self._update, self._control = memory, layout, update, control
        self._written: list[wire.Piece] = []
        self._unsaid_bytes = 0

    def send(self, items: Sequence[Item]) -> None:
        """Write a bucket, and say so when there is enough to check."""
        for item in items:
            self._written.append(self._write(item))
            self._unsaid_bytes += item.nbytes
        if self._unsaid_bytes >= SAID_BYTES:
            self.flush()

    def _write(self, item: Item) -> wire.Piece:
        header = wire.Piece(
            model=item.model,  # type: ignore[arg-type]
            tensor=item.tensor,
            start=item.start,
            shape=tuple(item.source.shape),
            nbytes=item.nbytes,
            digest=bytes(16),
        )
        box = self._layout.box(self._memory, header)
        if item.is_direct and box.flags.c_contiguous:
            self._copy(bytes_of(item.source), box.reshape(-1).view(np.uint8), item)
        else:
            self._cast(item, box)
        return item.piece()

    @staticmethod
    def _copy(source: np.ndarray, target: np.ndarray, item: Item) -> None:
        """Copy, and take the digest while the bytes are in the cache."""
        hasher = None if item.digest is not None else Hasher()
        for begin in range(0, source.size, CHUNK_BYTES):
            part = target[begin : begin + CHUNK_BYTES]
            np.copyto(part, source[begin : begin + CHUNK_BYTES])
            if hasher is not None:
                hasher.update(part)
        if hasher is not None:
            item.digest = hasher.digest()

    @staticmethod
    def _cast(item: Item, box: np.ndarray) -> None:
        signed = torch.from_numpy(box.view(f"i{box.itemsize}"))
        signed.view(item.dtype).copy_(item.source.detach())
        if item.digest is None:
            item.digest = digest(np.ascontiguousarray(box).reshape(-1).view(np.uint8))

    def flush(self) -> None:
        """Say what was written."""
        if self._written:
            self._control(wire.Staged(update=self._update, pieces=tuple(self._written)))
        self._written, self._unsaid_bytes = [], 0

    def close(self) -> None:
        """Nothing is held here; the mapping is kept for the next update."""


class ZmqSender:
    """Sends buckets over the control socket: encrypted when that is."""

    writes_at_once = False

    def __init__(self, update: str, control: Callable[[wire.FromTrainer, np.ndarray | bytes], None], *, delta: bool) -> None:
        self._update, self._control, self._delta = update, control, delta

    def send(self, items: Sequence[Item]) -> None:
        """One message: the headers, and the payloads one after the other."""
        pieces = tuple(item.piece(as_delta=self._delta) for item in items)
        parts = [_payload(item, self._delta) for item in items]
        payload = parts[0] if len(parts) == 1 else b"".join(view_of(part) for part in parts)
        self._control(wire.Data(update=self._update, pieces=pieces), payload)

    def flush(self) -> None:
        """The socket has a copy."""

    def close(self) -> None:
        """The control socket is not ours."""


def _payload(item: Item, delta: bool) -> np.ndarray | bytes:
    return item.delta if delta and item.delta is not None else item.wired()


class TcpSender:
    """Sends buckets over several connections in turn, each with a thread that writes while the next bucket is hashed."""

    writes_at_once = False

    def __init__(self, address: str, token: bytes, update: str, *, streams: int, delta: bool, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._update, self._delta, self._turn = update, delta, 0
        self._streams = [_Stream(host, int(port), token, timeout_s) for _ in range(streams)]

    def send(self, items: Sequence[Item]) -> None:
        """Hand a bucket to the next connection; waits while that has two unsent."""
        header = wire.encode(wire.Data(update=self._update, pieces=tuple(item.piece(as_delta=self._delta) for item in items)))
        parts: list[np.ndarray | bytes] = [HEADER.pack(len(header)) + header]
        parts += [_payload(item, self._delta) for item in items]
        self._streams[self._turn % len(self._streams)].put(parts)
        self._turn += 1

    def flush(self) -> None:
        """Wait until the system has everything. Raises `UpdateError` when a connection broke."""
        for stream in self._streams:
            stream.drain()

    def close(self) -> None:
        """End all streams."""
        for stream in self._streams:
            stream.close()


class _Stream:
    """One connection and its thread."""

    def __init__(self, host: str, port: int, token: bytes, timeout_s: float) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(MAGIC + token)
        self._queue: queue.Queue[list[np.ndarray | bytes] | None] = queue.Queue(maxsize=2)
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="specdraft-send", daemon=True)
        self._thread.start()

    def put(self, parts: list[np.ndarray | bytes]) -> None:
        self._queue.put(parts)
        self._raise()

    def _write(self) -> None:
        while (parts := self._queue.get()) is not None:
            try:
                for part in parts:
                    if self._error is None:
                        self._socket.sendall(view_of(part))
            except OSError as error:
                # What is queued behind it is dropped, so that whoever waits for us goes on.
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def drain(self) -> None:
        self._queue.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise UpdateError(f"a data connection broke: {self._error}")

    def close(self) -> None:
        if self._thread.is_alive():
            if self._error is None:
                self._queue.put([HEADER.pack(0)])
            self._queue.put(None)
            self._thread.join(5)
        self._socket.close()
