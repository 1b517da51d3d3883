"""EAGLE-3 drafts: one decoder layer over tapped hidden states, trained by training-time test."""

from trainer_bridge.draft.eagle3.kind import Eagle3

__all__ = ["Eagle3"]
