"""Catches a teacher's row of another token, a row that travels once for every pass that needs it, and a trunk whose gradient is
lost or counted twice when every pass has a backward of its own.

Gloo processes, 2 and 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from specdraft_kernels.zigzag_ring import Exchange, Trunk, ZigzagLayout, lookahead, shift

from tests.builders import generator
from tests.distributed.processes import on_ranks
from tests.distributed.test_zigzag_ring import FORMS, LENGTHS, PASSES, Leaves, gradients_of, packed, with_gradients
from tests.tolerances import OPERATOR_FP64, assert_close

DOCUMENTS = (LENGTHS, (0,), (1,), (2, 1, 3), (64,), (0, 31, 0, 2, 9, 0))
"""Odd lengths, empty ones and single tokens; chunks that are shorter than what is looked ahead."""
AHEAD = (1, 2, 3, 4, 17)
WIDTH = 3
Which = str
"""``all``: every row is an anchor; ``few``: every third on the first rank, none on the others."""


def rows_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(sum(lengths), WIDTH, generator=generator(len(lengths)), dtype=torch.float64)


def looked(lengths: tuple[int, ...], exchange: Exchange, n: int) -> dict[str, Any]:
    """What `lookahead` gives and sends, and what as many shifts give."""
    layout = ZigzagLayout(lengths, exchange.ranks)
    rows = layout.split(rows_of(lengths), exchange.rank).requires_grad_()
    before = exchange.sent_bytes
    longer, index = lookahead(rows, layout, exchange, n)
    sent = exchange.sent_bytes - before
    shifted = [shift(rows, layout, exchange, d).detach() for d in range(1, n + 1)]
    return {"rows": rows.detach(), "longer": longer, "index": index, "sent": sent, "shifted": torch.stack(shifted, 1)}


def trunk_gradients(layout: ZigzagLayout, exchange: Exchange, form: Any, which: Which, *, stepwise: bool) -> Leaves:
    """Three passes of branches and one of blocks of this rank's anchors: one backward for all, or one for each."""
    mine = with_gradients({name: layout.split(leaf, exchange.rank) for name, leaf in packed().items()})
    trunk = Trunk(mine["k"], mine["v"], layout, exchange, form=form, passes=PASSES + 1, stepwise=stepwise)
    rows = layout.real(exchange.rank).nonzero().squeeze(1)
    if which == "few":
        rows = rows[::3] if exchange.rank == 0 else rows[:0]
    losses = []

    def done(out: torch.Tensor, weight: torch.Tensor) -> None:
        loss = (out * weight).sum()
        if stepwise:
            loss.backward()
        else:
            losses.append(loss)

    for d in range(PASSES):
        branch = (mine["k_branch"][rows, :d], mine["v_branch"][rows, :d])
        done(trunk.branch_attention(mine["q"][rows, d], *branch, anchors=rows)[0], mine["weight"][rows, d])
    sequences, prefix = layout.sequences(exchange.rank)[rows], layout.positions(exchange.rank)[rows] + 1
    block = (mine["q"][rows], mine["k_branch"][rows], mine["v_branch"][rows])
    done(trunk.block_attention(*block, sequences, prefix)[0], mine["weight"][rows].flip(1))
    if stepwise:
        trunk.send_home()
    else:
        torch.stack(losses).sum().backward()
    return gradients_of(mine)


def refusals(exchange: Exchange) -> list[str]:
    said, ranks = [], exchange.ranks
    for rows, layout in ((torch.zeros(3, 1), ZigzagLayout([4 * ranks], ranks)), (torch.zeros(4, 1), ZigzagLayout([20], 5))):
        with pytest.raises(ValueError) as error:
            lookahead(rows, layout, exchange, 1)
        said.append(str(error.value))
    return said


def on_a_rank(_: Path) -> dict[str, Any]:
    exchange = Exchange()
    found: dict[str, Any] = {"refused": refusals(exchange)}
    for lengths in DOCUMENTS:
        for n in AHEAD:
            found[f"{lengths} {n}"] = looked(lengths, exchange, n)
    layout = ZigzagLayout(LENGTHS, exchange.ranks)
    for form in FORMS:
        for which in ("all", "few"):
            for stepwise in (False, True):
                before = exchange.sent_bytes
                found[f"{form} {which} {stepwise}"] = trunk_gradients(layout, exchange, form, which, stepwise=stepwise)
                found[f"{form} {which} {stepwise} bytes"] = exchange.sent_bytes - before
    return found


Ran = tuple[int, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """How many ranks, and what each found."""
    return request.param, on_ranks(on_a_rank, request.param, tmp_path_factory.mktemp("lookahead"))


def needed_of_others(layout: ZigzagLayout, n: int) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Per owner and other rank the tokens that travel, from the definition."""
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for sequence, length in enumerate(layout.lengths):
        for position in range(length):
            for ahead in range(position + 1, min(length, position + n + 1)):
                owner, reader = layout.owner(sequence, ahead)[0], layout.owner(sequence, position)[0]
                if owner != reader:
                    found.setdefault((owner, reader), set()).add((sequence, ahead))
    return found


@pytest.mark.parametrize("n", AHEAD)
def test_rows_ahead_are_those_that_as_many_shifts_give(ran: Ran, n: int) -> None:
    """D14, and a document's end is an end."""
    count, ranks = ran
    found_some = 0
    for lengths in DOCUMENTS:
        layout = ZigzagLayout(lengths, count)
        for rank, found in enumerate(one[f"{lengths} {n}"] for one in ranks):
            longer, index = found["longer"], found["index"]
            assert index.shape == (layout.rows, n) and index.dtype == torch.int64
            assert not longer.requires_grad and torch.equal(longer[: layout.rows], found["rows"])
            there = index >= 0
            assert torch.equal(torch.where(there[..., None], longer[index], 0.0), found["shifted"])
            positions, ends = layout.positions(rank), torch.tensor(lengths)[layout.sequences(rank)]
            ahead = positions[:, None] + torch.arange(1, n + 1)
            assert torch.equal(there, ahead < ends[:, None])
            found_some += int(there.sum())
    assert found_some > 100


@pytest.mark.parametrize("n", AHEAD)
def test_each_row_travels_once_to_a_rank_that_needs_it(ran: Ran, n: int) -> None:
    count, ranks = ran
    total = 0
    for lengths in DOCUMENTS:
        layout = ZigzagLayout(lengths, count)
        travels = needed_of_others(layout, n)
        for rank, found in enumerate(one[f"{lengths} {n}"] for one in ranks):
            sent = sum(len(tokens) for (owner, _), tokens in travels.items() if owner == rank)
            borrowed = sum(len(tokens) for (_, reader), tokens in travels.items() if reader == rank)
            assert found["sent"] == sent * WIDTH * 8
            assert found["longer"].shape[0] == layout.rows + borrowed
            total += sent
    assert total > 10


@pytest.mark.parametrize("which", ["all", "few"])
@pytest.mark.parametrize("form", FORMS)
def test_a_backward_for_every_pass_gives_the_gradient_of_one_for_all(ran: Ran, form: str, which: Which) -> None:
    """Also where a rank has no anchors at all: the others wait for its share of the trunk."""
    _, ranks = ran
    for rank, found in enumerate(ranks):
        together, each = found[f"{form} {which} False"], found[f"{form} {which} True"]
        assert together.keys() == each.keys() == {f"d {name}" for name in ("k", "v", "q", "k_branch", "v_branch")}
        for name, expected in together.items():
            assert_close(each[name], expected, OPERATOR_FP64, f"{name} on rank {rank}")
        assert found[f"{form} {which} True bytes"] == found[f"{form} {which} False bytes"]
    # Whoever holds the anchors, the trunk's gradient is everywhere.
    assert all(float(found[f"{form} {which} True"]["d k"].abs().max()) > 1e-3 for found in ranks)


def test_both_forms_agree(ran: Ran) -> None:
    for found in ran[1]:
        for name, expected in found["ring few True"].items():
            assert_close(found["gather few True"][name], expected, OPERATOR_FP64, name)


def test_what_does_not_fit_is_refused(ran: Ran) -> None:
    for found in ran[1]:
        assert "the layout has 4 per rank" in found["refused"][0]
        assert f"a layout of 5 ranks on a group of {ran[0]}" in found["refused"][1]
