"""Catches a server that leaves processes behind, hangs, or ends in a page of tracebacks: on Ctrl-C, on SIGTERM, when it starts,
loads and learns; and an engine that dies without a last line that says why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.in_vllm import engines
from vllm_specdraft.launch import Server

EXIT_S = 20.0
OPTIONS = ["--kv-gib", "1", "--max-model-len", "2048"]


def group_of(pid: int) -> list[psutil.Process]:
    """Processes of a server's session that still run. They stay in it whoever their parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def start(server: Server) -> tuple[subprocess.Popen[bytes], int]:
    """The server's process, started in a session of its own, and the session's id."""
    server.start()
    process = server._process
    assert process is not None
    return process, process.pid


def wait_for(what: str, holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert process.poll() is None, f"the server ended before {what}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"no {what}:\n{log.read_text()}"
        time.sleep(0.05)


def end(process: subprocess.Popen[bytes], session: int, sent: signal.Signals) -> int:
    """Send a signal as a terminal does for Ctrl-C, to all, or as a supervisor does, to the one; the exit code."""
    if sent == signal.SIGINT:
        os.killpg(session, sent)
    else:
        process.send_signal(sent)
    deadline = time.monotonic() + EXIT_S
    code = process.wait(timeout=EXIT_S)
    # The last child may end a moment after its parent.
    while (left := group_of(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left behind: {[p.name() for p in left]}"
    return code


# Words of vLLM's log, in the order in which they come.
MOMENTS = {
    "imports": "starting vLLM",
    "engine core": "non-default args",
    "worker": "Initializing a V1 LLM engine",
    "load": "Starting to load model",
}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_start_can_be_ended_at_any_moment(
    moment: str, sent: signal.Signals, target: Path, first_draft: Path, tmp_path: Path
) -> None:
    server = Server(target, draft=first_draft, log_path=tmp_path / "server.log", extra=OPTIONS)
    process, session = start(server)
    try:
        wait_for(moment, lambda: MOMENTS[moment] in server.log_path.read_text(), process, server.log_path)
        # Some way into it: what begins then is what would be left half-made.
        time.sleep(1.5)
        code = end(process, session, sent)
    finally:
        server.stop()
    log = server.log_path.read_text()
    assert code in (-sent, 128 + sent), log
    assert "Traceback" not in log, log


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_server_that_learns_ends_at_once(sent: signal.Signals, target: Path, first_draft: Path, tmp_path: Path) -> None:
    server = Server(target, draft=first_draft, log_path=tmp_path / "server.log", extra=OPTIONS)
    process, session = start(server)
    try:
        server.wait_ready()
        engines.chat_many(server.url, [f"{question} ({n})" for n in range(6) for question in engines.QUESTIONS], max_tokens=24)

        def learns() -> bool:
            return engines.status(server.url)["learning"]["steps"] > 0

        wait_for("step of learning", learns, process, server.log_path)
        code = end(process, session, sent)
    finally:
        server.stop()
    log = server.log_path.read_text()
    assert code == 0, log
    # vLLM's own output handler may note that the engine it listened to is gone.
    assert log.count("Traceback") <= 1 and not re.search(r'File "[^"]*/vllm_specdraft/', log), log


def test_an_engine_that_cannot_start_says_why_in_its_last_line(target: Path, first_draft: Path, tmp_path: Path) -> None:
    """What only the engine can find out: a cache that is too small for the longest request."""
    longer = ["--max-model-len", "100000", "--hf-overrides", '{"max_position_embeddings": 100000}']
    server = Server(target, draft=first_draft, log_path=tmp_path / "server.log", extra=["--kv-gib", "1", *longer])
    process, session = start(server)
    try:
        code = process.wait(timeout=180)
        assert not group_of(session)
    finally:
        server.stop()
    assert code == 1
    last = server.log_path.read_text().rstrip().splitlines()[-1]
    assert last.startswith("specdraft: the server did not start: "), last
    assert "See root cause above" not in last
