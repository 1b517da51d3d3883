"""Updates of the target that fail at each of their points, in one engine: ``python -m tests.in_vllm.run_policy_faults JSON``.

Leaves, per fault, the error, whether the served target was touched, and what the engine answered, drafted and accepted.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.in_vllm import run_policy, tiny, tiny_engine

LAYER = "model.layers.3."
ALTERED = (
    "self_attn.k_proj.weight", "self_attn.v_proj.bias", "self_attn.o_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight",
)  # fmt: skip
"""Tensors of one layer that arrive other than they were given."""
FAULTS: tuple[tuple[str, Any], ...] = (
    ("a tensor is missing", LAYER + "mlp.gate_proj.weight"),
    ("a tensor is missing", "model.embed_tokens.weight"),
    ("a tensor that nobody takes", LAYER + "self_attn.q_norm.weight"),
    ("a tensor that nobody takes", LAYER + "self_attn.o_proj.bias"),
    ("a tensor comes twice", LAYER + "mlp.gate_proj.weight"),
    ("too many rows", LAYER + "self_attn.q_proj.weight"),
    ("too many rows", "model.embed_tokens.weight"),
    ("too many rows", LAYER + "self_attn.k_proj.bias"),
    ("too many columns", LAYER + "self_attn.o_proj.weight"),
    ("too many columns", LAYER + "mlp.down_proj.weight"),
    ("a tensor cannot be read", LAYER + "mlp.down_proj.weight"),
    *(("a tensor arrives wrong", name) for name in (*(LAYER + leaf for leaf in ALTERED), "model.embed_tokens.weight")),
    ("a tensor is lost on the way", LAYER + "self_attn.v_proj.weight"),
    ("a tensor is lost on the way", LAYER + "post_attention_layernorm.weight"),
    ("packing fails", 7),
    ("the end of the reload fails", None),
    ("it is put in too early", 40),
    ("putting it in fails", 0),
    ("putting it in fails", 9),
    ("putting it in fails", 38),
    ("putting it back fails", 9),
)


class InjectedError(Exception):
    """The planted fault. No RuntimeError: vLLM's packing takes one for a missing kernel, and goes another way."""


def _readers(fault: str, argument: Any, directory: str) -> list[tuple[str, Callable[[], torch.Tensor]]]:
    readers = dict(run_policy.readers_of(directory))

    def unreadable() -> torch.Tensor:
        raise InjectedError(fault)

    if fault == "a tensor is missing":
        del readers[argument]
    elif fault == "a tensor that nobody takes":
        readers[argument] = lambda: torch.ones(64)
    elif fault == "a tensor comes twice":
        return [*readers.items(), (argument, readers[argument])]
    elif fault == "too many rows":
        whole = readers[argument]
        readers[argument] = lambda: torch.cat([whole(), whole()[:1]])
    elif fault == "too many columns":
        whole = readers[argument]
        readers[argument] = lambda: torch.cat([whole(), whole()[:, :1]], 1)
    elif fault == "a tensor cannot be read":
        readers[argument] = unreadable
    return list(readers.items())


def _failing_after(count: int, call: Callable[..., Any], fault: str) -> Callable[..., Any]:
    left = [count]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise InjectedError(fault)
        return call(*args, **kwargs)

    return counted


def _planted(stack: ExitStack, worker: Any, fault: str, argument: Any) -> None:
    """Make an update fail at one point, as long as the stack is open."""
    import vllm.model_executor.model_loader.reload as reload
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from vllm_specdraft import policy_swap

    kind = type(worker.model_runner.get_model())
    load = kind.load_weights

    def altered(self: Any, weights: Any) -> Any:
        if fault == "a tensor arrives wrong":
            return load(self, ((name, tensor + 0.01 if name == argument else tensor) for name, tensor in weights))
        return load(self, ((name, tensor) for name, tensor in weights if name != argument))

    if fault in ("a tensor arrives wrong", "a tensor is lost on the way"):
        stack.enter_context(mock.patch.object(kind, "load_weights", altered))
    elif fault == "packing fails":
        packing = UnquantizedLinearMethod.process_weights_after_loading
        failing = _failing_after(argument, packing, fault)
        stack.enter_context(mock.patch.object(UnquantizedLinearMethod, "process_weights_after_loading", failing))
    elif fault == "the end of the reload fails":
        failing = _failing_after(0, reload.finalize_layerwise_reload, fault)
        stack.enter_context(mock.patch.object(reload, "finalize_layerwise_reload", failing))
    elif fault in ("putting it in fails", "putting it back fails"):
        failing = _failing_after(argument, policy_swap._put_into, fault)
        stack.enter_context(mock.patch.object(policy_swap, "_put_into", failing))


def attempt(worker: Any, fault: str, argument: Any, directory: str) -> str | None:
    """In the worker: one update with a planted fault; the error that it raised."""
    from vllm_specdraft.policy_swap import PolicySwapError

    swap = run_policy.swap_of(worker)
    with ExitStack() as stack:
        try:
            if fault not in ("putting it in fails", "putting it back fails"):
                _planted(stack, worker, fault, argument)
            build = swap.build(_readers(fault, argument, directory))
            if fault == "it is put in too early":
                for _ in range(argument):
                    build.step(0.0)
            else:
                while not build.step(0.01):
                    pass
            if fault == "putting it back fails":
                replaced = swap.apply(build)
                _planted(stack, worker, fault, argument)
                return _restored_at_last(swap, replaced)
            _planted(stack, worker, fault, argument)
            swap.apply(build)
        except PolicySwapError as error:
            return str(error)
    return None


def _restored_at_last(swap: Any, replaced: Any) -> str | None:
    """The error of a first try, which a second one makes good."""
    from vllm_specdraft.policy_swap import PolicySwapError

    try:
        swap.restore(replaced)
    except PolicySwapError as error:
        swap.restore(replaced)
        return str(error)
    return None


def again(worker: Any, directory: str) -> list[str | None]:
    """In the worker: what a build says that is asked again after it failed, and after it was put in; the old weights are back."""
    from vllm_specdraft.policy_swap import PolicySwapError

    swap, errors = run_policy.swap_of(worker), []

    def said(call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
            errors.append(None)
        except PolicySwapError as error:
            errors.append(str(error))

    failed = swap.build(_readers("a tensor cannot be read", LAYER + "mlp.down_proj.weight", directory))
    for call in (lambda: failed.step(60.0), lambda: failed.step(0.0), lambda: swap.apply(failed)):
        said(call)
    # One that fails while it is put in is whole, and can be tried again.
    build = swap.build(run_policy.readers_of(directory))
    build.step(60.0)
    with ExitStack() as stack:
        _planted(stack, worker, "putting it in fails", 5)
        said(swap.apply, build)
    replaced = swap.apply(build)
    said(swap.apply, build)
    said(build.step, 0.0)
    swap.restore(replaced)
    return errors


def odd_but_fine(worker: Any, directory: str) -> dict[str, Any]:
    """In the worker: builds that must succeed. The last one is kept, with a head that a tied target does not take."""
    from vllm_specdraft import policy_swap

    swap, readers = run_policy.swap_of(worker), dict(run_policy.readers_of(directory))

    def built(changed: dict[str, Callable[[], torch.Tensor]]) -> Any:
        build = swap.build([*{**readers, **changed}.items()])
        while not build.step(0.0):
            pass
        return build

    def with_nan(whole: Callable[[], torch.Tensor], value: float) -> Callable[[], torch.Tensor]:
        return lambda: whole().index_fill(0, torch.tensor([1]), value)

    names = ("model.embed_tokens.weight", LAYER + "mlp.up_proj.weight", LAYER + "self_attn.q_proj.bias", "model.norm.weight")
    seen = {}
    for value in (float("nan"), float("inf")):
        seen[str(value)] = built({name: with_nan(readers[name], value) for name in names}).done
    halves = built({name: (lambda whole=whole: whole().bfloat16()) for name, whole in readers.items()})
    seen["bfloat16"] = halves.done
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    policy_swap.logger.addHandler(handler)
    worker.policy_build = built({"lm_head.weight": lambda: torch.randn(160, 64)})
    policy_swap.logger.removeHandler(handler)
    return {**seen, "total": halves.total, "warnings": said}


def dropped(worker: Any, directory: str) -> list[dict[str, int]]:
    """In the worker: what is alive before a build, in the middle of it, and after it was dropped, at several places."""
    found = []
    for pieces in (0, 1, 2, 40, 41, 42, 500):
        before = run_policy.alive(worker)
        build = run_policy.swap_of(worker).build(run_policy.readers_of(directory))
        for _ in range(pieces):
            build.step(0.0)
        during = run_policy.alive(worker)
        del build
        found.append({"pieces": pieces, "before": before, "during": during, "after": run_policy.alive(worker)})
    return found


def exercise(arguments: dict[str, Any]) -> None:
    """A learned draft serves; every fault is planted once; at last an update succeeds."""
    from vllm import SamplingParams

    config = tiny_engine.config_of(arguments, "faults", min_samples=8, held_out_share=0.3, warmup_steps=5)
    first, second = arguments["targets"]["first"], arguments["targets"]["second"]
    prompts = tiny.prompts(24, seed=5)
    with tiny_engine.engine(first, config, **run_policy.OPTIONS) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        tiny_engine.answers(llm, prompts, greedy)
        # One more request: the finished ones reach the worker with the step after them.
        tiny_engine.answers(llm, prompts[:1], SamplingParams(temperature=0, max_tokens=1))
        tiny_engine.learn(llm, 60)
        tiny_engine.swap(llm, {})

        def marks() -> Any:
            return llm.collective_rpc(run_policy.marks)

        seen: dict[str, Any] = {"prompts": prompts[:6], "start": run_policy.look(llm, prompts[:6]), "faults": []}
        for fault, argument in FAULTS:
            before, records = marks(), llm.collective_rpc(run_policy.alive)
            error = llm.collective_rpc(attempt, args=(fault, argument, second))[0]
            entry = {"error": error, "untouched": marks() == before, "alive": [records, llm.collective_rpc(run_policy.alive)]}
            seen["faults"].append({**entry, **run_policy.look(llm, prompts[:6])})
        before = marks()
        seen["again"] = llm.collective_rpc(again, args=(second,))[0]
        seen["fine"] = llm.collective_rpc(odd_but_fine, args=(second,))[0]
        seen["dropped"] = llm.collective_rpc(dropped, args=(second,))[0]
        seen["untouched"] = marks() == before
        llm.collective_rpc(run_policy.apply)
        seen["second"] = run_policy.look(llm, prompts[:6])
        # The draft in training is the served one.
        tiny_engine.swap(llm, {})
        seen["draft swapped"] = run_policy.look(llm, prompts[:6])
        llm.collective_rpc(run_policy.restore)
        seen["end"] = run_policy.look(llm, prompts[:6])
    torch.save(seen, Path(arguments["out"]) / "faults.pt")


if __name__ == "__main__":
    exercise(json.loads(sys.argv[1]))
