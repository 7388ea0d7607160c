"""`python -m weightcast.bench.ipc_gloo trainer|receiver`: the same bytes by a gloo broadcast, straight into live tensors."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from weightcast.bench.ipc_children import Message, serve
from weightcast.bench.ipc_tensors import Model, blank_tensors, digest_of
from weightcast.tensors.flat import Array, flat_bytes

RANKS = {"trainer": 0, "receiver": 1}


class Member:
    """One of two processes of a group that is made once. Every tensor is a broadcast, all of them under way at once."""

    def __init__(self, role: str) -> None:
        self._rank = RANKS[role]
        self._model: Model | None = None
        self._arrays: dict[str, Array] = {}

    def begin(self, directory: str, nbytes: int, seed: int, timeout_s: float) -> Message:
        """Make the tensors and join the group."""
        torch.set_num_threads(1)
        if self._rank == 0:
            self._model = Model(nbytes, seed)
        self._arrays = self._model.tensors if self._model is not None else blank_tensors(nbytes)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/gloo",
            rank=self._rank,
            world_size=2,
            timeout=timedelta(seconds=timeout_s),
        )
        return {}

    def change(self, number: int) -> Message:
        """Make it another version, at the trainer."""
        if self._model is not None:
            self._model.change(number)
        return {}

    def move(self) -> Message:
        """Send or receive everything, and tell between which moments."""
        began_s = time.monotonic()
        tensors = [torch.from_numpy(flat_bytes(array)) for array in self._arrays.values()]
        for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors]:
            if work is not None:
                work.wait()
        return {"began_s": began_s, "ended_s": time.monotonic()}

    def digest(self) -> Message:
        """Of all tensors."""
        return {"digest": digest_of(self._arrays)}


def main() -> None:
    """Answer the bench until it closes the input."""
    member = Member(sys.argv[1])
    serve({"begin": member.begin, "change": member.change, "move": member.move, "digest": member.digest})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
