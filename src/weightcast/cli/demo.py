"""`weightcast demo`: a small RL run that a newcomer can watch, and every commit mode in a few seconds."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from weightcast.bench.scratch import ended_in_order
from weightcast.cli.completion import directories
from weightcast.cli.help import Group
from weightcast.cli.output import emit, json_option, short, size, table
from weightcast.demo.commit_modes import run_demo
from weightcast.demo.records import STEPS, Finished, Happened, RunSettings, Started, Step, Told
from weightcast.demo.sources import DEFAULT, TRANSPORTS, Transport
from weightcast.demo.summary import RISE, Summary, facts, summarize
from weightcast.demo.view import Lines, LiveView, Silent, View
from weightcast.errors import MissingExtra, WeightcastError

if TYPE_CHECKING:
    from collections.abc import Generator


@click.group(cls=Group, invoke_without_command=True, short_help="Train a small policy and update a running engine with it.")
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default=DEFAULT,
    show_default=True,
    help="How versions get to the engine.",
)
@click.option("--steps", type=click.IntRange(min=2), default=STEPS, show_default=True, help="Optimizer steps.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first weights, and of sampling."
)
@click.option("--no-tty", is_flag=True, help="One plain line per step, also in a terminal.")
@click.option(
    "--out",
    "out_dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("weightcast-demo"),
    show_default=True,
    shell_complete=directories,
    help="For the plot, and for the engine's log.",
)
@json_option
@click.pass_context
def demo(
    context: click.Context, transport: Transport, steps: int, seed: int, no_tty: bool, out_dir: Path, as_json: bool
) -> None:
    """Train a small policy by reinforcement learning, with a running engine that makes its rollouts.

    The engine has 2 ranks and is asked over HTTP by the OpenAI API. After every step of the optimizer (GRPO) the new weights
    are published and committed while it runs: the first version full, the next ones as deltas. Half-way a rank is killed,
    and comes back. At the end the engine's weights are compared with the trainer's, bit for bit.

    The policy is a random Qwen3 model of 1.2 million weights. It is rewarded for text that can be pronounced: lower-case
    letters, vowels and consonants in turn. Needs `pip install 'weightcast[demo]'`.

    Exit status:
      0  the weights are equal, and the last reward is at least twice the first
      1  they are not, or it is not, or something failed
      2  the call itself is wrong, or an extra is not installed

    Examples:
      weightcast demo
      weightcast demo --transport ipc --steps 60
      weightcast demo --no-tty --out /tmp/demo
      weightcast demo modes
    """
    if context.invoked_subcommand is not None:
        return
    settings = RunSettings(out_dir=out_dir.absolute(), transport=transport, steps=steps, seed=seed)
    told = _watched(settings, _view(settings, as_json=as_json, plain=no_tty))
    summary = summarize(told.started, told.steps, told.finished)
    plot, why = _plotted(settings, told)
    document = {
        "settings": asdict(settings) | {"out_dir": str(settings.out_dir)},
        "steps": [asdict(step) for step in told.steps],
        "events": [asdict(event) for event in told.events],
        "summary": asdict(summary) | {"rise": summary.rise, "learned": summary.learned, "equal": summary.equal},
        "plot": plot,
    }
    emit(as_json, document, lambda console: _summary(console, summary, plot, why))
    if not (summary.equal and summary.learned):
        context.exit(1)


class _Collected:
    """Everything that a run told."""

    def __init__(self, told: Iterable[Told]) -> None:
        everything = list(told)
        self.started = next(one for one in everything if isinstance(one, Started))
        self.steps = [one for one in everything if isinstance(one, Step)]
        self.events = [one for one in everything if isinstance(one, Happened)]
        self.finished = next(one for one in everything if isinstance(one, Finished))


def _view(settings: RunSettings, *, as_json: bool, plain: bool) -> View:
    if as_json:
        return Silent()
    console = Console(highlight=False, markup=False, emoji=False)
    return LiveView(console, settings) if console.is_terminal and not plain else Lines(console)


def _watched(settings: RunSettings, view: View) -> _Collected:
    """Run it and show it. Whatever ends it, nothing of it is left but its log, whose path is told if it failed."""
    run = _run(settings)
    settings.out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with ended_in_order(), view, closing(run):
            return _Collected(_shown(run, view))
    except WeightcastError:
        log = settings.out_dir / "engine.log"
        if log.exists():
            click.echo(f"the engine's log: {log}", err=True)
        raise


def _shown(run: Iterable[Told], view: View) -> Iterable[Told]:
    for told in run:
        view.show(told)
        yield told


def _run(settings: RunSettings) -> Generator[Told]:
    try:
        import fastapi  # noqa: F401, PLC0415 - the engine is another process: what it lacks is said here

        from weightcast.demo.run import run  # noqa: PLC0415 - extras, and slow to import
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "a package", "demo", "weightcast demo") from error
    return run(settings)


def _plotted(settings: RunSettings, told: _Collected) -> tuple[str | None, str]:
    """The path of the plot, or why there is none."""
    from weightcast.demo.plot import draw  # noqa: PLC0415 - not needed before

    path = settings.out_dir / "plot.png"
    title = f"weightcast demo: {settings.transport}, seed {settings.seed}"
    try:
        draw(path, told.steps, told.finished.recovery, title=title)
    except MissingExtra as error:
        return None, str(error)
    return str(path), ""


def _summary(console: Console, found: Summary, plot: str | None, why: str) -> None:
    console.print()
    for name, text in [*facts(found), ("plot", plot or f"none: {why}")]:
        console.print(f"{name:12} {text}")
    console.print(
        f"final weights equal, bit for bit: {f'yes ({found.version}, {found.root_digest})' if found.equal else 'NO'}"
    )
    for problem in found.problems:
        console.print(f"  {problem}")
    if not found.learned:
        console.print(f"the reward rose {found.rise:.1f} times, less than {RISE:.0f}: give it more --steps")


@demo.command(short_help="See every commit mode at work on a small torch model.")
@click.option("--width", type=click.IntRange(min=8), default=1024, show_default=True, help="Width of the model.")
@json_option
def modes(width: int, as_json: bool) -> None:
    """Publish versions and deltas of a small torch model and update a live copy through every commit mode.

    Then a byte of a last version is flipped, to show that it is refused and that not one bit of the model changes.

    Exit status:
      0  every live digest is the published one, and the damaged version was refused
      1  a digest is wrong, or the damaged version changed the model
      2  the call itself is wrong, or torch is not installed

    Examples:
      weightcast demo modes
      weightcast demo modes --width 256 --json
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
