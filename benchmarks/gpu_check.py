"""Every kernel on one GPU: is it right, and how fast is it. Under 8 minutes; made for the day one is at hand.

``python -m benchmarks.gpu_check --json`` holds outputs and all gradients of each backend against the reference in fp64, on the same
rounded inputs, then times forward and backward. Progress goes to standard error, one JSON object is the last line of standard
output; the exit code is 1 when anything is wrong. ``--interpret`` checks the check itself on a CPU: small shapes in Triton's
interpreter, nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_specdraft.console import Console
from vllm_specdraft.demo.run import EXIT_FAILED, EXIT_INTERRUPTED

if TYPE_CHECKING:
    import torch

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative to the largest entry: sums in another order, and factors rounded to 8 bits. A wrong key or row is off by over 1e-1."""
LENGTHS = (300, 1, 0, 129, 64)
SMALL_LENGTHS = (9, 1, 0, 6)
SHAPES = ((40, 3), (64, 1), (80, 4), (128, 8))
"""Size of a head, query heads per key head."""
TIMED_TOKENS, TIMED_HEADS, TIMED_KV_HEADS, TIMED_SIZE, TIMED_PASSES = (8192, 32768), 32, 8, 128, 2
TIMED_BLOCKS = (1024, 8)
"""Blocks, and slots of each."""
LOSS_ROWS, LOSS_WIDTH, LOSS_VOCABULARY = 8192, 4096, 32768


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    dtype: str
    run: Callable[[str], list[torch.Tensor]]
    """Output and gradients of a backend; ``naive`` computes in fp64."""


def backends(interpret: bool) -> list[str]:
    """Attention backends to check."""
    found = ["triton"]
    if not interpret and importlib.util.find_spec("flash_attn") is not None:
        found.append("flash_attn")
    return found


def attention_cases(device: str, lengths: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    """Branch attention of every kind of call, and block attention."""
    for dtype, (size, share), passes in itertools.product(dtypes, SHAPES, (0, 1, 3)):
        for window, every in ((None, 1), (None, 3), (17, 1)):
            yield Case(
                name=f"branch, head {size} x {share}, {passes} own keys, window {window}, every {every}",
                dtype=dtype,
                run=_branch(device, lengths, dtype, size, share, passes, window, every),
            )
    for dtype, (size, share) in itertools.product(dtypes, SHAPES):
        yield Case(name=f"block, head {size} x {share}", dtype=dtype, run=_block(device, lengths, dtype, size, share))


def loss_cases(device: str, rows: int, vocabulary: int, dtypes: Sequence[str]) -> Iterator[Case]:
    """The distillation loss with both kinds of teacher."""
    for dtype, states in itertools.product(dtypes, (False, True)):
        name = f"distill_loss, teacher's {'states' if states else 'logits'}"
        yield Case(name=name, dtype=dtype, run=_loss(device, rows, vocabulary, dtype, states=states))


def _leaves(device: str, dtype: str, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    import torch

    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(device, getattr(torch, dtype)) for shape in shapes]


def _results(out: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import torch

    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.device, out.dtype)
    gradients = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
    return [out.detach(), *gradients]


def _as_asked(leaves: Sequence[torch.Tensor], backend: str) -> list[torch.Tensor]:
    """Inputs for a backend: the reference gets the same numbers, rounded as they are, in fp64."""
    return [(leaf.double() if backend == "naive" else leaf.clone()).requires_grad_() for leaf in leaves]


def _branch(
    device: str, lengths: Sequence[int], dtype: str, size: int, share: int, passes: int, window: int | None, every: int
) -> Callable[[str], list[torch.Tensor]]:
    import torch
    from specdraft_kernels.branch_attention import branch_attention

    rows, kv_heads = sum(lengths), 2
    anchors = torch.arange(0, rows, every, device=device)
    shapes = [(len(anchors), kv_heads * share, size), *[(rows, kv_heads, size)] * 2, *[(len(anchors), passes, kv_heads, size)] * 2]
    leaves = _leaves(device, dtype, shapes)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    chosen = None if every == 1 else anchors

    def run(backend: str) -> list[torch.Tensor]:
        given = _as_asked(leaves, backend)
        return _results(branch_attention(*given, cu, anchors=chosen, window=window, backend=backend)[0], given)

    return run


def _block(device: str, lengths: Sequence[int], dtype: str, size: int, share: int) -> Callable[[str], list[torch.Tensor]]:
    import torch
    from specdraft_kernels.block_attention import block_attention

    places = [(d, p) for d, length in enumerate(lengths) for p in range(0, length + 1, 1 + length // 5)]
    document, prefix = (torch.tensor(column, device=device) for column in zip(*places, strict=True))
    rows, kv_heads, width = sum(lengths), 2, 4
    own = (len(places), width, kv_heads, size)
    leaves = _leaves(device, dtype, [(len(places), width, kv_heads * share, size), *[(rows, kv_heads, size)] * 2, own, own])
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device=device)

    def run(backend: str) -> list[torch.Tensor]:
        given = _as_asked(leaves, backend)
        return _results(block_attention(*given, cu, document, prefix, backend=backend)[0], given)

    return run


def _loss(device: str, rows: int, vocabulary: int, dtype: str, *, states: bool) -> Callable[[str], list[torch.Tensor]]:
    import torch
    from specdraft_kernels.distill_loss import TeacherLogits, TeacherStates, distill_loss

    width = 48
    shapes = [(rows, width), (vocabulary, width), (rows, width), (vocabulary, width)]
    hidden, head, final, teacher_head = _leaves(device, dtype, shapes)
    final, head = final / width**0.5, head / width**0.5
    row = torch.arange(rows - 1, -1, -1, device=device)

    def run(backend: str) -> list[torch.Tensor]:
        given = _as_asked([hidden, head], backend)
        fixed = [final, teacher_head] if states else [final @ teacher_head.T]
        if backend == "naive":
            fixed = [each.double() for each in fixed]
        teacher = TeacherStates(*fixed, row=row) if states else TeacherLogits(*fixed, row=row)
        return _results(distill_loss(*given, teacher, normaliser=float(rows), chunk_rows=64, backend=backend), given)

    return run


def check(cases: Sequence[Case], attention_backends: Sequence[str], say: Callable[[str], None]) -> dict[str, float]:
    """Largest relative error by backend and dtype, infinite for NaN or another shape; a case that is wrong is named."""
    worst: dict[str, float] = {}
    for case in cases:
        expected = case.run("naive")
        for backend in ("triton",) if case.name.startswith("distill") else attention_backends:
            if backend == "flash_attn" and case.dtype == "float32":
                continue
            key = f"{backend}, {case.dtype}"
            try:
                error = max(map(_error, case.run(backend), expected))
            except Exception as raised:  # noqa: BLE001 - one kernel that does not run must not keep the others from being checked
                # What flash-attn's kernels cannot do, they say; the others do everything.
                if backend == "flash_attn" and isinstance(raised, ValueError):
                    say(f"{key}: {case.name}: {raised}")
                    continue
                say(f"{key}: {case.name}: {type(raised).__name__}: {raised}")
                error = float("inf")
            worst[key] = max(worst.get(key, 0.0), error)
            if not error <= TOLERANCES[case.dtype]:
                say(f"WRONG  {key}: {case.name}: off by {error:.1e}")
    return worst


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    error = float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")


def speeds(say: Callable[[str], None]) -> dict[str, float]:
    """Milliseconds of forward and backward together, bf16."""
    import torch
    from specdraft_kernels.block_attention import block_attention
    from specdraft_kernels.branch_attention import branch_attention
    from specdraft_kernels.distill_loss import TeacherStates, distill_loss
    from triton.testing import do_bench

    found: dict[str, float] = {}

    def timed(name: str, forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        def both() -> None:
            out = forward()
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        found[name] = round(do_bench(both, warmup=50, rep=400), 3)
        say(f"{name}: {found[name]:.2f} ms, forward and backward")

    for tokens, backend in itertools.product(TIMED_TOKENS, backends(interpret=False)):
        own = (tokens, TIMED_PASSES, TIMED_KV_HEADS, TIMED_SIZE)
        trunk = (tokens, TIMED_KV_HEADS, TIMED_SIZE)
        given = _leaves("cuda", "bfloat16", [(tokens, TIMED_HEADS, TIMED_SIZE), trunk, trunk, own, own])
        leaves = [each.requires_grad_() for each in given]
        cu = torch.tensor([0, tokens], device="cuda")
        timed(
            f"branch_attention, {backend}, {tokens} tokens",
            lambda leaves=leaves, cu=cu, backend=backend: branch_attention(*leaves, cu, backend=backend)[0],
            leaves,
        )
    tokens, (blocks, width) = TIMED_TOKENS[0], TIMED_BLOCKS
    own, trunk = (blocks, width, TIMED_KV_HEADS, TIMED_SIZE), (tokens, TIMED_KV_HEADS, TIMED_SIZE)
    given = _leaves("cuda", "bfloat16", [(blocks, width, TIMED_HEADS, TIMED_SIZE), trunk, trunk, own, own])
    slots = [each.requires_grad_() for each in given]
    places = torch.linspace(1, tokens, blocks, device="cuda").long()
    where = (torch.tensor([0, tokens], device="cuda"), torch.zeros_like(places), places)
    timed(
        f"block_attention, triton, {blocks} blocks of {width}",
        lambda: block_attention(*slots, *where, backend="triton")[0],
        slots,
    )
    shapes = [(LOSS_ROWS, LOSS_WIDTH), (LOSS_VOCABULARY, LOSS_WIDTH)] * 2
    hidden, head, final, teacher_head = _leaves("cuda", "bfloat16", shapes)
    for backend in ("triton", "torch"):
        leaves = [hidden.detach().requires_grad_(), head.detach().requires_grad_()]
        timed(
            f"distill_loss, {backend}, {LOSS_ROWS} rows of {LOSS_VOCABULARY}",
            lambda leaves=leaves, backend=backend: distill_loss(
                *leaves, TeacherStates(final, teacher_head), normaliser=LOSS_ROWS, backend=backend
            ),
            leaves,
        )
    return found


def parser() -> argparse.ArgumentParser:
    """The check's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    made.add_argument("--interpret", action="store_true", help="small shapes in Triton's interpreter, on a CPU; nothing is timed")
    return made


def _run(interpret: bool, say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    began = time.monotonic()
    device = "cpu" if interpret else "cuda"
    # What Triton's interpreter makes of bf16 products is not what a GPU does.
    dtypes = ["float32"] if interpret else list(TOLERANCES)
    lengths, rows, vocabulary = (SMALL_LENGTHS, 7, 29) if interpret else (LENGTHS, 500, 1111)
    cases = [*attention_cases(device, lengths, dtypes), *loss_cases(device, rows, vocabulary, dtypes)]
    if interpret:
        # One of each kind: the tests of the operators do them all.
        cases = [cases[index] for index in (4, 5, len(cases) - 4, len(cases) - 2, len(cases) - 1)]
    say(f"{len(cases)} comparisons ...")
    errors = check(cases, backends(interpret), say)
    for key, error in errors.items():
        say(f"{key}: off by {error:.1e} at most")
    passed = all(error <= TOLERANCES[key.split(", ")[1]] for key, error in errors.items())
    return {
        "passed": passed,
        # Infinity is no JSON.
        "largest_errors": {key: error if math.isfinite(error) else None for key, error in errors.items()},
        "ms": speeds(say) if passed and not interpret else {},
        "device": "Triton's interpreter" if interpret else torch.cuda.get_device_name(),
        "seconds": round(time.monotonic() - began, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; the exit code: 0, 1 after an error or a wrong result, 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    console = Console(sys.stderr)
    if options.interpret:
        if "triton" in sys.modules:
            console.line("error: --interpret needs a process of its own: Triton was imported before")
            return EXIT_FAILED
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not options.interpret and not torch.cuda.is_available():
        console.line("error: no CUDA device here; --interpret checks small shapes on a CPU")
        return EXIT_FAILED
    try:
        result = _run(options.interpret, console.line)
    except KeyboardInterrupt:
        console.line("stopped")
        return EXIT_INTERRUPTED
    print(json.dumps(result, indent=None if options.json else 1), flush=True)
    return 0 if result["passed"] else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
