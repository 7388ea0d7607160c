"""`weightcast bench`: measure, beside what limits it, and say which targets are met."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from weightcast.bench import (
    choice_bench,
    engine_bench,
    fanout_bench,
    ipc_bench,
    network_bench,
    pause_bench,
    update_bench,
    vllm_bench,
)
from weightcast.bench.delta_bench import QUICK, DeltaSettings, run_delta_bench
from weightcast.bench.report import Report
from weightcast.cli.bench_network import draw_network_rows
from weightcast.cli.bench_tables import (
    draw_choice_rows,
    draw_delta_rows,
    draw_engine_rows,
    draw_fanout_rows,
    draw_ipc_rows,
    draw_pause_rows,
    draw_targets,
    draw_update_rows,
    draw_vllm_rows,
    machine_line,
)
from weightcast.cli.help import Group
from weightcast.cli.output import Size, emit


def _can_be_written(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a file that cannot be made before minutes of measuring, not after."""
    if value is not None and value != "-" and not Path(value).parent.is_dir():
        raise click.BadParameter(f"{Path(value).parent} is not a directory", context, parameter)
    return value


def _each_size(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read sizes with commas between them."""
    if value is None:
        return None
    return tuple(Size().convert(one, parameter, context) for one in value.split(",") if one.strip())


_OUTPUT = click.option(
    "--json",
    "output",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    metavar="FILE|-",
    callback=_can_be_written,
    help="Also write JSON to FILE; -: print that and nothing else.",
)

_DIRECTORY = click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Where versions lie meanwhile.  [default: /dev/shm if it has room]",
)


@click.group(cls=Group, short_help="Measure on this machine, beside what limits it.")
def bench() -> None:
    """Measure on this machine, beside what limits it, and say which targets are met.

    Each figure stands beside its limit, taken in the same run: a copy of the same memory, a bare TCP stream, the entropy of
    a change. Nothing else should run meanwhile.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed, or something failed
      2  the call itself is wrong, a package is not installed, or the memory does not suffice

    Examples:
      weightcast bench delta --quick
      weightcast bench ipc --size 4GiB --json ipc.json
      sudo weightcast bench fanout --hosts 8
    """


@bench.command(short_help="Size and speed of deltas.")
@_OUTPUT
@click.option("--quick", is_flag=True, help="A few seconds on small weights: shows that it works, asserts no speed.")
@click.option("--elements", type=click.IntRange(min=1 << 16), help="Of the generated weights.  [default: 134217728]")
@click.option("--steps", type=click.IntRange(min=1), help="To train real weights for.  [default: 20]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def delta(output: str | None, quick: bool, elements: int | None, steps: int | None, seed: int) -> None:
    """Measure the size and the speed of deltas on real and generated BF16 weights.

    Sizes stand beside the codecs of others and the entropy of the change, speeds beside what NumPy takes to find and to
    scatter the same changes in the same run.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  the extra `bench` is not installed (not needed with --quick)

    Examples:
      weightcast bench delta --quick
      weightcast bench delta --json delta.json
    """
    settings = replace(QUICK if quick else DeltaSettings(), seed=seed)
    settings = replace(settings, elements=elements or settings.elements, steps=steps or settings.steps)
    with _status() as say:
        report = run_delta_bench(settings, say)
    _show(report, output, draw_delta_rows)


@bench.command(short_help="Full version or delta: the choice of publish.")
@_OUTPUT
@click.option("--quick", is_flag=True, help="A few seconds on 4 MiB: shows that it works, asserts no time.")
@click.option("--size", "nbytes", type=Size(), help="Of the model, about.  [default: 128MiB]")
@click.option("--rounds", type=click.IntRange(min=1), help="To take the median of.  [default: 5]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def choice(output: str | None, quick: bool, nbytes: int | None, rounds: int | None, seed: int) -> None:
    """Measure publishing and one update as a full version, as a delta, and as `auto` chooses.

    For 0 to 100 % of the weights changed, in BF16 and FP32; a model reads the store, another asks a depot process. All ways
    take turns in the same rounds, and the store is in memory: nothing is in favour of small payloads but their size.

    Exit status:
      0  the way chosen took at most 1.2 times as long as the faster one, and 20 ms, everywhere
      1  it took longer somewhere
      2  the call itself is wrong

    Examples:
      weightcast bench choice --quick
      weightcast bench choice --size 512MiB --json choice.json
    """
    settings = replace(choice_bench.QUICK if quick else choice_bench.ChoiceSettings(), seed=seed)
    settings = replace(settings, nbytes=nbytes or settings.nbytes, rounds=rounds or settings.rounds)
    with _status() as say:
        report = choice_bench.run_choice_bench(settings, say)
    _show(report, output, draw_choice_rows)


@bench.command(short_help="Speed of the embedded engine.")
@_OUTPUT
@click.option("--quick", is_flag=True, help="A few seconds on the tiny model: shows that it works, asserts no speed.")
@click.option("--rounds", type=click.IntRange(min=1), help="To take the fastest of.  [default: 5]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def engine(output: str | None, quick: bool, rounds: int | None, seed: int) -> None:
    """Measure tokens per second of `weightcast serve` over HTTP, beside transformers.generate in the same run.

    One request and eight at once, one rank and two. The answers of both are compared token for token.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  the extras `serve` and `bench` are not installed

    Examples:
      weightcast bench engine --quick
      weightcast bench engine --rounds 10 --json engine.json
    """
    settings = replace(engine_bench.QUICK if quick else engine_bench.EngineSettings(), seed=seed)
    settings = replace(settings, rounds=rounds or settings.rounds)
    with _status() as say:
        report = engine_bench.run_engine_bench(settings, say)
    _show(report, output, draw_engine_rows)


@bench.command(short_help="Pauses of a replica that is updated.")
@_OUTPUT
@click.option("--size", "nbytes", type=Size(), default="512MiB", show_default=True, help="Of the model, about.")
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Processes that share the model.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="To take the fastest of.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@_DIRECTORY
def pause(output: str | None, nbytes: int, ranks: int, rounds: int, seed: int, directory: str | None) -> None:
    """Measure how long a replica under load cannot compute while an update is committed, in every way to commit.

    Full versions by copy and by swap, deltas of 1 % by scatter and by swap; beside them, in the same run, as many processes
    as there are ranks copying as much memory. What clients see of an update is measured by `weightcast bench update`.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  the extra `serve` is not installed

    Examples:
      weightcast bench pause
      weightcast bench pause --size 2GiB --ranks 1 --json pause.json
    """
    settings = pause_bench.PauseSettings(nbytes=nbytes, ranks=ranks, rounds=rounds, seed=seed, directory=directory)
    with _status() as say:
        report = pause_bench.run_pause_bench(settings, say)
    _show(report, output, draw_pause_rows)


@bench.command(short_help="Updates of a served replica, from publish to first token.")
@_OUTPUT
@click.option("--quick", is_flag=True, help="A minute on 4 MiB: shows that it works, asserts nothing.")
@click.option("--size", "nbytes", type=Size(), help="Of the model, about.  [default: 512MiB]")
@click.option(
    "--sizes",
    metavar="SIZE,…",
    callback=_each_size,
    help="Others, at which one full version, one delta and the longest way behind are measured; '' is none.  "
    "[default: 128MiB,2GiB]",
)
@click.option("--rounds", type=click.IntRange(min=1), help="To take the median of.  [default: 3]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@_DIRECTORY
def update(
    output: str | None,
    quick: bool,
    nbytes: int | None,
    sizes: tuple[int, ...] | None,
    rounds: int | None,
    seed: int,
    directory: str | None,
) -> None:
    """Measure updates of `weightcast serve` with two ranks: from publish to the first token of the new version.

    Full versions and deltas of 1 %, from a store, a depot on it, a trainer on the same host and trainer ranks that publish
    shares: along a chain whose versions are taken in turn, and from 1, 5 and 15 versions behind. Phases, bytes, CPU seconds
    of every process, and the longest gap that eight streaming clients see.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  the extra `serve` is not installed

    Examples:
      weightcast bench update --quick
      weightcast bench update --sizes 128MiB --rounds 5 --json update.json
    """
    settings = replace(update_bench.QUICK if quick else update_bench.UpdateSettings(), seed=seed, directory=directory)
    settings = replace(settings, nbytes=nbytes or settings.nbytes, rounds=rounds or settings.rounds)
    settings = replace(settings, sizes=settings.sizes if sizes is None else sizes)
    with _status() as say:
        report = update_bench.run_update_bench(settings, say)
    _show(report, output, draw_update_rows)


@bench.command(short_help="Updates from a trainer on the same host.")
@_OUTPUT
@click.option("--size", "nbytes", type=Size(), default="1GiB", show_default=True, help="Of the model, about.")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="To take the fastest of.")
@click.option("--rivals/--no-rivals", default=True, show_default=True, help="Also measure gloo, Ray and safetensors.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def ipc(output: str | None, nbytes: int, rounds: int, rivals: bool, seed: int) -> None:
    """Measure updates over ipc://, from a trainer's tensors to weights committed in another process, digests on.

    One and two receivers by swap, one by copy, and a stream through two buckets; beside them, in the same run, the two
    copies of the same bytes that it takes at least. The first update, in memory that nobody has touched, is shown apart.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  the extra `ipc` or `torch` is not installed, or the memory does not suffice

    Examples:
      weightcast bench ipc
      weightcast bench ipc --size 256MiB --rounds 3 --no-rivals
    """
    settings = ipc_bench.IpcSettings(nbytes=nbytes, rounds=rounds, rivals=rivals, seed=seed)
    with _status() as say:
        report = ipc_bench.run_ipc_bench(settings, say)
    _show(report, output, draw_ipc_rows)


@bench.command(short_help="Updates of a running vLLM server.")
@_OUTPUT
@click.option("--size", "nbytes", type=Size(), default="512MiB", show_default=True, help="Of the model, about.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="To take the median of.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def vllm(output: str | None, nbytes: int, rounds: int, seed: int) -> None:
    """Measure full updates and deltas of 1 % of a running `vllm serve`: their phases, bytes and CPU seconds, and the longest
    gap that streaming clients see.

    Beside them, in the same run, vLLM's own reload_weights from disk. Runs where vLLM is installed beside weightcast.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  vLLM is not installed

    Examples:
      weightcast bench vllm --size 256MiB
    """
    settings = vllm_bench.VllmSettings(nbytes=nbytes, rounds=rounds, seed=seed)
    with _status() as say:
        report = vllm_bench.run_vllm_bench(settings, say)
    _show(report, output, draw_vllm_rows)


@bench.command(short_help="Versions over a network, beside bare TCP.")
@_OUTPUT
@click.option("--size", "nbytes", type=Size(), default="1GiB", show_default=True, help="Of the model, about.")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="To take the fastest of.")
@click.option("--rivals/--no-rivals", default=True, show_default=True, help="Also measure gloo, Mooncake and Ray.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def network(output: str | None, nbytes: int, rounds: int, rivals: bool, seed: int) -> None:
    """Measure versions over http:// and nixl://, from published to staged and verified in another process.

    Over loopback, one receiver; beside them, in turn with them, the same bytes over bare TCP and by a bare READ of NIXL.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  a package is not installed, or the memory does not suffice

    Examples:
      weightcast bench network
      weightcast bench network --size 256MiB --rounds 3 --no-rivals
    """
    settings = network_bench.NetworkSettings(nbytes=nbytes, rounds=rounds, rivals=rivals, seed=seed)
    with _status() as say:
        report = network_bench.run_network_bench(settings, say)
    _show(report, output, draw_network_rows)


@bench.command(short_help="A version to many hosts over capped links.")
@_OUTPUT
@click.option("--hosts", type=click.IntRange(min=2, max=64), default=8, show_default=True, help="That receive it.")
@click.option("--size", "nbytes", type=Size(), default="256MiB", show_default=True, help="Of the model, about.")
@click.option(
    "--rate", type=click.IntRange(min=1), default=200, show_default=True, help="Of each link, both ways, in Mbit/s."
)
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="To take the fastest of.")
@click.option("--kill/--no-kill", default=True, show_default=True, help="Also kill a relay half-way, of 3 hosts or more.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def fanout(output: str | None, hosts: int, nbytes: int, rate: int, rounds: int, kill: bool, seed: int) -> None:
    """Measure how long a version takes to many hosts, each of which mirrors the one before it, beside one host alone.

    Hosts are network namespaces whose links are capped with `tc tbf`: this needs root and iproute2. Each has a relay and a
    receiver; what the publisher's link carried is counted too, and one round is taken with a relay killed half-way.

    Exit status:
      0  all targets that are asserted are met
      1  a target is missed
      2  not root, or no iproute2

    Examples:
      sudo weightcast bench fanout
      sudo weightcast bench fanout --hosts 4 --size 64MiB --rate 400 --no-kill
    """
    settings = fanout_bench.FanoutSettings(
        hosts=hosts, nbytes=nbytes, rate_bits=rate * 1_000_000, rounds=rounds, kill=kill and hosts > 2, seed=seed
    )
    with _status() as say:
        report = fanout_bench.run_fanout_bench(settings, say)
    _show(report, output, draw_fanout_rows)


def _show(report: Report, output: str | None, draw_rows: Callable[[Console, Report], None]) -> None:
    """Print and write a report; ends the command with status 1 if a target was missed."""
    if output == "-":
        click.echo(report.to_json(), nl=False)
    else:
        if output is not None:
            Path(output).write_bytes(report.to_json())

        def human(console: Console) -> None:
            console.print(machine_line(report.machine))
            draw_rows(console, report)
            draw_targets(console, report)

        emit(False, None, human)
    if report.missed:
        click.get_current_context().exit(1)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being done; nothing where no terminal is attached."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(stderr=True).status("starting") as status:
        yield status.update
