"""Which draft is served, which was before it, and how each came to be served."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_bridge.draft import checkpoint
from vllm_specdraft.gate import Verdict

KEPT_RECORDS = 50


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One draft."""

    version: int
    """Grows by one with every swap, a rollback included."""
    state: dict[str, torch.Tensor] = field(repr=False)
    """Checkpoint names."""
    digest: str


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A draft that a swap request names."""

    state: dict[str, torch.Tensor] = field(repr=False)
    origin: str
    """Where it comes from, in words, for the publish record."""
    verdict: Verdict | None = None
    rollback: bool = False


class DraftSlots:
    """The served draft, its predecessor, and the records of all publishes. Writes nothing into the engine."""

    def __init__(self, state: dict[str, torch.Tensor], *, version: int, rollbacks: int = 0) -> None:
        """`state`: the draft that the engine started with."""
        self.served = Slot(version=version, state=state, digest=checkpoint.digest_of(state))
        self.previous: Slot | None = None
        """What a rollback would serve: the last draft before this one that saw traffic. None before the first swap and after a
        rollback."""
        self.rollbacks = rollbacks
        self.records: list[dict[str, Any]] = []

    def swapped(self, wanted: Wanted, digest: str, *, was_measured: bool, **facts: Any) -> dict[str, Any]:
        """`wanted` serves from here on; its publish record, `facts` included.

        `was_measured`: whether the draft that is replaced saw enough traffic to be one to go back to.
        """
        old = self.served
        self.served = Slot(version=old.version + 1, state=wanted.state, digest=digest)
        if wanted.rollback:
            self.previous = None
        elif was_measured or self.previous is None:
            self.previous = old
        self.rollbacks += wanted.rollback
        verdict = wanted.verdict
        record = {
            "draft_version": self.served.version,
            "unix_time_s": time.time(),
            "origin": wanted.origin,
            "held_out_before": verdict.served if verdict else None,
            "held_out_after": verdict.candidate if verdict else None,
            "digest": digest,
            **facts,
        }
        self.records.append(record)
        del self.records[:-KEPT_RECORDS]
        return record
