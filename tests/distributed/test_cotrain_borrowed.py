"""Catches a draft that reads the embedding of another step, rows of tokens that another tensor-parallel rank has, or padding of the
vocabulary; ranks that wait for each other because one of them holds more than it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.builders import HIDDEN, VOCAB, generator
from tests.distributed.processes import on_ranks
from trainer_bridge.cotrain.borrowed import BorrowedWeights, Rows
from trainer_bridge.draft.interface import FrozenTarget

IDS = torch.tensor([0, 3, 11, 12, 13, VOCAB - 1])
LATER = torch.tensor([2, 12, 20])
KEPT = torch.tensor([1, 12, 14, 22])
ROWS = {"half each": 12, "all on the first": VOCAB, "more than all on the first": VOCAB + 7}
"""Rows that a tensor-parallel rank holds: 24 for a vocabulary of 23; and a padded share that is larger than the vocabulary."""


def table(seed: int, rows: int) -> torch.Tensor:
    """Both ranks' rows; those of padding are not numbers."""
    whole = torch.full((2 * rows, HIDDEN), float("nan"))
    whole[:VOCAB] = torch.randn(VOCAB, HIDDEN, generator=generator(seed))
    return whole


def copied(target: FrozenTarget | None) -> dict[str, torch.Tensor]:
    return {} if target is None else {"embedding": target.embedding.clone(), "head": target.head.clone()}


def on_a_rank(_: Path) -> dict[str, Any]:
    """Two stages of two tensor-parallel ranks: 0 1 | 2 3."""
    rank = dist.get_rank()
    stage, share = divmod(rank, 2)
    tensors, pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], [dist.new_group(r) for r in ([0, 2], [1, 3])]
    found: dict[str, Any] = {}
    for name, rows in ROWS.items():
        mine = slice(share * rows, (share + 1) * rows)
        for tied in (False, True):
            tables = {seed: table(seed, rows) for seed in (0, 1)}
            embedding = Rows(weight=tables[0][mine], start=mine.start) if stage == 0 or tied else None
            head = Rows(weight=tables[0 if tied else 1][mine], start=mine.start) if stage == 1 else None
            borrowed = BorrowedWeights(
                vocab_size=VOCAB, embedding=embedding, head=head, draft_rank=1, pipeline=pipelines[share], tensor=tensors[stage]
            )
            first = copied(borrowed.collect(IDS, KEPT if stage else None))
            # The policy has taken a step.
            for whole in tables.values():
                whole += 1.0
            then = copied(borrowed.collect(LATER, None))
            found[f"{name} {tied}"] = {"first": first, "then": then}
    # Stages without tensor parallelism: the embedding travels, the head is used as it is.
    whole = table(7, VOCAB)[:VOCAB]
    if share == 0:
        borrowed = BorrowedWeights(
            vocab_size=VOCAB, embedding=None if stage else Rows(weight=whole), head=Rows(weight=whole) if stage else None,
            draft_rank=1, pipeline=pipelines[0],
        )  # fmt: skip
        target = borrowed.collect(IDS, KEPT if stage else None)
        found["untied"] = copied(target)
        found["as it is"] = target is not None and target.head.data_ptr() == whole.data_ptr()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return on_ranks(on_a_rank, 4, tmp_path_factory.mktemp("borrowed"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_all_ranks_come_together_on_the_drafts(ranks: list[dict[str, Any]], rows: str, tied: bool) -> None:
    embedding, head = table(0, VOCAB), table(0 if tied else 1, VOCAB)
    for rank, found in enumerate(ranks):
        first, then = found[f"{rows} {tied}"]["first"], found[f"{rows} {tied}"]["then"]
        if rank < 2:
            assert first == then == {}
            continue
        assert first["embedding"].shape == first["head"].shape == (VOCAB, HIDDEN)
        assert torch.equal(first["embedding"][IDS], embedding[IDS])
        needed = torch.cat([IDS, KEPT])
        assert torch.equal(first["head"][needed], head[needed])
        assert torch.equal(then["embedding"][LATER], embedding[LATER] + 1.0)
        assert torch.equal(then["head"][LATER], head[LATER] + 1.0)
        assert not any(bool(tensor.isnan().any()) for part in (first, then) for tensor in part.values())


def test_an_embedding_travels_to_the_last_stage(ranks: list[dict[str, Any]]) -> None:
    whole, found = table(7, VOCAB), ranks[2]["untied"]
    assert torch.equal(found["embedding"][IDS], whole[IDS]) and torch.equal(found["head"], whole[:VOCAB])
    assert ranks[2]["as it is"] and ranks[0]["untied"] == {}
