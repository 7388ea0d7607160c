"""The tensor-parallel ranks of one SGLang server: all of them take a version, or none does."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
from torch._C._distributed_c10d import AllgatherOptions

from weightcast import logs
from weightcast.errors import DeadlineExceeded, UpdateFailed
from weightcast.wire.decoding import decode

if TYPE_CHECKING:
    import torch.distributed as dist

log = logs.get(__name__)

_WORDS_NBYTES = 4096


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others. An empty `problem` means that it went well."""

    version: str = ""
    root_digest: str = ""
    problem: str = ""


class Ranks:
    """A gloo group, or nobody else. SGLang hands a request to all ranks of such a group, so all of them get here."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

    def exchange(self, said: Said, timeout_s: float) -> list[Said]:
        """What each rank said, in their order. Raises if one of them does not answer in time."""
        if self._group is None or self.size == 1:
            return [said]
        mine = torch.zeros(_WORDS_NBYTES, dtype=torch.uint8)
        words = _encoded(said)
        mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        theirs = [torch.zeros_like(mine) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)  # gloo does not heed that of `wait`
        try:
            self._group.allgather([theirs], [mine], options).wait()
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise DeadlineExceeded("waiting for the other ranks of the server", timeout_s) from error
            raise UpdateFailed(f"rank {self.rank} lost the other ranks of the server: {error}") from error
        return [decode(bytes(one.numpy()).rstrip(b"\0"), Said) for one in theirs]


def tensor_parallel_ranks() -> Ranks:
    """The group of this process in SGLang, or nobody else where SGLang has made none."""
    try:
        from sglang.srt.distributed import get_tp_group  # noqa: PLC0415 - only there inside of a server
    except ImportError:
        return Ranks()
    try:
        group = get_tp_group()
    except AssertionError as error:  # SGLang's way to say that there is no group
        log.debug("no ranks found", error=error)
        return Ranks()
    return Ranks(group.cpu_group)


def problems(said: list[Said]) -> str:
    """What went wrong, for each rank that something went wrong at; empty if all is well."""
    wrong = [(rank, one.problem) for rank, one in enumerate(said) if one.problem]
    if len(said) == 1:
        return "".join(problem for _, problem in wrong)
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in wrong)


def _encoded(said: Said) -> bytes:
    problem = said.problem
    words = msgspec.json.encode(said)
    while len(words) > _WORDS_NBYTES:
        problem = problem[: len(problem) // 2]
        words = msgspec.json.encode(msgspec.structs.replace(said, problem=f"{problem} …"))
    return words
