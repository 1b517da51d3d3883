"""Rows of prompts that several requests share: where a prefix-cache hit left a hole, the rows of whoever computed it fill it.

vLLM computes a shared prompt once, so its siblings never pass those positions through the model. But same tokens under the
same policy have the same states: the rows lie in the store of a running request, or in a sample of the replay. The index
knows them by a hash chained over blocks of tokens, and holds only weak references: what is gone from its owner is gone here.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch

BLOCK_TOKENS = 16
"""vLLM's blocks are multiples of this, so every hit ends at a boundary of ours."""


class RowOwner(Protocol):
    """Something that holds the rows of a token sequence's beginning."""

    def first_rows(self, count: int) -> torch.Tensor | None:
        """``[count, width]``: taps and final state side by side of positions ``0..count-1``; None when it has them not."""


KEPT_OWNERS = 8
"""Owners remembered of one prefix, the newest: of siblings the later ones live longer."""


class PrefixIndex:
    """Finds the owner of a prefix's rows."""

    def __init__(self) -> None:
        self._owners: dict[bytes, list[weakref.ref[RowOwner]]] = {}

    def add(self, keys: Sequence[bytes], owner: RowOwner) -> None:
        """`owner` holds the rows of the prefixes with these keys, for as long as it lives."""
        for key in keys:
            references = self._owners.setdefault(key, [])
            references.append(weakref.ref(owner, functools.partial(self._gone, key)))
            del references[:-KEPT_OWNERS]

    def _gone(self, key: bytes, reference: weakref.ref[RowOwner]) -> None:
        references = self._owners.get(key, [])
        # Gone ones are equal only to themselves.
        if reference in references:
            references.remove(reference)
        if not references:
            self._owners.pop(key, None)

    def find(self, chain: PrefixChain, count: int) -> torch.Tensor | None:
        """``[count, width]``: rows ``0..count-1`` of the chain's tokens, or None when nobody has them (any more)."""
        blocks = -(-count // BLOCK_TOKENS)
        keys = chain.keys_until(blocks * BLOCK_TOKENS)
        if len(keys) < blocks:
            return None
        for reference in reversed(self._owners.get(keys[blocks - 1], [])):
            owner = reference()
            if owner is not None and (rows := owner.first_rows(count)) is not None:
                return rows
        return None


class PrefixChain:
    """Hashes of a token sequence's whole blocks, each chained to the one before, computed as far as asked for.

    >>> PrefixChain(0, range(40)).keys_until(40) == PrefixChain(0, range(32)).keys_until(32)
    True
    """

    def __init__(self, policy_version: int, token_ids: Sequence[int]) -> None:
        """`token_ids` may grow later; tokens already hashed must stay what they were."""
        self._ids = token_ids
        self._last = policy_version.to_bytes(8, "big")
        self._keys: list[bytes] = []

    def keys_until(self, count: int) -> list[bytes]:
        """Keys of the whole blocks among the first `count` tokens."""
        blocks = min(count, len(self._ids)) // BLOCK_TOKENS
        while len(self._keys) < blocks:
            start = len(self._keys) * BLOCK_TOKENS
            block = array("q", self._ids[start : start + BLOCK_TOKENS]).tobytes()
            self._last = hashlib.blake2b(self._last + block, digest_size=16).digest()
            self._keys.append(self._last)
        return self._keys[:blocks]
