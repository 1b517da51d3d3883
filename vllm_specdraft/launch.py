"""Start, watch and stop a server process: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from vllm_specdraft import cpu


class LaunchError(RuntimeError):
    """The server did not come up, or died."""


class Server:
    """One ``specdraft serve`` process and all its children, in a process group of its own."""

    def __init__(
        self,
        target: Path,
        *,
        draft: Path | None,
        log_path: Path,
        extra: Sequence[str] = (),
        plain: bool = False,
        governor: bool = False,
        state_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`extra`: options of ``specdraft serve`` or vLLM; `plain`: the stock engine under the same settings; `governor`: draft
        where it pays only; in every step otherwise, which shows what a draft is worth; `environment`: variables to add."""
        self._environment = {**os.environ, **(environment or {})}
        self.log_path = log_path
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        # Open to those who start another server under the same care.
        self.command = [
            sys.executable, "-m", "vllm_specdraft.cli", "serve", str(target), "--host", "127.0.0.1",
            "--port", str(self._port), "--served-model-name", "specdraft", *extra,
        ]  # fmt: skip
        if plain:
            self.command.append("--plain")
        elif not governor:
            self.command.append("--no-governor")
        if draft is not None and not plain:
            self.command += ["--draft", str(draft)]
        if state_dir is not None:
            self.command += ["--state-dir", str(state_dir)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; `wait_ready` says when it serves."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment,
            )

    def wait_ready(self, timeout_s: float = 300.0, waiting: Callable[[float], None] | None = None) -> None:
        """Wait until the server answers; `waiting` is called about each second with the seconds so far."""
        began = time.monotonic()
        while True:
            elapsed = time.monotonic() - began
            if self._process is None or self._process.poll() is not None:
                raise LaunchError(f"the server ended while starting, see {self.log_path}:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                pass
            if elapsed > timeout_s:
                self.stop()
                raise LaunchError(f"the server was not ready after {timeout_s:.0f} s, see {self.log_path}:\n{self.log_tail()}")
            if waiting is not None:
                waiting(elapsed)
            time.sleep(1)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def rss_bytes(self) -> int:
        """Resident memory of the process and all its descendants; shared pages count once for each."""
        total = 0
        for process in _family(self._process.pid) if self._process else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it does not run."""
        return self._process.pid if self._process is not None else None

    def freeze(self) -> None:
        """Stop all processes where they are: they take no time until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let frozen processes go on; harmless when they run."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop(self, grace_s: float = 15.0) -> None:
        """End the process and all its descendants: asked first, then forced."""
        process = self._process
        if process is None:
            return
        self.thaw()
        self._process = None
        family = _family(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=grace_s)
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        # Children whose parent died before are in the group, if not in the family.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        psutil.wait_procs(left, timeout=10)
        process.wait(timeout=10)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(no log: {error})"

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, given by the system."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def settings_summary() -> dict[str, object]:
    """The machine and the CPU settings that every server started here gets."""
    settings = cpu.choose(os.environ)
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "settings": settings.notes,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
