"""The other ranks of a replica: agreement about what is staged and what was committed, over vLLM's own host-side groups."""

from __future__ import annotations

from datetime import timedelta

import torch
from vllm.distributed import parallel_state

VOTE_S = 60.0  # a rank that does not vote in this time is dead or hung, which vLLM does not survive either


class Peers:
    """All ranks of the replica that this process belongs to. Every rank must call, in the same order."""

    def range_of(self, value: int) -> tuple[int, int]:
        """The smallest and the largest of the values that the ranks brought."""
        votes = torch.tensor([value, -value], dtype=torch.int64)
        for group in _groups():
            work = torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group, async_op=True)
            work.wait(timedelta(seconds=VOTE_S))
        return int(votes[0]), -int(votes[1])


def _groups() -> list[torch.distributed.ProcessGroup]:
    """Tensor, pipeline and context parallel: together they are the replica."""
    if not torch.distributed.is_initialized():
        return []
    found = []
    for name in ("get_tp_group", "get_pp_group", "get_pcp_group"):
        group = getattr(parallel_state, name)() if hasattr(parallel_state, name) else None
        if group is not None and group.world_size > 1:
            found.append(group.cpu_group)
    return found
