"""Sparse updates: the elements of a tensor whose bits changed, in the dtype in which it travels. Imports no torch.

A tensor is its elements in row-major order, as unsigned integers of their width (1, 2, 4 or 8 bytes). Values travel, not
differences: applied to the right base, the result is bitwise the sender's tensor, NaN payloads and signs of zero included.

Payload, little-endian throughout::

    magic      4 bytes   b"sdd1"
    width      1 byte    bytes of an element; 3 zero bytes follow
    elements   u64       elements of the whole tensor
    changed    u64       elements that changed
    gap_bytes  u64       length of the next part
    gaps       u8 * gap_bytes         where they lie
    values     width * changed        their new values, in the same order

A gap counts the unchanged elements since the changed element before (since the beginning, for the first). A byte below 255
ends a gap and stands for one changed element; 255 means 255 unchanged elements more, and none changed yet. So indexes grow
strictly whatever the bytes are, and one costs 1.08 bytes where 1% changed at random.

>>> import numpy as np
>>> base, new = np.zeros(600, np.uint16), np.zeros(600, np.uint16)
>>> new[[2, 3, 513]] = 7, 8, 9                        # gaps 2, 0 and 509 = 255 + 254
>>> delta = encode(base, new)
>>> list(delta.payload[32:36]), list(delta.payload[36:])
([2, 0, 255, 254], [7, 0, 8, 0, 9, 0])

Work goes in blocks. `encode` needs up to 60 bytes per element of a block beside the delta, of which there are two copies while its
parts are joined; it gives up as soon as the delta is as large as the tensor. `apply` and `Undo.restore` need about 30 bytes
per byte of a block, beside the undo itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer_bridge.errors import DeltaError

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
Words: TypeAlias = npt.NDArray[Any]

HEADER_BYTES = 32
BLOCK_ELEMENTS = 1 << 16
"""Elements compared at once: both sides of a block stay in the processor's cache until the changed ones are picked."""
BLOCK_BYTES = 1 << 16
"""Gap bytes decoded at once."""
_HEADER = struct.Struct("<4sB3xQQQ")
_MAGIC = b"sdd1"
_SKIP = 255


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What `encode` returns."""

    payload: bytes
    changed: int
    """Elements that changed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return len(self.payload)


@dataclass(frozen=True, kw_only=True, eq=False)
class Undo:
    """What a delta overwrote; of the delta's size."""

    elements: int
    gaps: bytes
    old: Words
    """``[changed]`` values, before. Fewer than `gaps` tells of when writing ended half-way."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return len(self.gaps) + self.old.nbytes

    def restore(self, base: Words) -> None:
        """Put the old values back, in place. `base`: the array that the delta was applied to. Raises `DeltaError`."""
        words = _writable(base)
        if words.size != self.elements or words.itemsize != self.old.itemsize:
            raise DeltaError(
                f"an undo of {self.elements} elements of {self.old.itemsize} bytes, the tensor has {words.size} of {words.itemsize}"
            )
        done = 0
        for index in _indexes(np.frombuffer(self.gaps, np.uint8), BLOCK_BYTES):
            values = self.old[done : done + index.size]
            words[index[: values.size]] = values
            done += values.size


def encode(base: Words, new: Words, *, block_elements: int = BLOCK_ELEMENTS) -> Delta | None:
    """The elements of `new` that differ from `base` in any bit, or None when the whole tensor would be no larger.

    Args:
        base, new: contiguous arrays of one shape and one dtype of 1, 2, 4 or 8 bytes.
        block_elements: see the file's docstring.

    Raises:
        DeltaError: the arrays do not fit each other.
    """
    before, after = _words(base), _words(new)
    if base.shape != new.shape or base.dtype != new.dtype:
        raise DeltaError(f"a base of {base.dtype} {list(base.shape)} for a tensor of {new.dtype} {list(new.shape)}")
    room = after.nbytes - HEADER_BYTES
    if room <= 0:
        return None
    gaps: list[np.ndarray] = []
    values: list[np.ndarray] = []
    changed, gap_bytes, last = 0, 0, -1
    differs = np.empty(min(block_elements, after.size), np.bool_)
    for begin in range(0, after.size, block_elements):
        part = after[begin : begin + block_elements]
        found = np.flatnonzero(np.not_equal(before[begin : begin + part.size], part, out=differs[: part.size]))
        if not found.size:
            continue
        gaps.append(_gap_bytes(found, last - begin))
        values.append(part[found])
        last = begin + int(found[-1])
        changed += found.size
        gap_bytes += gaps[-1].size
        if gap_bytes + changed * after.itemsize >= room:
            return None
    header = _HEADER.pack(_MAGIC, after.itemsize, after.size, changed, gap_bytes)
    return Delta(payload=b"".join([header, *(part.data for part in (*gaps, *values))]), changed=changed)


def apply(base: Words, payload: Buffer, *, block_bytes: int = BLOCK_BYTES) -> Undo:
    """Write a delta into `base`, in place, and return what takes it back.

    Everything is checked before the first element is written, against the bytes that are there: a payload is not trusted, and a
    count that it declares is never the size of an allocation. Whoever calls this checks the result's digest.

    Args:
        base: writable contiguous array of the tensor that the delta was made against.
        payload: what `encode` made, as contiguous bytes.
        block_bytes: see the file's docstring.

    Raises:
        DeltaError: the payload is malformed or made for another tensor; nothing was written.
    """
    words = _writable(base)
    gaps, values = _parts(words, payload, block_bytes)
    undo = Undo(elements=words.size, gaps=gaps.tobytes(), old=np.empty(values.size, words.dtype))
    done = 0
    try:
        for index in _indexes(gaps, block_bytes):
            begin, stop = done, done + index.size
            undo.old[begin:stop] = words[index]
            done = stop
            words[index] = values[begin:stop]
    except BaseException:
        # Out of memory, or interrupted. Every block that may have been written has its old values by now.
        Undo(elements=words.size, gaps=undo.gaps, old=undo.old[:done]).restore(words)
        raise
    return undo


def _words(array: Words) -> Words:
    """``[elements]`` view of an array as unsigned integers."""
    if array.itemsize not in (1, 2, 4, 8) or array.dtype.hasobject:
        raise DeltaError(f"elements of {array.itemsize} bytes ({array.dtype}); 1, 2, 4 and 8 can be sent as deltas")
    if not array.flags.c_contiguous:
        raise DeltaError(f"a tensor {list(array.shape)} with strides {list(array.strides)}: deltas need a contiguous one")
    return array.reshape(-1).view(f"u{array.itemsize}")


def _writable(base: Words) -> Words:
    words = _words(base)
    if not words.flags.writeable:
        raise DeltaError("the tensor to change is read-only")
    return words


def _gap_bytes(found: np.ndarray, previous: int) -> np.ndarray:
    """Gap bytes of ascending indexes, `previous` being the changed element before the first of them."""
    gaps = np.empty_like(found)
    gaps[0] = found[0] - previous - 1
    np.subtract(found[1:], found[:-1], out=gaps[1:])
    gaps[1:] -= 1
    skips = gaps // _SKIP
    ends = np.cumsum(skips + 1)
    coded = np.full(int(ends[-1]), _SKIP, np.uint8)
    coded[ends - 1] = gaps - _SKIP * skips
    return coded


def _indexes(gaps: np.ndarray, block_bytes: int) -> Iterator[np.ndarray]:
    """Ascending element indexes, one array per block of gap bytes."""
    last = -1
    for begin in range(0, gaps.size, block_bytes):
        part = gaps[begin : begin + block_bytes]
        is_element = part != _SKIP
        reached = np.add(part, is_element, dtype=np.int64)
        np.cumsum(reached, out=reached)
        reached += last
        last = int(reached[-1])
        yield reached[is_element]


def _parts(words: Words, payload: Buffer, block_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaps and values of a payload that fits `words`, as views. Raises `DeltaError`."""
    try:
        view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        data = np.frombuffer(view.cast("B"), np.uint8)
    except (TypeError, ValueError) as error:  # an empty one cannot be cast, and a strided one neither
        raise DeltaError(f"the payload is no contiguous bytes: {error}") from None
    if data.size < HEADER_BYTES:
        raise DeltaError(f"{data.size} bytes are no delta, its header alone has {HEADER_BYTES}")
    magic, width, elements, changed, gap_bytes = _HEADER.unpack(data[:HEADER_BYTES].tobytes())
    if magic != _MAGIC or data[5:8].any():
        raise DeltaError("the payload does not begin like a delta: it is none, or one of another version")
    if width != words.itemsize or elements != words.size:
        raise DeltaError(
            f"a delta for {elements} elements of {width} bytes, the tensor has {words.size} of {words.itemsize}: send it whole"
        )
    if data.size != HEADER_BYTES + gap_bytes + changed * width:
        raise DeltaError(
            f"{data.size} bytes, a delta of {changed} elements and {gap_bytes} gap bytes has "
            f"{HEADER_BYTES + gap_bytes + changed * width}: cut short, or something was added"
        )
    gaps = data[HEADER_BYTES : HEADER_BYTES + gap_bytes]
    found, unchanged = 0, 0
    for begin in range(0, gap_bytes, block_bytes):
        part = gaps[begin : begin + block_bytes]
        found += int(np.count_nonzero(part != _SKIP))
        unchanged += int(part.sum(dtype=np.int64))
    if found != changed:
        raise DeltaError(f"gaps for {found} elements and values for {changed}")
    if gap_bytes and gaps[-1] == _SKIP:
        raise DeltaError("the last gap has no end")
    if unchanged + changed > elements:
        raise DeltaError(f"the last index is {unchanged + changed - 1}, the tensor has {elements} elements")
    return gaps, data[HEADER_BYTES + gap_bytes :].view(f"<u{width}")
