"""What the engine's side of the plugin is told: one frozen config that travels to every vLLM process in the environment.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

ENVIRONMENT = "SPECDRAFT_CONFIG"
"""Environment variable that holds the config as JSON. Where it is absent the plugin does nothing at all."""


LEARN_DTYPES = ("auto", "float32", "bfloat16")


class SettingsError(ValueError):
    """A setting is unknown or out of range."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of taps, replay, learner and publishing inside one engine."""

    draft_dir: str
    """Checkpoint directory of the draft that the engine starts with."""
    state_dir: str
    """Directory for the status file; one per server."""
    num_speculative_tokens: int = 3
    """Draft tokens per target step (k); also the number of training passes."""
    governor: bool = True
    """Choose the number of draft tokens per step by measurement, 0 included; False: as many as vLLM's own schedule says."""
    speculate_up_to: int = 0
    """Largest batch that the governor drafts for; 0: no limit."""
    gap_bytes: int = 256 << 20
    """Bound of the hidden states kept for a draft that was left out of steps, in bytes."""
    learn: bool = True
    """Train the draft in idle windows. False: taps and replay only."""
    auto_publish: bool = True
    """Swap a better draft in by itself. False: only when asked over HTTP."""
    slice_ms: float = 100.0
    """Longest piece of training between two looks at the request queue, in ms: what an arriving request may wait."""
    cool_ms: float = 150.0
    """Quiet time after the last engine step before training may start, in ms."""
    replay_bytes: int = 1 << 30
    """Bound of the replay buffer, in bytes; the oldest samples go first."""
    held_out_share: float = 0.12
    """Share of prompts (by group) that is never trained on and decides what is published."""
    min_samples: int = 12
    """Training samples that must be there before learning starts."""
    batch_samples: int | None = None
    """Samples per optimizer step; None: as the draft's type learns best."""
    anchor_share: float | None = None
    """Share of their anchors, drawn anew each time, that is trained; None: as the draft's type learns best."""
    deep_anchor_share: float = 1.0
    """Share of those that is trained beyond the first pass."""
    learn_dtype: str = "auto"
    """Dtype of the factors of training's matrix products, one of `LEARN_DTYPES`; ``auto``: bfloat16 where this processor multiplies
    in it. Each product is rounded once; weights, optimizer and everything between are fp32 in any case."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    max_gradient_norm: float = 1.0
    """Gradient-norm clip, over the draft's parameters only."""
    evaluate_every_steps: int = 60
    """Optimizer steps between two measurements on held-out samples."""
    patience_evaluations: int = 12
    """Measurements without progress after which learning rests until new samples come; 0: it never rests."""
    evaluate_samples: int = 32
    """Held-out samples per measurement at most, the newest first."""
    publish_min_gain: float = 0.02
    """Gain in expected accepted length that a candidate must show, beyond two standard errors, to be published."""
    rollback_margin: float = 0.02
    """A published draft whose measured accepted length is lower than its predecessor's by this, beyond two standard errors,
    is taken back."""
    checkpoint_dir: str | None = None
    """Directory of the learner's state and the served draft, kept across restarts; None: learning ends with the process."""
    checkpoint_interval_s: float = 60.0
    """Time between two checkpoints while learning, in seconds: what a crash may cost."""
    long_quota: float = 0.25
    """Share of every draw that goes to the longest answers of the last round."""
    max_sample_tokens: int = 1024
    """Longer samples are cut to their first tokens, whose rows need no later ones; bounds a slice."""
    seed: int = 0
    """Seed of sampling from the replay."""
    policy_version: int = 0
    """Version of the target's weights at start."""
    min_policy_version: int = 0
    """No answers before this version is served: for an engine that (re)joins a run. 0: answers from the start."""
    sync_bind: str | None = "tcp://127.0.0.1:0"
    """Address at which trainers bring weights and samples; port 0: the system chooses. None: no weights are taken."""
    sync_keys: str | None = None
    """Directory of CURVE keys for that address; None: no encryption."""
    sync_insecure: bool = False
    """Allow an address of other machines without keys, and data planes that no key protects."""
    keep_previous: bool = False
    """Keep the weights before the last update in memory, so that a rollback can bring them back: with those that serve and the room
    for the next update, three targets."""
    teacher_versions: int = 2
    """Policies whose samples may be in the replay at once, the served one included; each older one keeps its embedding and head."""
    build_ms: float = 30.0
    """Longest piece of building new weights aside between two steps while requests run, in ms."""

    def __post_init__(self) -> None:
        positive = ("num_speculative_tokens", "slice_ms", "replay_bytes", "batch_samples", "evaluate_every_steps",
                    "evaluate_samples", "min_samples", "learning_rate", "max_gradient_norm", "checkpoint_interval_s",
                    "teacher_versions", "build_ms", "gap_bytes")  # fmt: skip
        not_negative = ("cool_ms", "warmup_steps", "weight_decay", "policy_version", "min_policy_version", "rollback_margin",
                        "patience_evaluations", "speculate_up_to")  # fmt: skip
        # Written so that a NaN is refused as well.
        for name in positive:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise SettingsError(f"{name} is {value}, must be above 0")
        for name in not_negative:
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{name} is {getattr(self, name)}, must not be negative")
        if not 0 < self.held_out_share < 1:
            raise SettingsError(f"held_out_share is {self.held_out_share}, must lie between 0 and 1")
        for name in ("deep_anchor_share", "anchor_share"):
            if (value := getattr(self, name)) is not None and not 0 < value <= 1:
                raise SettingsError(f"{name} is {value}, must lie in (0, 1]")
        if self.learn_dtype not in LEARN_DTYPES:
            raise SettingsError(f"learn_dtype is {self.learn_dtype!r}, must be one of {', '.join(LEARN_DTYPES)}")
        if not 0 <= self.long_quota < 1:
            raise SettingsError(f"long_quota is {self.long_quota}, must lie in [0, 1)")

    def to_json(self) -> str:
        """JSON text for the environment."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping; unknown keys are refused with the nearest known name."""
        known = {field.name for field in fields(cls)}
        for key in mapping:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SettingsError(f"unknown setting {key!r}{hint}")
        return cls(**mapping)

    @classmethod
    def from_environment(cls) -> EngineConfig | None:
        """The config this process was started with, or None when the plugin was not asked for. Raises `SettingsError`."""
        text = os.environ.get(ENVIRONMENT)
        if not text:
            return None
        try:
            return cls.from_mapping(json.loads(text))
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"{ENVIRONMENT} in the environment is no config ({error}): unset it, or use `specdraft serve`"
            ) from None
