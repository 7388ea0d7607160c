"""The ranks of a replica as torch.distributed sees them. Groups are made here, once, at the start, and nowhere else."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from weightcast.engines.embedded.ranks.vitals import Vitals
from weightcast.engines.embedded.settings import RankSettings
from weightcast.errors import ReplicaFailed

_RENDEZVOUS = "rendezvous"
# Up to here gloo's sum is slower than passing everything to everybody and adding: it goes round the ranks twice. Between two
# ranks on one host a sum of 64 numbers took 860 µs, this 320 µs.
_SMALL_NBYTES = 64 << 10


class RankGroup:
    """What the ranks do together. A context manager; with one rank no group is made and nothing is sent.

    Host-side agreement (the step message) always goes through gloo. On a GPU the sums of the layers go through NCCL, in a
    second group that is made at the start too.
    """

    def __init__(self, settings: RankSettings, vitals: Vitals) -> None:
        self.rank, self.size = settings.rank, settings.engine.ranks
        self.collectives = 0
        self.groups_made = 0
        self._vitals = vitals
        self._sums: dist.ProcessGroup | None = None
        if self.size > 1:
            self._join(settings)

    def _join(self, settings: RankSettings) -> None:
        timeout = timedelta(seconds=settings.engine.collective_timeout_s)
        wanted = ["gloo", "nccl"] if settings.engine.device == "cuda" else ["gloo"]
        missing = [name for name in wanted if not (dist.is_available() and dist.is_backend_available(name))]
        if missing:
            raise ReplicaFailed(
                f"torch {torch.__version__} has no {' and no '.join(missing)} here, which {self.size} ranks need to work "
                "together. Install a build that has it, or serve with --ranks 1."
            )
        os.putenv("GLOO_SOCKET_IFNAME", "lo")  # read by gloo itself; the ranks of a replica share a host
        try:
            store = FileStore(str(Path(settings.run_dir) / _RENDEZVOUS), self.size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout)
            self.groups_made += 1
            if "nccl" in wanted:
                self._sums = dist.new_group(backend="nccl", timeout=timeout)
                self.groups_made += 1
            self._check(settings)
        except (RuntimeError, OSError) as error:
            self.close()
            raise ReplicaFailed(f"rank {self.rank} of {self.size} could not join its peers through gloo: {error}") from error

    def _check(self, settings: RankSettings) -> None:
        """One sum whose result every rank knows beforehand: a group that cannot do that must not serve."""
        device = "cpu" if self._sums is None else settings.engine.device
        total = self.all_reduce(torch.tensor([1 << self.rank], dtype=torch.int32, device=device))
        if int(total.item()) != (1 << self.size) - 1:
            raise ReplicaFailed(
                f"rank {self.rank} of {self.size}: the first sum over all ranks came out wrong ({total.item()})."
            )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each. Called in every layer, so it counts as progress."""
        self._vitals.progress += 1
        if self.size == 1:
            return tensor
        self.collectives += 1
        if self._sums is None and tensor.nbytes <= _SMALL_NBYTES:
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(parts, tensor)
            return reduce(torch.Tensor.add_, parts)
        dist.all_reduce(tensor, group=self._sums)
        return tensor

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """On rank 0 the ranks' tensors side by side (along the last dimension), on the host; no rows on the others."""
        self._vitals.progress += 1
        tensor = tensor.cpu()
        if self.size == 1:
            return tensor
        self.collectives += 1
        if self.rank:
            dist.gather(tensor, None, dst=0)
            return tensor[:0]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.gather(tensor, parts, dst=0)
        return torch.cat(parts, dim=-1)

    def agree(self, fine: bool) -> list[bool]:
        """What every rank says, in their order. Part of a command that all of them execute, never of a step."""
        self._vitals.progress += 1
        if self.size == 1:
            return [fine]
        self.collectives += 1
        votes = [torch.empty(1, dtype=torch.int32) for _ in range(self.size)]
        dist.all_gather(votes, torch.tensor([int(fine)], dtype=torch.int32))
        return [bool(vote.item()) for vote in votes]

    def broadcast(self, message: torch.Tensor) -> None:
        """Rank 0's int32 tensor to all ranks, in place."""
        self._vitals.progress += 1
        self.collectives += 1
        dist.broadcast(message, src=0)

    def close(self) -> None:
        """Leave the groups. Safe twice."""
        self._sums = None
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:  # after a failure peers may be gone, and leaving the group would wait for them
            self.close()
