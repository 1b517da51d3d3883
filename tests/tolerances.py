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
OBJECTIVE_FP64 = Tolerance(
    relative=1e-10,
    reason="three chained fp64 passes in another order differ by about 1e-14; a wrong label, position or mask by over 1e-3",
)
REGROUPED_FP64 = Tolerance(
    relative=1e-10,
    reason="packing and splitting only change the order of fp64 sums; a label counted twice or left out is a whole label",
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


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, name: str = "tensor") -> None:
    """Fail when shapes or dtypes differ, anything is NaN, or an entry is off by more than the tolerance."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    if expected.numel() == 0:
        return
    error = (actual - expected).abs().max().item()
    bound = tolerance.relative * expected.abs().max().item()
    # Written so that a NaN on either side fails.
    assert error <= bound, f"{name}: off by {error:.3e}, allowed {bound:.3e} ({tolerance.reason})"
