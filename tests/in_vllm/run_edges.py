"""Every way in which a request can start, run and end, in one engine: ``python -m tests.in_vllm.run_edges JSON``.

Leaves what was asked and answered, the samples that were tapped, and the status.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm import tiny, tiny_engine
from tests.in_vllm.run_targets import samples_of

MAX_MODEL_LEN = 128
ABORT_AFTER = 6
"""Engine steps until a running request is aborted."""


def shared_prompt_requests(prompt: list[int]) -> list[tuple[str, list[int], dict[str, Any]]]:
    """Siblings: the prompt is computed once and hit by all others, which end in every place of an accepted run."""
    requests = [(f"ends after {n}", prompt, {"max_tokens": n, "temperature": 0}) for n in range(1, 9)]
    requests += [(f"seed {n}", prompt, {"max_tokens": 20, "temperature": 1.0, "seed": n}) for n in range(4)]
    return [*requests, ("three at once", prompt, {"max_tokens": 12, "temperature": 1.0, "n": 3})]


def single_requests(prompts: list[list[int]]) -> list[tuple[str, list[int], dict[str, Any]]]:
    """Prompts of their own with options that touch sampling or the scheduler."""
    long = [token for prompt in prompts[6:] for token in prompt][:100]
    return [
        ("to the length limit", long, {"max_tokens": 200, "temperature": 0}),
        ("logprobs", prompts[0], {"max_tokens": 24, "temperature": 0, "logprobs": 3}),
        ("prompt logprobs", long[:60], {"max_tokens": 10, "temperature": 0, "prompt_logprobs": 2}),
        ("top k", prompts[1], {"max_tokens": 24, "temperature": 0.7, "top_k": 5, "seed": 1}),
        ("penalty", prompts[2], {"max_tokens": 24, "temperature": 0, "repetition_penalty": 1.3}),
        ("no early end", prompts[3], {"max_tokens": 24, "temperature": 1.0, "min_tokens": 20, "seed": 2}),
        ("frequency penalty", prompts[4], {"max_tokens": 24, "temperature": 0, "frequency_penalty": 0.5}),
        ("one token", prompts[5], {"max_tokens": 1, "temperature": 0}),
    ]


def run(llm: Any, requests: list[tuple[str, list[int], dict[str, Any]]], abort: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """All requests at once; what came of each. Those in `abort` are aborted in the middle."""
    from vllm import SamplingParams

    core, outputs, step = llm.llm_engine, {}, 0
    for name, prompt, options in requests:
        core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**{"ignore_eos": "stop" not in name, **options}))
    while core.has_unfinished_requests():
        for output in core.step():
            outputs[output.request_id] = output
        step += 1
        if step == ABORT_AFTER:
            core.abort_request(list(abort))
    prompts = {name: prompt for name, prompt, _ in requests}
    return [
        {"name": name, "prompt": prompts[name], "answer": list(answer.token_ids), "reason": answer.finish_reason}
        for name, output in outputs.items()
        for answer in output.outputs
    ]


def stop_requests(done: list[dict[str, Any]]) -> list[tuple[str, list[int], dict[str, Any]]]:
    """Greedy requests again, now stopped by a token or a word that is known to come."""
    made = []
    for one in [entry for entry in done if entry["name"] in ("logprobs", "first 1", "ends after 8")]:
        for index in range(1, min(7, len(one["answer"]))):
            token = one["answer"][index]
            common = {"max_tokens": 24, "temperature": 0}
            made.append((f"stop token {index} {one['name']}", one["prompt"], {**common, "stop_token_ids": [token]}))
            made.append((f"stop word {index} {one['name']}", one["prompt"], {**common, "stop": [f"t{token}"]}))
    return made


def exercise(arguments: dict[str, Any]) -> None:
    """One engine, several waves of requests."""
    out = Path(arguments["out"])
    config = tiny_engine.config_of(arguments, "edges", min_samples=8, held_out_share=0.3, warmup_steps=5, max_sample_tokens=512)
    prompts = tiny.prompts(24, seed=4)
    options = {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 32,
        # Few blocks: requests are preempted in the middle of an answer. Small steps: prompts are prefilled in chunks.
        "num_gpu_blocks_override": 20,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 12,
        "skip_tokenizer_init": False,
        "disable_log_stats": False,
        "speculative_config": {"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 10, 1], [11, 64, 0]]},
    }
    with tiny_engine.engine(arguments["targets"]["edges"], config, **options) as llm:
        done = run(llm, [(f"first {i}", prompt, {"max_tokens": 30, "temperature": 0}) for i, prompt in enumerate(prompts[:12])])
        tiny_engine.learn(llm, 60)
        tiny_engine.swap(llm, {})
        # With a draft the last block of a hit is computed again: a hit needs two whole blocks.
        shared = [token for prompt in prompts[12:] for token in prompt][:100]
        wave = [*shared_prompt_requests(shared), *single_requests(prompts)]
        aborted = [(f"aborted {i}", prompt, {"max_tokens": 60, "temperature": 0}) for i, prompt in enumerate(prompts[12:15])]
        # The aborted ones first: they are in the middle of an answer when their end comes.
        done += run(llm, [*aborted, *wave], abort=tuple(name for name, _, _ in aborted))
        done += run(llm, stop_requests(done))
        turns = [entry for entry in done if entry["name"].startswith("first")][:4]
        made = [
            (f"turn two of {entry['name']}", [*entry["prompt"], *entry["answer"], 9, 8, 7], {"max_tokens": 12, "temperature": 0})
            for entry in turns
        ]
        done += run(llm, made)
        # One more request: the finished ones reach the worker with the step after them.
        run(llm, [("last", prompts[0], {"max_tokens": 1})])
        llm.collective_rpc(samples_of, args=(str(out / "samples.pt"),))
        preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        seen = {"done": done, "status": tiny_engine.control(llm, "status"), "preemptions": preemptions}
    torch.save(seen, out / "seen.pt")


if __name__ == "__main__":
    exercise(json.loads(sys.argv[1]))
