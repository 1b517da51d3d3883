"""The other end of what weight sync is compared with: a plain ZeroMQ pipe, and a gloo broadcast. Each a process of its own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist
import zmq

from benchmarks.sync.weights import digests
from trainer_bridge.digest import Hasher
from vllm_specdraft.demo.session import SessionError

_WAIT_S = 120.0
_LOOPBACK = "tcp://127.0.0.1"
_START, _CHECK, _END = b"drop", b"check", b"end"


class PlainPipe:
    """PUSH to PULL over TCP on loopback: frames without a copy; the other end drops them and answers when it has all."""

    def __enter__(self) -> PlainPipe:
        self._context = zmq.Context()
        self._push, self._answers = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._push.setsockopt(zmq.SNDTIMEO, int(1e3 * _WAIT_S))
        ports = [socket.bind_to_random_port(_LOOPBACK) for socket in (self._push, self._answers)]
        self._process = multiprocessing.get_context("spawn").Process(target=_drop, args=ports, daemon=True)
        self._process.start()
        self._hear()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(zmq.Again):
            self._push.send(_END, zmq.NOBLOCK)
        self._process.join(5)
        self._process.kill()
        self._context.destroy(linger=0)

    def send(self, data: np.ndarray, *, frame_bytes: int, check: bool = False) -> tuple[float, str]:
        """Send ``[bytes]`` uint8; seconds until the answer, and with `check` the digest of what arrived (then not for timing)."""
        began = time.perf_counter()
        self._push.send(_CHECK if check else _START)
        for begin in range(0, data.size, frame_bytes):
            self._push.send(data[begin : begin + frame_bytes].data, copy=False)
        self._push.send(b"")
        answer = json.loads(self._hear())
        seconds = time.perf_counter() - began
        if answer["bytes"] != data.size:
            raise SessionError(f"of {data.size} bytes {answer['bytes']} arrived over plain ZeroMQ")
        return seconds, answer["digest"]

    def _hear(self) -> bytes:
        if not self._answers.poll(int(1e3 * _WAIT_S)):
            raise SessionError(f"the other end of the plain ZeroMQ pipe said nothing for {_WAIT_S:.0f} s")
        return self._answers.recv()


def _drop(data_port: int, answer_port: int) -> None:
    context = zmq.Context()
    pull, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect(f"{_LOOPBACK}:{data_port}")
    answers.connect(f"{_LOOPBACK}:{answer_port}")
    answers.send(b"ready")
    while (how := pull.recv()) != _END:
        count, hasher = 0, Hasher()
        while len(frame := pull.recv(copy=False)):
            count += len(frame)
            if how == _CHECK:
                hasher.update(frame.buffer)
        answers.send(json.dumps({"bytes": count, "digest": hasher.digest().hex()}).encode())
    context.destroy(linger=0)


class BroadcastPeer:
    """Rank 1 of a gloo group; this process is rank 0. Tensors are broadcast one by one."""

    def __enter__(self) -> BroadcastPeer:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # The system picks the port; held here, nobody else can take it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._process = context.Process(target=_take, args=(theirs, self._store.port), daemon=True)
        self._process.start()
        theirs.close()
        _join_group(self._store, rank=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(5)
        self._process.kill()
        dist.destroy_process_group()

    def expect(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Have room for these tensors over there."""
        self._ask({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()})

    def broadcast(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Broadcast all tensors; seconds until the other rank has the last one."""
        self._pipe.send("broadcast")
        dist.barrier()
        began = time.perf_counter()
        for tensor in weights.values():
            dist.broadcast(tensor, 0)
        dist.barrier()
        return time.perf_counter() - began

    def digests(self) -> dict[str, str]:
        """Of what the other rank has."""
        return self._ask("digests")

    def _ask(self, request: object) -> dict[str, str]:
        self._pipe.send(request)
        if not self._pipe.poll(_WAIT_S):
            raise SessionError(f"the other rank of the gloo group said nothing for {_WAIT_S:.0f} s")
        return self._pipe.recv()


def _join_group(store: dist.Store, rank: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_WAIT_S))


def _take(pipe: Connection, port: int) -> None:
    _join_group(dist.TCPStore("127.0.0.1", port, is_master=False), rank=1)
    tensors: dict[str, torch.Tensor] = {}
    while (request := pipe.recv()) is not None:
        if request == "broadcast":
            dist.barrier()
            for tensor in tensors.values():
                dist.broadcast(tensor, 0)
            dist.barrier()
        elif request == "digests":
            pipe.send(digests(tensors))
        else:
            tensors.clear()
            # Written, and not merely reserved: the first touch of a page is not part of the broadcast.
            tensors.update({name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in request.items()})
            pipe.send({})
    dist.destroy_process_group()
