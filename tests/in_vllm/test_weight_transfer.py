"""Catches an update through vLLM's own four-phase interface that is less of a transaction than one of the bridge: its client,
unmodified, drives our backend, and one that fails or vanishes half-way leaves the engine at its version, open for the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.in_vllm import engines, tiny
from tests.in_vllm.test_sync import answers
from vllm_specdraft import drafts
from vllm_specdraft.launch import Server

OPTIONS = ["--kv-gib", "1", "--no-auto-publish", "--weight-transfer-config", '{"backend": "specdraft"}']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transfer")


@pytest.fixture(scope="module")
def targets(folder: Path) -> list[Path]:
    return [tiny.save_target(folder / f"v{v}", "llama", tied=True, seed=60 + v) for v in range(2)]


@pytest.fixture(scope="module")
def draft_dirs(folder: Path, targets: list[Path]) -> list[Path]:
    return [drafts.init(targets[v], folder / f"draft{v}", draft_vocab_size=100, seed=v) for v in range(2)]


@pytest.fixture(scope="module")
def fresh(folder: Path, targets: list[Path]) -> list[list[list[int]]]:
    found = []
    for v, target in enumerate(targets):
        with Server(target, draft=None, log_path=folder / f"plain{v}.log", plain=True, extra=["--kv-gib", "1"]) as server:
            found.append(answers(server.url))
    return found


@pytest.fixture(scope="module")
def server(folder: Path, targets: list[Path], draft_dirs: list[Path]) -> Iterator[Server]:
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    log = folder / "server.log"
    with Server(targets[0], draft=draft_dirs[0], log_path=log, extra=OPTIONS, environment=environment) as made:
        yield made


def trainer(server: Server, **arguments: Any) -> str | None:
    command = [sys.executable, "-m", "tests.in_vllm.run_client", json.dumps({"url": server.url, **arguments})]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["error"]


def test_vllm_s_own_client_brings_a_version_or_leaves_the_one_before(
    server: Server, targets: list[Path], draft_dirs: list[Path], fresh: list[list[list[int]]]
) -> None:
    """Cases A2, C1, C2, C7."""
    assert answers(server.url) == fresh[0]
    assert trainer(server, target=str(targets[1]), version=0) is None
    assert answers(server.url) == fresh[1]
    found = engines.status(server.url)
    assert (found["policy_version"], found["draft_is_behind"]) == (1, True)
    assert requests.get(f"{server.url}/weight_info", timeout=10).json() == {"weight_version": "policy-1/draft-0"}

    error = trainer(server, target=str(targets[0]), version=1, fault="nan")
    assert error is not None and "500" in error
    assert answers(server.url) == fresh[1]

    assert trainer(server, target=str(targets[0]), version=1, fault="vanish") is None
    assert answers(server.url) == fresh[1]
    error = trainer(server, target=str(targets[0]), version=1)
    assert error is not None
    engines.post(server.url, "abort", {}).raise_for_status()
    assert trainer(server, target=str(targets[0]), version=1) is None
    assert answers(server.url) == fresh[0]
    assert engines.status(server.url)["policy_version"] == 2

    assert trainer(server, draft=str(draft_dirs[1]), version=2) is None
    after = engines.status(server.url)
    assert (after["policy_version"], after["draft_version"], after["draft_is_behind"]) == (2, 1, False)
    assert after["draft_digest"] != found["draft_digest"]
    assert answers(server.url) == fresh[0]


def test_other_backends_are_refused_and_so_is_the_checker(server: Server) -> None:
    answer = requests.post(f"{server.url}/weight_checker", json={"action": "reset"}, timeout=10)
    assert answer.status_code == 409
