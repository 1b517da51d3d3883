"""Catches an update that does not arrive whole in the engine: weights that differ from a fresh engine's, old KV that is read,
a draft that is left behind in silence, a failure after which the engine serves something else or nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file

from tests.in_vllm import engines, tiny
from tests.in_vllm.engines import complete, tokens
from trainer_bridge import connect
from trainer_bridge.adapters.hf import hf_weights
from trainer_bridge.errors import BridgeError, UpdateError
from trainer_bridge.taps.stream import SampleStream
from vllm_specdraft import drafts
from vllm_specdraft.launch import Server

OPTIONS = ["--kv-gib", "1", "--no-auto-publish", "--keep-previous"]
PROMPTS = tiny.prompts(6, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sync")


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[int, Path]:
    """The policy at three versions."""
    return {v: tiny.save_target(folder / f"v{v}", "llama", tied=True, seed=40 + v) for v in range(3)}


@pytest.fixture(scope="module")
def draft_dirs(folder: Path, targets: dict[int, Path]) -> dict[int, Path]:
    return {v: drafts.init(targets[v], folder / f"draft{v}", draft_vocab_size=100, seed=v) for v in range(2)}


@pytest.fixture(scope="module")
def fresh(targets: dict[int, Path], folder: Path) -> dict[int, list[list[int]]]:
    """What each policy says: version 1 in a stock engine started from its checkpoint, the others in transformers."""
    found = {version: [tiny.greedy(tiny.load(targets[version]), prompt, 24) for prompt in PROMPTS] for version in (0, 2)}
    with Server(targets[1], draft=None, log_path=folder / "plain.log", plain=True, extra=["--kv-gib", "1"]) as server:
        found[1] = answers(server.url)
    assert found[0] != found[1] != found[2]
    return found


@pytest.fixture(scope="module")
def running(targets: dict[int, Path], draft_dirs: dict[int, Path], folder: Path) -> Iterator[Server]:
    with Server(targets[0], draft=draft_dirs[0], log_path=folder / "server.log", extra=OPTIONS) as server:
        yield server


@pytest.fixture
def server(running: Server, targets: dict[int, Path], draft_dirs: dict[int, Path]) -> Server:
    """The server at version 0's weights, whatever the test before left it at."""
    with connect(running.url) as bridge, bridge.update(version=bridge.policy_version + 10) as update:
        update.target(policy(targets[0]))
        update.draft(load_file(draft_dirs[0] / "model.safetensors").items())
    return running


def policy(target: Path) -> Any:
    return hf_weights(tiny.load(target))


def answers(url: str) -> list[list[int]]:
    return [tokens(url, prompt) for prompt in PROMPTS]


def test_after_an_update_the_engine_is_a_fresh_one_of_the_new_checkpoint(
    server: Server, targets: dict[int, Path], draft_dirs: dict[int, Path], fresh: dict[int, list[list[int]]]
) -> None:
    """Hand-over; cases A1, B11, F7: the same prompts as before, so a cached block of old weights would show."""
    assert answers(server.url) == fresh[0]
    before = engines.status(server.url)
    with connect(server.url) as bridge:
        version = bridge.policy_version + 1
        with bridge.update(version=version) as update:
            update.target(policy(targets[1]))
        assert answers(server.url) == fresh[1]
        found = engines.status(server.url)
        assert (found["policy_version"], found["draft_version"]) == (version, before["draft_version"])
        assert found["target_digest"] != before["target_digest"]
        assert found["draft_digest"] == before["draft_digest"]
        assert found["draft_is_behind"]
        # Reloading the very same weights changes nothing.
        with bridge.update(version=version + 1) as update:
            update.target(policy(targets[1]))
        assert answers(server.url) == fresh[1]
        assert engines.status(server.url)["target_digest"] == found["target_digest"]
        # Both together: received once, swapped once.
        with bridge.update(version=version + 2) as update:
            update.target(policy(targets[0]))
            update.draft(load_file(draft_dirs[1] / "model.safetensors").items())
        assert answers(server.url) == fresh[0]
        found = engines.status(server.url)
        assert found["draft_version"] == before["draft_version"] + 1
        assert found["draft_digest"] != before["draft_digest"]
        assert not found["draft_is_behind"]
        assert found["updates"][-1]["origin"].startswith("update default-")
    headers = complete(server.url, PROMPTS[0]).headers
    assert headers["X-Specdraft-Policy-Version"] == str(version + 2)
    assert headers["X-Specdraft-Draft-Version"] == str(found["draft_version"])
    metrics = requests.get(f"{server.url}/metrics", timeout=10).text
    assert f"specdraft_policy_version {float(version + 2)}" in metrics
    assert "specdraft_draft_is_behind 0.0" in metrics
    assert 'specdraft_sync_events_total{event="committed"}' in metrics


def test_a_draft_of_an_update_is_the_learner_s_from_then_on(server: Server, draft_dirs: dict[int, Path], tmp_path: Path) -> None:
    """Its master copy is replaced, and a publish of what it has is the draft that came."""
    sent = load_file(draft_dirs[1] / "model.safetensors")
    engines.post(server.url, "train", {"action": "pause"}).raise_for_status()
    with connect(server.url) as bridge, bridge.update(version=bridge.policy_version) as update:
        update.draft(sent.items())
    served = engines.status(server.url)
    record = engines.post(server.url, "publish", {}).json()
    assert record["digest"] == served["draft_digest"]
    engines.post(server.url, "save", {"directory": str(tmp_path / "saved")}).raise_for_status()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in sent.items())
    engines.post(server.url, "train", {"action": "resume"}).raise_for_status()


@pytest.mark.parametrize("running_policy", ["recompute", "keep", "drain", "abort"])
def test_requests_that_run_over_an_update_are_treated_as_asked(
    server: Server, targets: dict[int, Path], fresh: dict[int, list[list[int]]], running_policy: str
) -> None:
    """Case C9: old, new, or both, and the answer says which; no later request reads older weights (case F7)."""
    long: dict[str, Any] = {}

    def ask() -> None:
        answer = requests.post(
            f"{server.url}/v1/completions",
            json={"model": "specdraft", "prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True,
                  "return_token_ids": True},
            headers={"X-Specdraft-Spans": "1"}, timeout=120,
        )  # fmt: skip
        long.update(answer.json(), headers=dict(answer.headers))

    with connect(server.url, running=running_policy) as bridge:
        old = bridge.policy_version
        thread = threading.Thread(target=ask)
        with bridge.update(version=old + 1) as update:
            update.target(policy(targets[1]))
            generated = engines.status(server.url)["counters"]["generated_tokens"]
            thread.start()
            while engines.status(server.url)["counters"]["generated_tokens"] < generated + 5:
                time.sleep(0.01)
        thread.join(120)
    assert answers(server.url) == fresh[1]
    choice, spans = long["choices"][0], long["specdraft"]["spans"][0]
    seen, boundary = [span["policy_version"] for span in spans], spans[0]["end"]
    before = tiny.greedy_gaps(tiny.load(targets[0]), PROMPTS[0], choice["token_ids"][:boundary])
    assert float(before.max()) < 1e-4
    if running_policy == "drain":
        assert (len(choice["token_ids"]), seen) == (400, [old])
    elif running_policy == "abort":
        assert choice["finish_reason"] == "abort"
        assert seen == [old]
    else:
        assert (len(choice["token_ids"]), seen) == (400, [old, old + 1])
        assert long["headers"]["x-specdraft-policy-version"] == f"{old}, {old + 1}"
        model = tiny.load(targets[1])
        after = choice["token_ids"][boundary:]
        gaps = tiny.greedy_gaps(model, [*PROMPTS[0], *choice["token_ids"][:boundary]], after)
        # With the KV cache recomputed, what follows is what the new policy says after this text; with the old one kept it is not.
        assert (float(gaps.max()) < 1e-4) == (running_policy == "recompute")


FAULTS = {
    "missing": (lambda w: w[:-1], "of the target came; missing"),
    "unknown": (lambda w: [*w, ("model.nothing", torch.zeros(3))], "is no tensor of the target"),
    "shape": (lambda w: [(n, t[:-1] if t.ndim == 2 else t) for n, t in w], "has shape"),
    "nan": (lambda w: [(n, t * torch.nan if n.endswith("norm.weight") else t) for n, t in w], "NaN or infinity"),
    "draft": (None, "of the draft came; missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_update_leaves_tokens_versions_and_digests(
    server: Server, targets: dict[int, Path], fresh: dict[int, list[list[int]]], draft_dirs: dict[int, Path], fault: str
) -> None:
    before = engines.status(server.url)
    change, message = FAULTS[fault]
    bridge = connect(server.url)
    with bridge, pytest.raises(BridgeError, match=message), bridge.update(version=bridge.policy_version + 1) as update:
        update.target(change(list(policy(targets[1]))) if change else policy(targets[1]))
        if change is None:
            update.draft(list(load_file(draft_dirs[1] / "model.safetensors").items())[:-1])
    after = engines.status(server.url)
    keys = ("policy_version", "draft_version", "target_digest", "draft_digest")
    assert {key: after[key] for key in keys} == {key: before[key] for key in keys}
    assert answers(server.url) == fresh[0]


def test_bytes_written_after_verification_are_noticed(
    server: Server, targets: dict[int, Path], fresh: dict[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn read is impossible: the engine compares what it loads with what was verified."""
    from trainer_bridge.publisher import Update

    wait = Update._await_all

    def scribble(self: Any, states: set[str], *arguments: Any) -> None:
        wait(self, states, *arguments)
        if states == {"VERIFIED"}:
            way = self._ways[0]
            way.sender._memory[way.sender._layout.offsets[0][0] + 5] ^= 1

    monkeypatch.setattr(Update, "_await_all", scribble)
    bridge, message = connect(server.url, carrier="shm"), "written again after it was verified"
    with bridge, pytest.raises(UpdateError, match=message), bridge.update(version=bridge.policy_version + 1) as update:
        update.target(policy(targets[1]))
    assert answers(server.url) == fresh[0]


def test_rollback_brings_back_target_and_draft(
    server: Server, targets: dict[int, Path], fresh: dict[int, list[list[int]]], draft_dirs: dict[int, Path]
) -> None:
    before = engines.status(server.url)
    with connect(server.url) as bridge, bridge.update(version=bridge.policy_version + 1) as update:
        update.target(policy(targets[1]))
        update.draft(load_file(draft_dirs[1] / "model.safetensors").items())
    assert engines.status(server.url)["previous_policy_version"] == before["policy_version"]
    answer = engines.post(server.url, "rollback", {"policy": True})
    answer.raise_for_status()
    after = engines.status(server.url)
    for key in ("policy_version", "target_digest", "draft_digest"):
        assert after[key] == before[key]
    assert answers(server.url) == fresh[0]
    assert "no previous version is kept" in engines.post(server.url, "rollback", {"policy": True}).json()["error"]
    # The next update succeeds from there.
    with connect(server.url) as bridge, bridge.update(version=after["policy_version"] + 5) as update:
        update.target(policy(targets[2]))
    assert answers(server.url) == fresh[2]


@pytest.mark.parametrize("carrier", ["shm", "tcp", "zmq", "gloo"])
def test_every_carrier_reaches_the_engine_whole_and_as_a_delta(
    server: Server, targets: dict[int, Path], fresh: dict[int, list[list[int]]], carrier: str
) -> None:
    """Case A2."""
    with connect(server.url, carrier=carrier, delta=carrier in ("tcp", "zmq")) as bridge:
        first = bridge.policy_version
        for step, version in enumerate((1, 2, 1), start=1):
            with bridge.update(version=first + step) as update:
                update.target(policy(targets[version]))
            assert answers(server.url) == fresh[version]
        # Only a few elements change, and back.
        for step, factor in enumerate((1.001, 1.0), start=4):
            weights = dict(policy(targets[1]))
            weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
            weights["model.embed_tokens.weight"][:2] *= factor
            with bridge.update(version=first + step) as update:
                update.target(weights.items())
        assert answers(server.url) == fresh[1]
    if carrier in ("tcp", "zmq"):
        # Of 1.3 MB.
        assert update.result.sent_bytes < 10_000


def test_samples_of_a_trainer_reach_the_replay_and_bad_ones_do_not(server: Server, targets: dict[int, Path]) -> None:
    """The trainer's stream has the engine's own contract."""
    from dataclasses import replace

    from trainer_bridge.taps import TapSample

    found = engines.status(server.url)
    layers = tuple(found["tap_layers"])
    model, ids = tiny.load(targets[0]), torch.tensor([*PROMPTS[0], *range(10, 30)])
    taps, final = tiny.states(model, ids, layers)
    sample = TapSample(
        request_id="from-trainer-1", group_id="g", policy_version=found["policy_version"], token_ids=ids,
        positions=torch.arange(len(ids)), loss_mask=torch.arange(len(ids)) >= len(PROMPTS[0]), tap_layers=layers,
        taps=taps[:-1], final=final[:-1], final_is_normed=True,
    )  # fmt: skip
    with SampleStream(server.url) as stream:
        stream.send(sample)
        stream.send(replace(sample, request_id="2", policy_version=found["policy_version"] + 7))
        stream.send(replace(sample, request_id="3", tap_layers=(0, 1, 2)))
        stream.flush()
        assert stream.taken == 1
        assert sorted(reason.split(":")[0] for reason in stream.refused) == ["2", "3"]
    after = engines.status(server.url)
    assert after["replay"]["added"] == found["replay"]["added"] + 1
    assert after["replay"]["dropped"]["from_trainer"] >= 2


def test_learning_goes_on_over_updates_with_each_policy_s_own_teacher(server: Server, targets: dict[int, Path]) -> None:
    """Samples of the policy before stay with their own teacher, older ones go; the learner's steps and its loss go on."""
    error = engines.status(server.url)["last_error"]
    for prompt in tiny.prompts(30, seed=8):
        complete(server.url, prompt)
    with connect(server.url) as bridge:
        for version in (1, 2):
            before = engines.status(server.url)
            with bridge.update(version=bridge.policy_version + version) as update:
                update.target(policy(targets[version]))
            for prompt in tiny.prompts(30, seed=8 + version):
                complete(server.url, prompt)
            deadline = time.monotonic() + 60
            while (found := engines.status(server.url))["learning"]["steps"] < before["learning"]["steps"] + 10:
                assert time.monotonic() < deadline, found["learning"]
                time.sleep(0.2)
    assert found["replay"]["dropped"]["aged"] >= 20
    assert found["last_error"] == error
    assert found["learning"]["skipped_steps"] == 0


def test_the_loop_of_the_readme_trains_what_the_server_serves(server: Server, targets: dict[int, Path]) -> None:
    """As it is written there; only the questions mean nothing to this model."""
    (targets[0] / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    (loop,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "hf_weights" in block]
    assert len(loop.splitlines()) <= 40
    before = engines.status(server.url)["policy_version"]
    environment = {**os.environ, "SPECDRAFT_URL": server.url}
    done = subprocess.run([sys.executable, "-c", loop], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"step 1: policy {before + 2} serves, 1 MB" in done.stdout
    assert engines.status(server.url)["policy_version"] == before + 2
