"""What carriers share: the frames of a data connection, their limits, and what the engine's side must do. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trainer_bridge import wire
from trainer_bridge.config import ReceiverConfig

if TYPE_CHECKING:
    from trainer_bridge.inbox import Inbox

MAGIC = b"SDT1"
TOKEN_BYTES = 32
HEADER = struct.Struct(">I")
"""Length of the header that follows, in bytes; 0 ends a stream."""
MAX_HEADER_BYTES = 4 << 20
HELD_PAYLOADS = 4
"""Payloads that wait for the receiver's loop, at most: the bound of memory beside the staging."""


class DataPlane(Protocol):
    """Receives one update's pieces."""

    address: str

    def join(self, message: wire.Join) -> None:
        """Connect to the trainer, where it is the engine that connects."""

    def close(self) -> None:
        """Stop; nothing is written into the staging memory once this returned."""


class Sink(Protocol):
    """Where a data plane's pieces go. All but `inbox` may be called from any thread."""

    config: ReceiverConfig

    @property
    def inbox(self) -> Inbox:
        """The staging memory: a data plane writes the boxes of its own pieces, and nothing else."""

    def pieces_arrived(self, update: str, work: Callable[[Inbox], None]) -> None:
        """Have pieces checked."""

    def data_failed(self, update: str, reason: str) -> None:
        """The update cannot be completed."""

    def dropped(self, kind: str, why: object) -> None:
        """Something that belongs to no update was dropped."""
