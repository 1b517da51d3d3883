"""When may the draft learn: a pure state machine over the engine's steps, with an injected clock.

::

    BUSY ----(step ended)----> COOLING ----(quiet for cool_s)----> OPEN
      ^                           |                                  |
      +------(step began)---------+----------(step began)------------+

BUSY: the engine runs a step. COOLING: between two steps of one burst there are short gaps that belong to nobody.
OPEN: nothing to generate; the learner may run, one slice at a time, looking for requests in between.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable

STOPPED_S = 0.1
"""A wait that ends so much late was none: the process was stopped meanwhile (SIGSTOP, a frozen container, a machine at rest)."""


class IdleState(enum.Enum):
    """See the module's drawing."""

    BUSY = "BUSY"
    COOLING = "COOLING"
    OPEN = "OPEN"


class IdleMonitor:
    """Follows the engine's steps and says whether the window is open."""

    def __init__(self, cool_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`cool_s`: quiet time before a window opens, in seconds; `clock`: monotonic seconds."""
        if cool_s < 0:
            raise ValueError(f"cool_s is {cool_s}, must not be negative")
        self._cool_s, self._clock = cool_s, clock
        self._running = False
        self._quiet_since = clock()
        self._wakes_at = math.inf

    def waits(self, at_most_s: float) -> float:
        """A wait begins; returns its length."""
        self._wakes_at = self._clock() + at_most_s
        return at_most_s

    def woke(self) -> None:
        """The wait is over. Time in which the process was stopped was not quiet: requests may be on their way to it."""
        if self._clock() > self._wakes_at + STOPPED_S:
            self._quiet_since = self._clock()
        self._wakes_at = math.inf

    def step_began(self) -> None:
        """The engine starts a step."""
        self._running = True

    def step_ended(self) -> None:
        """The engine's step is over."""
        self._running = False
        self._quiet_since = self._clock()

    @property
    def state(self) -> IdleState:
        """The state now."""
        if self._running:
            return IdleState.BUSY
        return IdleState.OPEN if self.opens_in_s <= 0 else IdleState.COOLING

    @property
    def quiet_s(self) -> float:
        """Seconds since the last step. Meaningless while BUSY."""
        return self._clock() - self._quiet_since

    @property
    def opens_in_s(self) -> float:
        """Seconds until the window opens if nothing happens; 0 when open. Meaningless while BUSY."""
        return max(0.0, self._quiet_since + self._cool_s - self._clock())
