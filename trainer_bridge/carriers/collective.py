"""Broadcast over a process group of the trainer (rank 0) and the engines' receivers: gloo, and NCCL between GPUs.

The group is made anew for every update: one that lost a member cannot be mended. Each bucket is two broadcasts: two lengths, then
the headers and payloads in one buffer. NCCL is written after the same protocol and needs a GPU on both sides; it has not been run.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist

from trainer_bridge import wire
from trainer_bridge.carriers.base import HELD_PAYLOADS, MAX_HEADER_BYTES, Sink
from trainer_bridge.errors import BridgeError, UpdateError, WireError

if TYPE_CHECKING:
    from trainer_bridge.carriers.sending import Item
    from trainer_bridge.config import BridgeConfig
    from trainer_bridge.inbox import Inbox

_JOIN_S = 5.0


LOOPBACK = "127.0.0.1"


def _group(backend: str, store: Any, rank: int, world: int, timeout_s: float, *, local: bool) -> Any:
    """A process group of its own: the trainer's default group is not touched, and need not exist.

    `local`: whether all of it is on this machine, and must not listen beyond it.
    """
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, rank, world, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    make = dist.ProcessGroupGloo.create_device
    options._devices = [make(hostname=LOOPBACK) if local else dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, world, options)


def _store(host: str, timeout_s: float) -> Any:
    """Where the members of a group find each other, on a free port of `host`: torch's own would listen on every address."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host, port, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def _device(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "nccl" else "cpu")


class Broadcast:
    """The trainer's side, for all engines at once."""

    writes_at_once = False

    def __init__(
        self, backend: str, controls: Sequence[Callable[[wire.FromTrainer], None]], update: str, config: BridgeConfig
    ) -> None:
        self._update, self._device = update, _device(backend)
        world, timeout_s = len(controls) + 1, config.offer_timeout_s
        host = LOOPBACK if not config.insecure else socket.gethostname()
        store = _store(host, timeout_s)
        for rank, control in enumerate(controls, start=1):
            control(wire.Join(update=update, address=f"{host}:{store.port}", rank=rank, world=world, timeout_s=timeout_s))
        try:
            self._group = _group(backend, store, 0, world, timeout_s, local=host == LOOPBACK)
        except RuntimeError as error:
            raise UpdateError(f"the {backend} group of {world} did not come together: {error}") from None
        self._store = store

    def send(self, items: Sequence[Item]) -> None:
        """Broadcast a bucket. Raises `UpdateError` when an engine is gone."""
        header = wire.encode(wire.Data(update=self._update, pieces=tuple(item.piece() for item in items)))
        parts = [np.frombuffer(header, np.uint8), *(item.wired() for item in items)]
        payload = torch.from_numpy(np.concatenate(parts)).to(self._device)
        self._broadcast(torch.tensor([len(header), payload.numel() - len(header)], device=self._device))
        self._broadcast(payload)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise UpdateError(f"the broadcast broke: {error}") from None

    def flush(self) -> None:
        """Each broadcast is waited for."""

    def close(self) -> None:
        """End the stream."""
        if self._group is not None:
            # Where that fails, nobody is left to tell.
            with contextlib.suppress(UpdateError):
                self._broadcast(torch.zeros(2, dtype=torch.int64, device=self._device))
        self._group = None


class CollectiveReceiver:
    """The engine's side: a thread that hears the broadcast and hands the pieces on."""

    address = ""

    def __init__(self, backend: str, receiver: Sink) -> None:
        self._backend, self._receiver = backend, receiver
        self._held = threading.Semaphore(HELD_PAYLOADS)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, message: wire.Join) -> None:
        """Come together with the trainer, in the background."""
        if self._thread is not None:
            raise WireError("a second group for one update")
        self._thread = threading.Thread(target=self._hear, args=(message,), name="specdraft-collective", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more pieces. A thread that waits for a trainer that is gone ends with the group's time-out."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S if self._thread.is_alive() else 0)

    def _hear(self, join: wire.Join) -> None:
        try:
            host, _, port = join.address.rpartition(":")
            timeout = timedelta(seconds=join.timeout_s)
            store = dist.TCPStore(host, int(port), None, is_master=False, timeout=timeout, wait_for_workers=False)
            group = _group(self._backend, store, join.rank, join.world, join.timeout_s, local=host == LOOPBACK)
            device = _device(self._backend)
            limit = self._receiver.config.max_data_bytes
            while not self._closed.is_set():
                lengths = torch.zeros(2, dtype=torch.int64, device=device)
                group.broadcast(lengths, 0).wait()
                header, payload = lengths.tolist()
                if not header:
                    return
                if not (0 < header <= MAX_HEADER_BYTES and 0 <= payload <= limit):
                    raise WireError(f"a broadcast of {header} and {payload} bytes, the limits are {MAX_HEADER_BYTES} and {limit}")
                buffer = torch.empty(header + payload, dtype=torch.uint8, device=device)
                group.broadcast(buffer, 0).wait()
                self._take(join.update, buffer.cpu().numpy(), header)
        except (RuntimeError, ValueError, BridgeError) as error:
            if not self._closed.is_set():
                self._receiver.data_failed(join.update, f"the {self._backend} broadcast broke: {error}")

    def _take(self, update: str, buffer: np.ndarray, header: int) -> None:
        message = wire.decode_from_trainer(bytes(buffer[:header]), MAX_HEADER_BYTES)
        if not isinstance(message, wire.Data) or message.update != update:
            raise WireError(f"{type(message).__name__} of another update in a broadcast")
        self._held.acquire(timeout=_JOIN_S)

        def put(inbox: Inbox) -> None:
            try:
                at = header
                for piece in message.pieces:
                    inbox.put(piece, buffer[at : at + piece.nbytes])
                    at += piece.nbytes
            finally:
                self._held.release()

        self._receiver.pieces_arrived(update, put)
