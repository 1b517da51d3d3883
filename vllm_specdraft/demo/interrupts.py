"""Ctrl-C, SIGTERM and a closed terminal all end a run the same way: once, wherever it is, with time to clean up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end."""


class Interrupts:
    """While entered, the first signal raises `Interrupted` in the main thread; later ones are ignored: clean-up finishes.

    Inside `run` the coroutine is cancelled instead, so that its own clean-up runs.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task | None = None

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Raises `Interrupted` after a signal."""

        async def watched() -> T:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            try:
                return await work
            finally:
                self._loop = self._task = None

        try:
            return asyncio.run(watched())
        except asyncio.CancelledError:
            raise Interrupted from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ignore signals for the few seconds in which processes are stopped."""
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        else:
            raise Interrupted
