"""Catches a route of the running server that changes something without the key, in vLLM's development mode too, whose routes
change weights and call workers by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.in_vllm import engines
from vllm_specdraft.launch import Server

KEY = "a-key-for-tests"
BEARER = {"Authorization": f"Bearer {KEY}"}
READS = ("/health", "/metrics", "/version", "/specdraft/status", "/is_paused")


@pytest.fixture(scope="module")
def guarded(target: Path, first_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key and with every route that vLLM has."""
    log = tmp_path_factory.mktemp("guarded") / "server.log"
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": KEY}
    extra = ["--no-learn", "--kv-gib", "1", "--max-model-len", "2048", "--enable-scale-out"]
    with Server(target, draft=first_draft, log_path=log, extra=extra, environment=environment) as server:
        yield server


def operations(server: Server) -> list[tuple[str, str]]:
    """Method and path of all routes, with something in place of their parameters."""
    schema: dict[str, Any] = requests.get(f"{server.url}/openapi.json", timeout=10).json()
    return [(method.upper(), re.sub(r"\{[^}]*\}", "x", path)) for path, methods in schema["paths"].items() for method in methods]


def call(server: Server, method: str, path: str, **options: Any) -> int:
    return requests.request(method, server.url + path, timeout=60, **options).status_code


def test_every_route_that_is_no_read_needs_the_key(guarded: Server) -> None:
    found = [(method, path) for method, path in operations(guarded) if method not in ("GET", "HEAD", "OPTIONS")]
    paths = {path for _, path in found}
    assert {"/specdraft/publish", "/specdraft/train", "/pause", "/resume", "/update_weights", "/sleep", "/tokenize"} <= paths
    for method, path in found:
        wanted = 404 if path == "/collective_rpc" else 401
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
            assert call(guarded, method, path, json={}, headers=headers) == wanted, f"{method} {path} {headers}"


def test_calling_workers_by_name_is_not_there(guarded: Server) -> None:
    assert ("POST", "/collective_rpc") in operations(guarded), "or this test shows nothing"
    for method in ("GET", "POST", "PUT", "HEAD"):
        assert call(guarded, method, "/collective_rpc", json={"method": "check_health"}, headers=BEARER) == 404


def test_reads_are_open_and_answers_are_not(guarded: Server) -> None:
    for path in READS:
        assert call(guarded, "GET", path) == 200, path
    assert call(guarded, "GET", "/v1/models") == 401
    assert call(guarded, "GET", "/server_info") == 401


def test_with_the_key_everything_works(guarded: Server) -> None:
    assert call(guarded, "GET", "/v1/models", headers=BEARER) == 200
    assert call(guarded, "POST", "/specdraft/train", json={"action": "pause"}, headers=BEARER) == 200
    assert call(guarded, "POST", "/pause", headers=BEARER) == 200
    assert requests.get(f"{guarded.url}/is_paused", timeout=10).json() == {"is_paused": True}
    assert call(guarded, "POST", "/resume", headers=BEARER) == 200
    body = {"model": "specdraft", "prompt": "1, 2, 3,", "max_tokens": 4}
    assert call(guarded, "POST", "/v1/completions", json=body, headers=BEARER) == 200


def test_without_a_key_a_web_page_changes_nothing_and_programs_do(live: Server) -> None:
    for origin in ("http://evil.example", "null", live.url.replace("127.0.0.1", "evil.example")):
        headers = {"Origin": origin, "Content-Type": "application/json"}
        assert call(live, "POST", "/specdraft/train", data='{"action": "pause"}', headers=headers) == 403
    assert engines.post(live.url, "train", {"action": "nonsense"}).status_code == 400
