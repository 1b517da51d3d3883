"""Engines shared by the tests of this folder: each is started once, when the first test asks for it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.in_vllm import engines
from vllm_specdraft import cpu, drafts, embedded
from vllm_specdraft.demo.prompts import PromptSource
from vllm_specdraft.launch import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder start a real engine."""
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker("in_vllm")


@pytest.fixture(scope="session")
def target() -> Path:
    """The default model."""
    return embedded.ensure()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of drafts run with one type, or with all where their module says so (``DRAFT_KINDS``)."""
    if "draft_kind" in metafunc.fixturenames:
        metafunc.parametrize("draft_kind", getattr(metafunc.module, "DRAFT_KINDS", ("eagle3",)), indirect=True, scope="session")


@pytest.fixture(scope="session")
def draft_kind(request: pytest.FixtureRequest) -> str:
    """The draft type under test."""
    return request.param


@pytest.fixture(scope="session")
def first_draft(target: Path, draft_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new draft, warm start."""
    return drafts.init(target, tmp_path_factory.mktemp("drafts") / "first", kind=draft_kind)


@pytest.fixture(scope="session")
def live(target: Path, first_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Our server, learning; it publishes only when a test says so."""
    log = tmp_path_factory.mktemp("live") / "server.log"
    with Server(target, draft=first_draft, log_path=log, extra=["--no-auto-publish", "--kv-gib", "1"]) as server:
        yield server


@pytest.fixture(scope="session")
def learned(live: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the draft that `live` learned in idle windows from 48 answers, and now serves; learning is paused."""
    questions = [prompt.question for prompt in PromptSource(evaluation=0, seed=3).take(48)]
    engines.chat_many(live.url, questions, max_tokens=64)
    deadline = time.monotonic() + 900
    while True:
        # As good as it must be, however fast the machine is.
        learning = engines.status(live.url)["learning"]
        if learning["seconds"] >= 15 and (learning["held_out_candidate"] or 0) >= 1.25:
            break
        assert time.monotonic() < deadline, learning
        time.sleep(1)
    engines.post(live.url, "train", {"action": "pause"}).raise_for_status()
    engines.post(live.url, "publish", {}).raise_for_status()
    directory = tmp_path_factory.mktemp("learned") / "draft"
    engines.post(live.url, "save", {"directory": str(directory)}).raise_for_status()
    return directory


@pytest.fixture(scope="session")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The stock engine: no plugin, no speculation, the same CPU settings."""
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with Server(target, draft=None, log_path=log, plain=True, extra=["--kv-gib", "1"]) as server:
        yield server


@pytest.fixture(scope="session")
def stock(target: Path, learned: Path, draft_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Stock vLLM that loads our checkpoint. Our plugin is installed and called by vLLM, but was not asked for."""
    log = tmp_path_factory.mktemp("stock") / "server.log"
    # Named, so that vLLM loads both of our entry points; not asked for, since there is no config in the environment.
    environment = {**cpu.choose(os.environ, kv_gib=1).environment, "VLLM_PLUGINS": "specdraft"}
    server = Server(target, draft=None, log_path=log, environment=environment)
    speculative = {"method": draft_kind, "model": str(learned), "num_speculative_tokens": 3}
    server.command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--served-model-name", "specdraft",
        "--port", server.url.rpartition(":")[2], "--dtype", "float32", "--enforce-eager",
        "--speculative-config", json.dumps(speculative),
    ]  # fmt: skip
    with server:
        yield server
