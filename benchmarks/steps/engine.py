"""One offline engine over one draft: ``python -m benchmarks.steps.engine JSON``; prints its measurements as JSON."""

from __future__ import annotations

import itertools
import json
import sys
from statistics import median
from typing import Any

from benchmarks.steps import probe

TOKENS = 64
PROMPTS = 3


def parts_of(steps: list[dict[str, float]], rows: int) -> dict[str, float]:
    """Median milliseconds by part over the steps that ran `rows` rows and were followed by another such step."""
    found: dict[str, list[float]] = {part: [] for part in (*probe.PARTS, "step")}
    for step, following in itertools.pairwise(steps):
        if (step["rows"], following["rows"]) != (rows, rows):
            continue
        whole = following["began"] - step["began"]
        draft, worker = step.get("draft", 0.0), step.get("worker", 0.0)
        inside = ("target layers", "target head", "sampling", "draft layers", "draft head")
        parts = {part: step.get(part, 0.0) for part in inside}
        parts["draft rest"] = draft - parts["draft layers"] - parts["draft head"]
        parts["worker rest"] = worker - draft - parts["target layers"] - parts["target head"] - parts["sampling"]
        parts["outside the worker"] = whole - worker
        for part, seconds in {**parts, "step": whole}.items():
            found[part].append(1e3 * seconds)
    return {part: median(values) for part, values in found.items()} if found["step"] else {}


def measure(target: str, draft: str | None, method: str | None, tokens: int, batches: list[int]) -> dict[str, Any]:
    """Per batch size the parts of a step in ms, and answer tokens per second."""
    from vllm import LLM, SamplingParams

    from vllm_specdraft.demo.prompts import PromptSource

    options: dict[str, Any] = {}
    if draft is not None:
        options = {
            "speculative_config": {"method": method, "model": draft, "num_speculative_tokens": tokens},
            "worker_extension_cls": "vllm_specdraft.worker.SpecdraftWorker",
        }
    llm = LLM(
        target, dtype="float32", enforce_eager=True, max_model_len=1024, async_scheduling=False,
        distributed_executor_backend="mp", enable_prefix_caching=False, disable_log_stats=True, **options,
    )  # fmt: skip
    llm.collective_rpc(probe.watch)
    questions = [prompt.question for prompt in PromptSource(evaluation=PROMPTS * max(batches)).evaluation]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found: dict[str, Any] = {}
    for batch in batches:
        steps: list[dict[str, float]] = []
        groups = [questions[i * batch : (i + 1) * batch] for i in range(PROMPTS if batch == 1 else 1)]
        llm.chat([[{"role": "user", "content": questions[0]}]], sampling, use_tqdm=False)
        llm.collective_rpc(probe.take)
        for group in groups:
            llm.chat([[{"role": "user", "content": question}] for question in group], sampling, use_tqdm=False)
            steps += llm.collective_rpc(probe.take)[0]
        # Each running request has so many rows in a step; a prompt has more than all of them.
        verified = sum(step["rows"] for step in steps if step["rows"] <= batch * (tokens + 1)) / (tokens + 1)
        found[str(batch)] = {
            "parts": parts_of(steps, batch * (tokens + 1)),
            "accepted_length": batch * len(groups) * (TOKENS - 1) / verified,
        }
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))), flush=True)
