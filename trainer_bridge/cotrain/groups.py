"""Process groups that nobody else uses."""

from __future__ import annotations

import torch
import torch.distributed as dist


def own_group(group: dist.ProcessGroup, *, backend: str = "gloo") -> dist.ProcessGroup:
    """A new group of the same ranks in the same order, for transfers of host memory.

    Every rank of the world calls it, each with its group; all these groups have the same size.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(group))
    if dist.get_backend() == "nccl":
        ranks = ranks.cuda()
    said = [torch.zeros_like(ranks) for _ in range(dist.get_world_size())]
    dist.all_gather(said, ranks)
    mine: dist.ProcessGroup | None = None
    # All ranks make all groups, in one order.
    for members in sorted({tuple(each.tolist()) for each in said}):
        made = dist.new_group(list(members), backend=backend)
        if dist.get_rank() in members:
            mine = made
    assert mine is not None
    return mine
