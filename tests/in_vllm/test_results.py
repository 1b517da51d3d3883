"""Catches: speculation or a swap that changes what is generated; a checkpoint only our own plugin can load; a plugin that is
not inert when nobody asked for it; a swapped draft that is not the draft a fresh engine would run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import requests

from tests.in_vllm import engines
from vllm_specdraft.launch import Server

DRAFT_KINDS = ("eagle3", "dflash")


@pytest.fixture(scope="module")
def reference(plain: Server) -> list[list[int]]:
    """Greedy answers of the stock engine."""
    return [engines.chat(plain.url, question) for question in engines.QUESTIONS]


def test_greedy_tokens_are_those_of_the_plain_engine(live: Server, learned: Path, reference: list[list[int]]) -> None:
    answers = [engines.chat(live.url, question) for question in engines.QUESTIONS]
    assert answers == reference


def test_greedy_tokens_in_a_batch_are_those_of_the_plain_engine(live: Server, reference: list[list[int]]) -> None:
    assert engines.chat_many(live.url, list(engines.QUESTIONS)) == reference


def test_sampling_without_a_choice_gives_the_greedy_answer(live: Server, learned: Path, reference: list[list[int]]) -> None:
    """Verified tokens are sampled with their request's own parameters: top-k 1 leaves no choice, whatever the temperature.
    A stock vLLM 0.32 on a CPU gives them parameters out of uninitialised memory."""
    no_choice = {"temperature": 0.7, "top_k": 1}
    assert [engines.chat(live.url, question, **no_choice) for question in engines.QUESTIONS] == reference
    assert engines.chat_many(live.url, list(engines.QUESTIONS), **no_choice) == reference


def test_drafts_are_accepted_when_sampling(live: Server, learned: Path) -> None:
    """A greedy draft token is accepted with its probability, which at a low temperature is nearly that of greedy decoding."""
    rates = []
    for temperature in (0.0, 0.1):
        before = engines.status(live.url)["counters"]
        for question in engines.QUESTIONS:
            engines.chat(live.url, question, temperature=temperature)
        after = engines.status(live.url)["counters"]
        drafted = after["draft_steps"] - before["draft_steps"]
        rates.append((after["accepted_tokens"] - before["accepted_tokens"]) / drafted)
    assert rates[1] > 0.6 * rates[0] > 0


def test_stock_vllm_loads_our_checkpoint_and_answers_the_same(stock: Server, reference: list[list[int]]) -> None:
    answers = [engines.chat(stock.url, question) for question in engines.QUESTIONS]
    assert answers == reference


def test_a_learned_draft_is_accepted_in_stock_vllm(stock: Server) -> None:
    counts = [engines.acceptance(stock.url, question) for question in engines.QUESTIONS]
    drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
    assert accepted > 0.04 * drafted > 0, "what was learned on word problems must show on word problems"


def test_a_swapped_draft_drafts_what_a_fresh_engine_drafts(live: Server, stock: Server) -> None:
    """Same counts of drafted and accepted tokens: the function that runs after the swap is the checkpoint's."""
    for question in engines.QUESTIONS:
        assert engines.acceptance(live.url, question) == engines.acceptance(stock.url, question)


def test_a_swap_in_the_middle_of_an_answer_changes_no_token(live: Server, plain: Server, learned: Path, first_draft: Path) -> None:
    question, options = engines.QUESTIONS[2], {"max_tokens": 200, "ignore_eos": True}
    wanted = engines.chat(plain.url, question, **options)
    before = engines.status(live.url)
    answer = engines.InBackground(live.url, question, **options)
    versions = []
    for draft in (first_draft, learned):
        start = engines.status(live.url)["counters"]["generated_tokens"]
        while engines.status(live.url)["counters"]["generated_tokens"] < start + 20:
            assert answer.is_alive(), "the answer ended before the swap"
            time.sleep(0.02)
        record = engines.post(live.url, "publish", {"draft": str(draft)})
        record.raise_for_status()
        assert answer.is_alive(), "the swap came after the answer"
        versions.append(record.json()["draft_version"])
        assert record.json()["target_untouched"] is True
    answer.join(timeout=120)
    assert answer.tokens == wanted
    after = engines.status(live.url)
    assert versions == [before["draft_version"] + 1, before["draft_version"] + 2]
    assert after["target_digest"] == before["target_digest"]
    assert after["draft_digest"] == before["draft_digest"], "the learned draft serves again"


def test_a_swap_drops_prefix_cache_entries(live: Server, learned: Path) -> None:
    """Blocks cached before a swap hold the old draft's KV: a repeated prompt must not reach them."""
    question = "Consider this. " * 120 + engines.QUESTIONS[0]
    wanted = engines.chat(live.url, question, max_tokens=24)
    assert _cached_tokens(live.url, question) >= 128
    record = engines.post(live.url, "publish", {"draft": str(learned)}).json()
    assert record["prefix_blocks_dropped"] > 0
    assert _cached_tokens(live.url, question) == 0
    assert engines.chat(live.url, question, max_tokens=24) == wanted


def test_a_cached_prompt_is_cached_as_far_as_without_a_draft(live: Server, plain: Server) -> None:
    """One block less costs the answers to one prompt more than a draft may save them."""
    question = "Consider that. " * 60 + engines.QUESTIONS[0]
    answers, cached = [], []
    for server in (plain, live):
        answers += [engines.chat(server.url, question, max_tokens=24) for _ in range(2)]
        cached.append(_cached_tokens(server.url, question))
    assert all(answer == answers[0] for answer in answers)
    assert cached[0] == cached[1] >= 128


def _cached_tokens(url: str, question: str) -> float:
    """Prefix-cache hits, in tokens, that one more request with this prompt has."""

    def hits() -> float:
        lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    before = hits()
    engines.chat(url, question, max_tokens=2)
    time.sleep(0.5)
    return hits() - before


def test_a_plugin_nobody_asked_for_is_inert(stock: Server) -> None:
    """It was loaded (vLLM logs that), and shows nowhere."""
    assert "Loading plugin specdraft" in stock.log_path.read_text()
    assert "specdraft_" not in requests.get(f"{stock.url}/metrics", timeout=10).text
    assert requests.get(f"{stock.url}/specdraft/status", timeout=10).status_code == 404
    assert "/specdraft/" not in requests.get(f"{stock.url}/openapi.json", timeout=10).text
