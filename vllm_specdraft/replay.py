"""Replay: tapped samples bounded in bytes, with a held-out share that is never trained on."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict

import torch

from trainer_bridge.errors import SampleError
from trainer_bridge.taps import TapSample


class Replay:
    """Two stores of samples, split by group so that siblings of one prompt are never on both sides.

    The oldest samples make room for new ones, each store within its share of the bytes. Whatever is dropped is counted
    by reason in `dropped`.
    """

    def __init__(self, *, limit_bytes: int, held_out_share: float, seed: int) -> None:
        """`limit_bytes`: bound of both stores together; `held_out_share`: share of groups, and of bytes, held out."""
        self.limit_bytes, self.held_out_share = limit_bytes, held_out_share
        self.dropped: Counter[str] = Counter()
        self.added = 0
        self._train: OrderedDict[str, TapSample] = OrderedDict()
        self._held_out: OrderedDict[str, TapSample] = OrderedDict()
        self._bytes = {id(self._train): 0, id(self._held_out): 0}
        self._random = random.Random(seed)
        self._order: list[str] = []

    def is_held_out(self, group_id: str) -> bool:
        """Side of the split a group falls on: a property of its id alone, the same in every process and run."""
        value = int.from_bytes(hashlib.blake2b(group_id.encode(), digest_size=8).digest(), "big")
        return value < self.held_out_share * 2**64

    def add(self, sample: TapSample) -> bool:
        """Take a sample; False when it was refused (counted in `dropped`)."""
        try:
            sample.validate()
        except SampleError:
            self.dropped["invalid"] += 1
            return False
        answer = sample.loss_mask
        if not bool((answer[1:-1] & answer[2:]).any()):
            # No two answer tokens in a row: nothing the engine would have drafted, so no label in any pass.
            self.dropped["nothing_to_draft"] += 1
            return False
        held_out = self.is_held_out(sample.group_id)
        store = self._held_out if held_out else self._train
        limit = self.limit_bytes * (self.held_out_share if held_out else 1 - self.held_out_share)
        if sample.nbytes > limit:
            self.dropped["too_large"] += 1
            return False
        if sample.request_id in store:
            self.dropped["duplicate_id"] += 1
            return False
        store[sample.request_id] = sample
        self._bytes[id(store)] += sample.nbytes
        self.added += 1
        while self._bytes[id(store)] > limit:
            _, old = store.popitem(last=False)
            self._bytes[id(store)] -= old.nbytes
            self.dropped["evicted"] += 1
        return True

    def draw(self, count: int) -> list[TapSample]:
        """`count` training samples without replacement: every sample is drawn once before any is drawn again."""
        drawn: list[TapSample] = []
        while len(drawn) < count and self._train:
            if not self._order:
                self._order = list(self._train)
                self._random.shuffle(self._order)
            sample = self._train.get(self._order.pop())
            if sample is not None:
                drawn.append(sample)
        return drawn

    def held_out(self, count: int) -> list[TapSample]:
        """The newest `count` held-out samples."""
        return list(self._held_out.values())[-count:]

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """``[vocab]`` int64: answer tokens of the training samples."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for sample in self._train.values():
            counts += torch.bincount(sample.token_ids[sample.loss_mask], minlength=vocab_size)
        return counts

    @property
    def num_train(self) -> int:
        """Number of training samples."""
        return len(self._train)

    @property
    def num_held_out(self) -> int:
        """Number of held-out samples."""
        return len(self._held_out)

    @property
    def nbytes(self) -> int:
        """Bytes of all samples held."""
        return sum(self._bytes.values())
