"""Functions that run inside the worker of an offline engine, sent there by name.

Run as a script it starts such an engine, answers a few prompts greedily and leaves what the worker saw in a file:
``python -m tests.in_vllm.probes TARGET METHOD DRAFT OUT``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm.engines import QUESTIONS


def watch_drafter(worker: Any) -> None:
    """Record every draft proposal of this worker: the tokens it stands on and the logits of each draft step."""
    drafter = worker.model_runner.drafter
    calls: list[dict[str, Any]] = []
    propose, compute_logits = drafter.propose, drafter.model.compute_logits

    def recorded_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        calls[-1]["logits"].append(logits.detach().clone())
        return logits

    def recorded_propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append({"logits": [], "next": kwargs["next_token_ids"].clone(), "positions": kwargs["target_positions"].clone()})
        rejected = kwargs["num_rejected_tokens_gpu"]
        calls[-1]["rejected"] = 0 if rejected is None else int(rejected[0])
        drafts = propose(*args, **kwargs)
        calls[-1]["drafts"] = drafts.clone()
        return drafts

    drafter.propose, drafter.model.compute_logits = recorded_propose, recorded_logits
    worker.probe_calls = calls


def save_seen(worker: Any, path: str) -> None:
    """Write the recorded proposals and the samples in replay."""
    replay = worker.specdraft_agent.replay
    torch.save({"calls": worker.probe_calls, "samples": replay.samples(), "dropped": dict(replay.dropped)}, path)


def main(target: str, method: str, draft: str, out: str) -> None:
    """Start the engine, generate, save."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        # One prompt fits into a step, two do not: together their prefill is cut into chunks. Alone it must not be: at a chunk's
        # end vLLM 0.32 gives its drafter the token after the next one, which no draft is trained for.
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        speculative_config={"method": method, "model": draft, "num_speculative_tokens": 3},
        worker_extension_cls="vllm_specdraft.worker.SpecdraftWorker",
        disable_log_stats=True,
    )
    llm.collective_rpc(watch_drafter)
    greedy = SamplingParams(temperature=0, max_tokens=40)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS[:2]]
    alone = [llm.chat([message], greedy, use_tqdm=False)[0] for message in messages]
    llm.collective_rpc(save_seen, args=(f"{out}/alone.pt",))
    together = llm.chat(messages, greedy, use_tqdm=False)
    # One more request: the finished ones reach the worker with the step after them.
    llm.chat([messages[0]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    llm.collective_rpc(save_seen, args=(f"{out}/together.pt",))
    ids = [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in (*alone, *together)]
    torch.save(ids, Path(out) / "answers.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
