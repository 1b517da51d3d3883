"""Slots over a process group: taps of one chunk on their way from rank to rank, with the same promises as shared memory.

The writer sends out of slots of its own, the reader receives into slots of its own; the n-th message is the n-th put. The group is
one that nobody else uses: transfers of the schedule must never come in between. A head travels with every message: what a reader
asks for is compared with it.

A reader has a receive posted for each free slot, or, `on_demand`, posts one only when it is asked for taps that have not come:
for NCCL, which knows no tags (each chunk has a communicator) and holds a GPU's processors for as long as a receive waits. What lies
on a device has never run.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from trainer_bridge.errors import TapDeadlineError, TapOverrunError, TapPeerError
from trainer_bridge.taps.ring import (
    Reading,
    Shape,
    Writing,
    check_fits,
    check_shape,
    check_step,
    parts_of,
    place_of,
    write_head,
)

HOST = torch.device("cpu")
_HEAD_BYTES = 128
"""16 words, as in shared memory."""
_NAP_S = 1e-4


class _Slots:
    """What both ends have. `group`: a process group, or a backend alone (``ProcessGroupNCCL``)."""

    def __init__(
        self,
        group: Any,
        peer: int,
        *,
        tag: int,
        slots: int,
        slot_bytes: int,
        name: str,
        device: torch.device = HOST,
    ) -> None:
        self.name, self.slots, self.slot_bytes = name, slots, slot_bytes
        self.high_water, self.waited_s = 0, 0.0
        self._group, self._peer, self._tag, self._device = group, peer, tag, device
        self._memory = [torch.zeros(_HEAD_BYTES + slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        # On the host, also where the slots are not: `_head_out` and `_head_in` carry them over.
        self._heads = [memory[:_HEAD_BYTES].cpu().numpy().view(np.int64) for memory in self._memory]

    def _data(self, index: int) -> torch.Tensor:
        return self._memory[index][_HEAD_BYTES:]

    def _head_out(self, index: int) -> None:
        if self._device.type != "cpu":
            self._memory[index][:_HEAD_BYTES].copy_(torch.from_numpy(self._heads[index].view(np.uint8)))

    def _head_in(self, index: int) -> None:
        if self._device.type != "cpu":
            self._heads[index].view(np.uint8)[:] = self._memory[index][:_HEAD_BYTES].cpu().numpy()

    def _wait(self, work: Any, timeout_s: float, what: str) -> None:
        """Until a transfer is over; transfers that failed because the other end is gone say so."""
        began = time.monotonic()
        try:
            # NCCL's wait would end the communicator when time is up.
            while self._device.type != "cpu" and not work.is_completed() and time.monotonic() - began < timeout_s:
                time.sleep(_NAP_S)
            late = self._device.type != "cpu" and not work.is_completed()
            arrived = False if late else work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited >= 0.9 * timeout_s or "timed out" in str(error).lower():
                raise TapDeadlineError(f"{self.name}: {what} did not come within {timeout_s:g} s") from None
            raise self._gone(f"waiting for {what}", error) from None
        finally:
            self.waited_s += time.monotonic() - began
        if arrived is False:
            raise TapDeadlineError(f"{self.name}: {what} did not come within {timeout_s:g} s")

    def _gone(self, doing: str, error: RuntimeError) -> TapPeerError:
        return TapPeerError(f"{self.name}: {doing}; the other end is gone ({str(error).splitlines()[0]})")


class GroupWriter(_Slots):
    """The end that puts."""

    def __init__(self, group: Any, *, to: int, **options: Any) -> None:
        super().__init__(group, to, **options)
        self._free = deque(range(self.slots))
        self._under_way: deque[tuple[int, Any]] = deque()

    def begin(self, step: int, microbatch: int, shape: Shape, *, timeout_s: float) -> Writing:
        """See `TapRing.begin`."""
        check_fits(self.name, shape, self.slot_bytes)
        while self._under_way and self._under_way[0][1].is_completed():
            self._free.append(self._under_way.popleft()[0])
        if not self._free:
            index, work = self._under_way[0]
            self._wait(work, timeout_s, f"a free slot for microbatch {microbatch} of step {step}")
            self._under_way.popleft()
            self._free.append(index)
        index = self._free.popleft()
        self.high_water = max(self.high_water, self.slots - len(self._free))
        write_head(self._heads[index], step, microbatch, shape)
        return _Sending(self._heads[index], parts_of(self._data(index), shape), lambda: self._send(index, shape))

    def flush(self, *, timeout_s: float) -> None:
        """Wait until all that was put has left: whoever drops the slots before takes it back."""
        while self._under_way:
            index, work = self._under_way[0]
            self._wait(work, timeout_s, "room for what was put")
            self._under_way.popleft()
            self._free.append(index)

    def _send(self, index: int, shape: Shape) -> None:
        # All of the slot: the receive was posted before anybody knew how long the microbatch would be.
        self._head_out(index)
        try:
            work = self._group.send([self._memory[index]], self._peer, self._tag)
        except RuntimeError as error:
            step, microbatch = place_of(self._heads[index])
            raise self._gone(f"sending microbatch {microbatch} of step {step}", error) from None
        self._under_way.append((index, work))


class _Sending(Writing):
    def __init__(self, stamp: np.ndarray, parts: list[torch.Tensor], send: Callable[[], None]) -> None:
        super().__init__(stamp, parts)
        self._send = send

    def commit(self) -> None:
        super().commit()
        self._send()


class GroupReader(_Slots):
    """The end that gets."""

    def __init__(self, group: Any, *, of: int, on_demand: bool = False, **options: Any) -> None:
        super().__init__(group, of, **options)
        self._posted: deque[tuple[int, Any]] = deque()
        self._arrived: list[int] = []
        self._idle: deque[int] = deque()
        self._on_demand = on_demand
        for index in range(self.slots):
            self._give_back(index)

    def get(self, step: int, microbatch: int, shape: Shape, *, timeout_s: float) -> Reading:
        """See `TapRing.get`."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index in self._arrived:
                check_step(self.name, self._heads[index], step)
                if place_of(self._heads[index]) == (step, microbatch):
                    check_shape(self.name, self._heads[index], shape)
                    self._arrived.remove(index)
                    parts = parts_of(self._data(index), shape)
                    return _Received(self._heads[index], parts, self.name, functools.partial(self._give_back, index))
            what = f"the taps of microbatch {microbatch} of step {step}"
            if self._idle and not self._posted:
                self._post(self._idle.popleft())
            if not self._posted:
                raise TapDeadlineError(f"{self.name}: {what} did not come; {self.slots} slots are full of other microbatches' taps")
            index, work = self._posted[0]
            self._wait(work, max(0.001, deadline - time.monotonic()), what)
            self._posted.popleft()
            self._head_in(index)
            self._arrived.append(index)
            self.high_water = max(self.high_water, len(self._arrived))

    def _give_back(self, index: int) -> None:
        if self._on_demand:
            self._idle.append(index)
        else:
            self._post(index)

    def _post(self, index: int) -> None:
        work: Any
        try:
            work = self._group.recv([self._memory[index]], self._peer, self._tag)
        except RuntimeError as error:
            # The other end may have gone because it is through: that is an error for who still expects something.
            work = _Failed(error)
        self._posted.append((index, work))


class _Failed:
    """A transfer that could not begin."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> bool:
        raise self._error


class _Received(Reading):
    def __init__(self, stamp: np.ndarray, parts: list[torch.Tensor], name: str, give_back: Callable[[], None]) -> None:
        super().__init__(stamp, parts, name)
        self._give_back = give_back
        self._read = True

    def release(self) -> None:
        if not self._read:
            raise TapOverrunError(f"{self._name}: released twice")
        self._read = False
        self._give_back()
