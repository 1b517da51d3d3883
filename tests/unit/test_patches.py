"""Catches: sampling parameters that reach the wrong verified tokens, or none."""

from __future__ import annotations

import pytest
import torch

from vllm_specdraft.patches import expand_batch_to_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_token_gets_its_requests_value(dtype: torch.dtype) -> None:
    x = torch.tensor([3, 0, 5], dtype=dtype)
    out = expand_batch_to_tokens(x, torch.tensor([2, 5, 6], dtype=torch.int32), 6)
    assert out.dtype == dtype
    assert out.tolist() == [3, 3, 0, 0, 0, 5]


def test_one_value_is_replaced() -> None:
    x = torch.tensor([0.0, 0.7])
    assert expand_batch_to_tokens(x, torch.tensor([1, 3]), 3, 0, 1).tolist() == pytest.approx([1.0, 0.7, 0.7])


def test_a_request_without_tokens_takes_no_place() -> None:
    assert expand_batch_to_tokens(torch.tensor([1, 2, 3]), torch.tensor([2, 2, 3]), 3).tolist() == [1, 1, 3]


def test_no_request_gives_no_token() -> None:
    assert expand_batch_to_tokens(torch.tensor([2.0]), torch.tensor([0]), 0).shape == (0,)
