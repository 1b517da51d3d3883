"""The status file: one small JSON that the worker replaces and the API server reads.

A file, so that looking at a busy engine costs it nothing: neither a message nor a step.
Imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME = "status.json"


def write(state_dir: Path, status: dict[str, Any]) -> None:
    """Replace the status; a reader sees the old one or the new one, whole."""
    temporary = state_dir / f".{NAME}.tmp"
    temporary.write_text(json.dumps(status))
    os.replace(temporary, state_dir / NAME)  # noqa: PTH105 - os.replace is the atomic one


def read(state_dir: Path) -> dict[str, Any] | None:
    """The last status, or None before the first one."""
    try:
        return json.loads((state_dir / NAME).read_text())
    except FileNotFoundError:
        return None
