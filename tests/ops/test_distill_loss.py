"""Catches a wrong draft loss: a wrong row, column, weight or factor in the loss or in either gradient, a row counted twice when
rows are split, memory that grows with rows times vocabulary, and NaN out of rows and tokens that do not count.

The oracle below goes row by row, in fp64. Triton's kernels run in its interpreter (see ``tests/ops/__init__.py``), and memory
that nothing has written yet is NaN, in all backends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import specdraft_kernels.distill_loss as distill_package
import torch
from specdraft_kernels.distill_loss import BACKENDS, TeacherLogits, TeacherStates, distill_loss, fused, matmuls
from specdraft_kernels.distill_loss.api import _backend_for
from specdraft_kernels.distill_loss.eager import EagerChunk
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.builders import generator
from tests.tolerances import (
    DISTILL_BF16,
    DISTILL_FP16,
    DISTILL_FP32,
    DISTILL_FP64,
    NARROW_PRODUCTS,
    REGROUPED_FP64,
    Tolerance,
    assert_close,
)

CHUNKED = ("torch", "triton")
TILE = 8
"""Columns of a Triton tile here, so that a small vocabulary has several, the last of them not full."""
WIDTH, TEACHER_WIDTH = 5, 7
NAMES = ("loss", "d hidden", "d head")
NARROW = {torch.float32: DISTILL_FP32, torch.bfloat16: DISTILL_BF16, torch.float16: DISTILL_FP16}


@pytest.fixture(autouse=True)
def small_tiles_interpreted_over_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused, "_BLOCK", TILE)
    torch.use_deterministic_algorithms(True)  # In this mode, what `empty` returns is filled with NaN.
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    """Leaves of one call, in fp64; the teacher has more columns than the draft when some are kept, and other rows when shared."""

    hidden: torch.Tensor
    head: torch.Tensor
    states: torch.Tensor
    teacher_head: torch.Tensor
    row: torch.Tensor | None
    kept: torch.Tensor | None
    weights: torch.Tensor | None
    normaliser: float = 2.5

    def teacher(self, kind: str) -> TeacherLogits | TeacherStates:
        if kind == "states":
            return TeacherStates(self.states, self.teacher_head, self.row)
        return TeacherLogits(self.states @ self.teacher_head.T, self.row)

    def to(self, dtype: torch.dtype) -> Case:
        names = ("hidden", "head", "states", "teacher_head")
        return replace(self, **{name: getattr(self, name).detach().to(dtype).requires_grad_() for name in names})

    def options(self, **more: Any) -> dict[str, Any]:
        return {"normaliser": self.normaliser, "weights": self.weights, "kept": self.kept, **more}

    def run(self, kind: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, and the gradients of hidden and head."""
        loss = distill_loss(self.hidden, self.head, self.teacher(kind), **self.options(**more))
        return (loss.detach(), *torch.autograd.grad(loss, [self.hidden, self.head]))


def case(rows: int, vocabulary: int, *, shared: bool = False, kept: bool = False, weighted: int = 0) -> Case:
    """`weighted`: 0 for no weights, 1 for fractions, 2 for True and False; every third row has none."""
    random = generator(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()

    columns = 2 * vocabulary + 3 if kept else vocabulary
    teacher_rows = max(1, rows // 3) if shared else rows
    weights = (torch.rand(rows, generator=random, dtype=torch.float64) + 0.2) * (torch.arange(rows) % 3 != 1)
    return Case(
        draw(rows, WIDTH), draw(vocabulary, WIDTH), draw(teacher_rows, TEACHER_WIDTH), draw(columns, TEACHER_WIDTH),
        torch.randint(teacher_rows, (rows,), generator=random) if shared else None,
        torch.randperm(columns, generator=random)[:vocabulary] if kept else None,
        (None, weights, weights != 0)[weighted],
    )  # fmt: skip


def oracle(c: Case, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row after the other: minus the mean, over the teacher's distribution, of the draft's log-probability."""
    hidden, head = (each.detach().double().requires_grad_() for each in (c.hidden, c.head))
    loss = hidden.sum() * 0 + head.sum() * 0
    for i in range(hidden.shape[0]):
        weight = 1.0 if c.weights is None else float(c.weights[i])
        if weight == 0:
            continue
        row = i if c.row is None else int(c.row[i])
        t = c.teacher_head.detach().double() @ c.states[row].detach().double() if logits is None else logits[row].double()
        if c.kept is not None:
            t = torch.stack([t[int(column)] for column in c.kept])
        q = (head @ hidden[i]).log_softmax(0)
        loss = loss - weight * (t.softmax(0) * q).sum() / c.normaliser
    return (loss.detach(), *torch.autograd.grad(loss, [hidden, head]))


def assert_all_close(found: Any, expected: Any, tolerance: Tolerance) -> None:
    for name, mine, theirs in zip(NAMES, found, expected, strict=True):
        assert_close(mine.double(), theirs, tolerance, name)


SHAPES = ((1, 1, 5), (1, 29, 1), (13, 29, 4), (12, 17, 12), (9, 16, 100))
"""Rows, vocabulary, rows of a chunk: chunks that do not divide the rows, tiles that do not divide the vocabulary."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["logits", "states"])
@pytest.mark.parametrize(("rows", "vocabulary", "chunk_rows"), SHAPES)
@pytest.mark.parametrize(("shared", "kept", "weighted"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 2)])
def test_loss_and_gradients_equal_the_loops(
    backend: str, kind: str, rows: int, vocabulary: int, chunk_rows: int, shared: bool, kept: bool, weighted: int
) -> None:
    c = case(rows, vocabulary, shared=shared, kept=kept, weighted=weighted)
    expected = oracle(c)
    assert vocabulary == 1 or all(each.abs().max() > 1e-3 for each in expected), "nothing to compare with"
    assert_all_close(c.run(kind, backend=backend, chunk_rows=chunk_rows), expected, DISTILL_FP64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_inputs_lose_only_the_last_rounding(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against fp64 on the same, rounded inputs. Many small chunks, and the head widened in several blocks."""
    monkeypatch.setattr(matmuls, "_BLOCK", 8)
    c = case(24, 29, shared=True, kept=True, weighted=1).to(dtype)
    found, expected = c.run("states", backend=backend, chunk_rows=1), oracle(c)
    assert [each.dtype for each in found] == [torch.float32, dtype, dtype]
    assert_close(found[0].double(), expected[0], DISTILL_FP32, "loss")
    assert_all_close(found, expected, NARROW[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_the_loss_multiplies_every_time(backend: str) -> None:
    """Of a billion labels, each fp16 gradient is below the smallest number until a loss scale lifts it."""
    c = replace(case(7, 13).to(torch.float16), normaliser=1e9)
    loss = distill_loss(c.hidden, c.head, c.teacher("states"), **c.options(backend=backend))
    for _ in range(2):
        found = torch.autograd.grad(-1e9 * loss, [c.hidden, c.head], retain_graph=True)
        for mine, theirs in zip(found, oracle(replace(c, normaliser=-1.0))[1:], strict=True):
            assert_close(mine.double(), theirs, DISTILL_FP16)
    if backend != "naive":  # The second derivative would be wrong, so there is none.
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(loss, c.hidden, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_that_counts_is_a_loss_of_zero(backend: str, rows: int) -> None:
    c = replace(case(rows, 11), weights=torch.zeros(rows))
    loss, d_hidden, d_head = c.run("states", backend=backend)
    assert loss == 0 and d_hidden.shape == (rows, WIDTH) and not d_hidden.any() and not d_head.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "shared"), [("states", True), ("states", False), ("logits", True), ("logits", False)])
def test_a_row_of_weight_zero_may_hold_anything(backend: str, kind: str, shared: bool) -> None:
    """Bitwise: NaN in such a row, in a teacher row only such rows have, or an index of nowhere."""
    c = case(13, 19, shared=shared, weighted=1)
    before = c.run(kind, backend=backend, chunk_rows=4)
    off = c.weights == 0
    assert 0 < int(off.sum()) < 13
    with torch.no_grad():
        c.hidden[off] = float("nan")
        if c.row is not None:
            c.row[off] = torch.tensor([-5, 10**9, 3])[torch.arange(int(off.sum())) % 3]
        else:
            c.states[off] = float("nan")
    after = c.run(kind, backend=backend, chunk_rows=4)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, before, strict=True))
    assert not after[1][off].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand_and_of_minus_infinity(backend: str, dtype: torch.dtype) -> None:
    """The head is the identity, so the logits are exact. Teacher rows begin, end, and go on with tokens it never emits."""
    vocabulary, never = 3 * TILE - 1, float("-inf")
    random = generator(3)
    scores = torch.tensor([-1e4, 0.0, 1e4])[torch.randint(3, (6, vocabulary), generator=random)]
    scores[0], scores[1], scores[2] = 1e4, -1e4, torch.linspace(-1e4, 1e4, vocabulary)
    logits = torch.tensor([-1e4, 1.0, 1e4])[torch.randint(3, (6, vocabulary), generator=random)]
    logits[0, : TILE + 2] = never
    logits[1, TILE:] = never
    logits[2, :-1] = never
    logits[3] = scores[3]
    logits[4, ::2] = never
    hidden, head = scores.to(dtype).requires_grad_(), torch.eye(vocabulary, dtype=dtype).requires_grad_()
    c = Case(hidden, head, logits, logits, None, None, None)
    loss = distill_loss(hidden, head, TeacherLogits(logits.to(dtype)), normaliser=c.normaliser, backend=backend, chunk_rows=4)
    found = (loss.detach(), *torch.autograd.grad(loss, [hidden, head]))
    tolerance = DISTILL_FP64 if dtype == torch.float64 else DISTILL_FP32
    assert_all_close(found, oracle(c, logits.to(dtype)), tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_rows_add_up_to_the_whole(backend: str) -> None:
    """Microbatches and data-parallel ranks divide by one global count, as a tensor: each label counts once."""
    c = case(13, 19, shared=True, kept=True, weighted=1)
    labels = (c.weights != 0).sum()
    whole = c.run("states", backend=backend, normaliser=labels)
    parts = []
    for part in (slice(0, 5), slice(5, 6), slice(6, 13)):
        one = replace(c, hidden=c.hidden[part], row=c.row[part], weights=c.weights[part])
        loss = distill_loss(one.hidden, c.head, one.teacher("states"), **one.options(backend=backend, normaliser=labels))
        parts.append((loss.detach(), *torch.autograd.grad(loss, [c.hidden, c.head])))
    for sums, theirs in zip((torch.stack(each).sum(0) for each in zip(*parts, strict=True)), whole, strict=True):
        assert_close(sums, theirs, REGROUPED_FP64)


class Largest(TorchDispatchMode):
    """Size of the largest memory that any operation took: what it returns, unless that is a view of what it was given."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, returned = tree_leaves((args, kwargs)), tree_leaves(out)
        old = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
        storages = [each.untyped_storage() for each in returned if isinstance(each, torch.Tensor)]
        self.nbytes = max([self.nbytes, *(each.nbytes() for each in storages if each.data_ptr() not in old)])
        return out


@pytest.mark.parametrize("backend", CHUNKED)
@pytest.mark.parametrize("kind", ["logits", "states"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_tensor_grows_with_rows_times_vocabulary(
    backend: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_BLOCK", 128)
    monkeypatch.setattr(matmuls, "_BLOCK", 32)
    sizes = []
    for rows, which in ((12, backend), (60, backend), (60, "naive")):
        c = case(rows, 101).to(dtype)
        teacher = c.teacher(kind)
        with Largest() as seen:
            distill_loss(c.hidden, c.head, teacher, normaliser=1, backend=which, chunk_rows=6).backward()
        sizes.append(seen.nbytes)
    logit = 8 if dtype == torch.float64 else 4
    # That the whole logits of the reference are seen shows that the measure sees.
    assert sizes == [6 * 101 * logit, 6 * 101 * logit, 60 * 101 * logit]


@pytest.mark.parametrize("backend", CHUNKED)
@pytest.mark.parametrize("chunk_rows", [4, 100])
def test_a_shared_teacher_row_is_computed_once(backend: str, chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft rows of one teacher row come far apart, as those of several passes do."""
    c = replace(case(12, 11, shared=True), row=torch.tensor([0, 1, 2, 3] * 3))
    computed, scores = [], matmuls.scores

    def counting(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(hidden.shape[0] if hidden.shape[1] == TEACHER_WIDTH else 0)
        return scores(hidden, *rest)

    monkeypatch.setattr(matmuls, "scores", counting)
    assert_all_close(c.run("states", backend=backend, chunk_rows=chunk_rows), oracle(c), DISTILL_FP64)
    # Sorted, 12 rows in chunks of 4 hold teacher rows 0001 | 1122 | 2333.
    assert sum(computed) == (6 if chunk_rows == 4 else 4)


@pytest.mark.parametrize(("backend", "chunk"), [("torch", EagerChunk), ("triton", fused.FusedChunk)])
def test_what_needs_no_gradient_costs_none(backend: str, chunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(5, 11)
    whole, teacher = c.run("states", backend=backend), c.teacher("states")
    for leaf, other, expected in ((c.hidden, c.head, whole[1]), (c.head, c.hidden, whole[2])):
        other.requires_grad_(False)
        loss = distill_loss(c.hidden, c.head, teacher, normaliser=c.normaliser, backend=backend)
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], expected)
        other.requires_grad_()
    monkeypatch.setattr(chunk, "gradient", lambda *_: pytest.fail("a gradient was computed"))
    with torch.no_grad():
        assert torch.equal(distill_loss(c.hidden, c.head, teacher, normaliser=c.normaliser, backend=backend), whole[0])
    # The teacher's tensors do require one, and get none.
    loss = distill_loss(c.hidden.detach(), c.head.detach(), teacher, normaliser=c.normaliser, backend=backend)
    assert not loss.requires_grad and torch.equal(loss, whole[0])


@pytest.mark.parametrize("kind", ["logits", "states"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_teacher_and_the_weights_get_no_gradient(backend: str, kind: str) -> None:
    c = case(5, 11, weighted=1)
    c.weights.requires_grad_()
    distill_loss(c.hidden, c.head, c.teacher(kind), **c.options(backend=backend)).backward()
    assert c.hidden.grad is not None and c.states.grad is None and c.teacher_head.grad is None and c.weights.grad is None


@pytest.mark.parametrize("backend", CHUNKED)
def test_autocast_changes_nothing(backend: str) -> None:
    c = case(5, 11).to(torch.float32)
    expected = c.run("states", backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = c.run("states", backend=backend)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", CHUNKED)
@pytest.mark.parametrize("dtype", NARROW_PRODUCTS)
def test_gradients_from_narrow_products(backend: str, dtype: torch.dtype) -> None:
    """The loss does not change by a bit."""
    c = case(13, 29, shared=True, kept=True, weighted=1)
    c = c.to(torch.float32) if dtype is torch.bfloat16 else c
    expected = c.run("states", backend=backend, chunk_rows=5)
    found = c.run("states", backend=backend, chunk_rows=5, gradient_dtype=dtype)
    assert torch.equal(found[0], expected[0])
    for name, mine, theirs in zip(NAMES[1:], found[1:], expected[1:], strict=True):
        assert mine.dtype == theirs.dtype and not torch.equal(mine, theirs)
        assert_close(mine, theirs, NARROW_PRODUCTS[dtype], name)
    as_narrow = c.to(torch.bfloat16)
    pair = [as_narrow.run("states", backend=backend, gradient_dtype=each) for each in (None, torch.bfloat16)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*pair, strict=True)), "no narrower: nothing may change"


REFUSED: dict[str, tuple[Callable[[Case], Any], str]] = {
    "width": (lambda c: distill_loss(c.hidden[:, :3], c.head, c.teacher("logits"), normaliser=1), r"hidden is \[6, 3\] and head"),
    "dtype": (lambda c: distill_loss(c.hidden.float(), c.head, c.teacher("logits"), normaliser=1), "hidden is torch.float32"),
    "weights": (lambda c: c.run("logits", weights=torch.ones(4)), r"weights is \[4\], needed is one for each of the 6 rows"),
    "no rows of the teacher": (lambda c: replace(c, row=None).run("logits"), "2 rows and the draft 6: pass `row`"),
    "row": (lambda c: replace(c, row=c.row[:2]).run("states"), r"row is torch.int64 of shape \[2\], needed is int64"),
    "row far": (lambda c: replace(c, row=c.row + 1).run("states"), "row reaches from 1 to 2, needed are indices of 0 to 1"),
    "no kept": (lambda c: c.run("states", kept=None), "25 columns and the draft 11 tokens: pass `kept`"),
    "kept": (lambda c: c.run("states", kept=c.kept.int()), r"kept is torch.int32 of shape \[11\], needed is int64"),
    "kept far": (lambda c: c.run("logits", kept=c.kept - 30), "kept reaches from -.* to -.*, needed are indices of 0 to 24"),
    "chunk": (lambda c: c.run("logits", chunk_rows=0), "chunk_rows is 0"),
    "nothing to divide by": (lambda c: c.run("logits", normaliser=0), "normaliser is 0.0, needed is a number above 0"),
    "normalisers": (lambda c: c.run("logits", normaliser=torch.ones(2)), r"normaliser is a tensor of shape \[2\]"),
    "backend": (lambda c: c.run("logits", backend="cuda"), "'cuda' is none of naive, torch, triton"),
    "gradient dtype": (lambda c: c.run("logits", backend="naive", gradient_dtype=torch.bfloat16), "every product in the inputs'"),
    "no vocabulary": (lambda c: replace(c, head=c.head[:0]).run("logits", kept=c.kept[:0]), "the head has no rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_what_is_needed(name: str) -> None:
    call, message = REFUSED[name]
    c = replace(case(6, 11, shared=True, kept=True), row=torch.tensor([0, 1] * 3))
    with pytest.raises(ValueError, match=message):
        call(c)


class AllTilesButOne:
    """A kernel that leaves one tile (row, block) of the scores as it was."""

    def __init__(self, kernel: Any, row: int, block: int) -> None:
        self.kernel, self.row, self.columns = kernel, row, slice(block * TILE, (block + 1) * TILE)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(scores: torch.Tensor, *rest: Any, **options: Any) -> None:
            before = scores[self.row, self.columns].clone()
            self.kernel[grid](scores, *rest, **options)
            scores[self.row, self.columns] = before

        return launch


@pytest.mark.parametrize(("row", "block"), list(itertools.product((0, 12), (0, 3))))
def test_one_tile_that_is_not_written_is_noticed(row: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above are worth: the first and the last tile of the first and the last row, each left out once."""
    c = case(13, 29)
    monkeypatch.setattr(fused, "_gradient_kernel", AllTilesButOne(fused._gradient_kernel, row, block))
    for name, mine, theirs in zip(NAMES, c.run("states", backend="triton", chunk_rows=13), oracle(c), strict=True):
        with pytest.raises(AssertionError, match="off by") if name != "loss" else contextlib.nullcontext():
            assert_close(mine, theirs, DISTILL_FP64)


def test_the_backend_asked_for_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_backend_for(None, torch.device(kind)) for kind in ("cpu", "cuda")] == ["torch", "triton"]
    c = case(5, 11)
    monkeypatch.setattr(fused, "_statistics_kernel", {})
    c.run("logits")
    with pytest.raises(KeyError, match=r"\(5,\)"):
        c.run("logits", backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="asked for cpu tensors: it needs CUDA tensors, or TRITON_INTERPRET=1"):
        c.run("logits", backend="triton")
    monkeypatch.delattr(distill_package, "fused")
    monkeypatch.setitem(sys.modules, fused.__name__, None)
    c.run("logits")
    with pytest.raises(ValueError, match="needs the package triton"):
        c.run("logits", backend="triton")


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdraft_kernels.distill_loss import fused
for scores, teacher in (("*fp32", "*fp32"), ("*fp32", "*bf16"), ("*fp64", "*fp64")):
    types = {"scores": scores, "out": scores, "peak": scores, "factor": scores, "teacher": teacher, "index": "*i64"}
    for kernel in (fused._statistics_kernel, fused._gradient_kernel):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names} | {"BLOCK": "constexpr"}
        source = ASTSource(kernel, signature, constexprs={"BLOCK": fused._BLOCK})
        print("cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm)
"""


def test_the_kernels_compile_for_an_nvidia_gpu(tmp_path: Path) -> None:
    """In a process without the interpreter: the compiler is stricter, and needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * 6, done.stdout + done.stderr
