"""The staging memory: one file in shared memory that the engine's side owns and a trainer of the same host writes into.

The file lives as long as its owner: whoever holds the lock on it. What a killed owner left behind is swept by the next one. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from trainer_bridge.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "specdraft-staging-"


def host_id() -> str:
    """Equal in two processes exactly when one can open the other's shared memory: same boot, same mount, same user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found = SHARED_MEMORY.stat()
    except OSError:
        return ""
    text = f"{boot}|{found.st_dev}|{found.st_ino}|{os.getuid()}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def sweep(directory: Path = SHARED_MEMORY) -> int:
    """Remove staging files whose owner is gone; how many."""
    removed = 0
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(handle)
    return removed


class Staging:
    """The owner's side. Grows when a larger layout needs it, and never shrinks: a page that was touched costs no more faults."""

    def __init__(self, job: str, directory: Path = SHARED_MEMORY) -> None:
        sweep(directory)
        self._directory = directory
        self._job = "".join(c if c.isalnum() else "_" for c in job)[:40]
        self._handle: int | None = None
        self.path: Path | None = None
        self.memory = np.empty(0, np.uint8)
        """``[bytes]`` uint8."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.memory.size

    def ensure(self, nbytes: int) -> None:
        """Have at least so many bytes; what was in it is kept only if it fitted. Raises `ConfigError` when memory is short."""
        if nbytes <= self.nbytes:
            return
        self.close()
        try:
            handle = self._create()
            # Unlike ftruncate this fails now, not with a bus error in the middle of an update.
            os.posix_fallocate(handle, 0, nbytes)
            self.memory = np.frombuffer(mmap.mmap(handle, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise ConfigError(
                f"{self._directory} has no room for {nbytes / 1e6:.0f} MB of staged weights: "
                "make it larger (docker: --shm-size), or send a smaller wire dtype"
            ) from None

    def _create(self) -> int:
        """Handle of a new file that no sweep will take for a left one."""
        while True:
            self._handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{self._job}-{os.getpid()}-", dir=self._directory)
            self.path = Path(name)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between the two calls, another server's sweep may have found it without an owner.
                if os.fstat(self._handle).st_nlink:
                    return self._handle
            self.close()

    def close(self) -> None:
        """Remove the file. Mappings that others hold stay valid until they let go."""
        self.memory = np.empty(0, np.uint8)
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self._handle is not None:
            os.close(self._handle)
        self._handle = self.path = None


class Mapping:
    """The trainer's side: the engine's staging memory, mapped once and kept for as long as the path is the same."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._memory = np.empty(0, np.uint8)

    def of(self, path: str, nbytes: int) -> np.ndarray:
        """``[nbytes]`` uint8, writable. Raises `OSError`."""
        if path != self._path or nbytes != self._memory.size:
            if Path(path).parent != SHARED_MEMORY or not Path(path).name.startswith(PREFIX):
                raise ConfigError(f"{path} is no staging file: an engine names one in {SHARED_MEMORY}")
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                memory = mmap.mmap(handle, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                os.close(handle)
            self._path, self._memory = path, np.frombuffer(memory, np.uint8)
        return self._memory
