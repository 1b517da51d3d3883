"""One update's life, as a pure state machine: no sockets, no tensors, no clock of its own. Imports no torch.

    OFFERED --attach/stage--> STAGING --all ranks finished, all checks passed--> VERIFIED --commit--> COMMITTED
       |                         |                                                  |
       +-------------------------+----------------- abort, deadline, silence -------+--------------> ABORTED

While the engine swaps (`committing`) an update can no longer be aborted: it ends as COMMITTED or, when the engine restored what it
served before, as ABORTED. COMMITTED and ABORTED are final; an update id is never used twice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trainer_bridge.errors import UpdateError


class UpdateState(enum.Enum):
    """Where an update is."""

    OFFERED = "OFFERED"
    STAGING = "STAGING"
    VERIFIED = "VERIFIED"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


FINAL = frozenset({UpdateState.COMMITTED, UpdateState.ABORTED})
_NEXT = {
    UpdateState.OFFERED: {UpdateState.STAGING, UpdateState.ABORTED},
    UpdateState.STAGING: {UpdateState.VERIFIED, UpdateState.ABORTED},
    UpdateState.VERIFIED: {UpdateState.COMMITTED, UpdateState.ABORTED},
    UpdateState.COMMITTED: set(),
    UpdateState.ABORTED: set(),
}


@dataclass(kw_only=True)
class UpdateSession:
    """An update on the engine's side. Times are whatever monotonic clock the caller uses, in seconds."""

    update: str
    version: int
    world: int
    deadline: float
    """When it is given up."""
    silence_s: float
    """How long a rank that has not finished, or the leader, may be silent."""
    state: UpdateState = UpdateState.OFFERED
    reason: str = ""
    """Why it was aborted."""
    committing: bool = False
    heard: dict[str, float] = field(default_factory=dict)
    """When each client was heard last."""
    ranks: dict[int, str] = field(default_factory=dict)
    """Client of each rank that joined."""
    sent: dict[int, int] = field(default_factory=dict)
    """Pieces that each rank that finished says it sent."""

    def join(self, rank: int, client: str, now: float) -> None:
        """A rank takes part. Raises `UpdateError` when it may not."""
        self._must_be(UpdateState.OFFERED, UpdateState.STAGING)
        if not 0 <= rank < self.world:
            raise UpdateError(f"rank {rank} of an update for {self.world} ranks: give every rank the same world size")
        if self.ranks.get(rank, client) != client:
            raise UpdateError(f"two processes say they are rank {rank}: give every rank its own")
        self.ranks[rank] = client
        self.heard[client] = now

    def began(self) -> None:
        """The first piece came, or the first rank finished."""
        self._must_be(UpdateState.OFFERED, UpdateState.STAGING)
        if self.state is UpdateState.OFFERED:
            self._go(UpdateState.STAGING)

    def finished(self, rank: int, client: str, pieces: int) -> bool:
        """A rank has sent all it has; whether that was the last one. Raises `UpdateError`."""
        if self.ranks.get(rank) != client:
            raise UpdateError(f"rank {rank} did not join this update from that process")
        if self.sent.get(rank, pieces) != pieces:
            raise UpdateError(f"rank {rank} finished twice, with {self.sent[rank]} and with {pieces} pieces")
        if rank not in self.sent:
            # Saying it again is harmless, also when all was verified meanwhile.
            self.began()
        self.sent[rank] = pieces
        return len(self.sent) == self.world

    def verified(self) -> None:
        """All checks passed."""
        self._go(UpdateState.VERIFIED)

    def commit_begins(self) -> None:
        """The engine swaps from here on. Raises `UpdateError` when it was not verified."""
        self._must_be(UpdateState.VERIFIED)
        self.committing = True

    def committed(self) -> None:
        """The engine serves it."""
        self.committing = False
        self._go(UpdateState.COMMITTED)

    def commit_failed(self, reason: str) -> None:
        """The engine refused it, and serves what it served before."""
        self.committing = False
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """Give it up. Raises `UpdateError` when that is no longer possible."""
        if self.committing:
            raise UpdateError(f"update {self.update} is being committed: it can no longer be aborted")
        self._go(UpdateState.ABORTED)
        self.reason = reason

    def overdue(self, now: float) -> str | None:
        """Why the update should be given up at `now`; None when it should not."""
        if self.state in FINAL or self.committing:
            return None
        if now >= self.deadline:
            return f"its deadline passed in state {self.state.value}"
        for rank, client in self.ranks.items():
            if now - self.heard[client] > self.silence_s:
                return f"rank {rank} was silent for {self.silence_s:g} s (killed, or cut off)"
        return None

    def alive(self, client: str, now: float) -> None:
        """A client was heard."""
        if client in self.heard:
            self.heard[client] = now

    def _must_be(self, *states: UpdateState) -> None:
        if self.state not in states:
            wanted = " or ".join(state.value for state in states)
            because = f" ({self.reason})" if self.reason else ""
            raise UpdateError(f"update {self.update} is {self.state.value}{because}, needs to be {wanted}")

    def _go(self, state: UpdateState) -> None:
        if state not in _NEXT[self.state]:
            because = f" ({self.reason})" if self.reason else ""
            raise UpdateError(f"update {self.update} is {self.state.value}{because} and cannot become {state.value}")
        self.state = state
