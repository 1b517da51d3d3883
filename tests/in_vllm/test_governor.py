"""Catches a draft whose KV cache misses what steps without drafts left out, a step without drafts that runs the draft all the same,
answers that depend on which steps drafted, and a governor that vLLM does not ask.

The same prompts are answered with drafts in every step and with drafts in some; where both proposed at the same place they must
have proposed the same, from the same logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import generator
from tests.in_vllm import tiny, tiny_engine
from tests.in_vllm.run_governor import GOVERNED_TOKENS, PROMPTS, RUNS
from trainer_bridge.draft import checkpoint, registry
from vllm_specdraft import drafts

KINDS = ("eagle3", "dflash")
OTHERS = [name for name in RUNS if name != "always"]
CLOSE = 2e-4
"""Of logits that spread over some units: batches of another size add in another order."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `run_governor` left, by draft type."""
    out = tmp_path_factory.mktemp("governor")
    target = tiny.save_target(out / "target", "llama", tied=True, seed=9)
    made = {kind: str(attentive(drafts.init(target, out / kind, kind=kind, draft_vocab_size=100))) for kind in KINDS}
    arguments = {"targets": dict.fromkeys(KINDS, str(target)), "drafts": made, "out": str(out), "kinds": KINDS}
    tiny_engine.run_script("tests.in_vllm.run_governor", arguments, timeout_s=400)
    return {kind: torch.load(out / f"{kind}.pt", weights_only=False) for kind in KINDS}


def attentive(draft: Path) -> Path:
    """A new draft whose attention says something: one that has learned nothing may look at nothing."""
    config, numbers = checkpoint.read_config(draft), generator(1)
    state = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=numbers) if "proj" in name else tensor
        for name, tensor in checkpoint.read_state(draft).items()
    }
    registry.of_config(config).save(draft, state, config)
    return draft


@pytest.fixture(params=KINDS)
def seen(ran: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    return ran[request.param]


def gaps_between(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[float]:
    """Largest differences of the logits of proposals at the same places; several requests are told apart by their order.

    In a block each token sees the others' places, so only blocks of one size are compared.
    """

    def by_place(proposals: list[dict[str, Any]]) -> dict[tuple[int, int, int], torch.Tensor]:
        order = {name: index for index, name in enumerate(dict.fromkeys(sorted((p["request"] for p in proposals), key=_number)))}
        return {(order[p["request"]], p["position"], p["tokens"]): p["logits"] for p in proposals}

    one, other = by_place(found), by_place(wanted)
    return [float((one[place] - other[place]).nan_to_num(0.0).abs().max()) for place in one.keys() & other.keys()]


def _number(request: str) -> int:
    return int(request.partition("-")[0])


@pytest.mark.parametrize("name", OTHERS)
def test_answers_do_not_depend_on_which_steps_drafted(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["answers"] == seen["always"]["answers"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_draft_that_was_left_out_proposes_as_one_that_was_not(seen: dict[str, Any], name: str) -> None:
    gaps = gaps_between(seen[name]["seen"], seen["always"]["seen"])
    assert len(gaps) >= 2 * PROMPTS
    assert max(gaps) < CLOSE, sorted(gaps)[-5:]


def test_without_what_was_kept_it_would_not(seen: dict[str, Any]) -> None:
    """The comparison can tell."""
    gaps = gaps_between(seen["forgotten"]["seen"], seen["always"]["seen"])
    assert max(gaps) > 100 * CLOSE


def test_a_prefix_that_was_computed_without_drafts_is_as_good(seen: dict[str, Any]) -> None:
    """Its blocks are found by later requests, after the one that computed them has ended."""
    gaps = gaps_between(seen["prefix not drafted, later"]["seen"], seen["prefix drafted, later"]["seen"])
    assert len(gaps) >= 20 and max(gaps) < CLOSE
    assert seen["prefix not drafted, later"]["answers"] == seen["prefix drafted, later"]["answers"]


def test_the_text_is_drafted_from(seen: dict[str, Any]) -> None:
    """What followed the last time: tokens of the text, and no others."""
    found = seen["from the text"]
    assert len(found["texts"]) >= 5
    assert found["counters"]["steps_without_draft"] > seen["fewer"]["counters"]["steps_without_draft"]


def test_steps_without_drafts_leave_the_draft_out(seen: dict[str, Any]) -> None:
    """Case F12; what such a step costs beside the stock engine's is measured by `benchmarks.governor`."""
    before, after = seen["always"]["counters"], seen["off at first"]["counters"]
    assert before["steps_without_draft"] == 0 and after["steps_without_draft"] == 8
    assert after["kept_rows"] > 0 and after["lost_rows"] == 0
    # The first step with drafts makes up for all of it.
    assert after["fills"] == 1 and after["filled_rows"] == after["kept_rows"]


def test_the_governor_is_asked_and_heard(seen: dict[str, Any]) -> None:
    """It tries drafts of a new batch size within its first steps, and the worker's status has what it reports."""
    found, status = seen["report"], seen["status"]["governor"]
    assert found["trials"] >= 1 and found["drafts_seen"] >= 10
    batch = found["batches"]["1"]
    assert batch["steps"] >= GOVERNED_TOKENS / 4 and batch["plain_step_ms"] > 0
    assert batch["compared"]["0"]["known"] and batch["compared"]["3"]["stays"] >= 1
    assert status["batches"].keys() and status["gaps"]["steps_without_draft"] > 0
