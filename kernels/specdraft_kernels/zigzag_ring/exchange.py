"""Moving rows between the ranks of a group: every transfer is started, waited for and counted here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Pending:
    """Transfers that are under way."""

    def __init__(self, works: Sequence[Any], ready_at: float, kept: Sequence[torch.Tensor]) -> None:
        # What is sent must live until it is gone.
        self._works, self._ready_at, self._kept = works, ready_at, kept

    def wait(self) -> None:
        """Until all have arrived and left."""
        for work in self._works:
            work.wait()
        if (left := self._ready_at - time.perf_counter()) > 0:
            time.sleep(left)
        self._kept = ()


class Exchange:
    """Point-to-point transfers within `group` (gloo or NCCL), with a count of what this rank sent.

    `delay_s` is added to every transfer, as a slow link would: it shows what is hidden behind computation and what is not.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, delay_s: float = 0.0) -> None:
        self.group = group
        self.rank, self.ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        self.delay_s = delay_s
        self.sent_bytes = 0
        self.transfers = 0

    def start(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> Pending:
        """Begin to send ``(to rank, contiguous tensor)`` and to receive ``(from rank, buffer)``; empty tensors stay here.

        Between two ranks transfers match in their order.
        """
        operations = [
            dist.P2POp(function, tensor, group=self.group, group_peer=peer)
            for function, pairs in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in pairs
            if tensor.numel()
        ]
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        self.transfers += 1
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, time.perf_counter() + self.delay_s, [tensor for _, tensor in sends])

    def to_next(self, tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> Pending:
        """Send `tensors` to the next rank of the ring and receive the previous rank's into `buffers`."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        return self.start([(after, tensor) for tensor in tensors], [(before, buffer) for buffer in buffers])
