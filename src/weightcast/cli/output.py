"""How commands speak: tables for people, one JSON document for programs, progress only where somebody watches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    _SizeType = click.ParamType[int]
else:
    _SizeType = click.ParamType  # a generic class in newer releases only

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}b": factor for unit, factor in _UNITS.items() if unit in "kmgt" and unit}
_UNITS |= {f"{unit}ib": 1 << shift for unit, shift in (("k", 10), ("m", 20), ("g", 30), ("t", 40))}


class Size(_SizeType):
    """A number of bytes: 1GiB, 512MB, 4096."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a size, or say what one looks like."""
        text = str(value).strip().lower()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        factor = _UNITS.get(text[len(digits) :].strip())
        try:
            nbytes = int(float(digits) * factor) if factor else 0
        except ValueError:
            nbytes = 0
        if nbytes < 1:
            self.fail(f"{value!r} is not a size: write 1GiB, 512MB or a number of bytes", param, ctx)
        return nbytes


def json_option(command: Command) -> Command:
    """Every command takes --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(command)


def emit(as_json: bool, data: Any, human: Callable[[Console], None]) -> None:
    """Print the result once: as JSON, or as `human` draws it."""
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(data), indent=1))
    else:
        width = None if sys.stdout.isatty() else 1000  # a pipe has no edge to wrap at
        human(Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=width))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A plain table; columns named in `right` are numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made


def size(nbytes: int) -> str:
    """Bytes as people read them."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def short(digest: str) -> str:
    """Enough of a digest to tell two apart in a table."""
    return digest.partition(":")[2][:16]


class _Sizes(ProgressColumn):
    """How much is done, of how much, and how fast, in the units of `size`: rich's own columns count in powers of ten."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        rate = f"  {size(int(speed))}/s" if speed else ""
        return Text(f"{size(int(task.completed))} of {size(int(task.total or 0))}{rate}")


@contextmanager
def progress(what: str, total: int, *, as_json: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while work goes on; nothing where no terminal is attached or JSON was asked for."""
    if as_json or not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Sizes(Column(no_wrap=True)), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda nbytes: bars.advance(task, nbytes)
