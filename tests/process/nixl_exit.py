"""A process that uses NIXL and ends in one of several ways, with a crash waiting where libraries are unloaded."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import sys
import threading

import numpy as np

from weightcast.errors import InvalidInput

AGENTS: list[object] = []


def use_nixl() -> None:
    """Read something, and leave the agents to the end of the process."""
    from weightcast.transports.nixl.agent import Agent, region_of

    agents = Agent(), Agent()
    AGENTS.extend(agents)
    target, source = np.zeros(1 << 20, np.uint8), np.full(1 << 20, 7, np.uint8)
    memory = agents[1].register([region_of("source", source)])
    agents[0].register([region_of("target", target)])
    peer = agents[0].add_peer(agents[1].metadata(memory))
    transfer = agents[0].read([region_of("target", target)], [region_of("source", source)], peer)
    while transfer.poll() == "moving":
        pass
    assert transfer.poll() == "done"
    assert (target == 7).all()


def child(code: int) -> None:
    """What a child process of this one does."""
    try:
        use_nixl()
    except InvalidInput:
        code += 1
    sys.exit(code)


def main() -> None:
    """End as the argument says."""
    how = sys.argv[1]
    libc = ctypes.CDLL(None)
    if how != "children":
        # What comes after everything that is registered later: the place where the libraries of NIXL have crashed.
        libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
    if how == "torch":
        import torch

        assert torch.ones(2).sum() == 2
    use_nixl()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    atexit.register(lambda: print("python is done"))
    libc.printf(b"c is done\n")  # stays in a buffer of the C library: standard output is a pipe
    if how == "children":
        for method in ("spawn", "fork"):
            process = multiprocessing.get_context(method).Process(target=child, args=(5,))
            process.start()
            process.join(30)
            print(f"{method} ended with {process.exitcode}")
    if how == "code":
        sys.exit(3)
    if how == "error":
        raise ValueError("an error that nobody catches")


if __name__ == "__main__":
    main()
