"""Catches a draft that copies the policy's embedding or head where it could read them, that trains them, or that takes a row of
another token from a part of the vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from tests.builders import HIDDEN, VOCAB, generator
from trainer_bridge.cotrain.borrowed import BorrowedWeights, Rows

PADDED = VOCAB + 5


def weight(seed: int, rows: int = PADDED) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=generator(seed)).requires_grad_()


def borrow(embedding: torch.Tensor, head: torch.Tensor) -> BorrowedWeights:
    return BorrowedWeights(vocab_size=VOCAB, embedding=Rows(weight=embedding), head=Rows(weight=head))


def test_whole_weights_are_used_where_they_lie() -> None:
    embedding, head = weight(0), weight(1, VOCAB)
    borrowed = borrow(embedding, head)
    for kept in (None, torch.tensor([3, 1])):
        target = borrowed.collect(torch.tensor([0, 2]), kept)
        assert target is not None
        assert target.embedding.data_ptr() == embedding.data_ptr() and target.head.data_ptr() == head.data_ptr()
        assert not target.embedding.requires_grad and not target.head.requires_grad
        # Without the padding of the vocabulary.
        assert target.embedding.shape == target.head.shape == (VOCAB, HIDDEN)
        with torch.no_grad():
            embedding += 1.0
        assert torch.equal(target.embedding, embedding[:VOCAB]), "a step of the policy is not seen"


def test_tied_weights_stay_one_tensor() -> None:
    tied = weight(0)
    target = borrow(tied, tied).collect(torch.tensor([1]), None)
    assert target is not None and target.embedding.data_ptr() == target.head.data_ptr() == tied.data_ptr()


@pytest.mark.parametrize("start", [0, 7, 14])
def test_rows_that_lie_elsewhere_are_zeros(start: int) -> None:
    part = weight(2, 7)
    ids = torch.tensor([22, 6, 7, 0, 13, 14, 20, 21])
    found = Rows(weight=part, start=start).take(ids)
    for row, token in zip(found, ids.tolist(), strict=True):
        assert torch.equal(row, part[token - start] if start <= token < start + 7 else torch.zeros(HIDDEN))
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("start", "rows", "whole"), [(0, VOCAB, True), (0, PADDED, True), (0, VOCAB - 1, False), (1, PADDED, False)]
)
def test_a_part_is_not_the_whole(start: int, rows: int, whole: bool) -> None:
    assert Rows(weight=weight(3, rows), start=start).whole(VOCAB) is whole


def test_no_token_is_no_row() -> None:
    assert Rows(weight=weight(4)).take(torch.zeros(0, dtype=torch.int64)).shape == (0, HIDDEN)
