"""Catches a status that shows something else than the server said, and a watch that ends with the server it watches."""

from __future__ import annotations

import http.server
import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_specdraft import cli, status_view
from vllm_specdraft.config import SettingsError
from vllm_specdraft.console import Console
from vllm_specdraft.launch import free_port

STATUS = {
    "policy_version": 4,
    "draft_version": 7,
    "draft_type": "eagle3",
    "draft_digest": "0123456789abcdef",
    "accepted_length": None,
    "idle_state": "OPEN",
    "learning": {
        "paused": True, "seconds": 61.54, "tokens": 9000, "steps": 250, "held_out_served": 1.9, "held_out_candidate": None,
    },
    "replay": {"samples": 40, "held_out_samples": 6, "bytes": 12_300_000},
    "publishes": [{}, {}],
    "last_error": None,
}  # fmt: skip


class StatusServer(http.server.ThreadingHTTPServer):
    """Answers with its `answer` (status code and body)."""

    allow_reuse_address = True

    def __init__(self, port: int = 0, answer: tuple[int, bytes] = (200, json.dumps(STATUS).encode())) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code, body = self.server.answer if self.path == "/specdraft/status" else (404, b"")  # type: ignore[attr-defined]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[StatusServer]:
    found = StatusServer()
    yield found
    found.stop()


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """One line on stderr that begins with our name, and nothing else."""
    seen = capsys.readouterr()
    assert seen.out == ""
    assert re.fullmatch(r"specdraft: [^\n]+\n", seen.err), seen.err
    return seen.err


def test_a_status_is_shown(server: StatusServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", server.url + "/"]) == 0
    text = capsys.readouterr().out
    for expected in ("v7 (eagle3, 0123456789ab)", "OPEN (learning paused)", "61.5 s, 9000 tokens, 250 steps", "40 + 6 held out"):
        assert expected in text
    assert "served 1.90, in training -" in text
    assert cli.main(["status", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_drafts_that_were_taken_back_are_shown() -> None:
    assert "publishes        2, 1 taken back" in status_view.lines_of({**STATUS, "rollbacks": 1})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, b""), "answered 404"),
        ((503, b'{"error": "the engine has not reported yet"}'), "answered 503: the engine has not reported yet"),
        ((200, b"<html>hello</html>"), "needs the address of a specdraft server"),
        ((200, b'{"status": "ok"}'), "is this a specdraft server"),
        ((200, b"[]"), "is this a specdraft server"),
    ],
)
def test_an_answer_that_is_no_status_ends_with_one_line(
    server: StatusServer, answer: tuple[int, bytes], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = answer
    assert cli.main(["status", server.url]) == 1
    assert message in one_line(capsys)


BAD_URLS = ["localhost:8000", "nonsense", "", "http://127.0.0.1:port", "http://[::1", "ftp://127.0.0.1:1", "http://:80"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", *BAD_URLS])
def test_a_url_without_a_server_ends_with_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", url]) == 1
    assert f"{url}/specdraft/status" in one_line(capsys)


# Watching.


@pytest.mark.parametrize("url", BAD_URLS)
def test_what_no_server_can_be_at_is_not_watched(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be waited for forever."""
    assert cli.main(["status", url, "--watch", "0.01"]) == 1
    assert "needs the address of a specdraft server" in one_line(capsys)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_watch_needs_a_time_between_two_looks(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "http://127.0.0.1:1", "--watch", seconds]) == 1
    assert "--watch" in one_line(capsys)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class StopWatchingError(Exception):
    """The end of a watch."""


def watched(stream: io.StringIO, url: str, steps: list[Any], **options: Any) -> str:
    """What a watch wrote; `steps` are called one by one in place of waiting, then it ends."""
    left = list(steps)

    def sleep(_: float) -> None:
        if not left:
            raise StopWatchingError
        left.pop(0)()

    with pytest.raises(StopWatchingError):
        status_view.watch(url, every_s=2.0, console=Console(stream), sleep=sleep, **options)
    return stream.getvalue()


def test_in_a_pipe_each_look_is_one_line_whether_the_server_is_there_or_not() -> None:
    """It goes away, and comes back with another draft."""
    port = free_port()
    servers = [StatusServer(port)]
    url = status_view.url_of(servers[0].url)

    def come_back() -> None:
        servers.append(StatusServer(port, (200, json.dumps({**STATUS, "draft_version": 8, "accepted_length": 2.125}).encode())))

    try:
        lines = watched(io.StringIO(), url, [servers[0].stop, lambda: None, come_back]).splitlines()
    finally:
        servers[1].stop()
    assert len(lines) == 4
    first, gone, still_gone, back = lines
    assert "draft v7" in first and "accepted -" in first and "OPEN paused" in first
    for line in (gone, still_gone):
        assert "no answer from" in line and "trying again" in line
    since = re.compile(r"since \d\d:\d\d:\d\d")
    assert since.findall(gone) == since.findall(still_gone) != []
    assert "draft v8" in back and "accepted 2.12" in back


def test_as_json_each_look_is_one_object(server: StatusServer) -> None:
    def refuse() -> None:
        server.answer = (503, b"{}")

    first, second = watched(io.StringIO(), status_view.url_of(server.url), [refuse], as_json=True).splitlines()
    assert json.loads(first) == STATUS
    assert "answered 503" in json.loads(second)["error"]


def screen_of(text: str) -> list[str]:
    """The lines that a terminal shows after `text`, as far as our two control sequences go."""
    screen: list[str] = []
    for part in re.split(r"(\x1b\[\d+F\x1b\[J)", text):
        if up := re.fullmatch(r"\x1b\[(\d+)F\x1b\[J", part):
            screen = screen[: len(screen) - int(up.group(1))]
        else:
            screen += part.splitlines()
    return screen


def test_on_a_terminal_the_status_is_redrawn_in_place(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from many lines to two and back: nothing of the earlier look stays."""
    monkeypatch.setenv("COLUMNS", "60")
    answers = [(503, b"{}"), (200, json.dumps({**STATUS, "draft_version": 9, "last_error": "x" * 300}).encode())]

    def following() -> None:
        server.answer = answers.pop(0)

    url = status_view.url_of(server.url)
    shown = screen_of(watched(Terminal(), url, [following]))
    assert len(shown) == 2 and "answered 503" in shown[1]
    answers.insert(0, (200, json.dumps(STATUS).encode()))
    shown = screen_of(watched(Terminal(), url, [following, following]))
    assert len(shown) == 1 + len(status_view.lines_of(STATUS))
    assert any("v9" in line for line in shown) and not any("v7" in line for line in shown)
    assert max(map(len, shown)) < 60, "a line that wraps would break the count of lines to go back"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_watch_ends_cleanly_on_a_signal(server: StatusServer, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "vllm_specdraft.cli", "status", server.url, "--watch", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert "draft v7" in process.stdout.readline()
        process.send_signal(end)
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_a_watch_ends_with_the_reader_of_its_pipe(server: StatusServer) -> None:
    command = [sys.executable, "-m", "vllm_specdraft.cli", "status", server.url, "--watch", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


def test_the_url_is_completed_once() -> None:
    assert status_view.url_of("https://host:8000/") == "https://host:8000/specdraft/status"
    with pytest.raises(SettingsError):
        status_view.url_of("http://host:0")
