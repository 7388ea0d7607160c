"""The tables of `weightcast bench network`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console

from weightcast.bench.report import Report, Row
from weightcast.cli.output import table

_Columns = dict[str, Callable[[Row], str]]

_TIMES: _Columns = {
    "": lambda row: row["kind"],
    "cold s": lambda row: f"{row['cold_s']:.3f}",
    "s": lambda row: f"{row['s']:.3f}",
    "median s": lambda row: f"{row['median_s']:.3f}",
    "GB/s": lambda row: f"{row['gb_per_s']:.2f}",
}


def _ratio(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.2f}" if name in row else "-"


_LIMITS: _Columns = {**_TIMES, "two streams s": lambda row: f"{row['two_streams_s']:.3f}" if "two_streams_s" in row else "-"}
_OURS: _Columns = {
    **_TIMES,
    "of raw TCP": _ratio("over_tcp"),
    "medians": _ratio("median_over_tcp"),
    "rounds": _ratio("median_round_over_tcp"),
    "of raw READ": _ratio("over_read"),
    "medians ": _ratio("median_over_read"),
    "noticed s": lambda row: f"{row['noticed_s']:.3f}",
    "staged s": lambda row: f"{row['stage_s'] + row['verify_s']:.3f}",
}
_RIVALS: _Columns = {
    **_TIMES,
    **{f"{kind} s": _ratio(f"{kind}_s") for kind in ("http", "nixl")},
    **{f"{kind} is ahead": _ratio(f"{kind}_ahead") for kind in ("http", "nixl")},
}


def draw_tables(console: Console, report: Report, tables: Iterable[tuple[_Columns, Sequence[Row]]]) -> None:
    """Tables that have rows, and why some of a report are in none."""
    for columns, rows in tables:
        drawn = table(*columns, right=tuple(columns)[1:])
        for row in rows:
            drawn.add_row(*(shown(row) for shown in columns.values()))
        if rows:
            console.print("")
            console.print(drawn)
    for row in report.rows:
        if "s" not in row:
            console.print(f"{row['kind']}: {row.get('missing') or row['failed']}")


def draw_network_rows(console: Console, report: Report) -> None:
    """Limits, ours, rivals, and why some are not there."""
    roles = (("limit", _LIMITS), ("ours", _OURS), ("rival", _RIVALS))
    draw_tables(console, report, [(columns, [row for row in report.rows if row.get("role") == of]) for of, columns in roles])
