"""A library for any RL trainer: weights to running engines as transactions, hidden states to drafts, drafts that co-train."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_bridge.publisher import connect

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    # Config, wire and state machine are imported where there is no torch.
    if name in __all__:
        return getattr(importlib.import_module("trainer_bridge.publisher"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
