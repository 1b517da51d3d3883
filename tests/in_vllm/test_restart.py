"""Catches: learning lost with the process; a restart from half a file, or from another draft's; a rollback that serves
something else; a swap or a checkpoint that the next start does not know of."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.in_vllm import engines, tiny
from vllm_specdraft import drafts
from vllm_specdraft.launch import LaunchError, Server
from vllm_specdraft.learner_state import FILE


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("restart") / "target", "llama", tied=True, seed=21)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafts.init(target, tmp_path_factory.mktemp("restart") / "draft", draft_vocab_size=100)


def server_of(target: Path, draft: Path, directory: Path, log: Path) -> Server:
    options = ["--kv-gib", "1", "--no-auto-publish", "--checkpoint-dir", str(directory), "--checkpoint-seconds", "2"]
    return Server(target, draft=draft, log_path=log, extra=options)


def complete(url: str, prompt: list[int]) -> list[int]:
    body = {"model": "specdraft", "prompt": prompt, "max_tokens": 32, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


def until(url: str, reached: Callable[[dict[str, Any]], bool], *, timeout_s: float = 60.0) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not reached(found := engines.status(url)):
        assert time.monotonic() < deadline, found["learning"]
        time.sleep(0.2)
    return found


def kill(server: Server) -> None:
    """With -9, all of it, in the middle of whatever it does."""
    assert server.pid is not None
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    os.killpg(server.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    server.stop()


def test_a_killed_server_goes_on_from_its_last_checkpoint(target: Path, draft: Path, tmp_path: Path) -> None:
    """Killed while it learns: the next one has its served draft, its draft in training and its counts, and learns on."""
    kept = tmp_path / "kept"
    server = server_of(target, draft, kept, tmp_path / "first.log")
    with server:
        prompts = tiny.prompts(30, seed=3)
        before = [complete(server.url, prompt) for prompt in prompts]
        until(server.url, lambda found: found["learning"]["steps"] >= 40)
        record = engines.post(server.url, "publish", {}).json()
        saved = until(server.url, lambda found: (found["learning"]["checkpoint_unix_time_s"] or 0) > record["unix_time_s"])
        then = until(server.url, lambda found: found["learning"]["steps"] > saved["learning"]["steps"])
        kill(server)
    server = server_of(target, draft, kept, tmp_path / "second.log")
    with server:
        found = engines.status(server.url)
        assert (found["draft_version"], found["draft_digest"]) == (record["draft_version"], record["digest"])
        assert 40 <= found["learning"]["steps"] <= then["learning"]["steps"]
        assert f"going on from {kept}" in server.log_path.read_text()
        assert [complete(server.url, prompt) for prompt in prompts] == before
        after = until(server.url, lambda now: now["learning"]["steps"] > found["learning"]["steps"] + 20)
        assert after["learning"]["seconds"] > found["learning"]["seconds"]
        again = engines.post(server.url, "publish", {}).json()
        assert again["draft_version"] == record["draft_version"] + 1

    for damage, word in ((truncate, "damaged or half-written"), (of_another_draft, "belongs to another draft")):
        broken = tmp_path / damage.__name__
        shutil.copytree(kept, broken)
        damage(broken, target)
        content = (broken / FILE).read_bytes()
        refused = server_of(target, draft, broken, tmp_path / f"{damage.__name__}.log")
        refused.start()
        with pytest.raises(LaunchError):
            refused.wait_ready()
        last = refused.log_tail(1)
        assert str(broken / FILE) in last and word in last and "--checkpoint-dir" in last
        assert "Traceback" not in refused.log_path.read_text()
        assert (broken / FILE).read_bytes() == content, "what is refused is not written over"


def truncate(directory: Path, target: Path) -> None:
    path = directory / FILE
    path.write_bytes(path.read_bytes()[:-100])


def of_another_draft(directory: Path, target: Path) -> None:
    """The served draft was replaced by hand by one of another vocabulary; the learner's state is of the old one."""
    shutil.rmtree(directory / "served")
    drafts.init(target, directory / "served", draft_vocab_size=64)


def test_a_stopped_server_saves_what_it_learned_since_the_last_checkpoint(target: Path, draft: Path, tmp_path: Path) -> None:
    """SIGTERM, long before the interval is over."""
    options = ["--kv-gib", "1", "--no-auto-publish", "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-seconds", "3600"]
    with Server(target, draft=draft, log_path=tmp_path / "first.log", extra=options) as server:
        for prompt in tiny.prompts(24, seed=3):
            complete(server.url, prompt)
        until(server.url, lambda found: found["learning"]["steps"] >= 20)
        steps = engines.post(server.url, "train", {"action": "pause"}).json()["learning"]["steps"]
    with Server(target, draft=draft, log_path=tmp_path / "second.log", extra=options) as server:
        assert engines.status(server.url)["learning"]["steps"] == steps
        refused = engines.post(server.url, "rollback", {})
        assert refused.status_code == 409 and "no draft to go back to" in refused.json()["error"]
        first = engines.status(server.url)["draft_digest"]
        engines.post(server.url, "publish", {}).raise_for_status()
        record = engines.post(server.url, "rollback", {}).json()
        assert record["digest"] == first
        assert record["origin"] == "rollback of draft 1 to draft 0"
        found = engines.status(server.url)
        assert (found["draft_version"], found["rollbacks"]) == (2, 1)
        assert engines.post(server.url, "rollback", {}).status_code == 409
        assert engines.post(server.url, "checkpoint", {}).status_code == 200
