"""What a target directory says about itself, and whether it is whole: read without torch, before anything slow starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainer_bridge.errors import ConfigError
from trainer_bridge.plan import read_header

INDEX = "model.safetensors.index.json"
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Numbers of a target's config that a draft has to fit."""
_KNOB = "; give a Hugging Face directory, or run `specdraft model`"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model directory that was looked at."""

    directory: Path
    config: Mapping[str, Any]
    """``config.json``."""
    parameters: int
    """Number of weights; 0 when they are in files that only the engine can read."""


def read(directory: Path) -> Target:
    """Look at a model directory. Raises `ConfigError` when it is none, or a file of it is missing or damaged."""
    config = read_config(directory)
    return Target(directory=directory, config=config, parameters=sum(parameters_in(file) for file in _weight_files(directory)))


def check_shapes(target: Target) -> None:
    """Raise `ConfigError` when the config lacks a number that a draft has to fit."""
    for key in NEEDED:
        value = target.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(
                f"{target.directory / 'config.json'}: {key} is {value!r}, needs a number: the config of a Llama-like language model"
            )


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of a model directory. Raises `ConfigError`."""
    path = directory / "config.json"
    if not directory.exists():
        raise ConfigError(f"{directory} is no model directory (it does not exist){_KNOB}")
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{directory} is no model directory (no config.json){_KNOB}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): copy it again from where the model came from") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, needs a JSON object")
    return config


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model; none when its weights are of another format. Raises `ConfigError`."""
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged ({error}): copy it again from where the model came from") from None
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ConfigError(f"{directory} lacks {', '.join(missing[:3])}, which its {INDEX} names: copy all files of the model")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files and not any(directory.glob("*.bin")) and not any(directory.glob("*.pt")):
        raise ConfigError(f"{directory} has a config.json and no weights (*.safetensors): copy all files of the model")
    return files


def parameters_in(path: Path) -> int:
    """Number of weights in a safetensors file, from its header. Raises `ConfigError` when the file is not whole."""
    return sum(prod(spec.shape) for spec in read_header(path).values())
