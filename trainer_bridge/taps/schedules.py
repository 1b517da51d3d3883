"""What a pipeline schedule asks of the channel that carries taps to the draft: how many microbatches are under way at once.

A schedule is, per rank, the order of its operations: forward and backward of a microbatch through a chunk (one of the model's
consecutive parts; with virtual stages a rank has several). Nothing is said of how long they take: a bound must hold whatever they
do, so it is read off the order that they force on each other. A microbatch's taps are put where its chunk runs forward and released
after the draft's work on it.

Worked example, two ranks, plain 1F1B, three microbatches. The first rank may run F0 F1 before it needs anything that comes after
the draft's work on microbatch 0 (B0 does), so two microbatches of its taps are under way at most::

    rank 0   F0 F1 B0 F2 B1 B2
    rank 1   F0 D0 B0 F1 D1 B1 F2 D2 B2          (D: the draft's work, with the last chunk's forward)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer_bridge.errors import ConfigError

Kind = Literal["F", "B", "W", "D"]
"""Forward; backward (of the inputs alone, where weights have a turn of their own); that turn; the draft's work."""


@dataclass(frozen=True, order=True)
class Op:
    """One operation of a rank."""

    kind: Kind
    chunk: int
    """Counted over the whole model, from 0."""
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order of all ranks' operations. Raises `ConfigError` for one that cannot run."""

    name: str
    ranks: tuple[tuple[Op, ...], ...]
    """Per rank its operations, in order; without the draft's."""

    def __post_init__(self) -> None:
        places = [op for rank in self.ranks for op in rank]
        if len(set(places)) < len(places):
            raise ConfigError(f"schedule {self.name} runs something twice")
        _order(self._before(self.ranks), f"schedule {self.name}")

    @property
    def chunks(self) -> int:
        """Parts of the model."""
        return 1 + max(op.chunk for rank in self.ranks for op in rank)

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return 1 + max(op.microbatch for rank in self.ranks for op in rank)

    def rank_of(self, chunk: int) -> int:
        """The rank that a chunk lies on."""
        return next(r for r, ops in enumerate(self.ranks) if any(op.chunk == chunk for op in ops))

    def with_draft(self, defer: int = 0) -> tuple[tuple[Op, ...], ...]:
        """The ranks' operations with the draft's work among the last chunk's.

        Args:
            defer: forwards of the last chunk that come between a microbatch's own and the draft's work on it; what is left at the
                end runs there. 0: at once. The number of microbatches or more: all of it at the end of the step.
        """
        last = self.chunks - 1
        rank = self.rank_of(last)
        ops: list[Op] = []
        waiting: list[int] = []
        for op in self.ranks[rank]:
            ops.append(op)
            if (op.kind, op.chunk) == ("F", last):
                waiting.append(op.microbatch)
                if len(waiting) > defer:
                    ops.append(Op("D", last, waiting.pop(0)))
        ops += [Op("D", last, microbatch) for microbatch in waiting]
        return tuple(tuple(ops) if r == rank else own for r, own in enumerate(self.ranks))

    def slots(self, defer: int = 0) -> dict[int, int]:
        """Per chunk the most microbatches whose taps are put and not yet released, whatever operations take."""
        ranks = self.with_draft(defer)
        before = self._before(ranks)
        order = _order(before, self.name)
        draft = [op for op in ranks[self.rank_of(self.chunks - 1)] if op.kind == "D"]
        needed = dict.fromkeys(range(self.chunks), 0)
        after: dict[Op, set[Op]] = {}
        for op in reversed(order):
            after.setdefault(op, set())
            for earlier in before[op]:
                after.setdefault(earlier, set()).update({op}, after[op])
        for count, release in enumerate(draft):
            # All that need not wait for this release may have happened before it; what was released before is free again.
            for chunk in needed:
                put = sum(1 for op in order if (op.kind, op.chunk) == ("F", chunk) and op not in after[release])
                needed[chunk] = max(needed[chunk], put - count)
        return needed

    def check_slots(self, slots: Mapping[int, int], defer: int = 0) -> None:
        """Raise `ConfigError` when so few slots per chunk, with puts that wait for a free one, would stop the schedule for ever."""
        ranks = self.with_draft(defer)
        before = self._before(ranks)
        released = [op for op in ranks[self.rank_of(self.chunks - 1)] if op.kind == "D"]
        for chunk, count in slots.items():
            puts = [op for ops in ranks for op in ops if (op.kind, op.chunk) == ("F", chunk)]
            for put, release in zip(puts[count:], released, strict=False):
                before[put] = {*before[put], release}
        _order(before, f"schedule {self.name} with {dict(slots)} slots")

    def _before(self, ranks: Sequence[Sequence[Op]]) -> dict[Op, set[Op]]:
        """Per operation those that must be over before it begins, not counting what follows from others."""
        known = {op for ops in ranks for op in ops}
        before: dict[Op, set[Op]] = {}
        for ops in ranks:
            for index, op in enumerate(ops):
                needed = {ops[index - 1]} if index else set()
                if op.kind == "F" and op.chunk:
                    needed.add(Op("F", op.chunk - 1, op.microbatch))
                if op.kind == "B":
                    needed |= {Op("F", op.chunk, op.microbatch), Op("B", op.chunk + 1, op.microbatch)} & known
                if op.kind == "W":
                    needed.add(Op("B", op.chunk, op.microbatch))
                if op.kind == "D":
                    needed.add(Op("F", op.chunk, op.microbatch))
                if missing := needed - known:
                    raise ConfigError(f"schedule {self.name}: {op} needs {sorted(missing)[0]}, which no rank runs")
                before[op] = needed
        return before


def _order(before: Mapping[Op, set[Op]], name: str) -> list[Op]:
    """Operations so that each comes after what it needs. Raises `ConfigError` when they wait for each other."""
    left = {op: set(needed) for op, needed in before.items()}
    followers: dict[Op, list[Op]] = {op: [] for op in before}
    for op, needed in before.items():
        for earlier in needed:
            followers[earlier].append(op)
    ready, order = [op for op, needed in left.items() if not needed], []
    while ready:
        op = ready.pop()
        order.append(op)
        for follower in followers[op]:
            left[follower].discard(op)
            if not left[follower]:
                ready.append(follower)
    if len(order) < len(before):
        stuck = sorted(set(before) - set(order))[0]
        raise ConfigError(f"{name} never ends: {stuck} waits for what waits for it")
    return order


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Plain 1F1B: each rank runs ahead by the ranks behind it, then forward and backward take turns."""
    ranks = []
    for rank in range(stages):
        ahead = min(microbatches, stages - rank - 1)
        ranks.append(
            _turns([Op("F", rank, m) for m in range(microbatches)], [Op("B", rank, m) for m in range(microbatches)], ahead)
        )
    return Schedule(name="1F1B", ranks=tuple(ranks))


def interleaved(stages: int, virtual: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2): each rank has `virtual` chunks, `stages` apart.

    Raises `ConfigError` when the microbatches do not fall into groups of `stages`.
    """
    if microbatches % stages:
        raise ConfigError(f"interleaved 1F1B over {stages} stages needs a multiple of {stages} microbatches, not {microbatches}")
    total, ranks = microbatches * virtual, []
    for rank in range(stages):

        def turn(index: int, rank: int = rank, *, backward: bool) -> tuple[int, int]:
            """Chunk and microbatch of a rank's so-many-th operation of one direction."""
            group, within = divmod(index, stages * virtual)
            own, place = divmod(within, stages)
            own = virtual - 1 - own if backward else own
            return own * stages + rank, group * stages + place

        forwards = [Op("F", *turn(i, backward=False)) for i in range(total)]
        backwards = [Op("B", *turn(i, backward=True)) for i in range(total)]
        ahead = total if microbatches == stages else min(total, 2 * (stages - rank - 1) + (virtual - 1) * stages)
        ranks.append(_turns(forwards, backwards, ahead))
    return Schedule(name="interleaved 1F1B", ranks=tuple(ranks))


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Forward passes alone, as for logprobs: nothing holds the first rank back but the channel itself."""
    ranks = tuple(tuple(Op("F", rank, m) for m in range(microbatches)) for rank in range(stages))
    return Schedule(name="forward only", ranks=ranks)


def of_pipelining(order: Mapping[int, Iterable[Any]], name: str) -> Schedule:
    """The schedule in ``pipeline_order`` of a multi-stage schedule of `torch.distributed.pipelining`.

    Its actions have ``stage_index``, ``computation_type`` and ``microbatch_index``; those that compute nothing are left out.
    """
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "B", "W": "W"}
    ranks = []
    for rank in sorted(order):
        ops = []
        for action in order[rank]:
            if action is not None and (kind := kinds.get(str(getattr(action.computation_type, "value", action.computation_type)))):
                ops.append(Op(kind, action.stage_index, action.microbatch_index))
        ranks.append(tuple(ops))
    return Schedule(name=name, ranks=tuple(ranks))


def _turns(forwards: list[Op], backwards: list[Op], ahead: int) -> tuple[Op, ...]:
    """So many forwards ahead, then forward and backward in turns, then the backwards that are left."""
    ops = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        ops += [forward, backward]
    return tuple(ops + backwards[len(forwards) - ahead :])
