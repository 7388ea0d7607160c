"""How a run is shown while it goes: a live picture in a terminal, or one plain line per step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weightcast.demo.records import RANKS, Committed, Finished, Happened, RunSettings, Started, Step, Told

_BLOCKS = " ▁▂▃▄▅▆▇█"
_GRAPH_ROWS, _GRAPH_COLUMNS = 6, 100
_LAST_STEPS = 6
_LAST_EVENTS = 5


class View(Protocol):
    """Is told everything that happens, in a `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, told: Told) -> None:
        """Show what has just happened."""


class Silent:
    """Shows nothing: for programs, which read the report."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to end."""

    def show(self, told: Told) -> None:
        """Show nothing."""


class Lines(Silent):
    """One plain line for each thing that happens: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, told: Told) -> None:
        """Print a line."""
        text = line_of(told)
        if text:
            self._console.print(text, soft_wrap=True)


class LiveView:
    """A picture that is drawn anew after each step, and stays when the run is over."""

    def __init__(self, console: Console, settings: RunSettings) -> None:
        self._settings = settings
        self._started: Started | None = None
        self._steps: list[Step] = []
        self._events: deque[str] = deque(maxlen=_LAST_EVENTS)
        self._live = Live(self._drawn(), console=console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def show(self, told: Told) -> None:
        """Draw it anew."""
        if isinstance(told, Started):
            self._started = told
        elif isinstance(told, Step):
            self._steps.append(told)
        elif isinstance(told, Happened):
            self._events.append(f"step {told.step}: {told.text}")
        self._live.update(self._drawn(), refresh=True)

    def _drawn(self) -> RenderableType:
        if self._started is None:
            return Text(f"starting an engine of {RANKS} ranks …", style="dim")
        if not self._steps:
            return Text(line_of(self._started), style="dim")
        last, steps = self._steps[-1], self._settings.steps
        head = Text.assemble(
            (f"step {last.number} of {steps}", "bold"), f"   the engine serves {last.committed.version}   ",
            f"{last.tokens_per_s:,.0f} tokens/s   best answer: ", (shown(last.sample), "green"),
        )  # fmt: skip
        parts: list[RenderableType] = [
            head,
            Text(""),
            Text(graph([step.reward for step in self._steps[-_GRAPH_COLUMNS:]], rows=_GRAPH_ROWS), style="cyan"),
            Text(""),
            _table(self._steps[-_LAST_STEPS:], self._started.full_nbytes),
        ]
        if self._events:
            parts += [Text(""), *(Text(event, style="yellow") for event in self._events)]
        title = f"weightcast demo, {self._settings.transport}: reward {last.reward:.3f}"
        return Panel(Group(*parts), title=title, title_align="left", expand=False)


def line_of(told: Told) -> str:
    """What happened, as a line of text; empty for the end, which the summary tells."""
    if isinstance(told, Started):
        return (
            f"engine: {RANKS} ranks at {told.url}, {told.parameters:,} weights, from {told.source}; "
            f"{told.first.version} committed, {size_of(told.full_nbytes)}, after {told.start_s:.1f} s"
        )
    if isinstance(told, Step):
        made = told.committed
        return (
            f"step {told.number:3}  reward {told.reward:.3f}  {made.version:8}  {made.kind:5}  {size_of(made.nbytes):>9}  "
            f"density {made.density:6.2%}  stage {made.stage_s * 1e3:5.0f} ms  pause {made.pause_s * 1e3:5.1f} ms  "
            f"{told.tokens_per_s:6.0f} tokens/s  {shown(told.sample)}"
        )
    if isinstance(told, Happened):
        return f"step {told.step:3}  ! {told.text}"
    assert isinstance(told, Finished)  # noqa: S101 - the last of them
    return ""


def graph(values: Sequence[float], *, rows: int) -> str:
    """Values from 0 to 1 as columns, so many lines high, with a scale at the left."""
    eighths = [round(min(max(value, 0.0), 1.0) * rows * 8) for value in values]
    lines = []
    for row in range(rows - 1, -1, -1):
        label = {rows - 1: "1.0 ", 0: "0.0 "}.get(row, "    ")
        lines.append(label + "│" + "".join(_BLOCKS[min(max(height - 8 * row, 0), 8)] for height in eighths))
    return "\n".join(lines)


def shown(text: str) -> str:
    """An answer on one line: what cannot be printed is a dot."""
    return "".join(character if character.isprintable() and character != "�" else "·" for character in text)


def _table(steps: Sequence[Step], full_nbytes: int) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("step", "reward", "version", "kind", "bytes", "of full", "density", "stage", "pause", "tokens/s"):
        drawn.add_column(column, justify="left" if column in ("version", "kind") else "right", no_wrap=True)
    for step in steps:
        drawn.add_row(*_cells(step, step.committed, full_nbytes))
    return drawn


def _cells(step: Step, made: Committed, full_nbytes: int) -> tuple[str, ...]:
    return (
        str(step.number), f"{step.reward:.3f}", made.version, made.kind,
        size_of(made.nbytes), f"{made.nbytes / full_nbytes:.1%}", f"{made.density:.1%}",
        f"{made.stage_s * 1e3:.0f} ms", f"{made.pause_s * 1e3:.1f} ms", f"{step.tokens_per_s:,.0f}",
    )  # fmt: skip


def size_of(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / 1024:.1f} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.2f} MiB"
