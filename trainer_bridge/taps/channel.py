"""TapChannel: taps from every pipeline stage straight to the draft's stage, on a way of their own (arXiv 2609.07108, section 4).

The schedule's communicators are not touched, and the schedule does not know. Each chunk with taps has slots, as many as the
schedule can have under way (`trainer_bridge.taps.schedules`), allocated once; a microbatch's taps are found by chunk and
microbatch, so interleaved stages need nothing more. A tensor-parallel rank ships its share of the columns to the same
tensor-parallel rank of the draft's stage.

Carriers. ``shm``: ranks of one host share one file; the writer's copy into the slot is the only one. ``group``: any process
group, host to host (`trainer_bridge.taps.group_ring`). ``p2p``: a communicator per chunk between its rank and the draft's, with
slots where the taps are: NCCL from GPU to GPU (never run), gloo otherwise. ``cuda``: as ``shm``, with the slots on the GPU of the
draft's rank (`trainer_bridge.taps.device_slots`; never run).
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from trainer_bridge.errors import ConfigError, TapPeerError
from trainer_bridge.taps import device_slots
from trainer_bridge.taps.group_ring import HOST, GroupReader, GroupWriter
from trainer_bridge.taps.ring import Reading, Shape, TapRing, Writing, format_memory, memory_bytes
from trainer_bridge.taps.tap_plan import Source, TapPlan

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "specdraft-taps-"
Carrier = Literal["shm", "group", "p2p", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What one slot holds at most, per tap layer."""

    rows: int
    """Of the longest microbatch, on one context-parallel rank."""
    width: int
    """Columns that one tensor-parallel rank ships."""
    dtype: torch.dtype

    def nbytes(self, layers: int) -> int:
        """Bytes for so many tap layers."""
        return self.rows * self.width * layers * self.dtype.itemsize


class TapChannel:
    """One pipeline rank's ends: of the chunks it ships from, and on the draft's rank of all that ship to it."""

    def __init__(
        self,
        plan: TapPlan,
        slot: Slot,
        *,
        pipeline: dist.ProcessGroup | None = None,
        carrier: Carrier = "shm",
        device: torch.device = HOST,
        timeout_s: float = 120.0,
    ) -> None:
        """Every rank of the pipeline makes one, with the same arguments.

        Args:
            plan: of all ranks (`trainer_bridge.taps.tap_plan.resolve`).
            pipeline: a group of the pipeline's ranks that nobody else uses, in the order of its stages.
            device: where the taps are made; ``p2p`` has its slots there.
            timeout_s: longest wait for taps, or for room for them.

        Raises:
            ConfigError: ranks have other slots or carriers, or there is no room for the slots.
            TapPeerError: ranks do not see the same shared memory (they are on several hosts: take ``group``).
        """
        self.plan, self.slot, self.timeout_s, self.carrier = plan, slot, timeout_s, carrier
        self.rank = dist.get_rank(pipeline) if pipeline is not None else 0
        self.sources = plan.sources()
        self._writers: dict[int, TapRing | GroupWriter] = {}
        self._readers: dict[int, TapRing | GroupReader] = {}
        self._pairs: list[Any] = []
        if self.sources and pipeline is not None:
            self._compare(pipeline)
            if carrier == "group":
                self._open_group(pipeline)
            elif carrier == "p2p":
                self._open_pairs(pipeline, device)
            else:
                self._open_shared(pipeline)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, by the formula: slots times rows times columns times bytes of an element, summed over chunks."""
        return sum(source.slots * self.slot.nbytes(len(source.layers)) for source in self.sources)

    def put(self, chunk: int, step: int, microbatch: int, rows: int) -> Writing:
        """A slot for a microbatch's taps of one chunk; see `TapRing.begin`."""
        shape = self._shape(rows, len(self.plan.of_chunk(chunk)))
        return self._writers[chunk].begin(step, microbatch, shape, timeout_s=self.timeout_s)

    def get(self, chunk: int, step: int, microbatch: int, rows: int) -> Reading:
        """A microbatch's taps of one chunk; see `TapRing.get`."""
        shape = self._shape(rows, len(self.plan.of_chunk(chunk)))
        return self._readers[chunk].get(step, microbatch, shape, timeout_s=self.timeout_s)

    def ships(self, chunk: int) -> bool:
        """Whether this rank ships a chunk's taps to another one."""
        return chunk in self._writers

    def close(self) -> None:
        """Wait until all that was put has left: over ``p2p``, until it was taken. What is there is still to be read; raises as
        `put` does."""
        for writer in self._writers.values():
            if isinstance(writer, GroupWriter):
                writer.flush(timeout_s=self.timeout_s)
        self._pairs.clear()

    def report(self) -> dict[str, dict[str, float]]:
        """Per chunk of this rank's ends: slots, bytes, most slots in use at once, seconds waited."""
        found = {}
        for chunk, ring in {**self._writers, **self._readers}.items():
            found[f"chunk {chunk}"] = {
                "slots": ring.slots,
                "bytes": ring.slots * ring.slot_bytes,
                "high_water": ring.high_water,
                "waited_s": ring.waited_s,
            }
        return found

    def _shape(self, rows: int, layers: int) -> Shape:
        return Shape(rows=rows, widths=(self.slot.width,) * layers, dtype=self.slot.dtype)

    def _compare(self, pipeline: dist.ProcessGroup) -> None:
        """Raise `ConfigError` on all ranks when they have other slots, which only a transfer would notice."""
        mine = torch.tensor([self.slot.rows, self.slot.width, self.slot.dtype.itemsize, get_args(Carrier).index(self.carrier)])
        found = torch.cat([mine, -mine])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=pipeline)
        most, least = found[:4].tolist(), (-found[4:]).tolist()
        if most != least:
            raise ConfigError(
                f"pipeline ranks have slots of {least[0]} to {most[0]} rows and {least[1]} to {most[1]} columns of {least[2]} to "
                f"{most[2]} bytes, and {'one carrier' if most[3] == least[3] else 'two carriers'}: give all ranks the same"
            )

    def _open_shared(self, pipeline: dist.ProcessGroup) -> None:
        sizes = {one.chunk: (one.slots, self.slot.nbytes(len(one.layers))) for one in self.sources}
        on_device = self.carrier == "cuda"
        bounds = [0, *itertools.accumulate(memory_bytes(slots, 0 if on_device else size) for slots, size in sizes.values())]
        parts = [(source, slice(*pair)) for source, pair in zip(self.sources, itertools.pairwise(bounds), strict=True)]
        draft, memory = self.rank == self.plan.draft_rank, None
        name = torch.tensor([int.from_bytes(secrets.token_bytes(7), "big")])
        # Whether the draft's rank finds no room, and how many others do not see what it has: all ranks hear of both.
        faults = torch.zeros(2, dtype=torch.int64)
        if draft:
            try:
                memory = _map(int(name), bounds[-1], create=True)
            except OSError:
                faults[0] = 1
            else:
                for source, part in parts:
                    slots, size = sizes[source.chunk]
                    format_memory(memory[part], slots=slots, slot_bytes=size, stamps_only=on_device)
        dist.broadcast(name, group=pipeline, group_src=self.plan.draft_rank)
        if not draft:
            try:
                memory = _map(int(name), bounds[-1], create=False)
            except OSError:
                faults[1] = 1
        dist.all_reduce(faults, group=pipeline)
        if draft and memory is not None:
            # All have it open, or do without: its name goes, and nothing is left behind, however a run ends.
            (SHARED_MEMORY / f"{PREFIX}{int(name):x}").unlink()
        if faults[0]:
            raise ConfigError(
                f"{SHARED_MEMORY} on the draft's host has no room for {bounds[-1]} bytes of tap slots: make it larger, or take "
                "carrier='group'"
            )
        if memory is None or faults[1]:
            raise TapPeerError(
                f"{int(faults[1])} of {dist.get_world_size(pipeline)} pipeline ranks do not see the draft's shared memory: ranks "
                "on several hosts need carrier='group' or 'p2p'"
            )
        held: dict[int, torch.Tensor] = {}
        if on_device:
            owned = device_slots.allocate(sizes, torch.device("cuda", torch.cuda.current_device())) if draft else None
            held = device_slots.broadcast(owned, sizes, group=pipeline, owner=self.plan.draft_rank)
        for source, part in parts:
            if draft or source.rank == self.rank:
                data = list(held[source.chunk]) if on_device else None
                ends: dict[int, Any] = self._readers if draft else self._writers
                ends[source.chunk] = TapRing(memory[part], name=_label(source), writes=not draft, data=data)
        # A reader that looks for its writer's process finds one from here on.
        dist.barrier(group=pipeline)

    def _open_group(self, pipeline: dist.ProcessGroup) -> None:
        for source in self.sources:
            self._open_ends(source, pipeline, peers=(source.rank, self.plan.draft_rank))

    def _open_pairs(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        # Made by their two ranks alone: a group of torch's would have to be made by all ranks of the world.
        token = torch.tensor([int.from_bytes(secrets.token_bytes(7), "big")])
        dist.broadcast(token, group=pipeline, group_src=self.plan.draft_rank)
        for source in self.sources:
            if self.rank in (source.rank, self.plan.draft_rank):
                pair = self._pair(f"{PREFIX}{int(token):x}/{source.chunk}", int(self.rank != source.rank), device)
                self._pairs.append(pair)
                self._open_ends(source, pair, peers=(0, 1), device=device, on_demand=True)

    def _pair(self, name: str, rank: int, device: torch.device) -> Any:
        """A communicator of two: the rank that writes is 0, the one that reads 1."""
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        # NCCL ends the process when a transfer takes longer than this: our own deadline comes first.
        limit = timedelta(seconds=2 * self.timeout_s)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        return dist.ProcessGroupGloo(store, rank, 2, limit)

    def _open_ends(
        self,
        source: Source,
        group: Any,
        *,
        peers: tuple[int, int],
        device: torch.device = HOST,
        on_demand: bool = False,
    ) -> None:
        """This rank's end of a chunk; `peers`: ranks in `group` that write and read."""
        common: dict[str, Any] = {
            "tag": source.chunk, "slots": source.slots, "slot_bytes": self.slot.nbytes(len(source.layers)),
            "name": _label(source), "device": device,
        }  # fmt: skip
        if self.rank == source.rank:
            self._writers[source.chunk] = GroupWriter(group, to=peers[1], **common)
        elif self.rank == self.plan.draft_rank:
            self._readers[source.chunk] = GroupReader(group, of=peers[0], on_demand=on_demand, **common)


def _label(source: Source) -> str:
    return f"taps of chunk {source.chunk} (pipeline rank {source.rank})"


def _map(token: int, size: int, *, create: bool) -> np.ndarray:
    """The shared memory of one channel."""
    path = SHARED_MEMORY / f"{PREFIX}{token:x}"
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            # Not sparse: a full /dev/shm is an error here, not a signal later.
            try:
                os.posix_fallocate(handle, 0, size)
            except OSError:
                path.unlink()
                raise
        return np.frombuffer(mmap.mmap(handle, size), np.uint8)
    finally:
        os.close(handle)
