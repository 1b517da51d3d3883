"""Catches: log-probabilities that belong to another token, request or distribution because several tokens were verified in one
step; structured output that speculation breaks; token ids that change on their way through the server; seeds that do not hold.

Against the stock engine without speculation, with the same prompts; drafts are swapped in between.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.in_vllm import engines
from tests.tolerances import LOGPROBS_VS_PLAIN, assert_close
from vllm_specdraft.launch import Server

TOP = 3
TEXTS = tuple(f"Question: {question}\nAnswer:" for question in engines.QUESTIONS)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def swapping(live: Server, learned: Path, first_draft: Path) -> Iterator[Any]:
    """Call it to have the other draft serve; the learned one serves in the end."""
    turns = itertools.cycle((first_draft, learned))

    def swap() -> None:
        engines.post(live.url, "publish", {"draft": str(next(turns))}).raise_for_status()

    yield swap
    engines.post(live.url, "publish", {"draft": str(learned)}).raise_for_status()


def complete(url: str, prompt: str | list[int], **options: Any) -> dict[str, Any]:
    """The one choice of a completion; greedy unless `options` say otherwise."""
    body = {"model": "specdraft", "prompt": prompt, "temperature": 0, "max_tokens": 32, "return_token_ids": True, **options}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=300)
    answer.raise_for_status()
    return answer.json()["choices"][0]


def complete_many(url: str, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Several completions at once, in their order."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt, **options), prompts))


def generated(choice: dict[str, Any]) -> tuple[list[int], torch.Tensor, list[set[str]]]:
    """Ids of the generated tokens, their log-probabilities, and the most likely tokens at each place."""
    found = choice["logprobs"]
    return choice["token_ids"], torch.tensor(found["token_logprobs"]), [set(top) for top in found["top_logprobs"]]


def of_prompt(choice: dict[str, Any]) -> torch.Tensor:
    """Log-probability of each prompt token but the first."""
    ids, entries = choice["prompt_token_ids"], choice["prompt_logprobs"]
    assert len(entries) == len(ids) and entries[0] is None
    return torch.tensor([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)])


@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a batch"])
def test_logprobs_of_generated_tokens_are_those_without_speculation(
    together: bool, live: Server, plain: Server, swapping: Any
) -> None:
    """Case F1. Some tokens were accepted drafts, some replaced a rejected one, some are bonus tokens."""
    wanted = [complete(plain.url, text, logprobs=TOP) for text in TEXTS]
    for _ in range(2):
        swapping()
        before = engines.status(live.url)["counters"]
        if together:
            found = complete_many(live.url, list(TEXTS), logprobs=TOP)
        else:
            found = [complete(live.url, text, logprobs=TOP) for text in TEXTS]
        after = engines.status(live.url)["counters"]
        accepted, drafted = (after[name] - before[name] for name in ("accepted_tokens", "drafted_tokens"))
        assert 0 < accepted < drafted
        for ours, theirs in zip(found, wanted, strict=True):
            (ids, values, top), (wanted_ids, wanted_values, wanted_top) = generated(ours), generated(theirs)
            assert ids == wanted_ids
            assert_close(values, wanted_values, LOGPROBS_VS_PLAIN, "log-probabilities")
            assert top == wanted_top


def test_logprobs_of_sampled_tokens_are_those_of_scoring_them_later(live: Server, plain: Server, swapping: Any) -> None:
    """Cases F1 and F2 above temperature 0: what the server says while sampling, the stock engine says of the finished text."""
    for seed, text in enumerate(TEXTS):
        swapping()
        ours = complete(live.url, text, logprobs=0, temperature=1.0, seed=seed, ignore_eos=True)
        ids, values, _ = generated(ours)
        scored = complete(plain.url, [*ours["prompt_token_ids"], *ids], prompt_logprobs=0, max_tokens=1)
        assert_close(values, of_prompt(scored)[-len(ids) :], LOGPROBS_VS_PLAIN, "log-probabilities")


def test_prompt_logprobs_are_those_without_speculation(live: Server, plain: Server, swapping: Any) -> None:
    """Case F2: alone and in a batch of prompts of different lengths, while the batch also generates."""
    texts = [TEXTS[0], TEXTS[1] * 3, TEXTS[2], TEXTS[3] * 2]
    wanted = [of_prompt(complete(plain.url, text, prompt_logprobs=0, max_tokens=1)) for text in texts]
    swapping()
    alone = [of_prompt(complete(live.url, text, prompt_logprobs=0)) for text in texts]
    swapping()
    batched = [of_prompt(choice) for choice in complete_many(live.url, texts, prompt_logprobs=0)]
    for found in (alone, batched):
        for ours, theirs in zip(found, wanted, strict=True):
            assert_close(ours, theirs, LOGPROBS_VS_PLAIN, "prompt log-probabilities")


def test_a_schema_is_obeyed_under_speculation(live: Server, plain: Server, swapping: Any) -> None:
    """Case F18: greedy, the same object as without speculation; sampled, still an object of the schema."""
    # Any number of blanks is valid JSON: a small model would never come to an end.
    options = {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}, "max_tokens": 64}
    prompt = "Question: Invent a person.\nAnswer, in JSON with name and age: "
    wanted = complete(plain.url, prompt, **options)
    for seed in range(4):
        swapping()
        before = engines.status(live.url)["counters"]
        choices = [complete(live.url, prompt, **options), complete(live.url, prompt, temperature=1.0, seed=seed, **options)]
        after = engines.status(live.url)["counters"]
        assert after["draft_steps"] > before["draft_steps"]
        assert choices[0]["token_ids"] == wanted["token_ids"]
        for choice in choices:
            person = json.loads(choice["text"])
            assert set(person) == {"name", "age"} and isinstance(person["name"], str) and 0 <= person["age"] <= 120


def test_a_pattern_is_obeyed_by_every_request_of_a_batch(live: Server, plain: Server, swapping: Any) -> None:
    """Case F18: requests with and without a pattern share a batch, and drafts that break a pattern are not accepted."""
    pattern = r"[A-F]{3}-[0-9]{4}-(red|green|blue)"
    options = {"structured_outputs": {"regex": pattern}}
    wanted = [complete(plain.url, text, **options)["token_ids"] for text in TEXTS[:2]]
    free = complete(plain.url, TEXTS[2])["token_ids"]
    swapping()
    with ThreadPoolExecutor(3) as pool:
        bound = [pool.submit(complete, live.url, text, **options) for text in TEXTS[:2]]
        unbound = pool.submit(complete, live.url, TEXTS[2])
    for choice, expected in zip((future.result() for future in bound), wanted, strict=True):
        assert re.fullmatch(pattern, choice["text"].strip()), choice["text"]
        assert choice["token_ids"] == expected
    assert unbound.result()["token_ids"] == free


def test_the_same_seed_gives_the_same_answer(live: Server, learned: Path) -> None:
    """With the same draft: which random numbers a token takes depends on which drafts were accepted before it."""
    answers = {
        seed: [complete(live.url, TEXTS[2], temperature=1.0, top_p=0.95, seed=seed)["token_ids"] for _ in range(2)]
        for seed in (1, 2)
    }
    assert answers[1][0] == answers[1][1] and answers[2][0] == answers[2][1]
    assert answers[1][0] != answers[2][0]


def test_token_ids_go_in_and_come_out_unchanged_over_turns(live: Server, plain: Server, swapping: Any) -> None:
    """Case F5: a second turn that sends the first one's ids back goes on as one longer generation would."""
    for text in TEXTS[:2]:
        whole = complete(plain.url, text, max_tokens=48, ignore_eos=True)
        swapping()
        first = complete(live.url, whole["prompt_token_ids"], max_tokens=20, ignore_eos=True)
        assert first["prompt_token_ids"] == whole["prompt_token_ids"]
        sent = [*first["prompt_token_ids"], *first["token_ids"]]
        second = complete(live.url, sent, max_tokens=28, ignore_eos=True)
        assert second["prompt_token_ids"] == sent
        assert [*first["token_ids"], *second["token_ids"]] == whole["token_ids"]


def test_the_end_token_is_returned_once_and_survives_the_next_turn(live: Server, plain: Server, swapping: Any) -> None:
    """Case F5 at the end of text: the answer holds it as its last id, also inside an accepted run of drafts, and nothing after."""
    body = {"model": "specdraft", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    found = []
    for url in (plain.url, live.url):
        swapping()
        answer = requests.post(
            f"{url}/v1/chat/completions", json={**body, "max_tokens": 200, "return_token_ids": True}, timeout=300
        )
        answer.raise_for_status()
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        prompt, ids = answer.json()["prompt_token_ids"], answer.json()["choices"][0]["token_ids"]
        more = complete(url, [*prompt, *ids], ignore_eos=True)
        assert more["prompt_token_ids"] == [*prompt, *ids]
        found.append((prompt, ids, more["token_ids"]))
    assert found[0] == found[1]
    ids = found[0][1]
    assert ids.count(ids[-1]) == 1
