"""Catches a server that others can change: a route without its key, a key that is compared wrongly, an address taken for this
machine that is not, and a web page that reaches a server on loopback.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from vllm_specdraft import security
from vllm_specdraft.config import SettingsError

CHANGES = (
    "/specdraft/publish",
    "/specdraft/speculate",
    "/pause",
    "/resume",
    "/update_weights",
    "/sleep",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/a/route/that/a/later/version/adds",
)
ANSWER = "/v1/chat/completions"
READS = ("/health", "/metrics", "/version", "/specdraft/status")


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(security.KEY_VARIABLE, raising=False)


def client(*, keys: Sequence[str] | None = None, origins: Sequence[str] = (), host: str = "127.0.0.1:8000") -> TestClient:
    """An app with the routes above behind the guard, every one of which answers 200."""
    app = FastAPI()
    app.state.args = Namespace(api_key=list(keys) if keys is not None else None, allowed_origins=list(origins))

    async def done() -> dict[str, str]:
        return {"done": "yes"}

    for path in (*CHANGES, ANSWER):
        app.add_api_route(path, done, methods=["POST", "PUT", "DELETE", "PATCH"])
    for path in (*READS, "/server_info"):
        app.add_api_route(path, done, methods=["GET"])
    app.add_api_route("/collective_rpc", done, methods=["GET", "POST"])
    app.add_api_route("/mounted/collective_rpc", done, methods=["POST"])

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    app.add_middleware(security.Guard)
    return TestClient(app, base_url=f"http://{host}")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", [*CHANGES, ANSWER])
def test_whatever_is_no_read_needs_the_key(path: str) -> None:
    http = client(keys=["right", "other"])
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert http.request(method, path).status_code == 401
        for key in ("right", "other"):
            assert http.request(method, path, headers=bearer(key)).status_code == (409 if path in security.WEIGHT_ROUTES else 200)


@pytest.mark.parametrize(
    "header",
    [
        "Bearer wrong", "Bearer righ", "Bearer right ", "Bearer rightx", "Bearer", "Bearer ", "right", "Basic right", "",
        "Bearer  right", "Bearer RIGHT",
    ],
)  # fmt: skip
def test_nothing_but_the_very_key_opens(header: str) -> None:
    assert client(keys=["right"]).post("/pause", headers={"Authorization": header}).status_code == 401


def test_the_word_before_the_key_may_be_written_either_way() -> None:
    """RFC 9110: the scheme's case does not matter."""
    assert client(keys=["right"]).post("/pause", headers={"Authorization": "bearer right"}).status_code == 200


def test_a_key_of_other_letters_is_compared_by_its_bytes() -> None:
    header = {"Authorization": "Bearer schlüssel".encode()}
    assert client(keys=["schlüssel"]).post("/pause", headers=header).status_code == 200  # type: ignore[arg-type]


def test_a_refusal_says_what_is_missing_in_the_form_of_vllm_s_errors() -> None:
    answer = client(keys=["right"]).post("/pause")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (401, "AuthenticationError", None)
    assert "Authorization: Bearer" in error["message"]
    assert "right" not in answer.text


@pytest.mark.parametrize("path", READS)
def test_reads_stay_open(path: str) -> None:
    assert client(keys=["right"]).get(path).status_code == 200


def test_a_read_that_tells_about_the_machine_needs_the_key() -> None:
    assert client(keys=["right"]).get("/server_info").status_code == 401
    assert client(keys=["right"]).get("/server_info", headers=bearer("right")).status_code == 200
    assert client().get("/server_info").status_code == 200


@pytest.mark.parametrize("keys", [None, ["right"]])
@pytest.mark.parametrize("path", ["/collective_rpc", "/collective%5Frpc", "/mounted/collective_rpc", "/collective_rpc/"])
def test_calling_workers_by_name_is_not_there_for_anybody(keys: Sequence[str] | None, path: str) -> None:
    http = client(keys=keys)
    for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
        assert http.request(method, path, headers=bearer("right")).status_code == 404


def test_a_key_in_the_environment_counts_when_none_is_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(security.KEY_VARIABLE, "environment")
    assert client().post("/pause").status_code == 401
    assert client().post("/pause", headers=bearer("environment")).status_code == 200
    assert client(keys=["line"]).post("/pause", headers=bearer("environment")).status_code == 401


def test_empty_keys_are_none() -> None:
    """As in vLLM: a key list of nothing guards nothing, so it must not count as guarded either."""
    assert security.keys_of(["", ""], {security.KEY_VARIABLE: "x"}) == []
    assert security.keys_of([], {security.KEY_VARIABLE: "x"}) == ["x"]
    assert security.keys_of(None, {security.KEY_VARIABLE: ""}) == []


def test_without_a_key_programs_are_let_in() -> None:
    for path in set(CHANGES) - security.WEIGHT_ROUTES | {ANSWER}:
        assert client().post(path).status_code == 200


def test_weights_are_not_written_behind_the_learner_s_back() -> None:
    """With or without a key, and in words: the teacher and every sample would be of other weights."""
    for http, headers in ((client(), {}), (client(keys=["right"]), bearer("right"))):
        refused = http.post("/update_weights", headers=headers)
        assert refused.status_code == 409
        assert "--plain" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://evil.example", "127.0.0.1:8000"),
        ("null", "127.0.0.1:8000"),
        # A name of its own that points to 127.0.0.1: both headers agree.
        ("http://evil.example:8000", "evil.example:8000"),
        ("http://localhost.evil.example:8000", "localhost.evil.example:8000"),
        # Another server on this machine.
        ("http://127.0.0.1:3000", "127.0.0.1:8000"),
        ("http://[::1", "127.0.0.1:8000"),
        ("", "127.0.0.1:8000"),
    ],
)
def test_a_web_page_of_another_origin_changes_nothing(origin: str, host: str) -> None:
    http = client(host=host)
    for path in CHANGES:
        answer = http.post(path, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "--api-key" in answer.json()["error"]["message"]
    assert http.post(ANSWER, headers={"Origin": origin}).status_code == 200, "who may ask is for --allowed-origins to say"
    assert http.get("/specdraft/status", headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000"])
def test_the_server_s_own_pages_and_those_it_allows_may(host: str) -> None:
    assert client(host=host).post("/pause", headers={"Origin": f"http://{host}"}).status_code == 200
    allowed = client(origins=["https://ui.example"])
    assert allowed.post("/pause", headers={"Origin": "https://ui.example"}).status_code == 200
    everybody = client(origins=["*"])
    assert everybody.post("/pause", headers={"Origin": "https://ui.example"}).status_code == 403


def test_a_websocket_needs_the_key_or_an_origin_of_this_server() -> None:
    with client().websocket_connect("/v1/realtime"):
        pass
    with client(keys=["right"]).websocket_connect("/v1/realtime", headers=bearer("right")):
        pass
    for http, headers in ((client(keys=["right"]), {}), (client(), {"Origin": "http://evil.example"})):
        with pytest.raises(WebSocketDisconnect) as closed, http.websocket_connect("/v1/realtime", headers=headers):
            pass
        assert closed.value.code == 1008


# The address.


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "127.1", "localhost", "::1"])
def test_loopback_in_all_its_spellings(host: str) -> None:
    assert security.is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "0", "::", "192.0.2.7", "2001:db8::1"])
def test_what_others_may_reach(host: str) -> None:
    assert not security.is_loopback(host)


def test_a_name_that_nobody_knows_is_named() -> None:
    with pytest.raises(SettingsError, match=r"--host no-such-host\.invalid cannot be resolved"):
        security.is_loopback("no-such-host.invalid")


def rule(**fields: Any) -> str | None:
    return security.refuse_open_bind(**{"host": "127.0.0.1", "uds": None, "keys": [], "insecure": False, **fields})


def test_an_open_address_needs_a_key_or_the_word_for_it() -> None:
    with pytest.raises(SettingsError) as refused:
        rule(host="0.0.0.0")
    for knob in ("--api-key", "--host 127.0.0.1", "--insecure"):
        assert knob in str(refused.value)
    assert rule(host="0.0.0.0", keys=["k"]) is None
    warning = rule(host="0.0.0.0", insecure=True)
    assert warning is not None and "without an API key" in warning


def test_this_machine_needs_nothing() -> None:
    assert rule() is None
    assert rule(insecure=True) is None
    assert rule(host="0.0.0.0", uds="/tmp/socket") is None, "host and port are not bound beside a Unix socket"
