"""Settings of draft training inside a trainer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_bridge.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CoTrainOptions:
    """How the draft learns beside the policy. Raises `ConfigError` for what cannot be."""

    passes: int | None = None
    """Tokens proposed per step, and passes trained; None: as many as the engine proposes with this type by default."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW; the policy's own does not touch the draft."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    """Clip of the draft's own gradient norm: in one group with the policy's, its larger gradients would shrink the policy's."""
    anchor_share: float | None = None
    """Share of their anchors that is trained, drawn anew each step; None: as the draft's type learns best."""
    deep_anchor_share: float = 1.0
    """Share of those that is trained beyond the first pass."""
    vocabulary_every_steps: int = 50
    """Steps between two adaptations of the draft's vocabulary to what the policy generates; 0: never."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_gradient_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be above 0")
        for name in ("anchor_share", "deep_anchor_share"):
            if (share := getattr(self, name)) is not None and not 0 < share <= 1:
                raise ConfigError(f"{name} is {share}, must lie above 0 and be at most 1")
        for name in ("passes", "warmup_steps", "vocabulary_every_steps"):
            if (count := getattr(self, name)) is not None and count < (name == "passes"):
                raise ConfigError(f"{name} is {count}, must be {int(name == 'passes')} or more")
