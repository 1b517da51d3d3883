"""Catches: rows stored while an answer waits for them, rows or samples lost when the next step begins at once, a sample built
before its last row is there, and a step that failed and leaves the tap waiting for its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine_play import LAYERS, PROMPT, true_rows
from trainer_bridge.taps import TapSample
from vllm_specdraft.runner_tap import RunnerTap

ANSWER = [21, 22, 23]


class Runner:
    """One request in a runner that gives a token per step: what `RunnerTap` reads of vLLM's."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=64)
        params = SimpleNamespace(stop_token_ids=None, all_stop_token_ids=frozenset(), ignore_eos=True, max_tokens=len(ANSWER))
        request = SimpleNamespace(
            prompt_token_ids=PROMPT, output_token_ids=[], sampling_params=params, prompt_embeds=None, prompt_is_token_ids=None,
            mm_features=[], lora_request=None,
        )  # fmt: skip
        self.requests = {"a": request}
        self.computed = 0
        self.input_batch = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=torch.zeros(1, dtype=torch.int64).numpy())
        self.execute_model_state: Any = None
        self.fails = False

    def execute_model(self, scheduler_output: Any) -> None:
        for request in scheduler_output.finished_req_ids:
            del self.requests[request]
        if self.fails:
            raise RuntimeError("out of memory")
        if count := scheduler_output.total_num_scheduled_tokens:
            rows = [true_rows("a", layer, range(self.computed, self.computed + count)) for layer in (*LAYERS, 0)]
            self.execute_model_state = SimpleNamespace(
                scheduler_output=scheduler_output, aux_hidden_states=rows[:-1], hidden_states=rows[-1]
            )

    def sample_tokens(self) -> Any:
        self.computed += self.execute_model_state.scheduler_output.total_num_scheduled_tokens
        self.execute_model_state = None
        self.input_batch.num_computed_tokens_cpu[0] = self.computed
        answer = self.requests["a"].output_token_ids
        answer.append(ANSWER[len(answer)])
        return SimpleNamespace(sampled_token_ids=[answer[-1:]], req_id_to_index={"a": 0})


def planned(tokens: int, finished: tuple[str, ...] = ()) -> Any:
    """A scheduler output."""
    return SimpleNamespace(
        finished_req_ids=finished, total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": tokens},
        scheduled_spec_decode_tokens={},
    )  # fmt: skip


class Tapped:
    """A runner with a tap, and what the tap said."""

    def __init__(self) -> None:
        self.runner = Runner()
        self.delivered: list[TapSample] = []
        self.steps = {"began": 0, "ended": 0}
        self.failures: list[Exception] = []
        self.tap = RunnerTap(
            self.runner,
            tap_layers=LAYERS,
            num_speculative_tokens=3,
            policy_version=lambda: 1,
            max_sample_tokens=64,
            limit_bytes=1 << 20,
            deliver=self.delivered.append,
            step_began=lambda: self._count("began"),
            step_ended=lambda: self._count("ended"),
            failed=self.failures.append,
            governed=lambda _: None,
        )

    def _count(self, what: str) -> None:
        self.steps[what] += 1

    def step(self, tokens: int) -> None:
        """Forward and sampling, the loop's look for a message between them."""
        self.runner.execute_model(planned(tokens))
        self.tap.catch_up()
        self.runner.sample_tokens()


@pytest.mark.parametrize("looked", [True, False], ids=["the loop looked for messages", "the next step came at once"])
def test_a_sample_has_the_rows_of_every_step(looked: bool) -> None:
    tapped = Tapped()
    for tokens in (len(PROMPT), 1, 1):
        tapped.step(tokens)
        if looked:
            tapped.tap.catch_up()
    tapped.runner.execute_model(planned(0, finished=("a",)))
    tapped.tap.catch_up()
    (sample,) = tapped.delivered
    assert sample.token_ids.tolist() == PROMPT + ANSWER
    expected = torch.cat([true_rows("a", layer, range(len(PROMPT) + 2)) for layer in LAYERS], -1)
    assert torch.equal(sample.taps, expected)
    assert not tapped.failures
    assert tapped.steps == {"began": 3, "ended": 3}


def test_nothing_is_stored_while_an_answer_waits() -> None:
    tapped = Tapped()
    tapped.step(len(PROMPT))
    # The answer is not on its way before this call returns.
    assert tapped.tap.collector.running_bytes == 0
    tapped.tap.catch_up()
    stored = tapped.tap.collector.running_bytes
    assert stored > 0
    tapped.step(1)
    tapped.step(1)
    tapped.runner.execute_model(planned(0, finished=("a",)))
    assert not tapped.delivered, "building a sample held a step up"
    tapped.tap.catch_up()
    assert len(tapped.delivered) == 1 and tapped.tap.collector.running_bytes == 0


def test_a_step_that_fails_leaves_nothing_waiting() -> None:
    tapped = Tapped()
    tapped.step(len(PROMPT))
    tapped.runner.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        tapped.runner.execute_model(planned(1))
    assert not tapped.tap.in_step
    assert tapped.steps == {"began": 2, "ended": 2}
    assert tapped.tap.collector.running_bytes > 0


def test_what_fails_later_ends_the_tapping_and_nothing_else() -> None:
    tapped = Tapped()

    def fail(*_: Any) -> None:
        raise MemoryError("no row left")

    tapped.tap.collector.step = fail  # type: ignore[method-assign]
    for tokens in (len(PROMPT), 1, 1):
        tapped.step(tokens)
    tapped.runner.execute_model(planned(0, finished=("a",)))
    tapped.tap.catch_up()
    assert [str(error) for error in tapped.failures] == ["no row left"]
    assert not tapped.delivered and tapped.steps["ended"] == 3
