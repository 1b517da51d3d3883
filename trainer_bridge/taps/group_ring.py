"""Slots over a process group: taps of one chunk on their way from host to host, with the same promises as shared memory.

The writer sends out of slots of its own, the reader has posted a receive for each of its slots; the n-th message is the n-th put.
The group is one that nobody else uses: transfers of the schedule must never come in between.
A head travels with every message: what a reader asks for is compared with it. Host memory, over gloo: NCCL knows no tags, and its
posted receives would hold a GPU's processors while they wait.
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
import torch.distributed as dist

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

_HEAD_BYTES = 128
"""16 words, as in shared memory."""


class _Slots:
    """What both ends have."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, tag: int, slots: int, slot_bytes: int, name: str) -> None:
        self.name, self.slots, self.slot_bytes = name, slots, slot_bytes
        self.high_water, self.waited_s = 0, 0.0
        self._group, self._peer, self._tag = group, peer, tag
        self._memory = [torch.zeros(_HEAD_BYTES + slot_bytes, dtype=torch.uint8) for _ in range(slots)]
        self._heads = [memory[:_HEAD_BYTES].numpy().view(np.int64) for memory in self._memory]

    def _data(self, index: int) -> torch.Tensor:
        return self._memory[index][_HEAD_BYTES:]

    def _wait(self, work: Any, timeout_s: float, what: str) -> None:
        """Until a transfer is over; transfers that failed because the other end is gone say so."""
        began = time.monotonic()
        try:
            arrived = work.wait(timedelta(seconds=timeout_s))
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

    def __init__(self, group: dist.ProcessGroup, *, to: int, **options: Any) -> None:
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
        try:
            work = dist.isend(self._memory[index], group=self._group, group_dst=self._peer, tag=self._tag)
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

    def __init__(self, group: dist.ProcessGroup, *, of: int, **options: Any) -> None:
        super().__init__(group, of, **options)
        self._posted: deque[tuple[int, Any]] = deque()
        self._arrived: list[int] = []
        for index in range(self.slots):
            self._post(index)

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
                    return _Received(self._heads[index], parts, self.name, functools.partial(self._post, index))
            what = f"the taps of microbatch {microbatch} of step {step}"
            if not self._posted:
                raise TapDeadlineError(f"{self.name}: {what} did not come; {self.slots} slots are full of other microbatches' taps")
            index, work = self._posted[0]
            self._wait(work, max(0.001, deadline - time.monotonic()), what)
            self._posted.popleft()
            self._arrived.append(index)
            self.high_water = max(self.high_water, len(self._arrived))

    def _post(self, index: int) -> None:
        work: Any
        try:
            work = dist.irecv(self._memory[index], group=self._group, group_src=self._peer, tag=self._tag)
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
    def __init__(self, stamp: np.ndarray, parts: list[torch.Tensor], name: str, post: Callable[[], None]) -> None:
        super().__init__(stamp, parts, name)
        self._post = post
        self._read = True

    def release(self) -> None:
        if not self._read:
            raise TapOverrunError(f"{self._name}: released twice")
        self._read = False
        self._post()
