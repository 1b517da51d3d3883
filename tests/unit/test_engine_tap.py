"""Catches hidden states that belong to a rejected draft, another request or another policy, and samples that are not what
the engine returned."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_play import DRAFTS, HIDDEN, PROMPT, REJECTED, Play, assert_whole
from vllm_specdraft.taps import StepRows


def test_an_answer_without_drafts() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, 0, [22]))
    play.step(("a", 6, 1, 0, [23]))
    assert play.plain_steps == 2
    sample = play.finish("a", PROMPT, [21, 22, 23])
    assert_whole(sample, "a", PROMPT, [21, 22, 23])
    assert play.delivered == [sample]
    assert sample is not None
    assert sample.policy_version == 5


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_rows_of_accepted_drafts_are_kept_and_no_others(accepted: int) -> None:
    """D2: the rows of the fed token and of each accepted draft; the next step starts where those end."""
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    run = [31 + i for i in range(accepted + 1)]
    play.step(("a", 5, 1, DRAFTS, run))
    play.step(("a", 6 + accepted, 1, DRAFTS, [41, 42]))
    answer = [21, *run, 41, 42]
    assert_whole(play.finish("a", PROMPT, answer), "a", PROMPT, answer)


def test_a_rejected_draft_s_row_is_not_even_stored() -> None:
    """An answer that claims a token whose row was a rejected draft's is a hole, not a wrong row."""
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, DRAFTS, [22]))
    assert play.finish("a", PROMPT, [21, 22, 23]) is None
    assert play.tap.dropped == Counter(hole=1)


def test_a_prompt_in_chunks() -> None:
    """D3: assembled by position, whatever the chunks; they sample nothing before the last one."""
    play = Play()
    play.step(("a", 0, 2, 0, []))
    play.step(("a", 2, 2, 0, []))
    play.step(("a", 4, 1, 0, [21]))
    play.step(("a", 5, 1, 0, [22]))
    assert_whole(play.finish("a", PROMPT, [21, 22]), "a", PROMPT, [21, 22])
    assert play.tap.counters.generated_tokens == 2


def test_a_chunk_that_sampled_nothing_keeps_no_draft_row() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, 2, []))
    play.step(("a", 5, 1, 0, [22]))
    assert_whole(play.finish("a", PROMPT, [21, 22]), "a", PROMPT, [21, 22])
    assert play.tap.counters.draft_steps == 0


def test_a_position_that_is_computed_again_is_written_again() -> None:
    """Preempted and resumed, prompt and answer are prefilled once more: the last computation counts."""
    play = Play()
    play.step(("old", 0, 5, 0, [21]), ("a", 0, 1, 0, []))
    stale = StepRows(request_id="a", start=0, rows=slice(0, 6), num_drafts=0, prompt_ids=PROMPT, sampled=[21])
    play.tap.step([stale], [torch.full((6, HIDDEN), 9.0)] * 3, torch.full((6, HIDDEN), 9.0))
    play.step(("a", 0, 4, 0, []))
    play.step(("a", 4, 2, 0, [22]))
    assert_whole(play.finish("a", PROMPT, [21, 22]), "a", PROMPT, [21, 22])


def test_an_answer_longer_than_the_first_store() -> None:
    play = Play()
    prompt = list(range(1, 201))
    play.step(("a", 0, 200, 0, [7]))
    answer = [7]
    while len(answer) < 700:
        play.step(("a", 199 + len(answer), 1, DRAFTS, [7] * (DRAFTS + 1)))
        answer += [7] * (DRAFTS + 1)
    assert_whole(play.finish("a", prompt, answer), "a", prompt, answer)


# What was returned.


def test_an_answer_ends_with_the_end_of_text_inside_an_accepted_run() -> None:
    """What follows it in the run was never returned, and is no training data; the end itself is."""
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, DRAFTS, [22, 2, 23, 24]))
    assert_whole(play.finish("a", PROMPT, [21, 22, 2, 23, 24], stops=[2, 99]), "a", PROMPT, [21, 22, 2])


def test_the_first_of_several_ends_counts_and_ends_in_the_prompt_do_not() -> None:
    play = Play()
    prompt = [11, 2, 13, 99, 15]
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, DRAFTS, [99, 2, 23, 24]))
    assert_whole(play.finish("a", prompt, [21, 99, 2, 23, 24], stops=[2, 99]), "a", prompt, [21, 99])


def test_an_answer_is_no_longer_than_was_asked_for() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, DRAFTS, [22, 23, 24, 25]))
    assert_whole(play.finish("a", PROMPT, [21, 22, 23, 24, 25], limit=3), "a", PROMPT, [21, 22, 23])


def test_the_limit_comes_before_an_end_that_lies_behind_it() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, DRAFTS, [22, 23, 2, 25]))
    assert_whole(play.finish("a", PROMPT, [21, 22, 23, 2, 25], stops=[2], limit=3), "a", PROMPT, [21, 22, 23])


@pytest.mark.parametrize(("most", "kept"), [(7, 2), (8, 3), (9, 3)])
def test_a_long_sample_is_cut_to_its_first_tokens(most: int, kept: int) -> None:
    """Whose rows need no later ones."""
    play = Play(max_sample_tokens=most)
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, DRAFTS, [22, 23]))
    assert_whole(play.finish("a", PROMPT, [21, 22, 23]), "a", PROMPT, [21, 22, 23][:kept])


# What gives no sample.


@pytest.mark.parametrize("most", [3, 5])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_counted(most: int) -> None:
    play = Play(max_sample_tokens=most)
    play.step(("a", 0, 5, 0, [21]))
    assert play.finish("a", PROMPT, [21]) is None
    assert play.tap.dropped == Counter(prompt_too_long=1)


def test_a_discarded_request_is_forgotten() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, [21]), ("b", 0, 5, 0, [21]))
    play.tap.discard("a")
    play.tap.discard("never seen")
    assert list(play.tap._rows) == list(play.tap._versions) == ["b"]
    assert play.finish("a", PROMPT, [21]) is None
    assert_whole(play.finish("b", PROMPT, [21]), "b", PROMPT, [21])
    assert not play.tap._rows
    assert not play.tap._versions


def test_a_prefix_cache_hit_is_a_hole_and_counted() -> None:
    """D1: rows that the engine never computed are not made up."""
    play = Play()
    play.step(("a", 2, 3, 0, [21]))
    play.step(("a", 5, 1, 0, [22]))
    assert play.finish("a", PROMPT, [21, 22]) is None
    assert (play.tap.dropped, play.delivered) == (Counter(hole=1), [])


def test_a_hole_in_the_middle_is_a_hole() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 6, 1, 0, [23]))
    assert play.finish("a", PROMPT, [21, 22, 23]) is None
    assert play.tap.dropped == Counter(hole=1)


def test_a_new_policy_in_the_middle_of_an_answer_drops_it() -> None:
    """No head is the teacher of both halves; the requests after it are good again."""
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.policy_version += 1
    play.step(("a", 5, 1, 0, [22]), ("b", 0, 5, 0, [21]))
    play.step(("b", 5, 1, 0, [22]))
    assert play.finish("a", PROMPT, [21, 22]) is None
    assert play.tap.dropped == Counter(policy_changed=1)
    sample = play.finish("b", PROMPT, [21, 22])
    assert_whole(sample, "b", PROMPT, [21, 22])
    assert sample is not None
    assert sample.policy_version == 6


def test_a_request_without_an_answer_is_counted() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, []))
    assert play.finish("a", PROMPT, []) is None
    assert play.tap.dropped == Counter(no_answer=1)


def test_a_request_that_was_never_seen_gives_nothing() -> None:
    play = Play()
    assert play.finish("never", PROMPT, [21, 22]) is None
    assert play.delivered == []


def test_a_finished_request_is_forgotten() -> None:
    """Nothing of it is left for another request of the same name, and nothing stays in memory."""
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, 0, [22]))
    assert play.finish("a", PROMPT, [21, 22]) is not None
    assert play.finish("a", PROMPT, [21, 22]) is None
    play.step(("a", 3, 2, 0, [21]))
    play.step(("a", 5, 1, 0, [22]))
    assert play.finish("a", PROMPT, [21, 22]) is None
    assert play.tap.dropped == Counter(hole=1)


# Several requests.


def test_requests_that_share_a_step_do_not_mix() -> None:
    """D7: one prefilled, one decoded without drafts, one with some of its drafts accepted, in one flat batch."""
    play = Play()
    play.step(("a", 0, 5, 0, [21]), ("b", 0, 2, 0, []))
    play.step(("b", 2, 3, 0, [31]), ("a", 5, 1, DRAFTS, [22, 23]), ("c", 0, 5, 0, [41]))
    play.step(("a", 7, 1, 1, [24]), ("c", 5, 1, 0, [42]), ("b", 5, 1, DRAFTS, [32, 33, 34, 35]))
    assert_whole(play.finish("c", PROMPT, [41, 42]), "c", PROMPT, [41, 42])
    assert_whole(play.finish("a", PROMPT, [21, 22, 23, 24]), "a", PROMPT, [21, 22, 23, 24])
    assert_whole(play.finish("b", PROMPT, [31, 32, 33, 34, 35]), "b", PROMPT, [31, 32, 33, 34, 35])
    assert not play.tap.dropped


def test_siblings_share_a_group_and_other_prompts_do_not() -> None:
    play = Play()
    prompts = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 23], "d": [12, 3]}
    found = {}
    for name, prompt in prompts.items():
        play.step((name, 0, len(prompt), 0, [21]))
        sample = play.finish(name, prompt, [21])
        assert sample is not None
        found[name] = sample.group_id
    assert found["a"] == found["b"]
    assert len(set(found.values())) == 3


@settings(deadline=None, max_examples=60)
@given(data=st.data(), prompt_length=st.integers(1, 9))
def test_any_way_through_a_request_gives_the_same_sample(data: st.DataObject, prompt_length: int) -> None:
    """Chunks, drafts, acceptances and a resumption in any order: the rows are those of the tokens, each at its place."""
    play = Play()
    prompt = list(range(1, prompt_length + 1))
    position, answer = 0, []
    while len(answer) < 8:
        tokens = prompt_length + len(answer)
        if position < tokens - 1 or not answer:
            chunk = data.draw(st.integers(1, tokens - position))
            last = position + chunk == tokens
            play.step(("a", position, chunk, 0, [50 + len(answer)] if last else []))
            position += chunk
            if last:
                answer.append(50 + len(answer))
            continue
        drafts = data.draw(st.integers(0, DRAFTS))
        run = [50 + len(answer) + i for i in range(data.draw(st.integers(0, drafts)) + 1)]
        play.step(("a", position, 1, drafts, run))
        answer += run
        position += len(run)
        if data.draw(st.booleans()):
            position = data.draw(st.integers(0, position))
    assert_whole(play.finish("a", prompt, answer), "a", prompt, answer)


# Counters.


def test_counters_follow_drafts_and_acceptances() -> None:
    play = Play()
    play.step(("a", 0, 5, 0, [21]), ("b", 0, 5, 0, [31]))
    play.step(("a", 5, 1, 3, [22, 23, 24, 25]), ("b", 5, 1, 3, [32]))
    play.step(("a", 9, 1, 3, [26, 27]), ("b", 6, 1, 2, [33, 34, 35]))
    play.step(("a", 11, 1, 0, [28]))
    counters = play.tap.counters
    assert counters.generated_tokens == 2 + 5 + 5 + 1
    assert counters.draft_steps == 4
    assert counters.drafted_tokens == 3 + 3 + 3 + 2
    assert counters.accepted_tokens == 3 + 0 + 1 + 2
    assert counters.per_position == [3, 2, 1]
    assert sum(counters.per_position) == counters.accepted_tokens


def test_half_precision_states_become_fp32() -> None:
    play = Play()
    rows = StepRows(request_id="a", start=0, rows=slice(0, 3), num_drafts=0, prompt_ids=PROMPT, sampled=[21])
    play.tap.step([rows], [torch.ones(3, HIDDEN, dtype=torch.bfloat16)] * 3, torch.ones(3, HIDDEN, dtype=torch.bfloat16))
    sample = play.finish("a", [1, 2, 3], [21])
    assert sample is not None
    assert (sample.taps.dtype, sample.final.dtype) == (torch.float32, torch.float32)


def test_a_sample_does_not_change_with_the_engine_s_buffers() -> None:
    """The engine writes its next step into the same memory."""
    play = Play()
    buffers = [torch.ones(3, HIDDEN) for _ in range(4)]
    rows = StepRows(request_id="a", start=0, rows=slice(0, 3), num_drafts=0, prompt_ids=PROMPT, sampled=[21])
    play.tap.step([rows], buffers[:3], buffers[3])
    for buffer in buffers:
        buffer.fill_(REJECTED)
    sample = play.finish("a", [1, 2, 3], [21])
    assert sample is not None
    assert float(sample.taps.min()) == float(sample.final.min()) == 1.0
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in (sample.taps, sample.final)}
    assert sum(held.values()) == 4 * (sample.taps.numel() + sample.final.numel()), "holds no memory that its size does not count"


def test_steps_with_fewer_drafts_do_not_make_a_draft_look_worse() -> None:
    """With one token a step at most two tokens come of it, however good the draft is: it says what one token is worth, no more."""
    play = Play()
    play.step(("a", 0, 5, 0, [21]))
    play.step(("a", 5, 1, 1, [22, 23]))
    play.step(("a", 7, 1, 3, [24, 25, 26, 27]))
    play.finish("a", PROMPT, [21, 22, 23, 24, 25, 26, 27])
    _, found = play.tap.acceptance.compared()
    assert found is not None
    assert (found.draft_tokens, found.steps, found.length) == (3, 1, 4.0)
    assert play.tap.counters.draft_steps == 2
