"""What deltas stand against, on the trainer's side: a copy of what one rank sent with the last committed update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainer_bridge import delta
from trainer_bridge.carriers.sending import Item


class DeltaBase:
    """This rank's copy of what it sent last: what deltas stand against."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.dtypes: tuple[str, str] = ("plan", "plan")
        self._kept: dict[tuple, np.ndarray] = {}
        self._changes: list[Callable[[], Any]] = []

    def words(self, item: Item) -> np.ndarray:
        """A box in the wire dtype, as unsigned integers."""
        return item.wired().view(f"u{item.dtype.itemsize}")

    def compare(self, item: Item) -> None:
        """Give an item its delta, and note what to keep if the update is committed."""
        key = (item.model, item.tensor, item.start, tuple(item.source.shape))
        new, old = self.words(item), self._kept.get(key)
        found = delta.encode(old, new) if old is not None and old.dtype == new.dtype else None
        if found is None or old is None:
            copy = new.copy()
            self._changes.append(lambda: self._kept.__setitem__(key, copy))
            return
        item.delta = found.payload
        self._changes.append(lambda: delta.apply(old, found.payload))

    def committed(self, version: int, dtypes: tuple[str, str]) -> None:
        """The engines serve what was compared."""
        for change in self._changes:
            change()
        self._changes.clear()
        self.version, self.dtypes = version, dtypes

    def aborted(self) -> None:
        """They do not."""
        self._changes.clear()
