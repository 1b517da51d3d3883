"""Catches: a fused layer laid in the wrong order, a check of packed functions that lets a wrong weight or bias through or refuses
NaN where it is due, and an exchange of weights that stops halfway."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vllm_specdraft import policy_swap
from vllm_specdraft.served import fused_into, off_by, tolerance_of
from vllm_specdraft.shadow import ABSENT


class Packed:
    """A layer whose weight is seen only through its function, padded by two outputs."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = torch.cat([weight, torch.full((2, weight.shape[1]), 7.0)])
        self.quant_method = self

    def apply(self, layer: Packed, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.weight, None if bias is None else F.pad(bias, (0, 2)))


def test_parts_of_a_fused_layer_in_order() -> None:
    assert fused_into("a.0.qkv_proj.bias") == ("a.0.q_proj.bias", "a.0.k_proj.bias", "a.0.v_proj.bias")
    assert fused_into("gate_up_proj.weight") == ("gate_proj.weight", "up_proj.weight")
    assert fused_into("a.down_proj.weight") == fused_into("norm") == ()


def test_a_function_is_told_from_that_of_another_weight_or_bias() -> None:
    weight, bias, x = torch.randn(5, 8), torch.randn(5), torch.randn(3, 8)
    layer, limit = Packed(weight), tolerance_of(torch.float32)
    assert off_by(layer, x, weight) <= limit
    assert off_by(layer, x, weight, (bias, bias)) <= limit
    assert off_by(layer, x, weight.roll(1, 0)) > limit
    assert off_by(layer, x, weight, (bias + 0.01, bias)) > limit
    changed = weight.clone()
    changed[2, 3] += 0.1
    assert off_by(layer, x, changed) > limit


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_right_only_where_it_is_due_and_asked_for(value: float) -> None:
    weight, x = torch.randn(5, 8), torch.randn(3, 8)
    odd = weight.clone()
    odd[1, 2] = value
    limit = tolerance_of(torch.float32)
    assert off_by(Packed(odd), x, odd, nan=True) <= limit
    assert not off_by(Packed(odd), x, odd) <= limit
    assert not off_by(Packed(odd), x, weight, nan=True) <= limit
    assert not off_by(Packed(weight), x, odd, nan=True) <= limit
    changed = odd.clone()
    changed[4] += 0.1
    assert off_by(Packed(odd), x, changed, nan=True) > limit


def state_of(modules: list[nn.Module]) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in modules]


@pytest.fixture
def modules() -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(4)]


def entries_for(modules: list[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    return [(one, {"_parameters": dict(copy.deepcopy(one)._parameters), "cpu_linear": object()}) for one in modules]


def test_an_exchange_gives_back_what_was_there(modules: list[nn.Module]) -> None:
    before, entries = state_of(modules), entries_for(modules)
    replaced = policy_swap._exchange(entries)
    assert all(vars(module)["cpu_linear"] is values["cpu_linear"] for module, values in entries)
    assert all(values["cpu_linear"] is ABSENT for _, values in replaced)
    after = state_of(modules)
    again = policy_swap._exchange(replaced)
    assert state_of(modules) == before
    policy_swap._exchange(again)
    assert state_of(modules) == after


@pytest.mark.parametrize("count", range(4))
def test_an_exchange_that_fails_puts_everything_back(modules: list[nn.Module], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, entries, put, calls = state_of(modules), entries_for(modules), policy_swap._put_into, []

    def fail(module: nn.Module, values: dict[str, Any]) -> None:
        calls.append(module)
        put(module, values)
        if len(calls) == count + 1:
            raise InterruptedError

    monkeypatch.setattr(policy_swap, "_put_into", fail)
    with pytest.raises(InterruptedError):
        policy_swap._exchange(entries)
    assert state_of(modules) == before
