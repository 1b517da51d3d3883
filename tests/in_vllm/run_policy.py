"""What the tests of target updates look at: ``python -m tests.in_vllm.run_policy JSON``.

An engine serves a random target, gets the weights of another one, and goes back; then a fresh engine serves the other one from
the start. `run_policy_faults` has the updates that fail.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm import tiny, tiny_engine
from vllm_specdraft import drafts

OPTIONS = {"max_model_len": 256, "enable_prefix_caching": False}
"""Whoever updates the target clears the prefix cache; here there is none to clear."""
ANSWER_TOKENS = 32
PIECES_PER_STEP = 12
"""Pieces of building between two engine steps: it takes some ten steps, and the answers more."""


def readers_of(directory: str) -> list[tuple[str, Any]]:
    """Every tensor of a checkpoint, the last ones first: a build must find its own order."""
    weights = drafts.TargetWeights(Path(directory))
    return [(name, partial(weights.__getitem__, name)) for name in sorted(weights, reverse=True)]


# -- in the worker -------------------------------------------------------------------------------------------------------


def swap_of(worker: Any) -> Any:
    """The worker's `PolicySwap`, made once."""
    from vllm_specdraft.policy_swap import PolicySwap

    if not hasattr(worker, "policy_swap"):
        worker.policy_swap = PolicySwap(worker.model_runner)
    return worker.policy_swap


def start(worker: Any, directory: str) -> None:
    """Start a build, which the worker keeps."""
    worker.policy_build = swap_of(worker).build(readers_of(directory))


def steps(worker: Any, pieces: int) -> bool:
    """Some pieces of the worker's build, one by one; whether it is finished."""
    return any(worker.policy_build.step(0.0) for _ in range(pieces))


def finish(worker: Any) -> tuple[int, int]:
    """The rest of the worker's build; its counts."""
    while not worker.policy_build.step(0.01):
        pass
    return worker.policy_build.done, worker.policy_build.total


def apply(worker: Any) -> None:
    """Put the worker's build in; the worker keeps what it replaced."""
    worker.policy_replaced = swap_of(worker).apply(worker.policy_build)


def restore(worker: Any) -> None:
    """Put back what the worker kept; it keeps what that replaced."""
    worker.policy_replaced = swap_of(worker).restore(worker.policy_replaced)


def drop(worker: Any) -> None:
    """Do not keep what was replaced. The build that was put in stays, and should hold nothing."""
    worker.policy_replaced = None


def marks(worker: Any) -> list[Any]:
    """Every object that the served target is made of, where its tensors lie, how often they were written, and their digest."""
    from vllm_specdraft.swap import target_digest

    target = worker.model_runner.get_model()
    found: list[Any] = [target_digest(target)]
    for name, module in target.named_modules():
        own = vars(module)
        found.append((name, id(module), sorted((key, id(value)) for key, value in own.items())))
        found.append(sorted((key, id(child)) for key, child in own["_modules"].items()))
        for key, tensor in [*own["_parameters"].items(), *own["_buffers"].items()]:
            if tensor is not None:
                attributes = sorted((attribute, id(value)) for attribute, value in vars(tensor).items())
                found.append((name, key, id(tensor), tensor.data_ptr(), tensor._version, tuple(tensor.shape), attributes))
    return found


def alive(worker: Any) -> dict[str, int]:
    """What must not pile up: packed functions, vLLM's records, and bytes of tensors, without waiting for the collector."""
    import gc

    from vllm._custom_ops import CPUDNNLGEMMHandler
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    # By type, not isinstance: that asks the objects, and among them are dead proxies. Fake tensors have no storage.
    objects = gc.get_objects()
    functions = sum(issubclass(type(one), CPUDNNLGEMMHandler) for one in objects)
    real = [one for one in objects if type(one) is torch.Tensor or issubclass(type(one), torch.nn.Parameter)]
    tensors = [one for one in real if one.device.type == "cpu"]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return {"functions": functions, "records": len(LAYERWISE_INFO), "bytes": sum(storages.values())}


def embedding_of_draft(worker: Any) -> tuple[bool, torch.Tensor]:
    """Whether the draft's embedding is the target's module, and the rows of it that lie here."""
    embedding = worker.model_runner.drafter.model.model.embed_tokens
    rows = embedding.num_org_embeddings_per_partition
    return embedding is worker.model_runner.get_model().model.embed_tokens, embedding.weight.detach()[:rows].clone()


# -- in the script -------------------------------------------------------------------------------------------------------


def look(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy answers, the log-probabilities of their tokens, and how much was drafted and accepted for them."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0)
    before = tiny_engine.control(llm, "status")["counters"]
    outputs = [output.outputs[0] for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
    after = tiny_engine.control(llm, "status")["counters"]
    return {
        "answers": [list(output.token_ids) for output in outputs],
        "logprobs": torch.tensor(
            [[place[token].logprob for place, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
        ),
        **{key: after[key] - before[key] for key in ("drafted_tokens", "accepted_tokens")},
    }


def update(llm: Any, directory: str) -> None:
    """Build and put in at once; what was replaced is dropped."""
    llm.collective_rpc(start, args=(directory,))
    llm.collective_rpc(finish)
    llm.collective_rpc(apply)
    llm.collective_rpc(drop)


def built_while_serving(llm: Any, directory: str, prompts: list[list[int]]) -> dict[str, Any]:
    """A build goes on between the steps of running requests."""
    from vllm import SamplingParams

    seen: dict[str, Any] = {"finished after": None, "marks": [llm.collective_rpc(marks)]}
    llm.collective_rpc(start, args=(directory,))

    def between(step: int) -> None:
        if seen["finished after"] is None and all(llm.collective_rpc(steps, args=(PIECES_PER_STEP,))):
            seen["finished after"] = step

    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    seen["answers"] = tiny_engine.answers_stepwise(llm, prompts, [params] * len(prompts), between)
    seen["counts"] = llm.collective_rpc(finish)
    seen["marks"].append(llm.collective_rpc(marks))
    return seen


def exercise(arguments: dict[str, Any]) -> None:
    """Both engines, one after the other; leaves what was seen."""
    prompts, target, options = tiny.prompts(12, vocab=150, seed=4), arguments["targets"], {**OPTIONS, **arguments["options"]}
    with tiny_engine.engine(target["first"], tiny_engine.config_of(arguments, "first", learn=False), **options) as llm:
        # What the taps collect would be counted as well.
        tiny_engine.control(llm, "taps_off")
        seen: dict[str, Any] = {"prompts": prompts, "first": look(llm, prompts)}
        # The first update of a process leaves caches behind, once.
        update(llm, target["first"])
        seen["same"], seen["alive"] = look(llm, prompts), [llm.collective_rpc(alive)]
        seen["while serving"] = built_while_serving(llm, target["second"], prompts)
        llm.collective_rpc(apply)
        seen["second"], seen["embedding"] = look(llm, prompts), llm.collective_rpc(embedding_of_draft)
        llm.collective_rpc(restore)
        seen["back"], seen["marks back"] = look(llm, prompts), llm.collective_rpc(marks)
        llm.collective_rpc(restore)
        seen["second again"] = look(llm, prompts)
        seen["alive"].append(llm.collective_rpc(alive))
        llm.collective_rpc(restore)
        llm.collective_rpc(drop)
        seen["alive"].append(llm.collective_rpc(alive))
    with tiny_engine.engine(target["second"], tiny_engine.config_of(arguments, "fresh", learn=False), **options) as llm:
        seen["fresh"] = look(llm, prompts)
    torch.save(seen, Path(arguments["out"]) / "seen.pt")


if __name__ == "__main__":
    exercise(json.loads(sys.argv[1]))
