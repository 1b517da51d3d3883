"""Catches labels and tokens that are shifted across a document's end, that depend on which rank looks, or that a split loses; a
microbatch that cannot be and is trained all the same.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specdraft_kernels.zigzag_ring import ZigzagLayout

from tests.builders import VOCAB, generator
from trainer_bridge.cotrain.microbatch import Microbatch, Share, share_of, token_counts
from trainer_bridge.draft.packing import AnchorSampling
from trainer_bridge.errors import SampleError

PASSES = 3


def drawn(seed: int) -> Microbatch:
    """Ragged, with empty documents, single tokens, and holes in the answers."""
    choose = random.Random(seed)
    lengths = tuple(choose.choice((0, 1, 2, 3, 5, 8, 13, 17)) for _ in range(choose.randint(1, 6)))
    tokens, numbers = sum(lengths), generator(seed)
    return Microbatch(
        token_ids=torch.randint(1, VOCAB, (tokens,), generator=numbers),
        loss_mask=torch.rand(tokens, generator=numbers) < choose.choice((0.0, 0.3, 0.8, 1.0)),
        lengths=lengths,
    )


def exchange_of(rank: int, ranks: int) -> Any:
    """What a share reads of an `Exchange`; nothing is moved."""
    return SimpleNamespace(rank=rank, ranks=ranks)


def documents_of(microbatch: Microbatch, whole: torch.Tensor) -> list[list[Any]]:
    """Entries of ``[tokens, ...]``, document by document."""
    return [part.tolist() for part in whole.split(list(microbatch.lengths))]


def expected(microbatch: Microbatch, passes: int) -> tuple[list[list[int]], list[list[bool]]]:
    """`Microbatch.shifted` from its definition, token by token."""
    futures, valids = [], []
    ids, masks = (documents_of(microbatch, whole) for whole in (microbatch.token_ids, microbatch.loss_mask))
    for tokens, mask in zip(ids, masks, strict=True):
        for i in range(len(tokens)):
            futures.append([tokens[i + d] if i + d < len(tokens) else 0 for d in range(1, passes + 2)])
            generated = [i + d < len(tokens) and mask[i + d] for d in range(1, passes + 2)]
            valids.append([generated[0] and label for label in generated[1:]])
    return futures, valids


@pytest.mark.parametrize("passes", [1, 2, 3, 20])
def test_tokens_and_labels_shift_within_their_document(passes: int) -> None:
    labels = 0
    for seed in range(60):
        microbatch = drawn(seed)
        future, valid = microbatch.shifted(passes)
        assert future.shape == (sum(microbatch.lengths), passes + 1) and valid.shape == (sum(microbatch.lengths), passes)
        assert (future.tolist(), valid.tolist()) == expected(microbatch, passes), seed
        labels += int(valid.sum())
    assert labels > 200


def test_the_worked_example() -> None:
    """Two documents; answers are 3 4 5 and 7 8: row 2 of the first proposes 4, then 5."""
    microbatch = Microbatch(
        token_ids=torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]),
        loss_mask=torch.tensor([False, False, True, True, True, False, True, True]),
        lengths=(5, 3),
    )
    future, valid = microbatch.shifted(2)
    assert future.tolist() == [[2, 3, 4], [3, 4, 5], [4, 5, 0], [5, 0, 0], [0, 0, 0], [7, 8, 0], [8, 0, 0], [0, 0, 0]]
    assert valid.tolist() == [[x == "x", y == "x"] for x, y in ("..", "xx", "x.", "..", "..", "x.", "..", "..")]
    assert microbatch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert microbatch.documents.tolist() == [0] * 5 + [1] * 3


def test_a_prompt_token_is_never_a_label() -> None:
    """Case A15: nor is the token after an answer's end, however many passes there are."""
    for seed in range(40):
        microbatch = drawn(seed)
        future, valid = microbatch.shifted(PASSES)
        rows, passes = valid.nonzero(as_tuple=True)
        labels = rows + passes + 2
        assert bool(microbatch.loss_mask[labels].all()) and torch.equal(microbatch.token_ids[labels], future[rows, passes + 1])
        assert torch.equal(microbatch.documents[labels], microbatch.documents[rows])


def test_one_rank_has_all_of_it() -> None:
    for seed in range(20):
        microbatch = drawn(seed)
        future, valid = microbatch.shifted(PASSES)
        share = share_of(microbatch, PASSES, sampling=None, exchange=None)
        assert share.split is None and share.rows == sum(microbatch.lengths)
        assert torch.equal(share.positions, microbatch.positions) and torch.equal(share.documents, microbatch.documents)
        assert torch.equal(share.future_ids, future)
        assert share.anchors.tolist() == valid[:, 0].nonzero().squeeze(1).tolist()
        assert torch.equal(share.valid, valid[share.anchors]) and share.num_documents == len(microbatch.lengths)
        alone = share_of(microbatch, PASSES, sampling=None, exchange=exchange_of(0, 1))
        assert alone.split is None and torch.equal(alone.anchors, share.anchors)


def places(share: Share, layout: ZigzagLayout, rank: int) -> dict[int, list[bool]]:
    """Row of the whole microbatch to the labels of the anchor there."""
    rows = layout.packed_rows(rank)[share.anchors]
    assert bool((rows >= 0).all()), "padding is an anchor"
    return dict(zip(rows.tolist(), share.valid.tolist(), strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_ranks_together_train_what_one_would(ranks: int, sampled: bool) -> None:
    """The same anchors with the same labels, whoever holds them; drawn for the whole microbatch."""

    def sampling() -> AnchorSampling | None:
        return AnchorSampling(share=0.4, deep_share=0.5, random=generator(3)) if sampled else None

    thinned = 0
    for seed in range(30):
        microbatch = drawn(seed)
        alone = share_of(microbatch, PASSES, sampling=sampling(), exchange=None)
        layout, found = ZigzagLayout(microbatch.lengths, ranks), dict[int, list[bool]]()
        future = torch.full((sum(microbatch.lengths), PASSES + 1), -1)
        for rank in range(ranks):
            share = share_of(microbatch, PASSES, sampling=sampling(), exchange=exchange_of(rank, ranks))
            assert share.split is not None and share.split.layout == layout and share.rows == layout.rows
            assert share.anchors.tolist() == sorted(share.anchors.tolist())
            mine = places(share, layout, rank)
            assert not mine.keys() & found.keys()
            found |= mine
            future[layout.packed_rows(rank)[layout.real(rank)]] = share.future_ids[layout.real(rank)]
        assert found == dict(zip(alone.anchors.tolist(), alone.valid.tolist(), strict=True))
        assert torch.equal(future, alone.future_ids)
        thinned += len(share_of(microbatch, PASSES, sampling=None, exchange=None).anchors) - len(found)
    assert (thinned > 50) == sampled


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_positions_of_all_ranks_count_every_document_through(ranks: int) -> None:
    """Case D13: global, and padding lies beyond the document's end."""
    for seed in range(30):
        microbatch = drawn(seed)
        seen: list[list[int]] = [[] for _ in microbatch.lengths]
        for rank in range(ranks):
            share = share_of(microbatch, PASSES, sampling=None, exchange=exchange_of(rank, ranks))
            for document, position in zip(share.documents.tolist(), share.positions.tolist(), strict=True):
                seen[document].append(position)
        for positions, length in zip(seen, microbatch.lengths, strict=True):
            padded = length if ranks == 1 else -(-length // (2 * ranks)) * 2 * ranks
            assert sorted(positions) == list(range(padded))


def test_a_padded_batch_is_a_microbatch() -> None:
    ids = torch.arange(8).view(2, 4)
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])
    microbatch = Microbatch.of_rows(ids, mask)
    assert microbatch.lengths == (4, 4) and microbatch.loss_mask.dtype == torch.bool
    assert torch.equal(microbatch.token_ids, torch.arange(8)) and microbatch.loss_mask.tolist() == mask.flatten().bool().tolist()
    # The padding behind the first answer is no label.
    assert share_of(microbatch, 1, sampling=None, exchange=None).anchors.tolist() == [0, 5]


def microbatch(**changes: Any) -> Microbatch:
    whole = {"token_ids": torch.zeros(5, dtype=torch.int64), "loss_mask": torch.ones(5, dtype=torch.bool), "lengths": (2, 3)}
    return Microbatch(**{**whole, **changes})


def test_prompts_have_names_or_none() -> None:
    assert microbatch().prompts == ()
    assert microbatch(prompts=("a", "a")).prompts == ("a", "a")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few tokens": (
        {"token_ids": torch.zeros(4, dtype=torch.int64)},
        r"documents of \(2, 3\) tokens need token_ids and a bool loss_mask of shape \[5\], not \[4\] and torch.bool \[5\]",
    ),
    "a mask of another length": ({"loss_mask": torch.ones(6, dtype=torch.bool)}, r"not \[5\] and torch.bool \[6\]"),
    "a mask of numbers": ({"loss_mask": torch.ones(5)}, r"a bool loss_mask .*torch.float32 \[5\]"),
    "rows of tokens": ({"token_ids": torch.zeros(1, 5, dtype=torch.int64)}, r"not \[1, 5\]"),
    "other lengths": ({"lengths": (2, 2)}, r"documents of \(2, 2\) tokens .*shape \[4\]"),
    "prompts of others": ({"prompts": ("a", "b", "c")}, "3 prompts for 2 documents"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named(what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises(SampleError, match=message):
        microbatch(**changes)


def test_generated_tokens_are_counted_and_no_others() -> None:
    batches = [drawn(seed) for seed in range(8)]
    counts = [0] * VOCAB
    for one in batches:
        for token, generated in zip(one.token_ids.tolist(), one.loss_mask.tolist(), strict=True):
            counts[token] += generated
    found = token_counts(batches, VOCAB)
    assert found.tolist() == counts and found.dtype == torch.int64 and 10 < sum(counts) < sum(sum(one.lengths) for one in batches)
