"""Steps without drafts between steps with them, in one engine: ``python -m tests.in_vllm.run_governor JSON``.

Leaves every proposal of the drafter: by request and position, in runs that differ only in which steps drafted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm import tiny, tiny_engine

TOKENS = 24
GOVERNED_TOKENS = 480
PROMPTS = 5
SHARED = 100
"""Tokens of a prompt that several requests share: with blocks of 32 a later one finds two."""


class Script:
    """Takes the governor's place: its arm per engine step."""

    def __init__(self, steps: Callable[[int], int]) -> None:
        self._steps, self._step, self.arm = steps, -1, 0

    def __getitem__(self, batch: int) -> int:
        self._step += 1
        self.arm = self._steps(self._step)
        return min(self.arm, tiny_engine.DRAFT_TOKENS)


TEXT = tiny_engine.DRAFT_TOKENS + 1
"""The governor's arm that drafts from the text."""
RUNS: dict[str, Callable[[int], int]] = {
    "always": lambda step: 3,
    "off at first": lambda step: 0 if step < 8 else 3,
    "off and on": lambda step: 0 if step % 7 in (1, 2, 3) else 3,
    "single steps": lambda step: 3 * (step % 2),
    "fewer": lambda step: (0, 2, 1, 3)[step // 4 % 4],
    "from the text": lambda step: TEXT if step % 8 < 5 else 3,
}


def watch(worker: Any) -> None:
    """Record proposals, and what the first draft token of each was chosen from."""
    drafter, runner = worker.model_runner.drafter, worker.model_runner
    propose, compute_logits = drafter.propose, drafter.model.compute_logits
    worker.seen, worker.texts, logits = [], [], list[torch.Tensor]()

    def recorded_logits(hidden: torch.Tensor) -> torch.Tensor:
        found = compute_logits(hidden)
        logits.append(found.detach().clone())
        return found

    def recorded_propose(**inputs: Any) -> torch.Tensor:
        logits.clear()
        # Read first: what follows writes into the metadata.
        bounds, refused = inputs["common_attn_metadata"].query_start_loc_cpu[1:], inputs.get("num_rejected_tokens_gpu")
        last = bounds - 1 - (refused if refused is not None else 0)
        positions = inputs["target_positions"][last.long()].tolist()
        drafts = propose(**inputs)
        if not logits:
            worker.texts += [row for row in drafts.tolist() if row and row[0] >= 0]
            return drafts
        # A block drafter gives the logits of all its tokens at once.
        rows_each = logits[0].shape[0] // drafts.shape[0]
        for index, request in enumerate(runner.input_batch.req_ids):
            place = {"request": request, "position": positions[index], "tokens": drafts.shape[1]}
            worker.seen.append({**place, "logits": logits[0][index * rows_each]})
        return drafts

    drafter.propose, drafter.model.compute_logits = recorded_propose, recorded_logits


def take(worker: Any) -> dict[str, Any]:
    """The proposals since the last call, of the draft and from the text, and what was left out and made up for so far."""
    found = {"seen": worker.seen, "texts": worker.texts, "counters": vars(worker.specdraft_agent.gaps.counters).copy()}
    worker.seen, worker.texts = [], []
    return found


def clear_cache(worker: Any) -> None:
    """No keys and values of an earlier run with the same tokens may stand in for those that are missing."""
    context = worker.model_runner.compilation_config.static_forward_context
    for name in worker.model_runner.drafter._draft_attn_layer_names:
        context[name].kv_cache.zero_()


def forget_gaps(worker: Any) -> None:
    """As if nothing had been kept: what a draft proposes whose keys and values were left out."""
    gaps = worker.specdraft_agent.gaps
    gaps._row_of[:] = -1
    gaps._held = 0
    gaps._pending.clear()
    gaps._pending_rows = 0


class Runs:
    """Greedy answers on one engine, with a script for each."""

    def __init__(self, llm: Any, params: Any) -> None:
        self._llm, self._params = llm, params
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.found: dict[str, Any] = {}
        llm.collective_rpc(watch)

    def run(
        self, name: str, steps: Callable[[int], int], prompts: list[list[int]], between: Callable[[int], None] = lambda step: None
    ) -> None:
        """`between` is called after each step with its number."""
        if not name.endswith("later"):
            self._llm.reset_prefix_cache()
            self._llm.collective_rpc(clear_cache)
        self._scheduler.dynamic_sd_lookup = self._scheduler._lookup = Script(steps)
        answers = tiny_engine.answers_stepwise(self._llm, prompts, [self._params] * len(prompts), between)
        self.found[name] = {"answers": answers, **self._llm.collective_rpc(take)[0]}

    def forget_after(self, step: int) -> Callable[[int], None]:
        """For `run`: what was kept until then is lost."""
        return lambda now: self._llm.collective_rpc(forget_gaps) if now == step else None


def exercise(arguments: dict[str, Any]) -> None:
    """One engine per draft type."""
    from vllm import SamplingParams

    prompts = tiny.prompts(PROMPTS, seed=4)
    shared = [token for prompt in tiny.prompts(24, seed=9) for token in prompt][:SHARED]
    options = {
        "scheduler_cls": "vllm_specdraft.governor.scheduler.GovernedScheduler",
        "speculative_config": {"num_speculative_tokens_per_batch_size": [[1, 64, 3]]},
        "max_model_len": 512,
        "block_size": 32,
    }
    for kind in arguments["kinds"]:
        config = tiny_engine.config_of(arguments, kind, learn=False)
        with tiny_engine.engine(arguments["targets"][kind], config, **options) as llm:
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            governed = scheduler.dynamic_sd_lookup
            runs = Runs(llm, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
            for name, steps in RUNS.items():
                runs.run(name, steps, prompts)
            # The proof that the comparison sees a gap.
            runs.run("forgotten", RUNS["off at first"], prompts, runs.forget_after(7))
            for name, first in (("prefix drafted", 3), ("prefix not drafted", 0)):
                runs.run(f"{name}, first", lambda step, first=first: first, [shared])
                runs.run(f"{name}, later", lambda step: 3, [[*shared, 7], [*shared, 8]])
            scheduler.dynamic_sd_lookup = scheduler._lookup = governed
            long = SamplingParams(temperature=0, max_tokens=GOVERNED_TOKENS, ignore_eos=True)
            tiny_engine.answers(llm, prompts[:1], long)
            # Reports go to the worker once in a while: the next step brings one.
            scheduler._report_due = 0.0
            tiny_engine.answers(llm, prompts[:1], SamplingParams(temperature=0, max_tokens=3))
            runs.found["report"] = scheduler.specdraft_governor.report()
            runs.found["status"] = tiny_engine.control(llm, "status")
        torch.save(runs.found, Path(arguments["out"]) / f"{kind}.pt")


if __name__ == "__main__":
    exercise(json.loads(sys.argv[1]))
