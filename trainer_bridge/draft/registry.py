"""The draft types there are. A new type is one folder and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trainer_bridge.draft.dflash import DFlash
from trainer_bridge.draft.eagle3 import Eagle3
from trainer_bridge.draft.interface import DraftType
from trainer_bridge.errors import CheckpointError, ConfigError

_TYPES: dict[str, DraftType] = {kind.name: kind for kind in (Eagle3(), DFlash())}


def names() -> list[str]:
    """Names of all draft types."""
    return sorted(_TYPES)


def by_name(name: str) -> DraftType:
    """The draft type of this name. Raises `ConfigError` with the nearest known one."""
    if name in _TYPES:
        return _TYPES[name]
    near = difflib.get_close_matches(name, _TYPES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown draft type {name!r}, known: {', '.join(names())}{hint}")


def of_config(config: Mapping[str, Any]) -> DraftType:
    """The draft type a checkpoint's config is of. Raises `CheckpointError` when none recognises it."""
    for kind in _TYPES.values():
        if kind.recognises(config):
            return kind
    raise CheckpointError(f"a draft of architecture {config.get('architectures')} is of no known type ({', '.join(names())})")
