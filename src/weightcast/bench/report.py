"""What every bench reports: the machine, rows of figures, and targets that were met or missed."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from weightcast.tensors.kernels import Backend, installed

Row = Mapping[str, Any]
At = Literal["most", "least"]

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Where figures were taken. The version of a package that is not installed is None."""

    cpu: str
    cores: int
    memory_nbytes: int
    system: str
    python: str
    numpy: str | None
    numba: str | None
    zstandard: str | None
    torch: str | None
    backend: Backend


def this_machine() -> Machine:
    """The machine this runs on. Imports none of the packages it names."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        numpy=_version("numpy"),
        numba=_version("numba"),
        zstandard=_version("zstandard"),
        torch=_version("torch"),
        backend=installed(),
    )


def _cpu_model() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Target:
    """A figure that must be at most or at least its limit. One that is not asserted may miss it: it is only reported.

    `why` says what it is not asserted for.
    """

    value: float
    limit: float
    at: At
    asserted: bool = True
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether the limit is kept. A value that is not a number keeps none."""
        return self.value <= self.limit if self.at == "most" else self.value >= self.limit


@dataclass(frozen=True)
class Report:
    """The outcome of a bench. `settings` are what it was called with, `notes` what a reader must know of the figures."""

    bench: str
    machine: Machine
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    targets: Mapping[str, Target]
    notes: Sequence[str] = field(default=())

    @property
    def missed(self) -> list[str]:
        """Targets that were missed and should not have been."""
        return [name for name, target in self.targets.items() if target.asserted and not target.ok]

    def to_json(self) -> bytes:
        """One JSON document."""
        targets = {name: _as_dict(target) for name, target in self.targets.items()}
        document = {
            "bench": self.bench,
            "machine": asdict(self.machine),
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "rows": [dict(row) for row in self.rows],
            "targets": targets,
        }
        return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _as_dict(target: Target) -> dict[str, Any]:
    fields = asdict(target) | {"ok": target.ok}
    return fields if target.why else {name: value for name, value in fields.items() if name != "why"}
