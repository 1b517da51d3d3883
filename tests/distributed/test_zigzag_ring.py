"""Catches context parallelism that is not exact: a key seen twice or never over the ring, a gradient that does not come home,
a label shifted across a chunk boundary to the wrong row, sums that get worse with the number of ranks, a neighbour document
that leaks.

Gloo processes, 2, 4 and 8; everything is compared with one device that holds the whole packed batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from specdraft_kernels.block_attention import block_attention
from specdraft_kernels.branch_attention import branch_attention
from specdraft_kernels.zigzag_ring import Exchange, Trunk, ZigzagLayout, sent_bytes, shift

from tests.builders import generator
from tests.distributed.processes import on_ranks
from tests.tolerances import OPERATOR_FP32, OPERATOR_FP64, assert_close

LENGTHS = (37, 1, 0, 16, 5)
"""None a multiple of 16; one of a single token, one without any, one shorter than 2 C for every C but 2."""
TOKENS = sum(LENGTHS)
CU = torch.tensor([0, *itertools.accumulate(LENGTHS)])
HEADS, KV_HEADS, SIZE, PASSES = 4, 2, 8, 3
WIDTH = KV_HEADS * SIZE
SHIFTS = (1, 2, 3, 17, -1)
SLOTS = 3
FORMS = ("ring", "gather")
Leaves = dict[str, torch.Tensor]


def packed(dtype: torch.dtype = torch.float64) -> Leaves:
    """The whole batch: the trunk, per pass the queries, a branch for all passes, weights that make a loss of the outputs."""
    random = generator(0)
    shapes = {
        "k": (TOKENS, KV_HEADS, SIZE),
        "v": (TOKENS, KV_HEADS, SIZE),
        "q": (TOKENS, PASSES, HEADS, SIZE),
        "k_branch": (TOKENS, PASSES - 1, KV_HEADS, SIZE),
        "v_branch": (TOKENS, PASSES - 1, KV_HEADS, SIZE),
        "weight": (TOKENS, PASSES, HEADS, SIZE),
    }
    return {name: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def blocks() -> tuple[torch.Tensor, torch.Tensor, Leaves]:
    """Sequence and prefix of blocks, sorted; and their own tensors, at the packed row of their anchor."""
    anchors = [(s, p) for s, length in enumerate(LENGTHS) for p in range(0, length, 3)]
    random = generator(5)
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "weight": HEADS}
    drawn = {n: torch.randn(len(anchors), SLOTS, h, SIZE, generator=random, dtype=torch.float64) for n, h in shapes.items()}
    sequences, prefix = (torch.tensor(column) for column in zip(*anchors, strict=True))
    return sequences, prefix, drawn


def with_gradients(leaves: Leaves) -> Leaves:
    return {name: leaf.clone().requires_grad_(name != "weight") for name, leaf in leaves.items()}


def gradients_of(leaves: Leaves) -> Leaves:
    return {f"d {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def branch_on_one(window: int | None, sampled: bool, dtype: torch.dtype = torch.float64) -> Leaves:
    """Three passes on the whole batch; passes after the first only for every second token if `sampled`."""
    leaves = with_gradients(packed(dtype).copy())
    outs = []
    for d in range(PASSES):
        rows = torch.arange(0, TOKENS, 2) if sampled and d else torch.arange(TOKENS)
        out, _ = branch_attention(
            leaves["q"][rows, d], leaves["k"], leaves["v"], leaves["k_branch"][rows, :d], leaves["v_branch"][rows, :d], CU,
            anchors=rows, window=window,
        )  # fmt: skip
        whole = torch.zeros(TOKENS, HEADS, SIZE, dtype=dtype).index_copy(0, rows, out)
        outs.append(whole)
    stacked = torch.stack(outs, 1)
    (stacked * leaves["weight"]).sum().backward()
    return {"out": stacked.detach(), **gradients_of(leaves)}


def branch_on_ranks(
    leaves: Leaves, layout: ZigzagLayout, exchange: Exchange, form: Any, window: int | None, sampled: bool
) -> Leaves:
    """The same for this rank's rows."""
    mine = with_gradients({name: layout.split(leaf, exchange.rank) for name, leaf in leaves.items()})
    trunk = Trunk(mine["k"], mine["v"], layout, exchange, form=form)
    chosen = torch.arange(layout.rows)
    even = (layout.packed_rows(exchange.rank) % 2 == 0).nonzero().squeeze(1)
    outs = []
    for d in range(PASSES):
        rows = even if sampled and d else chosen
        branch = (mine["k_branch"][rows, :d], mine["v_branch"][rows, :d])
        out, _ = trunk.branch_attention(mine["q"][rows, d], *branch, anchors=rows, window=window)
        outs.append(torch.zeros(layout.rows, HEADS, SIZE, dtype=out.dtype).index_copy(0, rows, out))
    stacked = torch.stack(outs, 1)
    # Padding has weight 0, as in every loss.
    (stacked * mine["weight"]).sum().backward()
    return {"out": stacked.detach(), **gradients_of(mine)}


def blocks_on_ranks(layout: ZigzagLayout, exchange: Exchange, form: Any) -> Leaves:
    """The blocks whose anchors this rank holds."""
    sequences, prefix, drawn = blocks()
    owners = [layout.owner(int(s), int(p)) for s, p in zip(sequences, prefix, strict=True)]
    mine = torch.tensor([i for _, i in sorted((row, i) for i, (rank, row) in enumerate(owners) if rank == exchange.rank)]).long()
    own = with_gradients({name: tensor[mine] for name, tensor in drawn.items()})
    whole = packed()
    k, v = (layout.split(whole[name], exchange.rank).requires_grad_() for name in ("k", "v"))
    trunk = Trunk(k, v, layout, exchange, form=form)
    out, _ = trunk.block_attention(own["q"], own["k"], own["v"], sequences[mine], prefix[mine])
    (out * own["weight"]).sum().backward()
    return {"which": mine, "out": out.detach(), "d trunk k": k.grad, "d trunk v": v.grad, **gradients_of(own)}


def on_a_rank(_: Path) -> dict[str, Any]:
    """Everything that the tests look at, in one start of the processes."""
    exchange = Exchange()
    layout = ZigzagLayout(LENGTHS, exchange.ranks)
    whole, found = packed(), {}
    for form in FORMS:
        for window, sampled in ((None, False), (4, False), (None, True)):
            before = exchange.sent_bytes
            found[f"{form} {window} {sampled}"] = branch_on_ranks(whole, layout, exchange, form, window, sampled)
            found[f"{form} {window} {sampled} bytes"] = exchange.sent_bytes - before
        found[f"{form} bf16"] = branch_on_ranks(packed(torch.bfloat16), layout, exchange, form, None, False)
        # Every document but the fourth becomes another one.
        changed = {name: leaf.clone() for name, leaf in whole.items()}
        for leaf in changed.values():
            leaf[: int(CU[3])] *= -3.0
            leaf[int(CU[4]) :] += 2.0
        found[f"{form} changed"] = branch_on_ranks(changed, layout, exchange, form, None, False)
        found[f"{form} blocks"] = blocks_on_ranks(layout, exchange, form)
    for n in SHIFTS:
        rows = layout.split(whole["q"], exchange.rank).requires_grad_()
        moved = shift(rows, layout, exchange, n)
        (moved * layout.split(whole["weight"], exchange.rank)).sum().backward()
        found[f"shift {n}"] = {"out": moved.detach(), "gradient": rows.grad}
    return found


@pytest.fixture(scope="module", params=[2, 4, 8])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ZigzagLayout, list[dict[str, Any]]]:
    """The layout, and what each rank found."""
    return ZigzagLayout(LENGTHS, request.param), on_ranks(on_a_rank, request.param, tmp_path_factory.mktemp("ring"))


def joined(ran: tuple[ZigzagLayout, list[dict[str, Any]]], key: str) -> Leaves:
    layout, ranks = ran
    return {name: layout.join([rank[key][name] for rank in ranks]) for name in ranks[0][key]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("window", "sampled"), [(None, False), (4, False), (None, True)])
def test_outputs_and_every_gradient_equal_one_device(ran: Any, form: str, window: int | None, sampled: bool) -> None:
    """D12: odd lengths; E3: gradients, not only outputs."""
    found, expected = joined(ran, f"{form} {window} {sampled}"), branch_on_one(window, sampled)
    assert found.keys() == expected.keys()
    for name in expected:
        assert expected[name].abs().max() > 1e-2, f"{name} is nothing to compare with"
        assert_close(found[name], expected[name], OPERATOR_FP64, name)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_see_what_they_see_on_one_device(ran: Any, form: str) -> None:
    layout, ranks = ran
    sequences, prefix, drawn = blocks()
    own, whole = with_gradients(drawn), packed()
    k, v = whole["k"].requires_grad_(), whole["v"].requires_grad_()
    out, _ = block_attention(own["q"], k, v, own["k"], own["v"], CU, sequences, prefix)
    (out * own["weight"]).sum().backward()
    which = torch.cat([rank[f"{form} blocks"]["which"] for rank in ranks])
    assert sorted(which.tolist()) == list(range(len(sequences)))
    for name, expected in {"out": out.detach(), **gradients_of(own)}.items():
        found = torch.cat([rank[f"{form} blocks"][name] for rank in ranks])
        assert_close(found, expected[which], OPERATOR_FP64, name)
    for name, expected in (("d trunk k", k.grad), ("d trunk v", v.grad)):
        assert_close(layout.join([rank[f"{form} blocks"][name] for rank in ranks]), expected, OPERATOR_FP64, name)


@pytest.mark.parametrize("form", FORMS)
def test_a_document_knows_nothing_of_the_others(ran: Any, form: str) -> None:
    """D9, bitwise."""
    before, after = joined(ran, f"{form} None False"), joined(ran, f"{form} changed")
    document = slice(int(CU[3]), int(CU[4]))
    for name in before:
        assert torch.equal(before[name][document], after[name][document]), name
        assert not torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_summed_in_fp32_however_many_ranks(ran: Any, form: str) -> None:
    """E2: the error is that of one device's rounding, at 2 ranks and at 8."""
    found, expected = joined(ran, f"{form} bf16"), branch_on_one(None, False, torch.bfloat16)
    for name in expected:
        assert_close(found[name], expected[name], OPERATOR_FP32[torch.bfloat16], name)


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_sent_are_those_of_the_formula(ran: Any, form: Any) -> None:
    layout, ranks = ran
    expected = sent_bytes(form, layout, WIDTH, 8, passes=PASSES)
    assert [rank[f"{form} None False bytes"] for rank in ranks] == [expected] * layout.ranks


@pytest.mark.parametrize("n", SHIFTS)
def test_a_shift_crosses_chunks_and_ranks_but_no_document(ran: Any, n: int) -> None:
    """D14: shifted after the split, token by token what a shift before it gives."""
    whole = packed()

    def moved(rows: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.zeros_like(rows)
        for begin, end in itertools.pairwise(CU.tolist()):
            for at in range(begin, end):
                if begin <= at + n < end:
                    out[at] = rows[at + n]
        return out

    found = joined(ran, f"shift {n}")
    assert torch.equal(found["out"], moved(whole["q"], n))
    assert torch.equal(found["gradient"], moved(whole["weight"], -n))


def refusals(_: Path) -> list[str]:
    exchange, said = Exchange(), []
    rows = torch.zeros(4, 1, 8)
    for make in (
        lambda: Trunk(rows, rows, ZigzagLayout([8], 3), exchange),
        lambda: Trunk(rows[:3], rows[:3], ZigzagLayout([8], 2), exchange),
        lambda: Trunk(rows, rows, ZigzagLayout([8], 2), exchange, form="star"),  # type: ignore[arg-type]
        lambda: shift(rows[:1], ZigzagLayout([8], 2), exchange, 1),
    ):
        with pytest.raises(ValueError) as error:
            make()
        said.append(str(error.value))
    return said


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    expected: Sequence[str] = ("group of 2", "the layout's 4 rows", "'ring' or 'gather'", "4 per rank")
    for rank in on_ranks(refusals, 2, tmp_path):
        assert all(part in text for part, text in zip(expected, rank, strict=True)), rank
