"""The program of a rank: `python -m weightcast.engines.embedded.ranks.process`, with its settings on standard input."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import msgspec
import torch
import zmq

from weightcast import logs
from weightcast.engines.embedded.messages import PROTOCOL, Failed, Ready
from weightcast.engines.embedded.ranks.device import claim_device
from weightcast.engines.embedded.ranks.follower import Follower
from weightcast.engines.embedded.ranks.group import RankGroup
from weightcast.engines.embedded.ranks.inbox import Inbox
from weightcast.engines.embedded.ranks.jobs import Jobs
from weightcast.engines.embedded.ranks.leader import Leader
from weightcast.engines.embedded.ranks.rank import Rank
from weightcast.engines.embedded.ranks.vitals import Pulse, Vitals
from weightcast.engines.embedded.ranks.wake import WakeReceiver, WakeSender
from weightcast.engines.embedded.settings import RankSettings
from weightcast.errors import WeightcastError

# M_MMAP_THRESHOLD: larger pieces are mapped and given back one by one. M_TRIM_THRESHOLD: so much stays when it is freed.
# M_ARENA_MAX: threads that stage take what other threads freed.
_MALLOC = {-3: 32 << 20, -1: 128 << 20, -8: 1}

log = logs.get("weightcast.engines.embedded.ranks.process")  # it is run, so its own name is __main__


def keep_freed_memory() -> None:
    """Let the next update use the memory of the last: to touch fresh memory takes seven times as long as to write to it.

    Where the C library has no such settings, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def serve(settings: RankSettings, inbox: Inbox, vitals: Vitals, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Meet the other ranks, say `Ready`, and work until told to leave. The first command brings the weights."""
    claim_device(settings.engine.device, settings.rank, settings.engine.ranks)
    with RankGroup(settings, vitals) as group, torch.inference_mode(), Jobs(settings, context) as jobs:
        rank = Rank(settings, group, vitals, jobs)
        gc.freeze()  # what is there stays: to look through all of it in the middle of a step takes 0.1 s
        log.info("rank ready", pid=os.getpid(), ranks=settings.engine.ranks, device=settings.engine.device)
        if settings.rank == 0:
            with WakeSender(settings, context) as sender:
                leader = Leader(rank, inbox, sender)
                inbox.send(_ready(rank))
                leader.run()
        else:
            with WakeReceiver(settings, context) as receiver:
                inbox.send(_ready(rank))
                Follower(rank, inbox, receiver).run()


def _ready(rank: Rank) -> Ready:
    runner = rank.runner
    return Ready(
        rank=rank.settings.rank,
        pid=os.getpid(),
        protocol=PROTOCOL,
        max_length=runner.max_length,
        blocks=runner.blocks,
        vocab_size=runner.config.vocab_size,
        moe=runner.moe,
        layouts=rank.live.layouts(),
    )


def main() -> None:
    """Run one rank. Whatever goes wrong is told to the front end before the process ends with status 1."""
    keep_freed_memory()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSettings)
    logs.configure(settings.log_level, as_json=settings.log_json, always={"rank": settings.rank})
    vitals = Vitals()
    with zmq.Context() as context, Pulse(settings, vitals, context), Inbox(settings) as inbox:
        try:
            serve(settings, inbox, vitals, context)
        except Exception as error:  # noqa: BLE001 - any error is sent to the front end
            known = isinstance(error, WeightcastError)
            if not known:
                log.error("rank failed", trace=error, error=error)
            code = error.code if isinstance(error, WeightcastError) else "replica_failed"
            message = str(error) if known else f"{type(error).__name__}: {error}"
            inbox.send(Failed(rank=settings.rank, code=code, message=message))
            inbox.close()
            os._exit(1)  # peers may be gone, and leaving groups or contexts in order would wait for them


if __name__ == "__main__":
    main()
