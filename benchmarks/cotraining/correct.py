"""Is it right: the policy's gradients with and without a draft beside it, and the draft's on every layout against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.cotraining.policy import Shape
from benchmarks.cotraining.run import SCHEDULES, Layout, Runner, microbatches
from benchmarks.ranks import on_ranks

KINDS = ("eagle3", "dflash")
LARGEST_DIFFERENCE = 1e-10
"""Of a gradient's entries, as a share of its largest, in fp64: other orders of sums are off by 1e-15, a wrong label by 1e-3."""
SCHEDULE_TASKS: dict[str, tuple[str, Any]] = {
    **{
        f"torch {SCHEDULES[name][0].__name__.removeprefix('Schedule')}, PP 2": ("torch", Layout(pipeline=2, schedule=name))
        for name in ("1F1B", "interleaved 1F1B", "zero bubble", "zero bubble V")
    },
    "megatron-core 1F1B, PP 2": ("megatron", {"pipeline": 2}),
    "megatron-core 1F1B, PP 2, recomputation": ("megatron", {"pipeline": 2, "recompute": True}),
    "megatron-core 1F1B, PP 2, untied embedding": ("megatron", {"pipeline": 2, "tied": False}),
    "megatron-core 1F1B, PP 2, uneven stages": ("megatron", {"pipeline": 2, "uneven": True}),
    "megatron-core 1F1B, PP 4": ("megatron", {"pipeline": 4}),
    "megatron-core interleaved, PP 2 x 2": ("megatron", {"pipeline": 2, "virtual": 2}),
    "megatron-core, no pipeline": ("megatron", {"pipeline": 1}),
}
LAYOUT_TASKS: dict[str, tuple[str, Any]] = {
    **{
        f"CP {context} x PP {pipeline}": ("torch", Layout(context=context, pipeline=pipeline))
        for pipeline in (1, 2, 4)
        for context in (1, 2, 4)
    },
    "TP 1 x PP 1": ("megatron", {"pipeline": 1}),
    "TP 2 x PP 1": ("megatron", {"tensor": 2, "pipeline": 1}),
    "TP 2 x PP 2": ("megatron", {"tensor": 2, "pipeline": 2}),
}
Task = tuple[str, Any]
"""``("torch", Layout)`` or ``("megatron", options of `megatron_run.step`)``."""


def ranks_of(task: Task) -> int:
    """Processes that a task takes."""
    program, options = task
    return options.ranks if program == "torch" else options.get("tensor", 1) * options["pipeline"]


def _torch_step(layout: Layout, kind: str | None) -> dict[str, Any]:
    shape = Shape()
    runner = Runner(layout, shape, microbatches(shape, layout.microbatches), kind=kind)
    found: dict[str, Any] = {"losses": [runner.step()], "policy": runner.gradients()}
    if runner.draft is not None and runner.co is not None and runner.co.result is not None:
        found["loss"], found["labels"] = runner.co.result.loss, runner.co.result.labels
        found["draft"] = {name: parameter.grad for name, parameter in runner.draft.model.named_parameters()}
    runner.close()
    return found


def on_this_rank(tasks: Mapping[str, Task], kinds: Sequence[str | None]) -> dict[str, Any]:
    """A step of every task with each type of draft (None: without one), on one of the ranks that all tasks take."""
    found: dict[str, Any] = {}
    for label, (program, options) in tasks.items():
        if program == "torch":
            found[label] = {str(kind): _torch_step(options, kind) for kind in kinds}
        else:
            from benchmarks.cotraining.megatron_cpu import stand_in_for_cuda
            from benchmarks.cotraining.megatron_run import step

            stand_in_for_cuda()
            found[label] = {str(kind): step(kind, **options) for kind in kinds}
    return found


def run(tasks: Mapping[str, Task], kinds: Sequence[str | None]) -> dict[str, list[dict[str, Any]]]:
    """Per task what its ranks found; tasks of as many ranks share their processes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for count in sorted({ranks_of(task) for task in tasks.values()}):
        some = {label: task for label, task in tasks.items() if ranks_of(task) == count}
        ranks = on_ranks(functools.partial(on_this_rank, some, kinds), count)
        found |= {label: [one[label] for one in ranks] for label in some}
    return found


def policy_untouched(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether on every rank the policy's gradients with a draft of each type are, bit for bit, those without one."""
    for found in ranks:
        plain = found["None"]["policy"]
        for kind in KINDS:
            beside = found[kind]["policy"]
            if not plain or plain.keys() != beside.keys() or not all(torch.equal(plain[name], beside[name]) for name in plain):
                return False
    return True


def off_by(ranks: Sequence[Mapping[str, Any]], alone: Mapping[str, Any]) -> float:
    """How far loss and gradients of the drafts on all ranks are off those of one, as a share of each tensor's largest entry."""
    worst = 0.0
    for kind in KINDS:
        wanted, drafts = alone[kind], [found[kind] for found in ranks if "draft" in found[kind]]
        if not drafts or any(each["labels"] != wanted["labels"] for each in drafts):
            return float("inf")
        for each in drafts:
            worst = max(worst, abs(each["loss"] / wanted["loss"] - 1))
            for name, gradient in wanted["draft"].items():
                worst = max(worst, float((each["draft"][name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-300)))
    return worst


def schedules(say: Callable[[str], None]) -> dict[str, bool]:
    """Per schedule whether the policy's gradients are bitwise those without a draft."""
    found = {}
    for label, ranks in run(SCHEDULE_TASKS, (None, *KINDS)).items():
        found[label] = policy_untouched(ranks)
        say(f"{label}: policy gradients {'bitwise equal' if found[label] else 'DIFFER'}")
    return found


def layouts(say: Callable[[str], None]) -> float:
    """How far the draft's loss and gradients are off those of one process, at worst over all layouts."""
    found = run(LAYOUT_TASKS, KINDS)
    worst = 0.0
    for label, ranks in found.items():
        alone = found["CP 1 x PP 1" if LAYOUT_TASKS[label][0] == "torch" else "TP 1 x PP 1"][0]
        off = off_by(ranks, alone)
        say(f"{label}: draft loss and gradients off by {off:.1e}")
        worst = max(worst, off)
    return worst
