"""Whose distribution a sample is learned from: the policy's that it came from, and no other's."""

from __future__ import annotations

from trainer_bridge.draft.interface import FrozenTarget


class Teachers:
    """Embedding and head of the policies whose samples may be learned from. No sample ever meets another policy's."""

    def __init__(self, version: int, target: FrozenTarget) -> None:
        self._targets = {version: target}

    @property
    def versions(self) -> list[int]:
        """Policies known, the oldest first."""
        return sorted(self._targets)

    @property
    def oldest(self) -> int:
        """The oldest policy known."""
        return min(self._targets)

    @property
    def newest(self) -> FrozenTarget:
        """Of the policy that is served."""
        return self._targets[max(self._targets)]

    def knows(self, version: int) -> bool:
        """Whether this policy's teacher is here."""
        return version in self._targets

    def of(self, version: int) -> FrozenTarget:
        """One policy's teacher."""
        return self._targets[version]

    def add(self, version: int, target: FrozenTarget, *, keep: int) -> None:
        """Another policy serves; keep the newest `keep`, this one included. A lower version than before makes all others void."""
        if version <= max(self._targets):
            self._targets.clear()
        self._targets[version] = target
        for old in self.versions[:-keep]:
            del self._targets[old]
