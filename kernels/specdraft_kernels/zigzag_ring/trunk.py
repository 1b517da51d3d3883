"""Context-parallel branch and block attention: one trunk, many passes, in the form that suits its size."""

from __future__ import annotations

from typing import Literal

import torch

from specdraft_kernels.block_attention import of_used_slots
from specdraft_kernels.branch_attention import within_window
from specdraft_kernels.interval_attention import choose_backend, load_backend
from specdraft_kernels.zigzag_ring import cost
from specdraft_kernels.zigzag_ring.exchange import Exchange
from specdraft_kernels.zigzag_ring.gathered import Gathered, GatheredAttention
from specdraft_kernels.zigzag_ring.layout import ZigzagLayout
from specdraft_kernels.zigzag_ring.ring import RingAttention
from specdraft_kernels.zigzag_ring.seen import Seen, of_blocks, of_branch

Form = Literal["ring", "gather"]


class Trunk:
    """One layer's trunk keys and values, split over the ranks of a context-parallel group, and attention over it.

    Made once per layer and step, used by all passes. Every rank of the group makes it and calls the same methods in the same order.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: ZigzagLayout,
        exchange: Exchange,
        *,
        form: Form | None = None,
        passes: int = 1,
        budget_bytes: int = cost.BUDGET_BYTES,
        backend: str | None = None,
        stepwise: bool = False,
    ) -> None:
        """
        Args:
            k, v: ``[layout.rows, Hkv, D]``, this rank's rows, as `ZigzagLayout.split` gives them; keys rotated to their positions.
            form: ``ring`` or ``gather``; by default what `cost.choose_form` says for `passes` and `budget_bytes`.
            passes: passes that will use this trunk.
            budget_bytes: memory that a gathered trunk with its gradient may take on each rank.
            backend: see `interval_attention`.
            stepwise: every pass gets a backward of its own, and `send_home` comes after the last one.

        Raises:
            ValueError: a shard of another size than the layout's, a group of another size, an unknown form.
        """
        if k.shape != v.shape or k.shape[0] != layout.rows:
            raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} must both have the layout's {layout.rows} rows")
        if exchange.ranks != layout.ranks:
            raise ValueError(f"a layout of {layout.ranks} ranks on a group of {exchange.ranks}")
        if form not in ("ring", "gather", None):
            raise ValueError(f"form {form!r}: it is 'ring' or 'gather', or None for the rule")
        self.layout, self.exchange = layout, exchange
        self.form: Form = form or cost.choose_form(
            layout, k.shape[1] * k.shape[2], k.element_size(), passes=passes, budget_bytes=budget_bytes
        )
        self._k, self._v = k, v
        self._backend = load_backend(choose_backend(backend, k.device))
        self._held = Gathered(layout, exchange) if self.form == "gather" else None
        self._brought = self._held.bring(k, v) if self._held is not None else None
        self._token = self._brought.detach().requires_grad_() if stepwise and self._brought is not None else self._brought

    def send_home(self) -> None:
        """After the backward of all passes of a `stepwise` trunk: let what they left of its gradient reach `k` and `v`.

        Every rank of the group calls it. In the ring form it has reached them already.
        """
        if self._brought is not None and self._brought.requires_grad:
            self._brought.backward()

    def branch_attention(
        self,
        q: torch.Tensor,
        k_branch: torch.Tensor,
        v_branch: torch.Tensor,
        *,
        anchors: torch.Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`specdraft_kernels.branch_attention` for this rank's queries. Branches never travel.

        Args:
            q: ``[A, Hq, D]``; k_branch, v_branch: ``[A, P, Hkv, D]``.
            anchors: ``[A]`` ascending local rows of the queries; all by default, padding too (give its output no weight).
            window, scale: as there.
        """
        passes = k_branch.shape[1]
        k_branch, v_branch = within_window(k_branch, v_branch, window)
        seen = of_branch(self.layout, self.exchange.rank, anchors=anchors, window=window, passes=passes, device=q.device)
        if seen.high.shape[0] != q.shape[0]:
            raise ValueError(f"{q.shape[0]} queries, but {seen.high.shape[0]} rows: name the queries' rows with anchors=")
        return self._attend(q, k_branch, v_branch, seen, scale)

    def block_attention(
        self,
        q: torch.Tensor,
        k_block: torch.Tensor,
        v_block: torch.Tensor,
        sequences: torch.Tensor,
        prefix: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`specdraft_kernels.block_attention` for the blocks of this rank: those whose anchor it holds, in the order of its rows.

        Args:
            q: ``[B, W, Hq, D]``; k_block, v_block: ``[B, W, Hkv, D]``.
            sequences: ``[B]``; prefix: ``[B]``, how many positions of its sequence a block sees: those before its anchor.
            slots, scale: as there.
        """
        seen = of_blocks(self.layout, sequences, prefix, width=q.shape[1], slots=slots)
        return of_used_slots(lambda q, k, v: self._attend(q, k, v, seen, scale), q, k_block, v_block, slots)

    def _attend(
        self, q: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, seen: Seen, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self._held is not None and self._token is not None:
            arguments = (own_k, own_v, self._held, seen.in_packed(), scale, self._backend)
            return GatheredAttention.apply(q, self._token, *arguments)
        return RingAttention.apply(q, self._k, self._v, own_k, own_v, seen, self.exchange, scale, self._backend)
