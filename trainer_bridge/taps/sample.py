"""The sample contract, written once: what a draft learns from, whoever tapped it.

Alignment. A sample of ``n`` tokens has ``n - 1`` rows. Row ``i`` is the target's state after it read tokens ``0..i``:
``taps[i]`` are the inputs of the tap layers at token ``i`` and ``final[i]`` is what the target's head turns into the
distribution of token ``i + 1``. The last token was sampled but never fed back, so it has an id and no row.

>>> # token_ids   t0 t1 t2 t3      (n = 4)
>>> # loss_mask    0  0  1  1      (t2, t3 were generated)
>>> # rows         r0 r1 r2        (r1 predicts t2, r2 predicts t3)
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from trainer_bridge.errors import SampleError

_TENSORS = (
    ("token_ids", "int64", 1),
    ("positions", "int64", 1),
    ("loss_mask", "bool", 1),
    ("taps", "floating", 2),
    ("final", "floating", 2),
)
"""Kind and number of dimensions of each tensor of a sample."""


@dataclass(frozen=True, kw_only=True)
class TapSample:
    """One generated answer with the target's hidden states. Immutable; `validate` checks it against the contract."""

    request_id: str
    """Owner: the engine's request id, or the trainer's sample id. Never empty."""
    group_id: str
    """Siblings of one prompt share it, so that they fall on the same side of the held-out split."""
    policy_version: int
    """Version of the policy whose states these are. The teacher of another version is never applied to them."""
    token_ids: torch.Tensor
    """``[n]`` int64: prompt and answer."""
    positions: torch.Tensor
    """``[n]`` int64: absolute positions, contiguous."""
    loss_mask: torch.Tensor
    """``[n]`` bool: True for answer tokens."""
    tap_layers: tuple[int, ...]
    """The tap at layer ``l`` is the input of decoder layer ``l`` (Hugging Face ``hidden_states[l]``)."""
    taps: torch.Tensor
    """``[n - 1, len(tap_layers) * hidden]`` floating: tap layers side by side, in the order of `tap_layers`."""
    final: torch.Tensor
    """``[n - 1, hidden]`` floating: the last hidden state, from which this version's head gives the teacher."""
    final_is_normed: bool
    """True when `final` has passed the target's final norm: what the head is applied to directly."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, the last one (which has no row) included."""
        return self.token_ids.shape[0]

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens that may be trained on."""
        return int(self.loss_mask.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.token_ids, self.positions, self.loss_mask, self.taps, self.final)
        return sum(t.numel() * t.element_size() for t in tensors)

    def first_rows(self, count: int) -> torch.Tensor | None:
        """``[count, taps + hidden]``: taps and final state side by side of the first `count` rows; None when it has fewer."""
        if count >= self.num_tokens:
            return None
        return torch.cat([self.taps[:count], self.final[:count]], -1)

    def digest(self) -> str:
        """Hex digest over header and tensors: equal samples have equal digests, wherever they were made."""
        digest = hashlib.blake2b(digest_size=16)
        header = (self.request_id, self.group_id, self.policy_version, self.tap_layers, self.final_is_normed)
        digest.update(repr(header).encode())
        for tensor in (self.token_ids, self.positions, self.loss_mask, self.taps, self.final):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def validate(self) -> TapSample:
        """Return self, or raise `SampleError` that names the broken clause."""
        if not self.request_id:
            raise SampleError("a sample without an owner: request_id is empty")
        if self.policy_version < 0:
            raise SampleError(f"{self.request_id}: policy_version {self.policy_version} is negative")
        for name, kind, dimensions in _TENSORS:
            tensor = getattr(self, name)
            fits = tensor.is_floating_point() if kind == "floating" else tensor.dtype == getattr(torch, kind)
            if not fits or tensor.ndim != dimensions:
                found = f"{tensor.dtype} with {tensor.ndim} dimensions"
                raise SampleError(f"{self.request_id}: {name} is {found}, needs {kind} with {dimensions}")
        n = self.num_tokens
        if n < 2:
            raise SampleError(f"{self.request_id}: {n} tokens; a sample needs at least 2 (one row, one label)")
        for name, length in (("positions", n), ("loss_mask", n), ("taps", n - 1), ("final", n - 1)):
            found = getattr(self, name).shape[0]
            if found != length:
                raise SampleError(f"{self.request_id}: {name} has {found} rows for {n} tokens, needs {length}")
        if not torch.equal(self.positions, self.positions[0] + torch.arange(n)):
            raise SampleError(f"{self.request_id}: positions are not contiguous: a trunk with a hole is never trained on")
        hidden = self.final.shape[1]
        if self.taps.shape[1] != hidden * len(self.tap_layers):
            raise SampleError(
                f"{self.request_id}: taps are {self.taps.shape[1]} wide, "
                f"{len(self.tap_layers)} layers of {hidden} need {hidden * len(self.tap_layers)}"
            )
        if not self.final_is_normed:
            raise SampleError(f"{self.request_id}: final states before the norm; apply the target's final norm first")
        if not (_is_finite(self.taps) and _is_finite(self.final)):
            raise SampleError(f"{self.request_id}: hidden states hold NaN or infinity")
        return self


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are. A finite sum says so, and sooner; one that overflowed does not deny it."""
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
