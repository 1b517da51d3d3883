"""What a draft type is: a model, an objective, a checkpoint layout, and the engine method that serves it.

A type is one folder beside this file that ends in a `DraftType`; `trainer_bridge.draft.registry` lists them. The learner,
the engine plugin and the command line know drafts only through this interface.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft import rope, vocab
from trainer_bridge.draft.layers import DraftModel
from trainer_bridge.draft.packing import PackedBatch
from trainer_bridge.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Shapes of a Llama-like target that a draft must fit."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    """Longest position the target was trained for, in tokens."""
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """``rope_parameters`` beyond ``rope_theta`` of a target whose rotary embedding is scaled; empty for a plain one."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TargetSpec:
        """Read a Hugging Face ``config.json`` mapping of a Llama-like model. Raises `ConfigError`."""
        heads = config["num_attention_heads"]
        parameters = rope.parameters_of(config)
        theta = parameters.pop("rope_theta")
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            max_positions=config.get("max_position_embeddings", 2048),
            rope_scaling=parameters if parameters["rope_type"] != "default" else {},
        )


@dataclass(frozen=True, kw_only=True)
class FrozenTarget:
    """Weights of the target that a draft borrows and never trains. Both may be one tensor (tied embeddings)."""

    embedding: torch.Tensor
    """``[vocab, hidden]``: input embedding."""
    head: torch.Tensor
    """``[vocab, hidden]``: output head; applied to normed hidden states it gives the teacher's logits."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance of a draft on held-out anchors, one number per sample so that an uncertainty can be stated."""

    accepted_sum: torch.Tensor
    """``[samples]`` fp64: sum over the sample's anchors of 1 + the run of accepted draft tokens."""
    anchors: torch.Tensor
    """``[samples]`` int64: number of anchors."""
    hits: torch.Tensor
    """``[passes]`` int64: anchors at which the first d + 1 draft tokens were all accepted."""

    @property
    def length(self) -> float:
        """Expected accepted length in tokens per target step, bonus token included; 1.0 when nothing is accepted."""
        return float(self.accepted_sum.sum() / self.anchors.sum().clamp_min(1))


class Objective(abc.ABC):
    """Training and measuring one draft model against tapped samples."""

    @abc.abstractmethod
    def pieces(self, batch: PackedBatch, normalisers: torch.Tensor) -> Iterator[None]:
        """Forward and backward of one packed microbatch, in pieces short enough to run between two requests.

        Gradients are added to the parameters' ``grad``; `take_loss` gives the loss once the iterator ended. An iterator
        that is closed early leaves gradients of a part: the caller must then drop them.

        Args:
            batch: packed samples and the anchors to train.
            normalisers: ``[passes]``: sum of `label_counts` over ALL microbatches of the optimizer step.
        """

    def label_counts(self, batch: PackedBatch) -> torch.Tensor:
        """``[passes]`` int64: labels that this objective counts in a microbatch, per pass."""
        return self.counted(batch.valid).sum(0)

    def counted(self, valid: torch.Tensor) -> torch.Tensor:
        """Of `valid` ``[A, passes]``, which passes of an anchor have a label, those that this objective trains."""
        return valid

    @abc.abstractmethod
    def take_loss(self) -> float:
        """Sum of the losses of the microbatches since the last call."""

    @abc.abstractmethod
    def vocabulary_changed(self) -> None:
        """The model's draft vocabulary was adapted: forget what was derived from it."""

    @abc.abstractmethod
    def measure(self, batch: PackedBatch) -> Acceptance:
        """Teacher-forced acceptance of the model's greedy draft tokens against the tokens that the target really sampled.

        The target sampled token ``x`` from its distribution ``p``; a greedy draft token ``t`` is accepted with probability
        ``p(t)``, and ``t == x`` has exactly that probability. So the match rate is an unbiased estimate at whatever
        temperature the traffic had, over the full vocabulary.
        """


class DraftType(abc.ABC):
    """One kind of draft. Stateless; the instance in the registry is shared."""

    name: str
    """How users name it, e.g. ``eagle3``."""
    engine_method: str
    """vLLM's speculative ``method``."""
    architecture: str
    """What a checkpoint's config names this type by."""
    batch_samples: int = 2
    """Samples per optimizer step, unless somebody says otherwise."""
    anchor_share: float = 1.0
    """Share of their anchors that is trained, drawn anew each time, unless somebody says otherwise."""
    default_tokens: int
    """Tokens proposed per step unless somebody says otherwise: what pays best on a CPU, see the README."""

    def default_tap_layers(self, target: TargetSpec) -> tuple[int, ...]:
        """Layers whose inputs are tapped: low, middle, high, those that EAGLE-3 and vLLM use. Raises `ConfigError`."""
        if target.num_layers < 4:
            raise ConfigError(f"a target of {target.num_layers} layers is too shallow to tap; name --tap-layers yourself")
        low = min(2, target.num_layers - 3)
        middle = max(low + 1, target.num_layers // 2)
        return (low, middle, max(middle + 1, target.num_layers - 3))

    def configure(self, target: TargetSpec, *, tap_layers: Sequence[int], draft_vocab_size: int) -> dict[str, Any]:
        """The checkpoint's ``config.json`` for a new draft of this target, in the public layout. Raises `ConfigError`."""
        outside = [layer for layer in tap_layers if not 0 < layer < target.num_layers]
        if not tap_layers or outside or list(tap_layers) != sorted(set(tap_layers)):
            # vLLM taps in ascending order, whatever the config's order is.
            raise ConfigError(f"tap layers {tuple(tap_layers)}: needs distinct ascending layers in 1..{target.num_layers - 1}")
        if not 0 < draft_vocab_size < target.vocab_size:
            # At equal size vLLM expects no map between the vocabularies and shares the target's head.
            raise ConfigError(
                f"draft vocabulary of {draft_vocab_size} tokens; needs 1..{target.vocab_size - 1}, below the target's"
            )
        return {
            "architectures": [self.architecture],
            "dtype": "float32",
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "hidden_act": "silu",
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "rms_norm_eps": target.rms_norm_eps,
            "rope_theta": target.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta, **target.rope_scaling},
            "max_position_embeddings": target.max_positions,
            "tie_word_embeddings": False,
            "attention_bias": False,
            **self.own_config(target, tap_layers),
        }

    @abc.abstractmethod
    def own_config(self, target: TargetSpec, tap_layers: Sequence[int]) -> dict[str, Any]:
        """Entries of the checkpoint's config beyond, or instead of, those that all types have."""

    @abc.abstractmethod
    def tap_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Layers whose inputs a draft of this config reads. Raises `KeyError` for a config that names none."""

    @abc.abstractmethod
    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """An untrained fp32 model for a checkpoint config; its ``state_dict`` has the checkpoint's names."""

    @abc.abstractmethod
    def warm_start(self, model: nn.Module, target: FrozenTarget, layers: Mapping[str, torch.Tensor]) -> None:
        """Write what the target's weights can give a new draft (`layers`: the target's state dict, Hugging Face names)."""

    def meet(self, model: nn.Module, target: FrozenTarget, batch: PackedBatch) -> bool:
        """Take from the first samples, before the first step, what the target's weights alone could not give a new draft.

        Returns whether anything was changed; a draft that has learned is left as it is.
        """
        return False

    def set_vocabulary(self, model: nn.Module, kept: torch.Tensor) -> None:
        """Let the draft propose exactly the target ids `kept` ``[draft_vocab]``; for types with a reduced vocabulary."""
        if isinstance(model, DraftModel):
            model.set_vocabulary(kept)

    def adapt_vocabulary(self, model: nn.Module, target: FrozenTarget, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give tokens that the traffic uses a place in a reduced draft vocabulary, at the cost of tokens it does not use.

        Args:
            counts: ``[vocab]`` int64: how often the traffic's answers hold each target token.

        Returns:
            Parameter name to the rows that now stand for another token: their optimizer state is of no use any more.
            Empty when nothing changed, and for types with the target's whole vocabulary.
        """
        if not isinstance(model, DraftModel):
            return {}
        rows, ids = vocab.exchange(model.kept(), counts)
        if rows.numel() == 0:
            return {}
        model.replace_tokens(rows, ids, target.head)
        return {"lm_head.weight": rows}

    @abc.abstractmethod
    def objective(self, model: nn.Module, target: FrozenTarget, *, passes: int) -> Objective:
        """The training objective for a model of this type, with `passes` drafted tokens."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's ``config.json`` is of this type."""
        return self.architecture in (config.get("architectures") or ())

    def files(self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, bytes]:
        """What the public layout has beside ``config.json`` and ``model.safetensors``, by file name."""
        return {}

    def save(self, directory: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Write a checkpoint directory, all of it or nothing. Raises `CheckpointError`, see `checkpoint.save`."""
        from trainer_bridge.draft import checkpoint

        checkpoint.save(directory, state, config, self.files(state, config))

    def load(self, directory: Path) -> tuple[nn.Module, dict[str, Any]]:
        """Model and config from a checkpoint directory. Raises `CheckpointError`."""
        from trainer_bridge.draft import checkpoint

        config = checkpoint.read_config(directory)
        if not self.recognises(config):
            raise CheckpointError(f"{directory}: architecture {config.get('architectures')} is no {self.name} draft")
        try:
            model = self.build(config)
        except KeyError as error:
            raise CheckpointError(f"{directory}: its config lacks {error}") from None
        checkpoint.read_into(model, directory)
        return model, config
