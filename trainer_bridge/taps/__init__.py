"""Hidden-state samples: the one contract between whoever produces them (engine, trainer) and whoever learns from them."""

from trainer_bridge.taps.sample import TapSample

__all__ = ["TapSample"]
