"""Packing: several samples laid end to end in one microbatch, documents kept apart, and the anchors that are trained.

Worked example, two documents of 4 and 3 tokens, answers in capitals, 2 passes::

    tokens      a b C D | e F G          rows (every token but a document's last)   a b C | e F
    document    0 0 0     1 1            future ids of row b   C D -               (x[i+1], x[i+2], x[i+3])
    anchors     rows b and e             label of row b, pass 1: D (row C is its teacher)

An anchor is a row from which the engine would draft (the token after it was generated) and whose first pass has a label:
rows C and F have none. Pass d of anchor i predicts token ``i + d + 1`` from teacher row ``i + d``; both must exist and the
token must be an answer token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer_bridge.draft.trunk import DraftTrunk, LocalTrunk, Split, SplitTrunk
from trainer_bridge.taps import TapSample


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Samples laid end to end. ``N`` rows in all, ``A`` anchors, ``D`` passes."""

    taps: torch.Tensor
    """``[N, K * hidden]`` fp32."""
    final: torch.Tensor
    """``[N, hidden]`` fp32, normed."""
    positions: torch.Tensor
    """``[N]`` int64, absolute within the document."""
    document: torch.Tensor
    """``[N]`` int64: index of the sample a row belongs to."""
    future_ids: torch.Tensor
    """``[N, D + 1]`` int64: ``x[i+1] .. x[i+D+1]``; 0 where the document has ended."""
    anchors: torch.Tensor
    """``[A]`` int64 row indices, ascending."""
    valid: torch.Tensor
    """``[A, D]`` bool: pass d of this anchor has a label."""
    num_documents: int
    split: Split | None = None
    """None: all rows of the documents are here. Otherwise this rank's, with padding; `anchors` are its own, and `final` goes on
    with the rows of other ranks that its anchors' labels need."""
    teacher_rows: torch.Tensor | None = None
    """``[A, D]`` int64: of a split batch, the row of `final` that labels pass d of an anchor; anything where it has no label."""

    @property
    def passes(self) -> int:
        """Number of passes ``D``."""
        return self.valid.shape[1]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """``[documents + 1]`` int64: where documents begin, and the last one's end."""
        counts = torch.bincount(self.document, minlength=self.num_documents)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def label_counts(self) -> torch.Tensor:
        """``[D]`` int64: labels per pass."""
        return self.valid.sum(0)

    def teachers(self) -> torch.Tensor:
        """``[A, D]`` int64: the row of `final` that labels pass d of an anchor; anything where it has no label."""
        if self.teacher_rows is not None:
            return self.teacher_rows
        return self.anchors[:, None] + 1 + torch.arange(self.passes, device=self.anchors.device)

    def prefix(self) -> torch.Tensor:
        """``[A]`` int64: rows of its document up to an anchor, its own among them."""
        if self.split is not None:
            return self.positions[self.anchors] + 1
        return self.anchors + 1 - self.cu_seqlens[self.document[self.anchors]]

    def trunk(self, keys: torch.Tensor, values: torch.Tensor) -> DraftTrunk:
        """The trunk of one layer, of keys and values ``[N, Hkv, D]`` of all rows."""
        if self.split is not None:
            return SplitTrunk(keys, values, self.split, passes=self.passes)
        return LocalTrunk(keys, values, self.cu_seqlens)


def _rows_of(sample: TapSample, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Future ids ``[n-1, D+1]`` and label validity ``[n-1, D]`` of one sample."""
    n = sample.num_tokens
    shift = torch.arange(n - 1)[:, None] + 1 + torch.arange(passes + 1)[None, :]
    inside = shift < n
    future = sample.token_ids[shift.clamp_max(n - 1)] * inside
    answer = sample.loss_mask[shift.clamp_max(n - 1)] & inside
    return future, answer[:, :1] & answer[:, 1:]


@dataclass(frozen=True, kw_only=True)
class AnchorSampling:
    """A random share of the anchors, drawn anew each time.

    Exact for those that are taken, because an anchor's passes depend on no other anchor; `PackedBatch.label_counts` counts what is
    there, so the expected gradient is that of all anchors.
    """

    share: float = 1.0
    """Of the anchors that are trained at all: neighbours in one answer teach much the same."""
    deep_share: float = 1.0
    """Of those, the ones that go on to passes 2 and later."""
    random: torch.Generator

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of the anchors `rows` that are trained; at least one of any."""
        if self.share >= 1 or not rows.numel():
            return rows
        stays = torch.rand(rows.shape[0], generator=self.random)
        return rows[stays <= max(self.share, float(stays.min()))]

    def limit(self, valid: torch.Tensor) -> torch.Tensor:
        """`valid` ``[A, D]`` without the later labels of those that do not go on."""
        if self.deep_share >= 1:
            return valid
        stays = torch.rand(valid.shape[0], generator=self.random) < self.deep_share
        return torch.cat([valid[:, :1], valid[:, 1:] & stays[:, None]], 1)


def pack(
    samples: Sequence[TapSample],
    passes: int,
    rows: Sequence[torch.Tensor] | None = None,
    sampling: AnchorSampling | None = None,
) -> PackedBatch:
    """Lay samples end to end.

    Args:
        samples: at least one.
        passes: ``D`` >= 1.
        rows: per sample its anchors, ascending and at least one; all that it has by default. Rows after the last one needed as a
            teacher are left out, earlier rows stay: they are the anchors' trunk.
        sampling: which anchors have labels after pass 1; all that can by default.
    """
    taps, final, positions, document, futures, anchors, valids = [], [], [], [], [], [], []
    offset = 0
    for index, sample in enumerate(samples):
        future, valid = _rows_of(sample, passes)
        picked = rows[index] if rows else valid[:, 0].nonzero().squeeze(1)
        count = _needed(sample, int(picked[-1]), passes) if rows else sample.num_tokens - 1
        taps.append(sample.taps[:count])
        final.append(sample.final[:count])
        positions.append(sample.positions[:count])
        document.append(torch.full((count,), index))
        futures.append(future[:count])
        anchors.append(picked + offset)
        valids.append(sampling.limit(valid[picked]) if sampling else valid[picked])
        offset += count
    return PackedBatch(
        taps=torch.cat(taps).float(),
        final=torch.cat(final).float(),
        positions=torch.cat(positions),
        document=torch.cat(document),
        future_ids=torch.cat(futures),
        anchors=torch.cat(anchors),
        valid=torch.cat(valids),
        num_documents=len(samples),
    )


def _needed(sample: TapSample, last: int, passes: int) -> int:
    """Rows of a sample that its anchors up to row `last` need, as trunk and as teachers."""
    return min(sample.num_tokens - 1, last + 1 + passes)


def microbatches(
    samples: Sequence[TapSample], passes: int, max_anchors: int, max_rows: int, sampling: AnchorSampling | None = None
) -> Iterator[PackedBatch]:
    """Split samples into packed microbatches of at most `max_anchors` anchors and about `max_rows` rows.

    Short samples share a microbatch; a long one is cut into runs of anchors that keep their whole trunk, which is exact: a
    trunk's keys and values depend on no other row. A single sample may exceed `max_rows`.
    """
    chosen: list[TapSample] = []
    parts: list[torch.Tensor] = []
    anchors = rows = 0
    for sample in samples:
        picked = _rows_of(sample, passes)[1][:, 0].nonzero().squeeze(1)
        if sampling is not None:
            picked = sampling.take(picked)
        for part in picked.split(max_anchors) if picked.numel() else ():
            needed = _needed(sample, int(part[-1]), passes)
            if chosen and (anchors + len(part) > max_anchors or rows + needed > max_rows):
                yield pack(chosen, passes, parts, sampling)
                chosen, parts, anchors, rows = [], [], 0, 0
            chosen.append(sample)
            parts.append(part)
            anchors, rows = anchors + len(part), rows + needed
    if chosen:
        yield pack(chosen, passes, parts, sampling)
