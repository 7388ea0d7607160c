"""What will be used on this machine, and why. Pure: facts in, words out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from weightcast.doctor.children import Loaded
from weightcast.doctor.finding import extra
from weightcast.doctor.hardware import Hardware
from weightcast.doctor.packages import Engine


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """For one task: what is used, and the reason."""

    task: str
    used: str
    why: str


def choices(loaded: Mapping[str, Loaded], hardware: Hardware, engines: Sequence[Engine], *, can_share: bool) -> list[Choice]:
    """Everything that is chosen by what is there."""
    return [
        same_host(loaded["zmq"], can_share=can_share),
        between_hosts(loaded["nixl"], hardware),
        deltas(loaded["numba"]),
        commits(loaded["torch"]),
        serving(loaded, engines),
    ]


def same_host(zmq: Loaded, *, can_share: bool) -> Choice:
    """From a trainer to the engines of its host."""
    if zmq.state != "loaded":
        why = f"ipc:// shares memory instead of copying it, but needs {extra('ipc')}"
        return Choice(task="same host", used="file://", why=why)
    if not can_share:
        return Choice(task="same host", used="file://", why="ipc:// needs memory that can be shared, see memfd above")
    return Choice(task="same host", used="ipc://", why="a trainer's Publisher lends its memory; nothing is sent")


def between_hosts(nixl: Loaded, hardware: Hardware) -> Choice:
    """From a depot to other hosts."""
    task = "between hosts"
    if nixl.state == "loaded" and hardware.active_ports:
        gpu = ", also of GPUs (mode=gdr)" if hardware.peer_module else ""
        why = f"{', '.join(hardware.active_ports)}: one-sided reads of a depot's memory{gpu}; http:// works as well"
        return Choice(task=task, used="nixl:// over RDMA", why=why)
    if nixl.state == "loaded":
        return Choice(task=task, used="http://", why="without an active RDMA port nixl:// goes over TCP, which is no faster")
    if hardware.active_ports:
        why = f"RDMA is there ({', '.join(hardware.active_ports)}), but NIXL is not: {extra('nixl')}"
        return Choice(task=task, used="http://", why=why)
    return Choice(
        task=task, used="http://", why="no RDMA, no NIXL; a depot's pieces go over TCP, from several depots at once"
    )


def deltas(numba: Loaded) -> Choice:
    """Encoding and applying deltas."""
    if numba.state == "loaded":
        return Choice(task="delta kernels", used="compiled", why="by numba; compiled at the first use and kept on disk")
    return Choice(task="delta kernels", used="NumPy", why=f"the same bytes, several times slower; {extra('fast')}")


def commits(torch: Loaded) -> Choice:
    """Where live weights are written."""
    if torch.state != "loaded":
        return Choice(task="commit", used="NumPy arrays", why=f"models of torch need {extra('torch')}")
    if torch.devices:
        why = "parameters are written on the device that they are on; CUDA is the same calls of torch, and was not exercised"
        return Choice(task="commit", used=f"CPU, and {len(torch.devices)} GPU(s)", why=why)
    return Choice(task="commit", used="CPU", why="torch sees no GPU")


def serving(loaded: Mapping[str, Loaded], engines: Sequence[Engine]) -> Choice:
    """What generates."""
    ready = [f"{one.title} {one.version}" for one in engines if one.plugin and one.version is not None]
    lacking = [name for name in ("torch", "serve") if loaded[name].state != "loaded"]
    if not lacking:
        device = "--device cuda" if loaded["torch"].devices else "--device cpu"
        ready.append(f"embedded ({device})")
    if ready:
        return Choice(task="engine", used=", ".join(ready), why="running servers take new versions while they serve")
    why = f"`weightcast serve` needs {extra('serve')}; a LiveModel updates a model of your own process"
    return Choice(task="engine", used="none", why=why)
