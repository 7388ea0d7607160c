"""`weightcast demo`: see it work in a few seconds."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Console

from weightcast.cli.output import emit, json_option, short, size, table
from weightcast.demo.commit_modes import run_demo


@click.command(short_help="See every commit mode at work on a small torch model.")
@click.option("--width", type=click.IntRange(min=8), default=1024, show_default=True, help="Width of the model.")
@json_option
def demo(width: int, as_json: bool) -> None:
    """Publish versions and deltas of a small torch model and update a live copy through every commit mode.

    Then a byte of a last version is flipped, to show that it is refused and that not one bit of the model changes.
    """
    report = run_demo(width=width)

    def human(console: Console) -> None:
        drawn = table(
            "version",
            "how",
            "fetched",
            "stage",
            "verify",
            "commit",
            "total",
            "live root digest",
            "proved",
            right=("fetched", "stage", "verify", "commit", "total"),
        )
        for row in report.rows:
            times = [f"{seconds * 1e3:.2f} ms" for seconds in (row.stage_s, row.verify_s, row.commit_s, row.total_s)]
            drawn.add_row(
                row.version, row.how, size(row.nbytes), *times, short(row.live_digest), "yes" if row.proved else "NO"
            )
        console.print(f"a model of {report.tensors} tensors, {size(report.nbytes)}, updated through every commit mode:")
        console.print(drawn)
        console.print(f"a version with one flipped byte: {report.refusal}")
        console.print(f"after the refusal the model is {'unchanged, bit for bit' if report.intact else 'CHANGED'}")

    emit(as_json, asdict(report), human)
    if not (report.intact and all(row.proved for row in report.rows)):
        click.get_current_context().exit(1)
