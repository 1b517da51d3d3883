"""Servers for a benchmark's session that it can look at: process ids, memory, folders for temporary files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specdraft.launch import Server


class Servers:
    """Makes a session's servers (its `make_server`) and remembers the last of each kind."""

    def __init__(self, *, environment: Mapping[str, str] | None = None, plain_environment: Mapping[str, str] | None = None) -> None:
        """Variables to add for the specdraft server, and for the stock one."""
        self.environment, self.plain_environment = dict(environment or {}), dict(plain_environment or {})
        self.state_dir: Path | None = None
        """State directory of specdraft servers that are made from now on; None: the session's choice."""
        self._made: dict[bool, Server] = {}

    def __call__(
        self, target: Path, *, plain: bool = False, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Server:
        """A server like `vllm_specdraft.launch.Server`."""
        if self.state_dir is not None and not plain:
            options["state_dir"] = self.state_dir
        environment = {**(environment or {}), **(self.plain_environment if plain else self.environment)}
        self._made[plain] = server = Server(target, plain=plain, environment=environment, **options)
        return server

    @property
    def live(self) -> Server:
        """The specdraft server that was made last."""
        return self._made[False]

    @property
    def plain(self) -> Server:
        """The stock server that was made last."""
        return self._made[True]
