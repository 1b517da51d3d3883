"""Slots in memory that two ranks share: taps of one chunk on their way to the draft.

One rank writes, one reads. A slot is free, being written, full, or being read; each side changes only what is its turn, so there
is no lock (and the processor must show stores in their order, as x86-64 does). Who has to wait sleeps, a little longer each time,
and looks whether the other side still lives. Every slot carries a stamp of what is in it; what a reader asks for is compared with
it, so a fault of the schedule is an error with a name.

The memory is a file in shared memory, or any buffer that threads of one process share. It is allocated once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer_bridge.errors import TapDeadlineError, TapOrderError, TapOverrunError, TapPeerError, TapShapeError

FREE, WRITING, FULL, READING = range(4)
_MAGIC, _LAYOUT = 0x5350_4454_4150_5331, 1
_HEAD_WORDS, _SLOT_WORDS, _ALIGNMENT = 16, 16, 4096
_STATE, _PUT, _STEP, _MICROBATCH, _ROWS, _DTYPE, _PARTS = range(7)
_WIDTHS = 7
MAX_PARTS = _SLOT_WORDS - _WIDTHS
"""Tap layers of one chunk at most."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_FIRST_NAP_S, _LONGEST_NAP_S, _LOOK_S = 2e-5, 1e-3, 0.2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a microbatch's taps of one chunk look like."""

    rows: int
    widths: tuple[int, ...]
    """Columns of each part: a tap layer's share of this tensor-parallel rank, or 1 for token ids."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.rows * sum(self.widths) * self.dtype.itemsize


def memory_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of the memory for so many slots."""
    head = 8 * (_HEAD_WORDS + slots * _SLOT_WORDS)
    return -(-head // _ALIGNMENT) * _ALIGNMENT + slots * (-(-slot_bytes // _ALIGNMENT) * _ALIGNMENT)


class TapRing:
    """One side's view of the slots. Both sides use the same class; each calls its own half of the methods."""

    def __init__(
        self,
        memory: np.ndarray,
        *,
        name: str,
        writes: bool,
        alive: Callable[[int], bool] | None = None,
        data: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Attach to memory that `format_memory` has laid out.

        Args:
            memory: ``[bytes]`` uint8, shared.
            name: of the chunk and rank that writes, for errors.
            writes: which side this is.
            alive: whether a process lives; of this machine by default.
            data: per slot ``[slot bytes]`` uint8 on a device, where memory holds the stamps alone.
        """
        words = memory[: memory.size // 8 * 8].view(np.int64)
        if words.size < _HEAD_WORDS or int(words[0]) != _MAGIC or int(words[1]) != _LAYOUT:
            raise TapOrderError(f"{name}: the shared memory holds no tap slots of this version")
        self.name, self.slots, self.slot_bytes = name, int(words[2]), int(words[3])
        self._head = words[:_HEAD_WORDS]
        self._stamps = words[_HEAD_WORDS : _HEAD_WORDS + self.slots * _SLOT_WORDS].reshape(self.slots, _SLOT_WORDS)
        self._data = list(data) if data is not None else _slots_of(memory, self.slots, self.slot_bytes)
        self._own, self._other = (4, 5) if writes else (5, 4)
        self._head[self._own] = os.getpid()
        self._alive = alive or _lives
        self.high_water = 0
        """Most slots that were not free at once, as this side saw it."""
        self.waited_s = 0.0
        """Time that this side has waited, in seconds."""

    # -- the writer ------------------------------------------------------------------------------------------------------

    def begin(self, step: int, microbatch: int, shape: Shape, *, timeout_s: float) -> Writing:
        """A free slot for a microbatch's taps; waits for one.

        Raises `TapOverrunError` for taps that are larger than a slot, `TapOrderError` when this microbatch's are there already,
        `TapDeadlineError` and `TapPeerError` when none becomes free.
        """
        check_fits(self.name, shape, self.slot_bytes)
        for stamp in self._stamps:
            if stamp[_STATE] != FREE and place_of(stamp) == (step, microbatch):
                raise TapOrderError(
                    f"{self.name}: the taps of microbatch {microbatch} of step {step} are there already: put twice?"
                )
        index = self._wait(self._free, timeout_s, f"a free slot for microbatch {microbatch} of step {step}")
        stamp = self._stamps[index]
        write_head(stamp, step, microbatch, shape)
        stamp[_STATE] = WRITING
        self._note_use()
        return Writing(stamp, parts_of(self._data[index], shape))

    def _free(self) -> int | None:
        found = np.flatnonzero(self._stamps[:, _STATE] == FREE)
        return int(found[0]) if found.size else None

    # -- the reader ------------------------------------------------------------------------------------------------------

    def get(self, step: int, microbatch: int, shape: Shape, *, timeout_s: float) -> Reading:
        """The taps of a microbatch; waits for them.

        Raises `TapShapeError` when they are not what is expected, `TapOrderError` when an earlier step's are still there,
        `TapDeadlineError` and `TapPeerError` when they do not come.
        """

        def there() -> int | None:
            for index, stamp in enumerate(self._stamps):
                if stamp[_STATE] != FULL:
                    continue
                check_step(self.name, stamp, step)
                if place_of(stamp) == (step, microbatch):
                    return index
            return None

        index = self._wait(there, timeout_s, f"the taps of microbatch {microbatch} of step {step}")
        stamp = self._stamps[index]
        check_shape(self.name, stamp, shape)
        stamp[_STATE] = READING
        self._note_use()
        return Reading(stamp, parts_of(self._data[index], shape), self.name)

    # -- both ------------------------------------------------------------------------------------------------------------

    def _note_use(self) -> None:
        self.high_water = max(self.high_water, int((self._stamps[:, _STATE] != FREE).sum()))

    def _wait(self, look: Callable[[], int | None], timeout_s: float, what: str) -> int:
        if (index := look()) is not None:
            return index
        began = time.monotonic()
        nap_s, look_at = _FIRST_NAP_S, began + _LOOK_S
        while True:
            time.sleep(nap_s)
            nap_s = min(_LONGEST_NAP_S, 1.5 * nap_s)
            if (index := look()) is not None:
                self.waited_s += time.monotonic() - began
                return index
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_S
                other = int(self._head[self._other])
                if other and not self._alive(other):
                    raise TapPeerError(
                        f"{self.name}: waiting for {what}; process {other} at the other end is gone; {self._account()}"
                    )
            if now - began >= timeout_s:
                raise TapDeadlineError(f"{self.name}: {what} did not come within {timeout_s:g} s; {self._account()}")

    def _account(self) -> str:
        """What is in the slots, in words."""
        names = ("free", "being written", "full", "being read")
        held = [
            f"microbatch {int(s[_MICROBATCH])} of step {int(s[_STEP])} ({names[int(s[_STATE])]})" for s in self._stamps if s[_STATE]
        ]
        return f"of {self.slots} slots {len(held)} are in use{': ' if held else ''}{', '.join(held)}"


class Writing:
    """A slot while it is being written."""

    def __init__(self, stamp: np.ndarray, parts: Sequence[torch.Tensor]) -> None:
        self._stamp, self._parts = stamp, parts

    def write(self, part: int, tensor: torch.Tensor) -> None:
        """Copy one part ``[rows, width]`` in; another dtype is cast. Raises `TapShapeError`."""
        if tensor.shape != self._parts[part].shape:
            raise TapShapeError(f"part {part} has shape {tuple(tensor.shape)}, the slot takes {tuple(self._parts[part].shape)}")
        self._parts[part].copy_(tensor.detach())

    def commit(self) -> None:
        """All parts are written: the other side may read them."""
        if self._parts[0].is_cuda:
            # The copies run behind; another process sees the stamp, not their stream.
            torch.cuda.current_stream(self._parts[0].device).synchronize()
        self._stamp[_STATE] = FULL

    def drop(self) -> None:
        """Give the slot back unread."""
        self._stamp[_STATE] = FREE


class Reading:
    """A microbatch's taps in their slot, until they are released."""

    def __init__(self, stamp: np.ndarray, parts: Sequence[torch.Tensor], name: str) -> None:
        self._stamp, self._name = stamp, name
        self._put = int(stamp[_PUT])
        self.parts = tuple(parts)
        """Views ``[rows, width]`` of the slot: not to be read after `release`."""

    def release(self) -> None:
        """The slot may be written again. Raises `TapOverrunError` when somebody has done so already."""
        if self.parts[0].is_cuda:
            torch.cuda.current_stream(self.parts[0].device).synchronize()
        if int(self._stamp[_PUT]) != self._put or self._stamp[_STATE] != READING:
            raise TapOverrunError(
                f"{self._name}: a slot was written again while its taps were read: two writers, or released twice"
            )
        self._stamp[_STATE] = FREE


def format_memory(memory: np.ndarray, *, slots: int, slot_bytes: int, stamps_only: bool = False) -> None:
    """Lay `memory` ``[memory_bytes(...)]`` uint8 out, all slots free; `stamps_only`: for slots that lie elsewhere.

    Raises `TapOverrunError` when it is too small.
    """
    needed = memory_bytes(slots, 0 if stamps_only else slot_bytes)
    if memory.size < needed:
        raise TapOverrunError(f"{slots} slots of {slot_bytes} bytes need {needed} bytes, not {memory.size}")
    words = memory[: 8 * (_HEAD_WORDS + slots * _SLOT_WORDS)].view(np.int64)
    words[:] = 0
    words[1], words[2], words[3] = _LAYOUT, slots, slot_bytes
    words[0] = _MAGIC


def check_fits(name: str, shape: Shape, slot_bytes: int) -> None:
    """Raise `TapOverrunError` or `TapShapeError` for taps that no slot of so many bytes can hold."""
    if shape.nbytes > slot_bytes:
        raise TapOverrunError(
            f"{name}: {shape.rows} rows of {sum(shape.widths)} columns are {shape.nbytes} bytes, a slot has {slot_bytes}: "
            "allocate for the longest microbatch"
        )
    if not 0 < len(shape.widths) <= MAX_PARTS:
        raise TapShapeError(f"{name}: {len(shape.widths)} tap layers in one chunk, 1 to {MAX_PARTS} are possible")


def write_head(stamp: np.ndarray, step: int, microbatch: int, shape: Shape) -> None:
    """Say in a slot's `stamp` what is about to be written."""
    stamp[_STEP], stamp[_MICROBATCH], stamp[_ROWS] = step, microbatch, shape.rows
    stamp[_DTYPE], stamp[_PARTS] = _DTYPES.index(shape.dtype), len(shape.widths)
    stamp[_WIDTHS : _WIDTHS + len(shape.widths)] = shape.widths
    stamp[_PUT] += 1


def place_of(stamp: np.ndarray) -> tuple[int, int]:
    """Step and microbatch of a slot's `stamp`."""
    return int(stamp[_STEP]), int(stamp[_MICROBATCH])


def check_step(name: str, stamp: np.ndarray, step: int) -> None:
    """Raise `TapOrderError` for a full slot of an earlier step."""
    found, microbatch = place_of(stamp)
    if found < step:
        raise TapOrderError(f"{name}: microbatch {microbatch} of step {found} was put and never taken; step {step} has begun")


def check_shape(name: str, stamp: np.ndarray, shape: Shape) -> None:
    """Raise `TapShapeError` when a slot holds something else than the draft expects."""
    found = Shape(
        rows=int(stamp[_ROWS]),
        widths=tuple(int(width) for width in stamp[_WIDTHS : _WIDTHS + int(stamp[_PARTS])]),
        dtype=_DTYPES[int(stamp[_DTYPE])],
    )
    if found != shape:
        step, microbatch = place_of(stamp)
        raise TapShapeError(f"{name}: microbatch {microbatch} of step {step} has taps {found}, the draft expects {shape}")


def _slots_of(memory: np.ndarray, slots: int, slot_bytes: int) -> list[torch.Tensor]:
    stride = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
    start = memory_bytes(slots, slot_bytes) - slots * stride
    return [torch.from_numpy(memory[start + i * stride : start + i * stride + slot_bytes]) for i in range(slots)]


def parts_of(data: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    """The parts one behind the other in a slot's bytes, each contiguous."""
    flat = data[: shape.nbytes].view(shape.dtype)
    return [
        part.view(shape.rows, width)
        for part, width in zip(flat.split([shape.rows * w for w in shape.widths]), shape.widths, strict=True)
    ]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # One that has ended and was not waited for is gone too.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
