"""Catches a trainer that gives an engine up, or crashes, because its receiver is just being started again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainer_bridge.errors import ConfigError, DeadlineError
from trainer_bridge.members import resolve

ADDRESS = "tcp://127.0.0.1:4567"


class Status:
    """A server whose status says of weight sync what it is told to."""

    def __init__(self) -> None:
        self.sync: dict[str, Any] | None = None
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                body = json.dumps({"sync": outer.sync}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def status() -> Iterator[Status]:
    made = Status()
    yield made
    made.close()


def test_a_receiver_on_its_way_up_is_waited_for(status: Status) -> None:
    status.sync = {"endpoint": None, "error": None}

    def comes() -> None:
        while status.asked < 3:
            time.sleep(0.01)
        status.sync = {"endpoint": ADDRESS, "error": None}

    thread = threading.Thread(target=comes)
    thread.start()
    assert resolve(status.url, 20.0) == ADDRESS
    thread.join()


def test_one_that_does_not_come_up_is_one_clear_error(status: Status) -> None:
    status.sync = {"endpoint": None, "error": "tcp://0.0.0.0:1: address in use"}
    with pytest.raises(DeadlineError, match=r"no receiver of weights after 0\.3 s: tcp://0\.0\.0\.0:1: address in use"):
        resolve(status.url, 0.3)


def test_an_engine_that_takes_no_weights_is_not_waited_for(status: Status) -> None:
    with pytest.raises(ConfigError, match="started with --no-sync"):
        resolve(status.url, 60.0)
    assert status.asked == 1


def test_an_address_that_listens_everywhere_is_reached_where_it_answered(status: Status) -> None:
    status.sync = {"endpoint": "tcp://0.0.0.0:4567", "error": None}
    assert resolve(f"{status.url}/v1/", 1.0) == ADDRESS
    assert resolve("tcp://10.0.0.1:5", 1.0) == "tcp://10.0.0.1:5"
