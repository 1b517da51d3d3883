"""Weight sync without an engine: what it takes until an update is verified, against the plain ways to move the same bytes.

All ways take turns in every round, so that what the machine does to one it does to all. Before anything is timed, and again after
every turn, the bytes that arrived are compared with those that were sent; the weights differ from turn to turn.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from benchmarks.sync.peers import BroadcastPeer, PlainPipe
from benchmarks.sync.receivers import ReceiverProcess
from benchmarks.sync.weights import Weights, change, digests, nbytes_of
from trainer_bridge import connect
from trainer_bridge.carriers.sending import bytes_of
from trainer_bridge.digest import digest
from trainer_bridge.publisher import Bridge, UpdateResult
from vllm_specdraft.console import Console
from vllm_specdraft.demo.session import SessionError

MEMCPY, SHM, AUTO, TCP, ZMQ, CHECKPOINT, GLOO = "memcpy", "sync shm", "sync auto", "sync tcp", "raw zmq", "checkpoint", "gloo"
WAYS = (MEMCPY, SHM, TCP, ZMQ, AUTO, CHECKPOINT, GLOO)
PAIRS = {
    "shm_vs_memcpy": (MEMCPY, SHM),
    "tcp_vs_raw_zmq": (ZMQ, TCP),
    "speedup_vs_checkpoint": (CHECKPOINT, AUTO),
    "speedup_vs_gloo_broadcast": (GLOO, AUTO),
}
"""Per result the plain way and ours: the former's time over the latter's, so that more is better."""
SHARES = {"delta_bytes_ratio_1pct": 0.01, "delta_bytes_ratio_3pct": 0.03}
"""Per result the share of elements that changed."""


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """What one model gave."""

    model: str
    nbytes: int
    tensors: int
    seconds: dict[str, list[float]]
    """Per way one time per round, in seconds."""
    delta_ratios: dict[str, float]
    """Bytes of a full update over those of a delta."""

    def ratios(self) -> dict[str, float]:
        """By result key; the median over rounds of the ratio within one round."""
        paired = {
            key: median(a / b for a, b in zip(self.seconds[plain], self.seconds[ours], strict=True))
            for key, (plain, ours) in PAIRS.items()
        }
        return {**paired, **self.delta_ratios}


def worst(results: list[ModelResult]) -> dict[str, float]:
    """Each ratio of the model that fares worst at it."""
    every = [result.ratios() for result in results]
    return {key: min(ratios[key] for ratios in every) for key in every[0]}


def table(results: list[ModelResult]) -> list[str]:
    """All times and ratios of all models."""
    names = "".join(f"{f'{result.model}, {result.nbytes / 1e6:.0f} MB':>26}" for result in results)
    lines = [f"{'':28}{names}"]
    for way in WAYS:
        cells = [
            f"{median(taken):.3f} ({min(taken):.3f}-{max(taken):.3f})" for taken in (result.seconds[way] for result in results)
        ]
        lines.append(f"{way + ', s':28}" + "".join(f"{cell:>26}" for cell in cells))
    every = [result.ratios() for result in results]
    return lines + [f"{key:28}" + "".join(f"{ratios[key]:26.3f}" for ratios in every) for key in every[0]]


class Transports:
    """Measures one model after the other."""

    def __init__(
        self, *, directory: Path, console: Console, rounds: int, bucket_bytes: int, pipe: PlainPipe, broadcast: BroadcastPeer
    ) -> None:
        """`directory`: on a disk, for logs and checkpoints. `bucket_bytes`: of the bridge, and of the plain pipe's frames."""
        self._directory, self._console = directory, console
        self._rounds, self._bucket_bytes = rounds, bucket_bytes
        self._pipe, self._broadcast = pipe, broadcast

    def measure(self, model: str, weights: Weights, *, target: Path, draft: Path) -> ModelResult:
        """All ways over one model. `weights`: fp32, contiguous; they are changed. `target`, `draft`: directories that name them.

        Raises `SessionError` when bytes arrived otherwise than they were sent.
        """
        log_path = self._directory / "receiver.log"
        with (
            ReceiverProcess(target, draft, log_path=log_path) as receiver,
            connect(receiver.endpoint, bucket_bytes=self._bucket_bytes) as bridge,
            tempfile.TemporaryDirectory(dir=self._directory) as scratch,
        ):
            self._broadcast.expect(weights)
            turns = _Turns(weights, receiver, bridge, Path(scratch), self._pipe, self._broadcast, self._bucket_bytes)
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            # The first round is the warm-up: connections, mappings and buffers are there afterwards.
            for number in range(self._rounds + 1):
                shift = number % len(WAYS)
                for way in WAYS[shift:] + WAYS[:shift]:
                    self._console.progress(f"{model}: round {number} of {self._rounds}, {way}")
                    taken = turns.play(way, warm_up=number == 0)
                    if number:
                        seconds[way].append(taken)
            ratios = {}
            self._console.progress(f"{model}: deltas")
            for key, ratio, line in turns.deltas():
                ratios[key] = ratio
                self._console.line(f"{model}: {line}")
        return ModelResult(
            model=model, nbytes=nbytes_of(weights), tensors=len(weights), seconds=seconds, delta_ratios=ratios
        )  # fmt: skip


class _Turns:
    """One turn of each way; what it needs is made once."""

    def __init__(
        self, weights: Weights, receiver: ReceiverProcess, bridge: Bridge, scratch: Path, pipe: PlainPipe,
        broadcast: BroadcastPeer, bucket_bytes: int,
    ) -> None:  # fmt: skip
        self._weights, self._receiver, self._bridge, self._scratch = weights, receiver, bridge, scratch
        self._pipe, self._broadcast, self._bucket_bytes = pipe, broadcast, bucket_bytes
        self._version = self._marks = 0
        # Written once, so that no copy pays for a page's first touch.
        self._copy = np.ones(nbytes_of(weights), np.uint8)
        self._ways: dict[str, Callable[[bool], float]] = {
            MEMCPY: self._memcpy,
            SHM: lambda warm_up: self._timed_update("shm"),
            AUTO: lambda warm_up: self._timed_update("auto"),
            TCP: lambda warm_up: self._timed_update("tcp"),
            ZMQ: self._raw_zmq,
            CHECKPOINT: self._checkpoint,
            GLOO: self._gloo,
        }

    def play(self, way: str, *, warm_up: bool) -> float:
        """Seconds of one turn. Raises `SessionError` when the bytes differ."""
        self._marks += 1
        for tensor in self._weights.values():
            # Other bytes in every tensor: what a turn before left behind cannot pass for this one's.
            tensor.view(-1)[0] = float(self._marks)
        return self._ways[way](warm_up)

    def _timed_update(self, carrier: str) -> float:
        return self._update(carrier=carrier).verified_s

    def _update(self, **options: Any) -> UpdateResult:
        self._version += 1
        with self._bridge.update(version=self._version, **options) as update:
            update.target(self._weights.items())
        assert update.result is not None
        self._receiver.check(self._weights)
        return update.result

    def _memcpy(self, warm_up: bool) -> float:
        began = time.perf_counter()
        self._copy_all(self._weights)
        seconds = time.perf_counter() - began
        self._check_copy("a plain copy")
        return seconds

    def _copy_all(self, weights: Weights) -> None:
        """One call of the C library per tensor."""
        at, base = 0, self._copy.ctypes.data
        for name in self._weights:
            tensor = weights[name]
            count = tensor.numel() * tensor.element_size()
            ctypes.memmove(base + at, tensor.data_ptr(), count)
            at += count

    def _check_copy(self, what: str) -> None:
        at = 0
        for name, tensor in self._weights.items():
            sent = bytes_of(tensor)
            if digest(self._copy[at : at + sent.size]) != digest(sent):
                raise SessionError(f"{what} of {name} is not what was copied")
            at += sent.size

    def _raw_zmq(self, warm_up: bool) -> float:
        # From one piece of memory, which spares it the packing of small tensors.
        self._copy_all(self._weights)
        seconds, found = self._pipe.send(self._copy, frame_bytes=self._bucket_bytes, check=warm_up)
        if warm_up and found != digest(self._copy).hex():
            raise SessionError("other bytes arrived over plain ZeroMQ than were sent")
        return seconds

    def _checkpoint(self, warm_up: bool) -> float:
        path = self._scratch / "model.safetensors"
        began = time.perf_counter()
        save_file(self._weights, path)
        loaded = load_file(path)
        # Loading maps the file; a byte is read when somebody wants it, as a loader does that copies it into its parameters.
        self._copy_all(loaded)
        seconds = time.perf_counter() - began
        del loaded
        # Not written out while the next way is timed.
        path.unlink()
        self._check_copy("a checkpoint's copy")
        return seconds

    def _gloo(self, warm_up: bool) -> float:
        seconds = self._broadcast.broadcast(self._weights)
        if self._broadcast.digests() != digests(self._weights):
            raise SessionError("other bytes arrived over gloo than were broadcast")
        return seconds

    def deltas(self) -> list[tuple[str, float, str]]:
        """Per share of changed elements: result key, bytes of a full update over the delta's, and a line for people."""
        options = {"carrier": "tcp", "dtype": "bfloat16", "cast": True, "delta": True}
        random = np.random.default_rng(0)
        whole, found = self._update(**options), []
        for key, share in SHARES.items():
            changed = change(self._weights, share, random)
            result = self._update(**options)
            line = (
                f"{100 * changed:.3f}% of the elements changed: {result.sent_bytes / 1e6:.2f} MB in {result.verified_s:.2f} s; "
                f"whole, in bfloat16: {whole.sent_bytes / 1e6:.1f} MB in {whole.verified_s:.2f} s"
            )
            found.append((key, whole.sent_bytes / result.sent_bytes, line))
        return found
