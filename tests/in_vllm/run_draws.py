"""Thousands of short answers to one prompt under speculation, with drafts swapping: ``python -m tests.in_vllm.run_draws JSON``.

Requests of three kinds share every batch: sampled freely, sampled narrowly (temperature, top-k and top-p), and greedy. Each has
a seed of its own and every swap falls between two given steps, so a run can be repeated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm import tiny, tiny_engine

KINDS: dict[str, dict[str, Any]] = {
    "free": {"temperature": 1.0},
    "narrow": {"temperature": 0.7, "top_k": 10, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}
TOKENS = 4
"""Tokens of each answer: the first comes from the prompt's step, the others from steps that verified drafts."""
VOCAB = 24
SWAP_EVERY = 7
"""Engine steps between two swaps."""
DEVELOPING, GROWN = 60, 200
"""Learning steps after which the two drafts that take turns were saved."""


def kind_of(index: int) -> str:
    """Kind of the i-th request."""
    return "greedy" if index % 20 == 0 else ("free", "narrow")[index % 2]


def make_drafts(llm: Any, out: Path) -> list[str]:
    """Let the draft learn from sampled answers; checkpoints of two stages."""
    from vllm import SamplingParams

    prompts = [[token % VOCAB for token in prompt] for prompt in tiny.prompts(160, seed=5)]
    tiny_engine.answers(llm, prompts, SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True))
    saved = []
    for steps in (DEVELOPING, GROWN):
        tiny_engine.learn(llm, steps)
        tiny_engine.swap(llm, {})
        saved.append(str(out / f"draft-{steps}"))
        tiny_engine.control(llm, "save", directory=saved[-1])
    return saved


def main(arguments: dict[str, Any]) -> None:
    """Run the engine and write all answers with the counters around them."""
    from vllm import SamplingParams

    out = Path(arguments["out"])
    # A tiny target is learned at a high rate.
    config = tiny_engine.config_of(arguments, "first", min_samples=16, held_out_share=0.1, learning_rate=3e-3)
    with tiny_engine.engine(arguments["target"], config, max_model_len=128, max_num_seqs=256) as llm:
        drafts = make_drafts(llm, out)
        swaps: list[dict[str, Any]] = []
        core = llm.llm_engine.engine_core.engine_core

        def swap_sometimes(step: int) -> None:
            running = len(core.scheduler.running)
            if step % SWAP_EVERY == 0 and running:
                record = tiny_engine.swap(llm, {"draft": drafts[len(swaps) % 2]})
                swaps.append({"running": running, "draft_version": record["draft_version"]})

        params = [
            SamplingParams(seed=index, max_tokens=TOKENS, ignore_eos=True, **KINDS[kind_of(index)])
            for index in range(arguments["requests"])
        ]
        before = tiny_engine.control(llm, "status")["counters"]
        tokens = tiny_engine.answers_stepwise(llm, [arguments["prompt"]] * len(params), params, swap_sometimes)
        after = tiny_engine.control(llm, "status")["counters"]
    torch.save({"tokens": torch.tensor(tokens), "before": before, "after": after, "swaps": swaps}, out / "draws.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
