"""DFlash drafts (arXiv 2602.06036): one pass for a whole block of tokens over tapped hidden states."""

from trainer_bridge.draft.dflash.kind import DFlash

__all__ = ["DFlash"]
