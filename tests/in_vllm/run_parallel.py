"""An engine of two tensor-parallel ranks: ``python -m tests.in_vllm.run_parallel JSON``.

Leaves what the ranks say of themselves, answers before and after swaps, a refused swap, and the samples.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm import tiny, tiny_engine
from tests.in_vllm.run_targets import samples_of


def plugin_of(worker: Any) -> dict[str, Any]:
    """In the worker: whether the plugin is there, and what this rank's part of it is."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    return {
        "process": os.getpid(),
        "rank": worker.rank,
        "patched": hasattr(WorkerProc.worker_busy_loop, "_specdraft_patches"),
        "agent": type(worker.specdraft_agent).__name__,
    }


def break_one_rank(worker: Any) -> None:
    """In the worker: the second rank's next swap fails after the reload."""
    if worker.rank == 1:
        import vllm.model_executor.model_loader.reload as reload

        finalize = reload.finalize_layerwise_reload

        def fail_once(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            reload.finalize_layerwise_reload = finalize
            raise RuntimeError("planted on rank 1")

        reload.finalize_layerwise_reload = fail_once


def exercise(arguments: dict[str, Any]) -> None:
    """Answers, learning, swaps that succeed, are refused on one rank, or name no draft."""
    from vllm import SamplingParams

    config = tiny_engine.config_of(arguments, "parallel", min_samples=8, held_out_share=0.3, warmup_steps=5)
    prompts = tiny.prompts(24, vocab=150, seed=6)
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    options = {"max_model_len": 256, "tensor_parallel_size": 2}
    seen: dict[str, Any] = {"prompts": prompts, "errors": []}
    with tiny_engine.engine(arguments["targets"]["parallel"], config, **options) as llm:
        seen["plugins"] = llm.collective_rpc(plugin_of)

        def look() -> dict[str, Any]:
            before = tiny_engine.control(llm, "status")["counters"]
            answers = tiny_engine.answers(llm, prompts, greedy)
            after = tiny_engine.control(llm, "status")
            counted = {key: after["counters"][key] - before[key] for key in ("drafted_tokens", "accepted_tokens")}
            return {"answers": answers, **counted, "version": after["draft_version"], "digest": after["draft_digest"]}

        seen["first"] = look()
        # One more request: the finished ones reach the worker with the step after them.
        tiny_engine.answers(llm, prompts[:1], SamplingParams(temperature=0, max_tokens=1))
        llm.collective_rpc(samples_of_first, args=(arguments["out"] + "/samples.pt",))
        tiny_engine.learn(llm, 60)
        seen["publish"] = tiny_engine.swap(llm, {})
        seen["learned"] = look()
        llm.collective_rpc(break_one_rank)
        for request in ({"draft": arguments["drafts"]["parallel"]}, {"draft": "/nowhere"}):
            try:
                tiny_engine.swap(llm, request)
            except Exception as error:  # noqa: BLE001 - what is raised is what the test looks at
                seen["errors"].append(str(error))
        seen["after errors"] = look()
        tiny_engine.control(llm, "save", directory=arguments["out"] + "/learned")
    torch.save(seen, Path(arguments["out"]) / "seen.pt")
    single = tiny_engine.config_of({**arguments, "drafts": {"single": arguments["out"] + "/learned"}}, "single")
    with tiny_engine.engine(arguments["targets"]["parallel"], single, max_model_len=256) as llm:
        before = tiny_engine.control(llm, "status")["counters"]
        answers = tiny_engine.answers(llm, prompts, greedy)
        after = tiny_engine.control(llm, "status")["counters"]
    counted = {key: after[key] - before[key] for key in ("drafted_tokens", "accepted_tokens")}
    torch.save({"answers": answers, **counted}, Path(arguments["out"]) / "single.pt")


def samples_of_first(worker: Any, path: str) -> None:
    """In the worker: the first rank's samples; the others have none."""
    if worker.rank == 0:
        samples_of(worker, path)


if __name__ == "__main__":
    exercise(json.loads(sys.argv[1]))
