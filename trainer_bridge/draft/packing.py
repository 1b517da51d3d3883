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


def _rows_of(sample: TapSample, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Future ids ``[n-1, D+1]`` and label validity ``[n-1, D]`` of one sample."""
    n = sample.num_tokens
    shift = torch.arange(n - 1)[:, None] + 1 + torch.arange(passes + 1)[None, :]
    inside = shift < n
    future = sample.token_ids[shift.clamp_max(n - 1)] * inside
    answer = sample.loss_mask[shift.clamp_max(n - 1)] & inside
    return future, answer[:, :1] & answer[:, 1:]


@dataclass(frozen=True, kw_only=True)
class DeepAnchors:
    """A random share of the anchors goes on to passes 2 and later; the others are trained in pass 1 only.

    Exact for those that go on, because later passes depend on their own anchor only; their labels are counted by
    `PackedBatch.label_counts` like all others, so the expected gradient is that of all anchors.
    """

    share: float
    random: torch.Generator

    def limit(self, valid: torch.Tensor) -> torch.Tensor:
        """`valid` ``[A, D]`` without the later labels of those left out."""
        if self.share >= 1:
            return valid
        stays = torch.rand(valid.shape[0], generator=self.random) < self.share
        return torch.cat([valid[:, :1], valid[:, 1:] & stays[:, None]], 1)


def pack(
    samples: Sequence[TapSample],
    passes: int,
    spans: Sequence[tuple[int, int]] | None = None,
    deep: DeepAnchors | None = None,
) -> PackedBatch:
    """Lay samples end to end.

    Args:
        samples: at least one.
        passes: ``D`` >= 1.
        spans: per sample the half-open range of rows whose anchors are taken; all by default. Rows after the last one
            needed as a teacher are left out, earlier rows stay: they are the anchors' trunk.
        deep: which anchors have labels after pass 1; all that can by default.
    """
    taps, final, positions, document, futures, anchors, valids = [], [], [], [], [], [], []
    offset = 0
    for index, sample in enumerate(samples):
        first, stop = spans[index] if spans else (0, sample.num_tokens - 1)
        rows = min(sample.num_tokens - 1, stop + passes)
        future, valid = _rows_of(sample, passes)
        chosen = valid[:, 0].clone()
        chosen[:first] = False
        chosen[stop:] = False
        picked = chosen.nonzero().squeeze(1)
        taps.append(sample.taps[:rows])
        final.append(sample.final[:rows])
        positions.append(sample.positions[:rows])
        document.append(torch.full((rows,), index))
        futures.append(future[:rows])
        anchors.append(picked + offset)
        valids.append(deep.limit(valid[picked]) if deep else valid[picked])
        offset += rows
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


def microbatches(
    samples: Sequence[TapSample], passes: int, max_anchors: int, max_rows: int, deep: DeepAnchors | None = None
) -> Iterator[PackedBatch]:
    """Split samples into packed microbatches of at most `max_anchors` anchors and about `max_rows` rows.

    Short samples share a microbatch; a long one is cut into spans of anchors that keep their whole trunk, which is exact:
    an EAGLE-3 trunk's keys and values depend on no other row. A single sample may exceed `max_rows`.
    """
    chosen: list[TapSample] = []
    spans: list[tuple[int, int]] = []
    anchors = rows = 0
    for sample in samples:
        indices = _rows_of(sample, passes)[1][:, 0].nonzero().squeeze(1).tolist()
        for start in range(0, len(indices), max_anchors):
            part = indices[start : start + max_anchors]
            needed = min(sample.num_tokens - 1, part[-1] + 1 + passes)
            if chosen and (anchors + len(part) > max_anchors or rows + needed > max_rows):
                yield pack(chosen, passes, spans, deep)
                chosen, spans, anchors, rows = [], [], 0, 0
            chosen.append(sample)
            spans.append((part[0], part[-1] + 1))
            anchors, rows = anchors + len(part), rows + needed
    if chosen:
        yield pack(chosen, passes, spans, deep)
