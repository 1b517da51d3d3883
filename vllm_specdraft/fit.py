"""Whether a draft fits a target: said before the engine starts, by the name of what differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_bridge.errors import CheckpointError

if TYPE_CHECKING:
    from trainer_bridge.draft.interface import DraftType

_KNOB = "make one for this target with `specdraft draft init`, or use --draft auto"


def check(directory: Path, target: Mapping[str, Any]) -> int:
    """Load a draft checkpoint and hold it against the target's config.

    Args:
        directory: the draft.
        target: the target's ``config.json``.

    Returns:
        Number of the draft's parameters.

    Raises `CheckpointError` when the checkpoint is missing, damaged, contradicts itself or was made for another target.
    """
    from trainer_bridge.draft import checkpoint, registry

    config = checkpoint.read_config(directory)
    try:
        draft_type = registry.of_config(config)
        check_shapes(directory, draft_type, config, target)
        model, _ = draft_type.load(directory)
        # Types with a reduced vocabulary check their maps when asked what they keep.
        if (kept := getattr(model, "kept", None)) is not None:
            kept()
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if str(directory) in text else f"{directory}: {text}") from None
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(f"{directory / checkpoint.CONFIG} describes no draft that can be built ({error}): {_KNOB}") from None
    if lacking := [name for name in draft_type.files(model.state_dict(), config) if not (directory / name).exists()]:
        raise CheckpointError(f"{directory} lacks {', '.join(lacking)}, which the engine reads beside the weights; {_KNOB}")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{directory}: {name} holds values that are not finite: the checkpoint is damaged; {_KNOB}")
    return sum(parameter.numel() for parameter in model.parameters())


def check_shapes(directory: Path, kind: DraftType, draft: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` that names every number in which a draft's config contradicts its target's."""
    differing = [
        f"{key} is {draft.get(key)}, the target's is {target.get(key)}"
        for key in ("hidden_size", "vocab_size")
        if draft.get(key) != target.get(key)
    ]
    try:
        taps = list(kind.tap_layers(draft))
    except KeyError:
        # Said by whoever loads it.
        taps = []
    layers = target["num_hidden_layers"]
    if any(not isinstance(layer, int) or not 0 < layer < layers for layer in taps):
        differing.append(f"it taps layers {taps}, the target has layers 1 to {layers - 1} to tap")
    size, vocab_size = draft.get("draft_vocab_size"), draft.get("vocab_size")
    if isinstance(size, int) and isinstance(vocab_size, int) and not 0 < size < vocab_size:
        differing.append(
            f"draft_vocab_size is {size}, must be below the vocabulary's {vocab_size} and is mapped to it by d2t and t2d"
        )
    if differing:
        raise CheckpointError(f"{directory} does not fit this target: {'; '.join(differing)}; {_KNOB}")
