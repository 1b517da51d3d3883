"""Catches a draft loss over a vocabulary that ranks split which is not the loss over the whole one: statistics that are not
joined, or joined over different maxima, a gradient of hidden that lacks a rank's part or has it twice, and a rank that waits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from specdraft_kernels.distill_loss import TeacherLogits, TeacherStates, distill_loss

from tests.distributed.processes import on_ranks
from tests.tolerances import DISTILL_BF16, DISTILL_FP64, assert_close

ROWS, VOCABULARY, CHUNK_ROWS = 11, 21, 4
SLICES = {2: (0, 8, 21), 3: (0, 13, 13, 21)}
"""Where the ranks' slices begin and end: uneven, and of three ranks one holds nothing."""
KINDS = ("logits", "states", "kept", "bf16")


def inputs(kind: str) -> dict[str, torch.Tensor]:
    """Seeded, so the same in every process. Row 2's teacher emits only what rank 0 holds, row 3's only what the last one does."""
    random = torch.Generator().manual_seed(5)
    columns = 2 * VOCABULARY if kind == "kept" else VOCABULARY
    shapes = {"hidden": (ROWS, 6), "head": (VOCABULARY, 6), "states": (ROWS, 7), "teacher_head": (columns, 7)}
    dtype = torch.bfloat16 if kind == "bf16" else torch.float64
    made = {name: (3 * torch.randn(shape, generator=random, dtype=torch.float64)).to(dtype) for name, shape in shapes.items()}
    made["logits"] = made["states"] @ made["teacher_head"].T
    if kind == "logits":
        made["logits"][2, 8:] = float("-inf")
        made["logits"][3, :13] = float("-inf")
    made["row"] = torch.randint(ROWS, (ROWS,), generator=random) if kind == "states" else torch.arange(ROWS)
    made["weights"] = torch.arange(ROWS) % 4 / 2.0
    return made


def loss_of(
    made: dict[str, torch.Tensor], kind: str, start: int, stop: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and both gradients over the tokens from `start` to `stop`; of kept ones the columns are every second of the teacher."""
    hidden, head = made["hidden"].clone().requires_grad_(), made["head"][start:stop].clone().requires_grad_()
    stride = 2 if kind == "kept" else 1
    columns = slice(stride * start, stride * stop)
    kept = torch.arange(stop - start) * 2 + 1 if kind == "kept" else None
    teacher: TeacherLogits | TeacherStates
    if kind in ("states", "bf16"):
        teacher = TeacherStates(made["states"], made["teacher_head"][columns], made["row"])
    else:
        teacher = TeacherLogits(made["logits"][:, columns], made["row"])
    # A tensor, as the sum over microbatches and ranks is.
    loss = distill_loss(
        hidden, head, teacher, normaliser=torch.tensor(3.0), weights=made["weights"], kept=kept, chunk_rows=CHUNK_ROWS, **options
    )
    (2 * loss).backward()
    assert hidden.grad is not None and head.grad is not None
    return loss.detach(), hidden.grad, head.grad


def on_my_slice(directory: Path) -> dict[str, Any]:
    """What this rank finds, of every kind and backend, and how many reductions a call took."""
    # This process is a fresh one and ends with the test, so nobody else inherits the variable.
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    torch.use_deterministic_algorithms(True)
    from specdraft_kernels.distill_loss import fused

    fused._BLOCK = 4
    calls, all_reduce = [], dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].numel())
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    edges = SLICES[dist.get_world_size()]
    start, stop = edges[dist.get_rank()], edges[dist.get_rank() + 1]
    found: dict[str, Any] = {}
    for kind in KINDS:
        for backend in ("torch", "triton"):
            calls.clear()
            found[f"{kind}, {backend}"] = loss_of(inputs(kind), kind, start, stop, group=dist.group.WORLD, backend=backend)
            found[f"{kind}, {backend}, calls"] = len(calls)
    try:
        loss_of(inputs("logits"), "logits", start, stop, group=dist.group.WORLD, backend="naive")
    except ValueError as error:
        found["naive"] = str(error)
    return found


@pytest.mark.parametrize("world", SLICES)
def test_ranks_that_split_the_vocabulary_find_what_one_process_finds(world: int, tmp_path: Path) -> None:
    ranks = on_ranks(on_my_slice, world, tmp_path)
    edges = SLICES[world]
    for kind in KINDS:
        loss, d_hidden, d_head = loss_of(inputs(kind), kind, 0, VOCABULARY, backend="naive")
        assert d_hidden.abs().max() > 1e-2 and d_head.abs().max() > 1e-2, "nothing to compare with"
        # Only gradients of narrow inputs are rounded; the loss is fp32.
        tolerance = DISTILL_BF16 if kind == "bf16" else DISTILL_FP64
        for backend in ("torch", "triton"):
            for rank, found in enumerate(ranks):
                name, mine = f"{kind}, {backend}, rank {rank}", found[f"{kind}, {backend}"]
                assert_close(mine[0], loss, tolerance, name)
                assert_close(mine[1], d_hidden, tolerance, f"{name}: d hidden")
                assert_close(mine[2], d_head[edges[rank] : edges[rank + 1]], tolerance, f"{name}: d head")
                # 8 rows count: two chunks of two reductions, and one for the gradient of hidden.
                assert found[f"{kind}, {backend}, calls"] == 5
            whole = [found[f"{kind}, {backend}"][:2] for found in ranks]
            assert all(torch.equal(a, b) for each in whole for a, b in zip(each, whole[0], strict=True)), "ranks differ"
    assert all("knows no group" in found["naive"] for found in ranks)
