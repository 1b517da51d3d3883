"""What a person sees: whole lines, and a progress line that lives only on a terminal. The one place that writes to it."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

_TICK_S = 1.0


class Console:
    """Writes lines to one stream, flushed one by one so that a pipe or a log file shows them as they happen."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard output when None; benchmarks give standard error and keep standard output for their result."""
        self._stream = stream if stream is not None else sys.stdout
        self._live = self._stream.isatty()
        self._shown = 0
        self._block_lines = 0
        # The progress of a blocking call is written by a thread of its own.
        self._lock = threading.Lock()

    def line(self, text: str = "") -> None:
        """Write one whole line, in place of the progress line if there is one."""
        with self._lock:
            self._erase()
            self._write(text + "\n")

    def progress(self, text: str) -> None:
        """Show a line that the next one overwrites. Nothing at all when the stream is no terminal."""
        if not self._live:
            return
        with self._lock:
            self._erase()
            self._write(text)
            self._shown = len(text)

    @property
    def live(self) -> bool:
        """Whether the stream is a terminal, on which a line can be written over."""
        return self._live

    def block(self, lines: Sequence[str]) -> None:
        """Show lines in place of the block before; on a terminal only, cut to its width so that none wraps."""
        width = max(20, shutil.get_terminal_size().columns - 1)
        with self._lock:
            self._erase()
            # Up to the first line of the block, then clear from there on.
            back = f"\x1b[{self._block_lines}F\x1b[J" if self._block_lines else ""
            self._write(back + "".join(f"{line[:width]}\n" for line in lines))
            self._block_lines = len(lines)

    def clear(self) -> None:
        """Take the progress line away."""
        with self._lock:
            self._erase()

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Say that something long and blocking runs, with its seconds while it does, and how long it took at the end."""
        started = time.monotonic()
        done = threading.Event()

        def tick() -> None:
            while not done.wait(_TICK_S):
                self.progress(f"{what} ... {time.monotonic() - started:.0f} s")

        if not self._live:
            self.line(f"{what} ...")
        ticker = threading.Thread(target=tick, name="console-progress", daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()
            self.clear()
        self.line(f"{what}: done in {time.monotonic() - started:.0f} s")

    def _erase(self) -> None:
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
