"""The machine itself: cores, memory, shared memory, limits. Reads files of the kernel and nothing else."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from pathlib import Path

from weightcast.doctor.finding import Finding, note, ok, problem
from weightcast.errors import WeightcastError
from weightcast.transports.ipc.host_memory import HostDevice

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")  # noqa: S108 - looked at, not relied on
_MIB, _GIB = 1 << 20, 1 << 30
_SMALL_SHM = 64 * _MIB  # what a container gets unless it asks for more
_FEW_FILES, _TOO_FEW_FILES = 1024, 128


def machine_findings() -> list[Finding]:
    """Everything about the machine that needs no package of others."""
    return [python(), cores(), memory(), shared_directory(SHM), shared_memory(), open_files()]


def python() -> Finding:
    """The interpreter that runs this."""
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.release()}"
    return ok("Python", found, f"packages are looked for in {sys.prefix}")


def cores() -> Finding:
    """How many cores this process may use: by its affinity, and by the quota of its container."""
    count, quota = len(os.sched_getaffinity(0)), _quota(_CGROUP / "cpu.max")
    if quota is not None and quota < count:
        return note("cores", f"{count}, of which a container may use {quota:g}", "hashing and deltas get that share")
    if count == 1:
        return note("cores", "1", "staging takes time from the engine: there is no second core to hash and copy on")
    return ok("cores", str(count), "hashing, copying and deltas use several")


def _quota(path: Path) -> float | None:
    """Cores that a control group (version 2) grants, None where it sets no limit."""
    words = _words(path)
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # not every system has it
        return []


def memory() -> Finding:
    """Memory of the machine, or what a container may take of it."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _words(_CGROUP / "memory.max")
    found = f"{nbytes(total)}, of which {nbytes(free)} are available"
    if limit and limit[0].isdigit() and int(limit[0]) < total:
        found += f"; a container may use {nbytes(int(limit[0]))}"
    return ok("memory", found, "an update by copy or swap holds the version beside the model; inplace needs a few blocks")


def shared_directory(path: Path) -> Finding:
    """A directory in memory, where stores and the sockets of ipc:// can lie."""
    name = str(path)
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        cure = "mount a tmpfs there, or use another directory: ipc:///run/user/..."
        return note(name, "cannot be written", "ipc:///dev/shm/... cannot be used, nor stores in memory", cure)
    room = shutil.disk_usage(path)
    found = f"{nbytes(room.total)}, of which {nbytes(room.free)} are free"
    if room.free < _MIB:
        meaning = "not even the sockets of ipc:// fit, and vLLM and torch fail with bus errors"
        return problem(
            name, found, meaning, f"remove what fills it (ls -l {name}), or start the container with --shm-size=8g"
        )
    if room.total <= _SMALL_SHM:
        meaning = "enough for ipc://, whose weights lie in memfds; stores in memory do not fit, nor do ranks of vLLM"
        return note(name, found, meaning, "start the container with --shm-size=8g or --ipc=host")
    return ok(name, found, "stores and the sockets of ipc:// can lie here; the weights of ipc:// do not count")


def shared_memory() -> Finding:
    """Whether memory can be shared with other processes, tried with a page."""
    try:
        HostDevice().allocate(os.sysconf("SC_PAGE_SIZE")).close()
    except WeightcastError as error:
        meaning = "ipc:// cannot lend weights to the engines of this host"
        return problem(
            "memfd", str(error), meaning, "allow memfd_create (seccomp, sysctl vm.memfd_noexec=0), or use file://"
        )
    return ok("memfd", "sealed memory can be shared", "ipc:// lends weights without copying; only free memory limits it")


def open_files() -> Finding:
    """The limit of open files: a depot has one per connection, ipc:// one per memory that is lent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, at most {_limit(hard)}"
    if 0 <= soft < _TOO_FEW_FILES:
        return problem("open files", found, "servers and publishers run out of descriptors", "ulimit -n 65536")
    if 0 <= soft < _FEW_FILES:
        return note(
            "open files", found, "a depot with many receivers, or a publisher of many engines, needs more", "ulimit -n 65536"
        )
    return ok("open files", found, "one is taken by each connection and each memory that is lent")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def nbytes(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"
