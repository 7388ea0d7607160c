"""All probes together."""

from __future__ import annotations

import msgspec

from weightcast import __version__
from weightcast.clock import Deadline
from weightcast.doctor.choices import Choice, choices
from weightcast.doctor.finding import Finding
from weightcast.doctor.hardware import hardware_findings, look
from weightcast.doctor.machine import machine_findings
from weightcast.doctor.packages import engine_findings, engines, loaded_packages, package_findings
from weightcast.doctor.source import source_finding


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What there is, and what will be used. `ok` unless something is broken."""

    weightcast: str
    ok: bool
    machine: list[Finding]
    packages: list[Finding]
    engines: list[Finding]
    sources: list[Finding]
    uses: list[Choice]


def examine(*, timeout_s: float, source: str | None = None) -> Diagnosis:
    """Look at everything. What takes long is given up after `timeout_s`, and so is a source that does not answer."""
    hardware, others = look(), engines()
    loaded = loaded_packages(Deadline.after(timeout_s))
    machine = machine_findings()
    can_share = all(finding.level != "problem" for finding in machine if finding.name == "memfd")
    packages = package_findings(loaded)
    sources = [] if source is None else [source_finding(source, Deadline.after(timeout_s))]
    machine += hardware_findings(hardware, loaded["torch"])
    engine = engine_findings(others)
    return Diagnosis(
        weightcast=__version__,
        ok=all(finding.level != "problem" for finding in [*machine, *packages, *engine, *sources]),
        machine=machine,
        packages=packages,
        engines=engine,
        sources=sources,
        uses=choices(loaded, hardware, others, can_share=can_share),
    )
