"""A trainer in a process of its own, as in a real run: it holds two sets of weights and brings an engine the one it is told to."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.sync.weights import Weights, perturbed, read
from trainer_bridge import connect
from trainer_bridge.errors import BridgeError
from vllm_specdraft.demo.session import SessionError

A, B = "A", "B"
"""The launch checkpoint's weights, and the same perturbed."""
OTHER = {A: B, B: A}
_START_S, _UPDATE_S = 120.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One update, as its trainer saw it. Times are of `time.perf_counter`, which on Linux is one clock for all processes."""

    began_s: float
    committed_s: float
    verified_s: float
    """From the offer until it was verified, in seconds."""
    report: dict[str, Any]
    """What the engine says it took."""


class Trainer:
    """The handle on that process. Use as a context."""

    def __init__(self, engine: str, *, target: Path, draft: Path) -> None:
        """`engine`: its URL. `target`, `draft`: the checkpoints that it was started with."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, engine, target, draft), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Trainer:
        """Wait until it has its weights and is connected. Raises `SessionError`."""
        try:
            self._hear(_START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join(5)

    def update(self, which: str, version: int, **options: Any) -> Sent:
        """Bring the engine one of the two sets of weights. `options`: of `Bridge.update`. Raises `SessionError` when it fails."""
        self._pipe.send((which, version, options))
        return self._hear(_UPDATE_S)

    def _hear(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise SessionError(f"the trainer said nothing for {timeout_s:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise SessionError("the trainer's process ended") from None
        if isinstance(answer, str):
            raise SessionError(f"the trainer's update failed: {answer}")
        return answer


def _serve(pipe: Connection, engine: str, target: Path, draft: Path) -> None:
    weights: dict[str, Weights] = {A: read(target, draft)}
    weights[B] = perturbed(weights[A])
    try:
        with connect(engine) as bridge:
            pipe.send(None)
            while True:
                which, version, options = pipe.recv()
                began = time.perf_counter()
                with bridge.update(version=version, **options) as update:
                    update.target(weights[which].items())
                committed = time.perf_counter()
                assert update.result is not None
                (report,) = update.result.reports.values()
                pipe.send(Sent(began_s=began, committed_s=committed, verified_s=update.result.verified_s, report=report))
    except BridgeError as error:
        pipe.send(str(error) or type(error).__name__)
    except EOFError:
        # Nobody wants anything more.
        pass
