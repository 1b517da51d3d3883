"""Catches a prompt hole that is left open although somebody has its rows, or is filled with rows of other tokens, another
policy, or a rejected draft."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from tests.engine_play import Play, assert_whole, true_rows
from vllm_specdraft.prefixes import BLOCK_TOKENS, PrefixChain

LONG = list(range(100, 140))
"""Two whole blocks and a half."""
HIT = 2 * BLOCK_TOKENS


def play_with(**prompts: list[int]) -> Play:
    play = Play()
    play.prompts = prompts
    return play


def test_a_sibling_s_hole_is_filled_from_a_running_request() -> None:
    """D1: the second request's prefill starts behind the hit; its sample has the rows of the first for the shared blocks."""
    play = play_with(a=LONG, b=LONG)
    play.step(("a", 0, len(LONG), 0, [21]))
    play.step(("a", len(LONG), 1, 0, [22]), ("b", HIT, len(LONG) - HIT, 0, [31]))
    play.step(("b", len(LONG), 1, 0, [32]))
    assert_whole(play.finish("b", LONG, [31, 32]), "b", LONG, [31, 32], filled=("a", HIT))
    assert_whole(play.finish("a", LONG, [21, 22]), "a", LONG, [21, 22])
    assert play.tap.filled_rows == HIT


def test_siblings_that_start_in_one_step_share_what_one_of_them_computes() -> None:
    """vLLM caches a block when it is scheduled: the others of the same step hit it, whatever their order in the batch."""
    play = play_with(a=LONG, b=LONG, c=LONG)
    rest = len(LONG) - HIT
    play.step(("b", HIT, rest, 0, [31]), ("a", 0, len(LONG), 0, [21]), ("c", HIT, rest, 0, [41]))
    play.step(("a", 40, 1, 0, [22]), ("b", 40, 1, 0, [32]), ("c", 40, 1, 0, [42]))
    for request, first in (("b", 31), ("c", 41)):
        answer = [first, first + 1]
        assert_whole(play.finish(request, LONG, answer), request, LONG, answer, filled=("a", HIT))


def test_a_finished_sample_fills_the_next_turn() -> None:
    """A next turn's prompt is this prompt and answer: its hit reaches into generated tokens."""
    play = play_with(a=LONG)
    answer = list(range(300, 330))
    play.step(("a", 0, len(LONG), 0, answer[:1]))
    for index in range(1, len(answer)):
        play.step(("a", len(LONG) + index - 1, 1, 0, answer[index : index + 1]))
    first = play.finish("a", LONG, answer)
    assert_whole(first, "a", LONG, answer)
    turn = [*LONG, *answer, 7, 8, 9]
    hit = 64
    play.prompts["b"] = turn
    play.step(("b", hit, len(turn) - hit, 0, [51]))
    play.step(("b", len(turn), 1, 0, [52]))
    assert_whole(play.finish("b", turn, [51, 52]), "b", turn, [51, 52], filled=("a", hit))


def test_a_filled_request_is_a_source_itself() -> None:
    """The first one's sample may be gone from the replay: whoever was filled from it has the rows as well."""
    play = play_with(a=LONG, b=LONG, c=LONG)
    play.step(("a", 0, len(LONG), 0, [21]))
    play.step(("b", HIT, len(LONG) - HIT, 0, [31]))
    play.finish("a", LONG, [21])
    play.delivered.clear()
    gc.collect()
    play.step(("c", HIT, len(LONG) - HIT, 0, [41]))
    play.step(("c", len(LONG), 1, 0, [42]))
    assert_whole(play.finish("c", LONG, [41, 42]), "c", LONG, [41, 42], filled=("a", HIT))


def test_a_hole_whose_rows_are_gone_is_counted_and_nothing_is_kept_of_the_request() -> None:
    play = play_with(a=LONG, b=LONG)
    play.step(("a", 0, len(LONG), 0, [21]))
    play.finish("a", LONG, [21])
    play.delivered.clear()
    gc.collect()
    play.step(("b", HIT, len(LONG) - HIT, 0, [31]))
    assert play.tap.running_bytes == 0
    play.step(("b", len(LONG), 1, 0, [32]))
    assert play.finish("b", LONG, [31, 32]) is None
    assert play.tap.dropped == Counter(hole=1)


def test_other_tokens_before_the_block_are_another_prefix() -> None:
    """The second block is the same, the first differs in one token: its states differ, so they are never borrowed."""
    other = [99, *LONG[1:]]
    play = play_with(a=LONG, b=other)
    play.step(("a", 0, len(LONG), 0, [21]))
    play.step(("b", HIT, len(other) - HIT, 0, [31]))
    assert play.finish("b", other, [31]) is None
    assert play.tap.dropped == Counter(hole=1)


def test_rows_of_an_older_policy_fill_nothing() -> None:
    play = play_with(a=LONG, b=LONG)
    play.step(("a", 0, len(LONG), 0, [21]))
    play.policy_version += 1
    play.step(("b", HIT, len(LONG) - HIT, 0, [31]))
    assert play.finish("b", LONG, [31]) is None
    assert play.tap.dropped == Counter(hole=1)


def test_a_prompt_in_chunks_lends_what_it_has_computed() -> None:
    play = play_with(a=LONG, b=LONG)
    play.step(("a", 0, BLOCK_TOKENS, 0, []))
    play.step(("b", BLOCK_TOKENS, len(LONG) - BLOCK_TOKENS, 0, [31]), ("a", BLOCK_TOKENS, 3, 0, []))
    play.step(("b", len(LONG), 1, 0, [32]))
    assert_whole(play.finish("b", LONG, [31, 32]), "b", LONG, [31, 32], filled=("a", BLOCK_TOKENS))


def test_generated_tokens_of_a_running_request_are_not_lent() -> None:
    """Only its prompt is known to the index while it runs: what follows may still be rejected."""
    play = play_with(a=LONG)
    play.step(("a", 0, len(LONG), 0, [140]))
    for position in range(len(LONG), 60):
        play.step(("a", position, 1, 0, [position + 101]))
    turn = [*LONG, *range(140, 160)]
    play.prompts["b"] = turn
    play.step(("b", 48, len(turn) - 48, 0, [31]))
    assert play.finish("b", turn, [31]) is None
    assert play.tap.dropped == Counter(hole=1)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40, 100])
def test_keys_are_those_of_whole_blocks_and_grow_with_the_prefix(count: int) -> None:
    chain = PrefixChain(3, LONG)
    keys = chain.keys_until(count)
    assert len(keys) == min(count, len(LONG)) // BLOCK_TOKENS
    assert PrefixChain(3, LONG).keys_until(1000)[: len(keys)] == keys
    assert not set(keys) & set(PrefixChain(4, LONG).keys_until(1000))


def test_requests_that_start_while_taps_are_off_are_not_tapped_and_counted() -> None:
    play = play_with(a=LONG, b=LONG, c=LONG)
    play.step(("a", 0, len(LONG), 0, [21]))
    play.tap.enabled = False
    play.step(("a", 40, 1, 0, [22]), ("b", 0, len(LONG), 0, [31]))
    play.tap.enabled = True
    play.step(("b", 40, 1, 0, [32]), ("c", 0, len(LONG), 0, [41]))
    assert_whole(play.finish("a", LONG, [21, 22]), "a", LONG, [21, 22])
    assert play.finish("b", LONG, [31, 32]) is None
    assert_whole(play.finish("c", LONG, [41]), "c", LONG, [41])
    assert play.tap.dropped == Counter(taps_off=1)
    assert play.tap.counters.generated_tokens == 5


def test_running_requests_are_bounded_in_bytes() -> None:
    play = Play(limit_bytes=1)
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, 0, [22]), ("b", 0, 5, 0, [31]))
    held = play.tap.running_bytes
    assert held > 1
    assert_whole(play.finish("a", [11, 12, 13, 14, 15], [21, 22]), "a", [11, 12, 13, 14, 15], [21, 22])
    assert play.finish("b", [11, 12, 13, 14, 15], [31]) is None
    assert play.tap.dropped == Counter(tap_memory=1)
    assert play.tap.running_bytes == 0


def test_rows_beyond_the_longest_sample_are_not_held() -> None:
    play = Play(max_sample_tokens=8)
    play.step(("a", 0, 5, 0, [21]))
    for position in range(5, 60):
        play.step(("a", position, 1, 0, [position + 17]))
    assert play.tap.running_bytes == 8 * 4 * 4 * torch.float32.itemsize
    sample = play.finish("a", [11, 12, 13, 14, 15], list(range(21, 77)))
    assert_whole(sample, "a", [11, 12, 13, 14, 15], [21, 22, 23])
    assert play.tap.cut_samples == 1


def test_a_hit_behind_a_hit_of_the_same_step_is_filled_too() -> None:
    """A system prompt that somebody else computed, then siblings of a new prompt: the first hits the one and computes the rest,
    which the others hit. Whatever their order in the batch."""
    prompt = list(range(100, 180))
    play = play_with(old=prompt[:40], a=prompt, b=prompt, c=prompt)
    play.step(("old", 0, 40, 0, [21]))
    play.step(("b", 64, 16, 0, [31]), ("a", 32, 48, 0, [41]), ("c", 64, 16, 0, [51]))
    play.step(("a", 80, 1, 0, [42]), ("b", 80, 1, 0, [32]), ("c", 80, 1, 0, [52]))
    assert_whole(play.finish("a", prompt, [41, 42]), "a", prompt, [41, 42], filled=("old", 32))
    for request in ("b", "c"):
        sample = play.finish(request, prompt, [31, 32] if request == "b" else [51, 52])
        assert sample is not None
        first = torch.cat([true_rows("old", 1, range(32)), true_rows("a", 1, range(32, 64)), true_rows(request, 1, range(64, 81))])
        assert torch.equal(sample.taps[:, : first.shape[1]], first)
    assert play.tap.dropped == Counter()


def test_a_request_that_outgrows_the_bound_is_given_up() -> None:
    play = Play(limit_bytes=300 * 4 * 4 * 4)
    play.step(("a", 0, 5, 0, [21]), ("b", 0, 5, 0, [31]))
    for position in range(5, 300):
        play.step(("a", position, 1, 0, [position + 17]))
    assert play.finish("a", [11, 12, 13, 14, 15], list(range(21, 317))) is None
    assert_whole(play.finish("b", [11, 12, 13, 14, 15], [31]), "b", [11, 12, 13, 14, 15], [31])
    assert play.tap.dropped == Counter(tap_memory=1)
