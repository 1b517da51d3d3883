"""Replay: tapped samples bounded in bytes, with a held-out share that is never trained on.

Short answers finish first. A learner that trains while the last long answers run would see little else, and it is the long
ones that drafting is for: so the longest answers of the round before have a share of every draw, and are the last to go
("Taming the Long Tail", arXiv 2511.16665, keeps them for the same reason).
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

import torch

from trainer_bridge.errors import SampleError
from trainer_bridge.taps import TapSample

LONGEST_SHARE = 0.25
"""Share of a round's samples that count as its longest."""
ROUND_SAMPLES = 8
"""Fewer new samples than this make no round: a lull between two requests is none."""


class Replay:
    """Two stores of samples, split by group so that siblings of one prompt are never on both sides.

    The oldest samples make room for new ones, each store within its share of the bytes. Whatever is dropped is counted
    by reason in `dropped`.
    """

    def __init__(
        self, *, limit_bytes: int, held_out_share: float, seed: int, long_quota: float = 0.0, least_held_out: int = 0
    ) -> None:
        """`limit_bytes`: bound of both stores together; `held_out_share`: share of groups, and of bytes, held out;
        `long_quota`: share of each draw that goes to the longest answers of the last round; `least_held_out`: so many held-out
        samples may take more than their share of the bytes, at most half of all."""
        self.limit_bytes, self.held_out_share, self.long_quota = limit_bytes, held_out_share, long_quota
        self.dropped: Counter[str] = Counter()
        self.added = 0
        self._least_held_out = least_held_out
        self._train: OrderedDict[str, TapSample] = OrderedDict()
        self._held_out: OrderedDict[str, TapSample] = OrderedDict()
        self._bytes = {id(self._train): 0, id(self._held_out): 0}
        self._random = random.Random(seed)
        self._order: list[str] = []
        self._round: deque[str] = deque(maxlen=1 << 16)
        self._longest: dict[str, None] = {}
        self._longest_order: list[str] = []
        self._quota_due = 0.0

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
        limit = self._limit_of(held_out)
        if sample.nbytes > limit:
            self.dropped["too_large"] += 1
            return False
        if sample.request_id in store:
            self.dropped["duplicate_id"] += 1
            return False
        store[sample.request_id] = sample
        self._bytes[id(store)] += sample.nbytes
        self.added += 1
        if not held_out:
            self._round.append(sample.request_id)
        self._evict(self._held_out, held_out=True, newcomer=sample.request_id)
        # What the held-out samples took beyond their share is the training samples' loss.
        self._evict(self._train, held_out=False, newcomer=sample.request_id)
        return True

    def _limit_of(self, held_out: bool) -> float:
        """Bytes that one store may hold now."""
        share = self.held_out_share * self.limit_bytes
        if not held_out:
            return self.limit_bytes - max(share, self._bytes[id(self._held_out)])
        return max(share, 0.5 * self.limit_bytes) if len(self._held_out) <= self._least_held_out else share

    def _evict(self, store: OrderedDict[str, TapSample], *, held_out: bool, newcomer: str) -> None:
        while store and self._bytes[id(store)] > self._limit_of(held_out):
            # The last round's longest go when nothing else is left but the newcomer.
            oldest = next((key for key in store if key not in self._longest and key != newcomer), next(iter(store)))
            self._remove(store, oldest, "evicted")

    def _remove(self, store: OrderedDict[str, TapSample], key: str, reason: str) -> None:
        self._bytes[id(store)] -= store.pop(key).nbytes
        self._longest.pop(key, None)
        self.dropped[reason] += 1

    def round_ended(self) -> bool:
        """Generation rests: what came since the last call is a round, and its longest answers get their quota.

        False when too little came to make one.
        """
        new = [key for key in self._round if key in self._train]
        if len(new) < ROUND_SAMPLES:
            return False
        new.sort(key=lambda key: self._train[key].num_answer_tokens, reverse=True)
        self._longest = dict.fromkeys(new[: max(1, int(LONGEST_SHARE * len(new)))])
        self._longest_order.clear()
        self._round.clear()
        return True

    def expire(self, oldest_policy_version: int) -> int:
        """Drop samples of older policies; how many. Their teacher's head is gone, and they are of another distribution."""
        before = self.dropped["aged"]
        for store in (self._train, self._held_out):
            for key in [key for key, sample in store.items() if sample.policy_version < oldest_policy_version]:
                self._remove(store, key, "aged")
        return self.dropped["aged"] - before

    def draw(self, count: int) -> list[TapSample]:
        """`count` training samples: the quota from the last round's longest, the rest from all.

        Both without replacement: each sample is drawn once before any is drawn again.
        """
        drawn: list[TapSample] = []
        while len(drawn) < count and self._train:
            self._quota_due += self.long_quota if self._longest else 0.0
            if self._quota_due >= 1:
                self._quota_due -= 1
                self._longest_order = self._longest_order or self._shuffled(self._longest)
                sample = self._train.get(self._longest_order.pop())
            else:
                self._order = self._order or self._shuffled(self._train)
                sample = self._train.get(self._order.pop())
            if sample is not None:
                drawn.append(sample)
        return drawn

    def _shuffled(self, keys: Iterable[str]) -> list[str]:
        order = list(keys)
        self._random.shuffle(order)
        return order

    def samples(self) -> list[TapSample]:
        """Every sample held, the held-out ones last."""
        return [*self._train.values(), *self._held_out.values()]

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
    def num_longest(self) -> int:
        """Training samples that the quota is for."""
        return len(self._longest)

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
