"""Digests and the finite check, over bytes: both sides compute the same over what they see. Imports no torch.

xxh3-128 finds every fault of memory, network and software; it is no signature. Who may send at all is for the control
plane to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import xxhash

from trainer_bridge.plan import Extents, blocks

CHUNK_BYTES = 1 << 18
"""Bytes that are worked on at once: they stay in the processor's cache from one pass to the next."""
_EXPONENT = {
    "float16": 0x7C00, "bfloat16": 0x7F80,
    # Of the 8-bit types, e4m3fn has one NaN and no infinity.
    "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F,
}  # fmt: skip
"""Magnitude bits from which on a number is infinite or none."""


def view_of(data: Any) -> memoryview:
    """Contiguous data as bytes, without a copy."""
    buffer: Any = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else data
    return memoryview(buffer).cast("B")


class Hasher:
    """Digest of bytes that come in parts."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, part: np.ndarray | bytes | memoryview) -> None:
        """Add contiguous bytes."""
        self._hash.update(view_of(part))

    def digest(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()


def digest(data: np.ndarray | bytes | memoryview) -> bytes:
    """16 bytes over contiguous data."""
    hasher = Hasher()
    hasher.update(data)
    return hasher.digest()


def tensor_digest(
    data: np.ndarray, shape: Extents, itemsize: int, known: Mapping[tuple[Extents, Extents], bytes] | None = None
) -> bytes:
    """16 bytes over a whole tensor, which do not depend on how it travelled.

    That of its bytes; of a tensor that is larger than a block, that of its blocks' digests in order.

    Args:
        data: ``[bytes]`` uint8.
        known: digests of boxes (start, shape): those that are blocks need not be read again.
    """
    at, found = 0, []
    for box in blocks(shape, itemsize=itemsize):
        count = prod(box[1]) * itemsize
        found.append((known or {}).get(box) or digest(data[at : at + count]))
        at += count
    return found[0] if len(found) == 1 else digest(b"".join(found))


def digest_and_check(data: np.ndarray, dtype: str) -> tuple[bytes, bool]:
    """Digest, and whether all numbers are finite, of contiguous elements as unsigned integers of their width.

    One walk in chunks, so that each is read from memory once. Integers and booleans are always finite.
    """
    hasher, finite = Hasher(), True
    flat = data.reshape(-1)
    step = max(1, CHUNK_BYTES // flat.itemsize)
    check = _finite_check(dtype, min(step, flat.size), flat.dtype)
    for begin in range(0, flat.size, step):
        chunk = flat[begin : begin + step]
        hasher.update(chunk)
        finite = finite and (check is None or check(chunk))
    return hasher.digest(), finite


def _finite_check(dtype: str, size: int, words: np.dtype) -> Callable[[np.ndarray], bool] | None:
    """Says of a chunk of at most `size` words whether all its numbers are finite; None where they always are."""
    if dtype in ("float32", "float64"):
        flags = np.empty(size, bool)
        kind = f"f{words.itemsize}"
        return lambda chunk: bool(np.isfinite(chunk.view(kind), out=flags[: chunk.size]).all())
    limit = _EXPONENT.get(dtype)
    if limit is None:
        return None
    scratch, magnitude = np.empty(size, words), words.type((1 << (8 * words.itemsize - 1)) - 1)
    # Of types that numpy does not know: by their magnitude bits.
    return lambda chunk: int(np.bitwise_and(chunk, magnitude, out=scratch[: chunk.size]).max()) < limit
