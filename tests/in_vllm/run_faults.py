"""A swap that fails at each of its points, in one engine: ``python -m tests.in_vllm.run_faults JSON``.

Leaves, per fault, the error, and what the engine answered, drafted and accepted before and after it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.in_vllm import tiny, tiny_engine

RELOAD = "vllm.model_executor.model_loader.reload"


OPTIONS = {"max_model_len": 256, "block_size": 32}
"""Small blocks, so that repeated prompts are found in the prefix cache, with the draft's KV in it."""


class InjectedError(RuntimeError):
    """The planted fault."""


def _raise_after(items: Iterator[Any], count: int) -> Iterator[Any]:
    for index, item in enumerate(items):
        if index == count:
            raise InjectedError(f"after {count} tensors")
        yield item


def plant(worker: Any, fault: str, argument: Any) -> None:
    """In the worker: make the next swap fail at one point. `mend` takes it out."""
    import vllm.model_executor.model_loader.reload as reload

    agent = worker.specdraft_agent
    model, swapper, runner = agent.swapper.model, agent.swapper, worker.model_runner
    load, initialize, finalize = model.load_weights, reload.initialize_layerwise_reload, reload.finalize_layerwise_reload
    worker.specdraft_planted = (initialize, finalize)

    def fail(*_: Any, **__: Any) -> None:
        raise InjectedError(fault)

    def and_fail(first: Any) -> Any:
        def both(*args: Any, **kwargs: Any) -> None:
            first(*args, **kwargs)
            raise InjectedError(fault)

        return both

    def write_target(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        with torch.no_grad():
            runner.get_model().model.norm.weight.mul_(1.0)

    def altered(items: Any) -> Iterator[Any]:
        for name, tensor in items:
            if name == argument:
                if fault == "a tensor is left out":
                    continue
                tensor = tensor + 0.01
            yield name, tensor

    if fault == "before the reload":
        reload.initialize_layerwise_reload = fail
    elif fault == "after all layers went to meta":
        reload.initialize_layerwise_reload = and_fail(initialize)
    elif fault == "in the middle of the tensors":
        model.load_weights = lambda items: load(_raise_after(iter(items), argument))
    elif fault in ("a tensor is left out", "a tensor arrives wrong"):
        model.load_weights = lambda items: load(altered(items))
    elif fault == "before the last repacking":
        reload.finalize_layerwise_reload = fail
    elif fault == "after everything":
        reload.finalize_layerwise_reload = and_fail(finalize)
    elif fault == "the target is written":
        reload.finalize_layerwise_reload = write_target
    elif fault == "another rank fails":
        swapper_apply = swapper.apply
        swapper.apply = lambda state, agree: swapper_apply(state, lambda fine: False)
    else:
        raise ValueError(fault)


def mend(worker: Any) -> None:
    """In the worker: take the planted fault out."""
    import vllm.model_executor.model_loader.reload as reload

    reload.initialize_layerwise_reload, reload.finalize_layerwise_reload = worker.specdraft_planted
    agent = worker.specdraft_agent
    vars(agent.swapper.model).pop("load_weights", None)
    vars(agent.swapper).pop("apply", None)


def put_on_probation(worker: Any) -> None:
    """In the worker: take the served draft for one that the gate let through."""
    worker.specdraft_agent.on_probation = True


def probation(llm: Any, prompts: list[list[int]], worse: dict[str, Any]) -> dict[str, Any]:
    """A draft that the held-out samples praised accepts less on the traffic than the one before it did."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    tiny_engine.answers(llm, prompts, greedy)
    tiny_engine.swap(llm, worse)
    llm.collective_rpc(put_on_probation)
    served = tiny_engine.control(llm, "status")
    tiny_engine.answers(llm, prompts, greedy)
    # The finished requests reach the worker with the step after them.
    tiny_engine.answers(llm, prompts[:1], greedy)
    judged = tiny_engine.control(llm, "status")
    return {"served": served, "judged": judged, "record": tiny_engine.swap(llm, {"rollback": judged["rollback_wanted"]})}


def break_guest(worker: Any, guest: str | None) -> None:
    """In the worker: let something of ours fail that runs inside the engine's steps; None mends it."""
    agent = worker.specdraft_agent

    def fail(*_: Any, **__: Any) -> None:
        raise InjectedError(guest)

    if guest == "the checkpoint":
        agent._save_if_due = fail
    elif guest == "the taps":
        agent.tap.collector.step = fail
    else:
        vars(agent).pop("_save_if_due", None)
        vars(agent.tap.collector).pop("step", None)


LAYER = {"eagle3": "midlayer", "dflash": "layers.0"}
"""What checkpoints of a type call its decoder layer."""
HIDDEN_NORM = {"eagle3": "midlayer.hidden_norm.weight", "dflash": "hidden_norm.weight"}
FAULTS: tuple[tuple[str, Any], ...] = (
    ("before the reload", None),
    ("after all layers went to meta", None),
    ("in the middle of the tensors", 0),
    ("in the middle of the tensors", 4),
    ("in the middle of the tensors", 11),
    ("a tensor is left out", "LAYER.mlp.up_proj.weight"),
    ("a tensor is left out", "LAYER.self_attn.o_proj.weight"),
    ("a tensor is left out", "HIDDEN_NORM"),
    ("a tensor is left out", "lm_head.weight"),
    ("a tensor is left out", "d2t"),
    ("a tensor arrives wrong", "LAYER.self_attn.k_proj.weight"),
    ("a tensor arrives wrong", "norm.weight"),
    ("before the last repacking", None),
    ("after everything", None),
    ("the target is written", None),
    ("another rank fails", None),
)


TENSORS = ("a tensor is left out", "a tensor arrives wrong")


def exercise(arguments: dict[str, Any]) -> None:
    """A learned draft serves; every fault is planted once while another draft is swapped in; at last a swap succeeds."""
    from vllm import SamplingParams

    config = tiny_engine.config_of(arguments, "faults", min_samples=8, held_out_share=0.3, warmup_steps=5)
    prompts = tiny.prompts(24, seed=5)
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with tiny_engine.engine(arguments["targets"]["faults"], config, **OPTIONS) as llm:

        def look() -> dict[str, Any]:
            before = tiny_engine.control(llm, "status")
            answers = tiny_engine.answers(llm, prompts[:6], greedy)
            after = tiny_engine.control(llm, "status")
            counted = {key: after["counters"][key] - before["counters"][key] for key in ("drafted_tokens", "accepted_tokens")}
            kept = ("draft_version", "draft_digest", "target_digest", "last_error")
            return {"answers": answers, **counted, **{key: after[key] for key in kept}}

        def attempt(request: dict[str, Any]) -> str | None:
            try:
                tiny_engine.swap(llm, request)
            except Exception as error:  # noqa: BLE001 - what is raised is what the test looks at
                return str(error)
            return None

        tiny_engine.answers(llm, prompts, greedy)
        # One more request: the finished ones reach the worker with the step after them.
        tiny_engine.answers(llm, prompts[:1], SamplingParams(temperature=0, max_tokens=1))
        tiny_engine.learn(llm, 60)
        assert attempt({}) is None
        tiny_engine.control(llm, "save", directory=arguments["out"] + "/learned")
        first = {"draft": arguments["drafts"]["faults"]}
        seen: dict[str, Any] = {"start": look(), "faults": []}
        kind = arguments["kind"]
        for fault, argument in FAULTS:
            named = (
                argument.replace("LAYER", LAYER[kind]).replace("HIDDEN_NORM", HIDDEN_NORM[kind]) if fault in TENSORS else argument
            )
            llm.collective_rpc(plant, args=(fault, named))
            error = attempt(first)
            llm.collective_rpc(mend)
            seen["faults"].append({"fault": fault, "argument": argument, "error": error, **look()})
        seen["nothing to roll back to"] = [attempt({"rollback": None}), attempt({"rollback": None})]
        seen["rolled back"] = look()
        assert attempt({"draft": arguments["out"] + "/learned"}) is None
        seen["end"] = look()
        seen["probation"] = probation(llm, prompts, first)
        for guest in ("the checkpoint", "the taps"):
            llm.collective_rpc(break_guest, args=(guest,))
            seen[guest] = look()
            llm.collective_rpc(break_guest, args=(None,))
        seen["guests"] = tiny_engine.control(llm, "status")
    torch.save(seen, Path(arguments["out"]) / "seen.pt")
    fresh_config = tiny_engine.config_of({**arguments, "drafts": {"fresh": arguments["out"] + "/learned"}}, "fresh")
    with tiny_engine.engine(arguments["targets"]["faults"], fresh_config, **OPTIONS) as llm:
        before = tiny_engine.control(llm, "status")["counters"]
        answers = tiny_engine.answers(llm, prompts[:6], greedy)
        after = tiny_engine.control(llm, "status")["counters"]
        fresh = {key: after[key] - before[key] for key in ("drafted_tokens", "accepted_tokens")}
    torch.save({"answers": answers, **fresh}, Path(arguments["out"]) / "fresh.pt")


if __name__ == "__main__":
    exercise(json.loads(sys.argv[1]))
