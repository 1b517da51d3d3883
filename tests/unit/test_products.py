"""Catches a narrow product with a wrong factor, one made of weights of yesterday, and one where none was asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.builders import draft, draft_config, frozen_target, sample
from tests.tolerances import NARROW_PRODUCTS, Tolerance, assert_close
from trainer_bridge.draft import products
from trainer_bridge.draft.packing import pack
from trainer_bridge.draft.products import Linear
from trainer_bridge.draft.registry import of_config

INPUTS, OUTPUTS, ROWS = 24, 10, 7


def layer() -> Linear:
    torch.manual_seed(0)
    return Linear(INPUTS, OUTPUTS).double()


def run(made: Linear, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    out = made(x)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, made.weight])]


@pytest.mark.parametrize("shape", [(ROWS, INPUTS), (2, 3, INPUTS), (1, INPUTS), (0, INPUTS)])
@pytest.mark.parametrize("dtype", NARROW_PRODUCTS)
def test_a_narrow_product_is_the_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made, x = layer(), torch.randn(shape, dtype=torch.float64)
    expected = run(made, x)
    with products.Narrow(dtype):
        found = run(made, x)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float64 and mine.shape == theirs.shape
        assert not mine.numel() or not theirs.any() or not torch.equal(mine, theirs), "it was not narrowed"
        assert_close(mine, theirs, NARROW_PRODUCTS[dtype])


def test_the_backward_is_narrow_wherever_it_runs() -> None:
    made, x = layer(), torch.randn(ROWS, INPUTS, dtype=torch.float64)
    with products.Narrow(torch.float32):
        inside = run(made, x)
        out = made(x)
    assert products.dtype() is None
    assert torch.equal(torch.autograd.grad(out.sin().sum(), made.weight)[0], inside[2])


def test_each_weight_is_narrowed_once() -> None:
    made, x = layer(), torch.randn(ROWS, INPUTS, dtype=torch.float64)
    narrow = products.Narrow(torch.float32)
    for _ in range(2):
        with narrow:
            before = made(x).detach()
    copy = narrow.copy_of(made.weight)
    assert copy is narrow.copy_of(made.weight) and copy.dtype == torch.float32
    with torch.no_grad():
        made.weight.add_(1.0)
    with products.Narrow(torch.float32):
        after = made(x).detach()
    assert_close(after, x @ made.weight.detach().T, NARROW_PRODUCTS[torch.float32])
    assert not torch.allclose(before, after, atol=1e-2)


def test_what_is_only_measured_is_not_narrowed() -> None:
    made, x = layer(), torch.randn(ROWS, INPUTS, dtype=torch.float64)
    with torch.no_grad(), products.Narrow(torch.bfloat16):
        assert torch.equal(made(x), x @ made.weight.T)


@pytest.mark.parametrize("dtype", NARROW_PRODUCTS)
def test_a_whole_draft_is_trained_in_narrow_products(dtype: torch.dtype) -> None:
    kind, found = of_config(draft_config()), []
    wide_dtype = torch.float32 if dtype is torch.bfloat16 else torch.float64
    batch = pack([sample("...AAAAAA", seed=1), sample("..AA.AAAA..AAA", seed=3)], 3)
    batch = dataclasses.replace(batch, taps=batch.taps.to(wide_dtype), final=batch.final.to(wide_dtype))
    for narrow in (None, dtype):
        model = draft(dtype=wide_dtype)
        with products.Narrow(narrow):
            for _ in kind.objective(model, frozen_target(dtype=wide_dtype), passes=3).pieces(batch, batch.label_counts()):
                pass
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    wide, narrowed = found
    # Three passes of a layer lose more than one product.
    tolerance = Tolerance(relative=10 * NARROW_PRODUCTS[dtype].relative, reason="some ten products one after the other")
    for name, theirs in wide.items():
        assert not torch.equal(narrowed[name], theirs), name
        assert_close(narrowed[name], theirs, tolerance, name)
