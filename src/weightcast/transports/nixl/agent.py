"""The one seam to NIXL: an agent, memory that it knows, and reads from the memory of other agents."""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

import numpy as np

from weightcast import logs
from weightcast.errors import InvalidInput, SourceFailed, UnsupportedTensor
from weightcast.tensors.bridges import host_array
from weightcast.tensors.flat import Buffer
from weightcast.transports.nixl.library import load_nixl
from weightcast.wire.nixl import HOST, Region

log = logs.get(__name__)

# The longest that the progress thread sleeps. Events wake it; with the zero of NIXL's own Python class it sleeps not at all,
# and an agent that does nothing takes a third of a core.
_LOOK_US = 100_000

_DEVICE = re.compile(r"[\w.:-]+", re.ASCII)
_LOOPBACK = "lo"
_SIOCGIFCONF, _IFREQ_NBYTES, _MAX_ADDRESSES = 0x8912, 40, 1024

State = Literal["moving", "done", "failed"]


def device_at(address: str) -> str:
    """The network device with an IP address: its RDMA device if it has one. Empty for the address that means all.

    UCX listens on the address of a device, and on those of all devices unless it is given one. Raises `InvalidInput` if no
    device has the address.
    """
    asked = ip_address(address.partition("%")[0])
    if asked.is_unspecified:
        return ""
    if asked.is_loopback:
        return _LOOPBACK
    devices = _addresses()
    if str(asked) not in devices:
        raise InvalidInput(
            f"no network device has the address {address}: NIXL cannot listen there. Listen on 0.0.0.0, or leave NIXL off."
        )
    device = devices[str(asked)]
    rdma = sorted(Path(f"/sys/class/net/{device}/device/infiniband").glob("*"))
    return f"{rdma[0].name}:1" if rdma else device


def _addresses() -> dict[str, str]:
    """The devices of this host by their addresses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        room = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ_NBYTES))
        asked = struct.pack("iP", len(room), room.buffer_info()[0])
        nbytes = struct.unpack("iP", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, asked))[0]
    for at in range(0, nbytes, _IFREQ_NBYTES):
        name = bytes(room[at : at + 16]).partition(b"\0")[0].decode().partition(":")[0]  # eth0:1 is a label of eth0
        found[socket.inet_ntoa(bytes(room[at + 20 : at + 24]))] = name
    ipv6 = Path("/proc/net/if_inet6")
    for line in ipv6.read_text().splitlines() if ipv6.exists() else ():
        digits, *_, name = line.split()
        found[str(ip_address(bytes.fromhex(digits)))] = name
    return found


def region_of(name: str, tensor: object) -> Region:
    """Where a tensor lies. It must be contiguous: NIXL moves stretches of bytes.

    The only place that tells host memory from a GPU's. Device memory takes the same way from here on, as another type of
    segment; that was never run, for want of a GPU.
    """
    device: Any = getattr(tensor, "device", None)
    if getattr(device, "type", "cpu") == "cuda":
        lying = cast("Any", tensor)
        if not lying.is_contiguous():
            raise UnsupportedTensor(f"tensor {name!r} is not contiguous: NIXL cannot read it where it lies.")
        return Region(lying.data_ptr(), lying.numel() * lying.element_size(), device.index or 0)
    array = host_array(name, tensor)
    if not array.flags.c_contiguous:
        raise UnsupportedTensor(f"tensor {name!r} is not contiguous: NIXL cannot read it where it lies.")
    return Region(array.__array_interface__["data"][0], array.nbytes)


def region_of_bytes(memory: Buffer) -> Region:
    """Where bytes lie, also those that cannot be written."""
    array = np.frombuffer(memory, dtype=np.uint8)
    return Region(array.__array_interface__["data"][0], array.nbytes)


@dataclass(frozen=True, eq=False)
class Registration:
    """Memory that an agent knows. Whoever registered it keeps the memory for as long."""

    lists: tuple[Any, ...]


class Transfer:
    """A read under way. `state` is "moving" until it has ended, one way or the other; nothing else ends it.

    NIXL lets go of a transfer that moves without stopping it, and its bytes still land. So this is kept until it has ended.
    """

    def __init__(self, agent: Agent, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._state: State = "moving"
        self.problem = ""

    def poll(self) -> State:
        """Look whether it has ended."""
        if self._state == "moving":
            self._take(self._agent.look(self._handle))
        return self._state

    def begin(self) -> None:
        """Start it. A read that cannot be started has failed."""
        self._take(self._agent.post(self._handle))

    def _take(self, told: tuple[State, str]) -> None:
        self._state, self.problem = told
        if self._state != "moving":
            self._agent.release(self._handle)
            self._handle = None


class Agent:
    """A NIXL agent with the UCX backend. It takes half a second to make: make one and keep it. Any thread may call.

    Its name is unique, also over restarts. It must not be closed while a read of its own is moving: the process on the other
    side can then be aborted by UCX, if it has not answered yet.

    One that is `polled` moves bytes only while somebody looks at its reads: over TCP in half the time, as nothing contends
    with its progress thread. One that others read from cannot be: it must answer also while this process computes.
    """

    def __init__(self, *, nic: str = "", polled: bool = False) -> None:
        if nic and not _DEVICE.fullmatch(nic):
            raise InvalidInput(f"{nic[:80]!r} is not the name of a network device: give one, mlx5_0 or eth0 say.")
        nixl = load_nixl()
        self.name = f"weightcast-{uuid4().hex}"
        self._lock = threading.Lock()
        self._owner = os.getpid()
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = not polled, _LOOK_US
        self._bindings: Any = nixl
        self._failures: tuple[type[Exception], ...] = _failures(nixl)
        try:
            self._nixl: Any = nixl.nixlAgent(self.name, config)
            self._backend = [self._nixl.createBackend("UCX", _settings(nic))]
        except self._failures as error:
            where = f" on {nic}" if nic else ""
            raise SourceFailed(f"NIXL cannot be started{where}: {_told(error)}. Look at the UCX_ variables.") from error

    @property
    def usable(self) -> bool:
        """False in a child of a fork: threads and connections stayed with the parent."""
        return self._nixl is not None and os.getpid() == self._owner

    @property
    def _open(self) -> Any:
        """NIXL's own agent."""
        if self._nixl is None:
            raise SourceFailed(f"NIXL agent {self.name} was closed.")
        return self._nixl

    def register(self, regions: Sequence[Region]) -> Registration:
        """Make memory known, so that it can be read by others and written by reads of this agent."""
        lists = []
        with self._lock:
            try:
                for kind, rows in _by_kind([region for region in regions if region.nbytes]).items():
                    one = self._bindings.nixlRegDList(getattr(self._bindings, kind), rows)
                    self._open.registerMem(one, self._backend)
                    lists.append(one)
            except self._failures as error:
                for one in lists:
                    self._nixl.deregisterMem(one, self._backend)
                raise SourceFailed(
                    f"NIXL cannot register {len(regions)} stretch(es) of memory: {_told(error)}. Is there a limit on locked "
                    "memory (ulimit -l)?"
                ) from error
        return Registration(tuple(lists))

    def deregister(self, registration: Registration) -> None:
        """Forget memory."""
        with self._lock:
            for one in registration.lists if self._nixl is not None else ():
                try:
                    self._nixl.deregisterMem(one, self._backend)
                except self._failures as error:
                    log.warning("deregistration failed", agent=self.name, error=_told(error))

    def metadata(self, registration: Registration) -> bytes:
        """What another agent must be given to read this memory."""
        with self._lock:
            parts = [self._open.getLocalPartialMD(one, True, self._backend) for one in registration.lists]
            return bytes(parts[0]) if len(parts) == 1 else bytes(self._open.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        """Make another agent known by its metadata, and tell its name. Raises `SourceFailed` if it cannot be reached."""
        with self._lock:
            try:
                return _text(self._open.loadRemoteMD(metadata))
            except self._failures as error:
                raise SourceFailed(
                    f"NIXL cannot connect to the agent that it was told of: {_told(error)}. The depot was started anew, or "
                    "its network cannot be reached from here."
                ) from error

    def forget_peer(self, name: str) -> None:
        """Disconnect from another agent."""
        with self._lock:
            try:
                self._open.invalidateRemoteMD(name)
            except self._failures as error:
                log.debug("peer not forgotten", peer=name, error=_told(error))

    def read(self, local: Sequence[Region], remote: Sequence[Region], peer: str) -> Transfer:
        """Begin to fill local memory from that of a peer, stretch by stretch. All of one side are of one kind of memory."""
        with self._lock:
            try:
                sides = [self._described(side) for side in (local, remote)]
                handle = self._open.createXferReq(self._bindings.NIXL_READ, *sides, peer, b"", self._backend)
            except self._failures as error:
                raise SourceFailed(f"NIXL cannot read from {peer}: {_told(error)}.") from error
        transfer = Transfer(self, handle)
        transfer.begin()
        return transfer

    def _described(self, regions: Sequence[Region]) -> Any:
        [(kind, rows)] = _by_kind(regions).items()
        return self._bindings.nixlXferDList(getattr(self._bindings, kind), rows)

    def post(self, handle: Any) -> tuple[State, str]:
        """Start a transfer; for `Transfer`."""
        return self._asked(lambda: self._open.postXferReq(handle, b""))

    def look(self, handle: Any) -> tuple[State, str]:
        """How a transfer stands; for `Transfer`."""
        return self._asked(lambda: self._open.getXferStatus(handle))

    def _asked(self, ask: Any) -> tuple[State, str]:
        with self._lock:
            try:
                told = ask()
            except self._failures as error:
                return "failed", _told(error)
        if told == self._bindings.NIXL_IN_PROG:
            return "moving", ""
        return ("done", "") if told == self._bindings.NIXL_SUCCESS else ("failed", f"NIXL reports {told}")

    def release(self, handle: Any) -> None:
        """Let go of a transfer that has ended; for `Transfer`."""
        with self._lock:
            try:
                self._open.releaseXferReq(handle)
            except self._failures as error:
                log.debug("transfer not released", error=_told(error))

    def close(self) -> None:
        """Disconnect and end the progress thread: nothing is read or written for this agent after it. Safe twice."""
        with self._lock:
            if self._owner == os.getpid():
                self._nixl = None


def _settings(nic: str) -> dict[str, str]:
    """The settings of NIXL's UCX backend: its device. `UCX_NET_DEVICES` in the environment overrides it."""
    is_rdma = ":" not in nic and Path(f"/sys/class/infiniband/{nic}").exists()
    return {"engine_config": f"NET_DEVICES={nic}:1" if is_rdma else f"NET_DEVICES={nic}"} if nic else {}


def _by_kind(regions: Sequence[Region]) -> dict[str, Any]:
    """Rows of address, length and device for NIXL, by its name for the type of memory."""
    kinds: dict[str, list[tuple[int, int, int]]] = {}
    for region in regions:
        kind = "DRAM_SEG" if region.device == HOST else "VRAM_SEG"
        kinds.setdefault(kind, []).append((region.address, region.nbytes, max(region.device, 0)))
    return {kind: np.array(rows, dtype=np.uint64) for kind, rows in kinds.items()}


def _failures(nixl: Any) -> tuple[type[Exception], ...]:
    """Everything that NIXL raises."""
    kinds = vars(nixl).values()
    return (RuntimeError, *(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)))


def _told(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
