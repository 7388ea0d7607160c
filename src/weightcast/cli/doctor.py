"""`weightcast doctor`: what this machine has, what is broken, and what will therefore be used."""

from __future__ import annotations

import click
from rich.console import Console

from weightcast.cli.help import Command
from weightcast.cli.output import emit, json_option
from weightcast.doctor.finding import Finding
from weightcast.doctor.report import Diagnosis, examine

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
_INDENT = " " * 26


@click.command(cls=Command, short_help="Say what this machine has, and what will be used.")
@click.option("--source", metavar="URL", help="Also ask this source for its newest version: a store, or any source's URL.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SEC",
    help="For packages to load, and then for --source to answer.",
)
@json_option
def doctor(source: str | None, timeout: float, as_json: bool) -> int:
    """Say what this machine has, what is broken, and what will therefore be used.

    Looks at cores, memory, shared memory and limits, at RDMA devices and GPUs, and at every optional package. Packages are
    loaded in child processes, so that one that crashes or hangs is found out and does no harm. Nothing is changed.

    A `note` is something absent or small, with what that means and the command that changes it. A `PROBLEM` is something
    that is there and broken.

    Exit status:
      0  nothing is broken; what is merely not installed is a note
      1  something is broken, or --source does not answer
      2  the call itself is wrong

    Examples:
      weightcast doctor
      weightcast doctor --json | jq '.uses'
      weightcast doctor --source http://trainer:8300
    """
    found = examine(timeout_s=timeout, source=source)
    emit(as_json, found, lambda console: _draw(console, found))
    return 0 if found.ok else 1


def _draw(console: Console, found: Diagnosis) -> None:
    groups = {"machine": found.machine, "packages": found.packages, "engines": found.engines, "source": found.sources}
    for title, findings in groups.items():
        if findings:
            console.print(title, style="bold")
            for finding in findings:
                _draw_finding(console, finding)
            console.print("")
    console.print("what will be used", style="bold")
    width = max(len(choice.used) for choice in found.uses)
    for choice in found.uses:
        console.print(f"  {choice.task:14} {choice.used:{width}}  {choice.why}")


def _draw_finding(console: Console, finding: Finding) -> None:
    """What is well is one line; the rest also says what it means and what to do."""
    line = f"  {_MARKS[finding.level]:8} {finding.name:14} {finding.found}"
    if finding.level == "ok":
        console.print(f"{line} ({finding.meaning})")
        return
    console.print(line)
    console.print(f"{_INDENT}{finding.meaning}")
    if finding.cure:
        console.print(f"{_INDENT}cure: {finding.cure}")
