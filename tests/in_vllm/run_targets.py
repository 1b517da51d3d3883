"""What the tests of targets look at, from one engine per target: ``python -m tests.in_vllm.run_targets JSON``.

Greedy answers before and after a learned draft is swapped in, answers interrupted by a pause, and the samples that were tapped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm import tiny_engine
from vllm_specdraft.config import EngineConfig

LEARNING_STEPS = 30
PAUSED_FROM, PAUSED_TO = 4, 7


def samples_of(worker: Any, path: str) -> None:
    """In the worker: write every sample in replay."""
    torch.save(worker.specdraft_agent.replay.samples(), path)


def exercise(target: str, config: EngineConfig, prompts: list[list[int]], out: Path) -> None:
    """Run one target and leave what was seen in `out`."""
    from vllm import SamplingParams

    # Few blocks, so that requests are preempted in the middle of an answer.
    options = {"max_model_len": 256, "block_size": 32, "num_gpu_blocks_override": 20, "disable_log_stats": False}
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with tiny_engine.engine(target, config, **options) as llm:
        seen: dict[str, Any] = {"prompts": prompts, "first": tiny_engine.answers(llm, prompts, greedy)}
        seen["preemptions"] = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        # One more request: the finished ones reach the worker with the step after them.
        tiny_engine.answers(llm, prompts[:1], SamplingParams(temperature=0, max_tokens=1))
        llm.collective_rpc(samples_of, args=(str(out / "samples.pt"),))
        tiny_engine.learn(llm, LEARNING_STEPS)
        seen["publish"] = tiny_engine.swap(llm, {})
        seen["second"] = tiny_engine.answers(llm, prompts, greedy)
        core = llm.llm_engine.engine_core.engine_core

        def pause_and_resume(step: int) -> None:
            if step == PAUSED_FROM:
                core.pause_scheduler("keep", clear_cache=True)
            elif step == PAUSED_TO:
                seen["running_while_paused"] = len(core.scheduler.running) + len(core.scheduler.waiting)
                core.resume_scheduler()

        seen["paused"] = tiny_engine.answers_stepwise(llm, prompts[:6], [greedy] * 6, pause_and_resume)
        seen["status"] = tiny_engine.control(llm, "status")
    torch.save(seen, out / "seen.pt")


def main(arguments: dict[str, Any]) -> None:
    """One engine after the other."""
    for name, target in arguments["targets"].items():
        out = Path(arguments["out"]) / name
        out.mkdir()
        config = tiny_engine.config_of(arguments, name, min_samples=8, held_out_share=0.3, warmup_steps=5)
        exercise(target, config, arguments["prompts"], out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
