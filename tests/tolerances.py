"""Every tolerance of the test suite, with its reason. A number that is not in this table is compared exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far two tensors that should be equal may lie apart."""

    relative: float
    """Largest allowed difference of any entry, as a share of the largest magnitude in the expected tensor."""
    reason: str
    """Why it is not zero, and what still shows up above it."""


OPERATOR_FP64 = Tolerance(
    relative=1e-10,
    reason="fp64 sums of a few hundred terms in another order differ by about 1e-15; a wrong key or mask by over 1e-3",
)
OPERATOR_FP32 = {
    torch.float32: Tolerance(
        relative=1e-5,
        reason="fp32 sums of a few hundred terms round at about 1e-6 of the largest entry; a tile joined wrongly by over 1e-2",
    ),
    torch.bfloat16: Tolerance(
        relative=2e-2,
        reason="inputs are the same bf16 numbers; weights and results round to 8 bits, 4e-3 each; a wrong key shows above 1e-1",
    ),
}
"""By the dtype of the inputs."""
OBJECTIVE_FP64 = Tolerance(
    relative=1e-10,
    reason="three chained fp64 passes in another order differ by about 1e-14; a wrong label, position or mask by over 1e-3",
)
LEARNED_FROM_SAMPLES = Tolerance(
    relative=1e-4,
    reason="the policy runs in fp32, and its attention over two ranks sums in another order; another row shows above 1e-1",
)
REGROUPED_FP64 = Tolerance(
    relative=1e-10,
    reason="packing and splitting only change the order of fp64 sums; a label counted twice or left out is a whole label",
)
NARROW_PRODUCTS = {
    torch.float32: Tolerance(
        relative=1e-5,
        reason="factors of fp64 layers rounded to 24 bits, 6e-8 each, sums of tens of terms; a wrong factor by over 1e-1",
    ),
    torch.bfloat16: Tolerance(
        relative=2e-2,
        reason="both factors and the product rounded to 8 bits, 4e-3 each, which sums do not add up; a wrong factor by over 1e-1",
    ),
}
"""By the dtype of the factors."""

DISTILL_FP64 = Tolerance(
    relative=1e-10,
    reason="fp64 softmax sums and products in another order differ by about 1e-15; a row, column or tile left out by over 1e-3",
)
DISTILL_FP32 = Tolerance(
    relative=1e-5,
    reason="fp32 logits, exponentials and sums over tens of terms against fp64: some 1e-7 each; a wrong row by over 1e-2",
)
DISTILL_BF16 = Tolerance(
    relative=2.0**-8,
    reason="all sums are fp32, and the result is rounded once to 8 bits of mantissa, 2^-9 of an entry; bf16 sums lose some 1e-2",
)
DISTILL_FP16 = Tolerance(
    relative=2.0**-11,
    reason="all sums are fp32, and the result is rounded once to 11 bits of mantissa, 2^-12 of an entry",
)

TAPS_VS_HUGGING_FACE = Tolerance(
    relative=2e-4,
    reason="fp32 through up to 30 layers of two implementations differs by some 1e-5 of a row's largest value; a row of "
    "another token, request or layer by over 1e-1",
)
DRAFT_LOGITS_VS_ENGINE = Tolerance(
    relative=2e-3,
    reason="the engine drafts from its own taps (see above) through its own kernels; a wrong rotary offset or input order "
    "shows above 1e-2",
)

GREEDY_TIE = Tolerance(
    relative=1e-4,
    reason="fp32 through six layers of two implementations moves a logit by some 1e-6 of the largest one: two logits this close "
    "are a tie, and either is greedy; the second best of a random target lies some 1e-1 below the best",
)
ROPE_FP32 = Tolerance(
    relative=1e-5,
    reason="transformers computes inverse frequencies in fp32, we in fp64; a wrong scaling shows above 1e-1",
)
WITH_HEAD_NORM = Tolerance(
    relative=0.35,
    reason="the norm of a head's output is replaced by the size it has on average over random inputs, which single inputs "
    "scatter around; without the norm's weight, or with the wrong axis, the size is off by a factor",
)
LOGPROBS_VS_PLAIN = Tolerance(
    relative=1e-4,
    reason="verifying several tokens in one step sums in another order than one at a time: some 1e-6 of a logit through 30 "
    "layers; the distribution of a neighbouring token is off by whole nats",
)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, name: str = "tensor") -> None:
    """Fail when shapes or dtypes differ, anything is NaN, or an entry is off by more than the tolerance."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    if expected.numel() == 0:
        return
    error = (actual - expected).abs().max().item()
    # Expected to be nothing at all: rounding has no size to be measured against but that of ordinary numbers.
    bound = tolerance.relative * (expected.abs().max().item() or 1e-3)
    # Written so that a NaN on either side fails.
    assert error <= bound, f"{name}: off by {error:.3e}, allowed {bound:.3e} ({tolerance.reason})"
