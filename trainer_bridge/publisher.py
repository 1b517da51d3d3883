"""The trainer's end of the bridge: bring every engine from one policy version to the next, or none of it.

>>> bridge = connect("http://127.0.0.1:8000")                         # doctest: +SKIP
>>> with bridge.update(version=7) as update:                          # doctest: +SKIP
...     update.target(module_weights(policy))
...     update.draft(module_weights(draft))

Leaving the block commits; an exception inside it, or a check that fails on an engine, aborts, and every engine goes on with the
version it serves. With several ranks each opens the same update and sends its share; rank 0 leads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainer_bridge.config import BridgeConfig, make
from trainer_bridge.engines import Engines
from trainer_bridge.members import Member
from trainer_bridge.session import UpdateState
from trainer_bridge.update import Update, UpdateResult

__all__ = ["Bridge", "Update", "UpdateResult", "connect"]


def connect(engines: str | Sequence[str], **options: Any) -> Bridge:
    """Connect to one or several engines.

    Args:
        engines: per engine its URL (``http://HOST:PORT``) or its sync address (``tcp://HOST:PORT``).
        options: fields of `trainer_bridge.config.BridgeConfig`.

    Raises:
        ConfigError: an option is unknown or out of range, or an address is none.
        SecurityError: an address of another machine without keys.
        DeadlineError: no engine answered.
    """
    config: BridgeConfig = make(BridgeConfig, options)
    return Bridge([engines] if isinstance(engines, str) else list(engines), config)


class Bridge:
    """The engines of one run. Not for several threads at once."""

    def __init__(self, engines: Sequence[str], config: BridgeConfig) -> None:
        self.config = config
        self._engines = Engines(engines, config)

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all engines. They serve on."""
        self._engines.close()

    @property
    def members(self) -> list[Member]:
        """The engines, dead ones included."""
        return self._engines.members

    @property
    def policy_version(self) -> int:
        """The newest version that an engine said it serves."""
        return max(member.policy_version for member in self.members)

    @property
    def on_state(self) -> Callable[[UpdateState], None]:
        """Called with every state that an update of this rank comes to: for progress, and for tests."""
        return self._engines.on_state

    @on_state.setter
    def on_state(self, call: Callable[[UpdateState], None]) -> None:
        self._engines.on_state = call

    def update(self, version: int, *, partial: bool = False, **options: Any) -> Update:
        """A context that brings the engines to `version`.

        Args:
            version: of the policy: one more than before, as a rule. The version served is taken again: that heals an engine.
            partial: whether target tensors may be missing; those keep the values of the version served.
            options: fields of `BridgeConfig` that differ for this update: ``running``, ``dtype``, ``cast``, ``delta``, time-outs.
        """
        config = self.config if not options else make(BridgeConfig, {**vars(self.config), **options})
        return Update(self._engines, config, version, partial=partial)
