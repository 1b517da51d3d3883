"""Catches: an update of the target that leaves one layer, norm, bias, head or embedding at the old version, or the draft at the
old embedding; one that is felt before it is put in; one that fails and leaves a trace; one that cannot be taken back; memory
that piles up.

All targets are random, so every tensor of one differs from the other's, and an answer under a mixture is neither's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.in_vllm import tiny, tiny_engine
from tests.in_vllm.run_policy_faults import FAULTS
from tests.tolerances import GREEDY_TIE, LOGPROBS_VS_PLAIN, assert_close
from vllm_specdraft import drafts

SINGLE = {tiny.name_of(*one): one for one in (("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False))}
"""Every type, with tied embeddings and without: two engines each, which takes most of a minute."""
PARALLEL = {"qwen2-untied on two ranks": ("qwen2", False)}
"""More ranks than key heads, and biases."""
WHICH = ("first", "second")
LOOK = ("answers", "drafted_tokens", "accepted_tokens")
SLACK_BYTES = 20_000
"""Of tensors, between two moments in one engine: half of the smallest of these targets' embeddings."""


@pytest.fixture(scope="module", params=[*SINGLE, *PARALLEL])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    """Directories of two targets of one kind, and what `run_policy` saw of them."""
    name, ranks = request.param, 1 if request.param in SINGLE else 2
    (kind, tied), root = {**SINGLE, **PARALLEL}[name], tmp_path_factory.mktemp("policy")
    # The engine pads this vocabulary, and two ranks share it unevenly.
    made = {which: tiny.save_target(root / which, kind, tied=tied, vocab=150, seed=seed) for seed, which in enumerate(WHICH)}
    draft = drafts.init(made["first"], root / "draft", draft_vocab_size=100)
    targets = {which: str(path) for which, path in made.items()}
    options = {"tensor_parallel_size": ranks}
    arguments = {"targets": targets, "drafts": {"first": str(draft), "fresh": str(draft)}, "options": options, "out": str(root)}
    tiny_engine.run_script("tests.in_vllm.run_policy", arguments, timeout_s=500, ranks=ranks)
    return targets, torch.load(root / "seen.pt", weights_only=False)


def _assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in LOOK:
        assert found[key] == wanted[key], key
    assert torch.equal(found["logprobs"], wanted["logprobs"])


def _assert_hugging_face(model: Any, prompts: list[list[int]], found: dict[str, Any]) -> None:
    for prompt, answer, logprobs in zip(prompts, found["answers"], found["logprobs"], strict=True):
        assert float(tiny.greedy_gaps(model, prompt, answer).max()) <= GREEDY_TIE.relative, GREEDY_TIE.reason
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert_close(logprobs, expected, LOGPROBS_VS_PLAIN, "log-probabilities")


def test_the_same_weights_again_change_nothing(case: Any) -> None:
    """Case B11: not a token, not a bit of a log-probability, not a draft token."""
    _, seen = case
    _assert_same(seen["same"], seen["first"])


def test_after_an_update_all_is_as_in_an_engine_started_from_the_new_weights(case: Any) -> None:
    """Drafted and accepted tokens too: the draft's embedding is the new one, and the hidden states it reads are."""
    _, seen = case
    assert seen["second"]["answers"] != seen["first"]["answers"]
    _assert_same(seen["second"], seen["fresh"])


def test_answers_and_log_probabilities_are_those_of_hugging_face(case: Any) -> None:
    """Cases B1, B8: the logits of a tied target use the new embedding, whatever the engine packed before."""
    targets, seen = case
    _assert_hugging_face(tiny.load(Path(targets["first"])), seen["prompts"], seen["first"])
    _assert_hugging_face(tiny.load(Path(targets["second"])), seen["prompts"], seen["second"])


def test_what_was_replaced_can_be_put_back_and_taken_again(case: Any) -> None:
    _, seen = case
    _assert_same(seen["back"], seen["first"])
    _assert_same(seen["second again"], seen["second"])
    assert seen["marks back"] == seen["while serving"]["marks"][0], "other objects serve than before the update"


def test_a_build_is_not_felt_by_running_requests(case: Any) -> None:
    """Nothing that serves is written while it goes on between their steps."""
    targets, seen = case
    serving = seen["while serving"]
    assert serving["finished after"] is not None and serving["finished after"] >= 5
    assert serving["answers"] == seen["first"]["answers"]
    assert serving["marks"][0] == serving["marks"][1]
    tensors = len(drafts.TargetWeights(Path(targets["second"])))
    assert all(tuple(counts) == (tensors, tensors) for counts in serving["counts"])


def test_the_embedding_of_the_draft_is_the_new_one(case: Any) -> None:
    targets, seen = case
    assert all(shared for shared, _ in seen["embedding"])
    wanted = drafts.TargetWeights(Path(targets["second"]))["model.embed_tokens.weight"]
    assert torch.equal(torch.cat([rows for _, rows in seen["embedding"]]), wanted)


def test_after_an_update_there_is_one_model_in_memory(case: Any) -> None:
    """While the replaced weights are kept there are two; no record of the build is left in either case."""
    _, seen = case
    for before, kept, after in zip(*seen["alive"], strict=True):
        assert kept["functions"] > before["functions"], "nothing was kept: the check sees nothing"
        assert kept["bytes"] > before["bytes"] + SLACK_BYTES
        assert after["functions"] == before["functions"]
        assert kept["records"] == after["records"] == before["records"]
        assert abs(after["bytes"] - before["bytes"]) < SLACK_BYTES


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `run_policy_faults` was told and left: a tied target with biases."""
    root = tmp_path_factory.mktemp("policy-faults")
    made = {which: tiny.save_target(root / which, "qwen2", tied=True, seed=seed) for seed, which in enumerate(WHICH)}
    draft = drafts.init(made["first"], root / "draft", draft_vocab_size=100)
    arguments = {"targets": {k: str(v) for k, v in made.items()}, "drafts": {"faults": str(draft)}, "out": str(root)}
    tiny_engine.run_script("tests.in_vllm.run_policy_faults", arguments, timeout_s=600)
    return {**torch.load(root / "faults.pt", weights_only=False), **arguments}


SAID = {
    "a tensor is missing": "the update lacks {}",
    "a tensor that nobody takes": "no served layer takes {}",
    "a tensor comes twice": "{} more than once",
    "too many rows": "{} has shape",
    "too many columns": "{} has shape",
    "a tensor cannot be read": "{} could not be read: InjectedError",
    "packing fails": "could not be loaded: InjectedError",
    "the end of the reload fails": "could not be built: InjectedError",
    "it is put in too early": " of 74 tensors are",
    "putting it in fails": "the weights before are back: InjectedError",
    "putting it back fails": "the weights before are back: InjectedError",
}
SERVED = {
    "k_proj.weight": "layers.3.self_attn.qkv_proj was built wrong",
    "v_proj.bias": "layers.3.self_attn.qkv_proj was built wrong",
    "o_proj.weight": "layers.3.self_attn.o_proj was built wrong",
    "up_proj.weight": "layers.3.mlp.gate_up_proj was built wrong",
    "input_layernorm.weight": "layers.3.input_layernorm.weight was built wrong",
    "embed_tokens.weight": "embed_tokens was built wrong",
    "v_proj.weight": "layers.3.self_attn.qkv_proj is still not whole",
    "post_attention_layernorm.weight": "nothing was loaded into model.layers.3.post_attention_layernorm.weight",
}
"""Per tensor that arrives wrong or not at all, what is said of the layer that it is served by."""


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=[f"{fault} {argument or ''}".strip() for fault, argument in FAULTS])
def test_a_failed_update_leaves_the_old_weights_and_the_draft_serving(failing: dict[str, Any], index: int) -> None:
    """Cases A9, B2: said by name; the very same objects serve, unwritten; nothing of the build is left in memory."""
    (fault, argument), seen, start = FAULTS[index], failing["faults"][index], failing["start"]
    assert seen["error"] is not None, "the fault was not met"
    said = SAID[fault].format(argument) if fault in SAID else next(v for k, v in SERVED.items() if str(argument).endswith(k))
    assert said in seen["error"]
    assert seen["untouched"]
    assert start["accepted_tokens"] > 20
    _assert_same(seen, start)
    assert seen["alive"][0] == seen["alive"][1]


def test_a_build_that_failed_or_was_put_in_is_over(failing: dict[str, Any]) -> None:
    """One that failed while it was put in is not: it is tried again."""
    first, later, put_in, midway, twice, then = failing["again"]
    assert "could not be read" in first
    assert "building them failed" in later and later == put_in
    assert "the weights before are back" in midway
    assert "were put in before" in twice and twice == then


def test_what_is_odd_but_fine_is_built(failing: dict[str, Any]) -> None:
    """Values that are no numbers are refused elsewhere; 16-bit values fit a 32-bit target; case B8: a head that a tied target
    does not take is left out, with a warning, and the embedding decides."""
    fine = failing["fine"]
    assert fine["nan"] == fine["inf"] == fine["bfloat16"] == fine["total"] == 74
    assert len(fine["warnings"]) == 1 and fine["warnings"][0].startswith("lm_head.weight is left out")
    _assert_hugging_face(tiny.load(Path(failing["targets"]["second"])), failing["prompts"], failing["second"])
    _assert_same(failing["end"], failing["start"])


def test_the_draft_can_still_be_swapped(failing: dict[str, Any]) -> None:
    """The draft's reload takes what it shares with the target out of its tree, and knows it by its modules."""
    _assert_same(failing["draft swapped"], failing["second"])


def test_a_dropped_build_frees_everything_at_once(failing: dict[str, Any]) -> None:
    """At whatever place; the last one was finished, and vLLM's records of it went with that."""
    assert failing["untouched"]
    *unfinished, finished = failing["dropped"]
    assert all(seen["during"]["records"] > seen["before"]["records"] for seen in unfinished), "the check sees nothing"
    assert finished["during"]["functions"] > finished["before"]["functions"], "the check sees nothing"
    for seen in failing["dropped"]:
        assert seen["after"] == seen["before"], seen["pieces"]
