"""What can be found out before the engine starts is found out here: place for files, the port, memory.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_specdraft.config import SettingsError

GIB = 1 << 30
PROCESSES_BYTES = 2 * GIB
"""Resident memory of the API server, the engine core and the worker without weights, cache and samples, as measured."""
_FP32 = 4
DRAFT_COPIES_LEARNING = 12
"""fp32 copies of a draft: the engine's, the learner's with gradients and two moments, the served, the previous and the candidate
state, the state that a swap loads from, and what a checkpoint is written from."""
DRAFT_COPIES = 4
_CGROUP = Path("/sys/fs/cgroup")
_UNIX_PATH_BYTES = 107


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What a server will take, in bytes."""

    target: int
    draft: int
    """With everything that training it takes."""
    kv_cache: int
    replay: int

    @property
    def total(self) -> int:
        """The sum, with the processes themselves."""
        return self.target + self.draft + self.kv_cache + self.replay + PROCESSES_BYTES


def weights_bytes(parameters: int, dtype: str | None) -> int:
    """Size of a target in the engine. `dtype`: vLLM's ``--dtype``; None: fp32, our default on a CPU."""
    return parameters * (2 if dtype in ("bfloat16", "half", "float16") else _FP32)


def draft_bytes(parameters: int, *, learns: bool) -> int:
    """Size of a draft with its copies."""
    return parameters * _FP32 * (DRAFT_COPIES_LEARNING if learns else DRAFT_COPIES)


def check_memory(need: MemoryNeed, available_bytes: int) -> None:
    """Raise `SettingsError` with the numbers when a server cannot fit."""
    if need.total <= available_bytes:
        return
    parts = {
        "target": need.target,
        "draft and its training": need.draft,
        "KV cache": need.kv_cache,
        "replay": need.replay,
        "processes": PROCESSES_BYTES,
    }
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    raise SettingsError(
        f"needs about {need.total / GIB:.1f} GiB of memory ({listed}), {available_bytes / GIB:.1f} GiB are free: "
        "lower --kv-gib or --replay-mb, or take a smaller target"
    )


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that new processes can have: what the system has left, and what this container may still take."""
    left = [psutil.virtual_memory().available]
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            left.append(int((cgroup / limit).read_text()) - int((cgroup / used).read_text()) + _reclaimable(cgroup / limit))
        except (OSError, ValueError):
            # No such controller, or "max": no limit.
            continue
    return max(0, min(left))


def _reclaimable(limit: Path) -> int:
    """File cache that the container's count includes and the system gives back on demand."""
    fields = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def check_writable(option: str, directory: Path) -> None:
    """Make a directory and write into it. Raises `SettingsError` that names `option`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
    except OSError as error:
        raise SettingsError(f"{option} {directory} cannot be written ({error.strerror}): name another directory") from None


def check_port(host: str, port: int, *, option: str = "--port") -> None:
    """Bind the address as the server will, and let it go again. Raises `SettingsError` when it is taken or not ours."""
    family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(_bind_problem(host, port, error, option)) from None


def _bind_problem(host: str, port: int, error: OSError, option: str) -> str:
    where = f"port {port} of {host or 'this machine'}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken by another server: stop it, or choose another one with {option}"
    if error.errno == errno.EACCES:
        return f"{where} is reserved for the system: choose one above 1023 with {option}"
    return f"{where} cannot be bound ({error.strerror}): needs an address of this machine, e.g. --host 127.0.0.1"


def check_unix_socket(path: str) -> None:
    """Raise `SettingsError` when a Unix socket cannot be made there."""
    place = Path(path)
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise SettingsError(f"--uds {path}: longer than the {_UNIX_PATH_BYTES} bytes that a socket's path may have")
    if place.exists():
        raise SettingsError(f"--uds {path} is there already: remove it if no server uses it, or name another")
    if not os.access(place.parent, os.W_OK):
        raise SettingsError(f"--uds {path}: its folder is missing or cannot be written; name another")


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
