"""GPUs and RDMA, as the kernel tells of them: no driver is called."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from weightcast.doctor.children import Loaded
from weightcast.doctor.finding import Finding, note, ok

_INFINIBAND = Path("/sys/class/infiniband")
_NVIDIA = Path("/proc/driver/nvidia/version")
_MODULES = Path("/sys/module")
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


@dataclass(frozen=True)
class Hardware:
    """What the kernel has: ports of RDMA devices that are active or not, the version of NVIDIA's driver, its peer module."""

    active_ports: tuple[str, ...] = ()
    idle_ports: tuple[str, ...] = ()
    nvidia_driver: str = ""
    peer_module: str = ""


def look(infiniband: Path = _INFINIBAND, nvidia: Path = _NVIDIA, modules: Path = _MODULES) -> Hardware:
    """Read what the kernel shows."""
    states = {
        f"{port.parents[1].name}:{port.name}": (port / "state").read_text().strip()  # "4: ACTIVE"
        for port in sorted(infiniband.glob("*/ports/*"))
    }
    told = nvidia.read_text() if nvidia.exists() else ""
    driver = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", told)
    return Hardware(
        active_ports=tuple(port for port, state in states.items() if state.endswith("ACTIVE")),
        idle_ports=tuple(port for port, state in states.items() if not state.endswith("ACTIVE")),
        nvidia_driver=driver.group(1) if driver else told.strip(),
        peer_module=next((name for name in _PEER_MODULES if (modules / name).is_dir()), ""),
    )


def hardware_findings(found: Hardware, torch: Loaded) -> list[Finding]:
    """What the hardware means for moving weights."""
    findings = [rdma(found)]
    if found.active_ports:
        findings.append(locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    findings.append(cuda(found, torch))
    if found.nvidia_driver:
        findings.append(gpu_direct(found))
    return findings


def rdma(found: Hardware) -> Finding:
    """Devices that read the memory of another host without its processor."""
    if found.active_ports:
        return ok("RDMA", f"active: {', '.join(found.active_ports)}", "nixl:// reads a depot's memory over it")
    if found.idle_ports:
        cure = "look at the cable, the switch and the subnet manager: cat /sys/class/infiniband/*/ports/*/state"
        return note("RDMA", f"not active: {', '.join(found.idle_ports)}", "nixl:// goes over TCP until a port is", cure)
    return note("RDMA", "no device in /sys/class/infiniband", "between hosts weights go over TCP")


def locked_memory(soft: int) -> Finding:
    """RDMA pins the memory that it reads."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited", "weights can be registered with the RDMA device")
    meaning = "RDMA pins the weights that it reads: registering more than this fails"
    return note("locked memory", f"{soft} bytes", meaning, "ulimit -l unlimited (a container: --ulimit memlock=-1)")


def cuda(found: Hardware, torch: Loaded) -> Finding:
    """NVIDIA's driver, and whether torch can use it."""
    if found.nvidia_driver and torch.state == "loaded" and not torch.devices:
        why = "sees no GPU" if torch.cuda else "is built for the CPU"
        cure = "install a torch for CUDA; where that is installed, look at CUDA_VISIBLE_DEVICES and at nvidia-smi"
        return note("CUDA driver", found.nvidia_driver, f"GPUs are not used: torch {why}", cure)
    if found.nvidia_driver:
        return ok("CUDA driver", found.nvidia_driver, "torch can use the GPUs")
    return note("CUDA driver", "none in /proc/driver/nvidia", "models are served and committed on the CPU")


def gpu_direct(found: Hardware) -> Finding:
    """What lets an RDMA device read the memory of a GPU."""
    if found.peer_module:
        return ok("GPUDirect", f"module {found.peer_module}", "nixl://...?mode=gdr can read the memory of a trainer's GPU")
    return note(
        "GPUDirect",
        "no module nvidia_peermem",
        "RDMA cannot read GPU memory: weights pass through the host",
        "modprobe nvidia_peermem",
    )
