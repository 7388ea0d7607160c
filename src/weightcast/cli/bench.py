"""`weightcast bench`: measure, beside what limits it, and say which targets are met."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from weightcast.bench import engine_bench, fanout_bench, ipc_bench, network_bench, pause_bench, vllm_bench
from weightcast.bench.delta_bench import QUICK, DeltaSettings, run_delta_bench
from weightcast.bench.report import Machine, Report, Row
from weightcast.cli.bench_network import draw_network_rows, draw_tables
from weightcast.cli.output import Size, emit, size, table

_Columns = dict[str, Callable[[Row], str]]


def _can_be_written(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a file that cannot be made before minutes of measuring, not after."""
    if value is not None and value != "-" and not Path(value).parent.is_dir():
        raise click.BadParameter(f"{Path(value).parent} is not a directory", context, parameter)
    return value


_OUTPUT = click.option(
    "--json",
    "output",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    metavar="FILE|-",
    callback=_can_be_written,
    help="Also write JSON to FILE; -: print that and nothing else.",
)


@click.group()
def bench() -> None:
    """Measure on this machine. Exit status 1 if a target is missed."""


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
    """
    settings = replace(QUICK if quick else DeltaSettings(), seed=seed)
    settings = replace(settings, elements=elements or settings.elements, steps=steps or settings.steps)
    with _status() as say:
        report = run_delta_bench(settings, say)
    _show(report, output, _draw_delta_rows)


@bench.command(short_help="Speed of the embedded engine.")
@_OUTPUT
@click.option("--quick", is_flag=True, help="A few seconds on the tiny model: shows that it works, asserts no speed.")
@click.option("--rounds", type=click.IntRange(min=1), help="To take the fastest of.  [default: 5]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def engine(output: str | None, quick: bool, rounds: int | None, seed: int) -> None:
    """Measure tokens per second of `weightcast serve` over HTTP, beside transformers.generate in the same run.

    One request and eight at once, one rank and two. The answers of both are compared token for token.
    """
    settings = replace(engine_bench.QUICK if quick else engine_bench.EngineSettings(), seed=seed)
    settings = replace(settings, rounds=rounds or settings.rounds)
    with _status() as say:
        report = engine_bench.run_engine_bench(settings, say)
    _show(report, output, _draw_engine_rows)


@bench.command(short_help="Pauses of a replica that is updated.")
@_OUTPUT
@click.option("--size", "nbytes", type=Size(), default="512MiB", show_default=True, help="Of the model, about.")
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Processes that share the model.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="To take the fastest of.")
@click.option(
    "--window",
    "window_s",
    type=click.FloatRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    help="Seconds over which tokens are counted, six times.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Where versions lie meanwhile.  [default: /dev/shm if it has room]",
)
def pause(
    output: str | None, nbytes: int, ranks: int, rounds: int, window_s: float, seed: int, directory: str | None
) -> None:
    """Measure how long a replica under load cannot compute while an update is committed, in every way to commit.

    Full versions by copy and by swap, deltas of 1 % by scatter and by swap; beside them, in the same run, as many processes
    as there are ranks copying as much memory. And tokens per second of eight streams, with and without staging.
    """
    settings = pause_bench.PauseSettings(
        nbytes=nbytes, ranks=ranks, rounds=rounds, window_s=window_s, seed=seed, directory=directory
    )
    with _status() as say:
        report = pause_bench.run_pause_bench(settings, say)
    _show(report, output, _draw_pause_rows)


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
    """
    settings = ipc_bench.IpcSettings(nbytes=nbytes, rounds=rounds, rivals=rivals, seed=seed)
    with _status() as say:
        report = ipc_bench.run_ipc_bench(settings, say)
    _show(report, output, _draw_ipc_rows)


@bench.command(short_help="Updates of a running vLLM server.")
@_OUTPUT
@click.option("--size", "nbytes", type=Size(), default="512MiB", show_default=True, help="Of the model, about.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="To take the fastest of.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def vllm(output: str | None, nbytes: int, rounds: int, seed: int) -> None:
    """Measure full updates and deltas of 1 % of a running `vllm serve`, and how long it says nothing meanwhile.

    Beside them, in the same run, vLLM's own reload_weights from disk. Runs where vLLM is installed beside weightcast.
    """
    settings = vllm_bench.VllmSettings(nbytes=nbytes, rounds=rounds, seed=seed)
    with _status() as say:
        report = vllm_bench.run_vllm_bench(settings, say)
    _show(report, output, _draw_vllm_rows)


@bench.command(short_help="Versions over a network, beside bare TCP.")
@_OUTPUT
@click.option("--size", "nbytes", type=Size(), default="1GiB", show_default=True, help="Of the model, about.")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="To take the fastest of.")
@click.option("--rivals/--no-rivals", default=True, show_default=True, help="Also measure gloo, Mooncake and Ray.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def network(output: str | None, nbytes: int, rounds: int, rivals: bool, seed: int) -> None:
    """Measure versions over http:// and nixl://, from published to staged and verified in another process.

    Over loopback, one receiver; beside them, in turn with them, the same bytes over bare TCP and by a bare READ of NIXL.
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
@click.option("--kill/--no-kill", default=True, show_default=True, help="Also kill a relay half-way.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def fanout(output: str | None, hosts: int, nbytes: int, rate: int, rounds: int, kill: bool, seed: int) -> None:
    """Measure how long a version takes to many hosts, each of which mirrors the one before it, beside one host alone.

    Hosts are network namespaces whose links are capped with `tc tbf`: this needs root and iproute2. Each has a relay and a
    receiver; what the publisher's link carried is counted too, and one round is taken with a relay killed half-way.
    """
    settings = fanout_bench.FanoutSettings(
        hosts=hosts, nbytes=nbytes, rate_bits=rate * 1_000_000, rounds=rounds, kill=kill, seed=seed
    )
    with _status() as say:
        report = fanout_bench.run_fanout_bench(settings, say)
    _show(report, output, _draw_fanout_rows)


def _show(report: Report, output: str | None, draw_rows: Callable[[Console, Report], None]) -> None:
    """Print and write a report; ends the command with status 1 if a target was missed."""
    if output == "-":
        click.echo(report.to_json(), nl=False)
    else:
        if output is not None:
            Path(output).write_bytes(report.to_json())

        def human(console: Console) -> None:
            console.print(_machine(report.machine))
            draw_rows(console, report)
            _draw_targets(console, report)

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


def _machine(machine: Machine) -> str:
    packages = [f"{name} {getattr(machine, name) or '-'}" for name in ("python", "numpy", "numba", "zstandard", "torch")]
    return f"{machine.cpu}, {machine.cores} cores, {size(machine.memory_nbytes)}; {', '.join(packages)}; {machine.backend}"


_SIZES: _Columns = {
    "weights": lambda row: row["workload"],
    "codec": lambda row: row["codec"],
    "changed": lambda row: f"{row['density']:.3%}",
    "size": lambda row: size(row["nbytes"]),
    "B/change": lambda row: f"{row['bytes_per_change']:.3f}",
    "full is": lambda row: f"{row['times_smaller_than_full']:.0f}×",
    "over order-0": lambda row: f"{row['over_order0']:.3f}",
    "over exponent bound": lambda row: f"{row['over_exponent_bound']:.3f}",
    "over loose one": lambda row: f"{row['over_loose_exponent_bound']:.3f}",
}
_FOLDS: _Columns = {
    "weights": lambda row: row["workload"],
    "steps folded": lambda row: str(row["steps"]),
    "changed": lambda row: f"{row['density']:.3%}",
    "size": lambda row: size(row["nbytes"]),
    "singles": lambda row: size(row["singles_nbytes"]),
    "over singles": lambda row: f"{row['over_singles']:.3f}",
}
_SPEEDS: _Columns = {
    "weights": lambda row: row["workload"],
    "operation": lambda row: row["operation"],
    "ms": lambda row: f"{row['ms']:.1f}",
    "median ms": lambda row: f"{row['median_ms']:.1f}",
    "spread": lambda row: f"{row['spread']:.0%}",
    "GB/s": lambda row: f"{row['gb_per_s']:.2f}",
    "limit": lambda row: row["limit"],
    "over limit": lambda row: f"{row['over_limit']:.2f}",
}
_WORDS = ("weights", "codec", "operation", "limit")


def _draw_delta_rows(console: Console, report: Report) -> None:
    for kind, columns in (("size", _SIZES), ("fold", _FOLDS), ("speed", _SPEEDS)):
        rows = [row for row in report.rows if row["kind"] == kind]
        if not rows:
            continue
        drawn = table(*columns, right=tuple(name for name in columns if name not in _WORDS))
        for row in rows:
            drawn.add_row(*(shown(row) for shown in columns.values()))
        console.print("")
        console.print(drawn)


_SERVED: _Columns = {
    "model": lambda row: row["preset"],
    "ranks": lambda row: str(row["ranks"]),
    "requests": lambda row: str(row["width"]),
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "transformers": lambda row: f"{row['transformers_tokens_per_s']:.0f}",
    "over it": lambda row: f"{row['over_transformers']:.2f}",
    "same tokens": lambda row: f"{row['same_tokens']:.2%}",
}


def _draw_engine_rows(console: Console, report: Report) -> None:
    drawn = table(*_SERVED, right=tuple(name for name in _SERVED if name != "model"))
    for row in report.rows:
        drawn.add_row(*(shown(row) for shown in _SERVED.values()))
    console.print("")
    console.print(drawn)


_PAUSES: _Columns = {
    "update": lambda row: row["kind"],
    "rounds": lambda row: str(row["rounds"]),
    "pause ms": lambda row: f"{row['ms']:.1f}",
    "median ms": lambda row: f"{row['median_ms']:.1f}",
    "worst ms": lambda row: f"{row['worst_ms']:.1f}",
    "staging s": lambda row: f"{row['stage_s']:.2f}",
    "memory": lambda row: f"{row['risen_shards']:.2f}",
    "longest gap ms": lambda row: f"{row['longest_gap_ms']:.1f}",
    "usual gap ms": lambda row: f"{row['usual_gap_ms']:.1f}",
}


def _draw_pause_rows(console: Console, report: Report) -> None:
    of = {row["kind"]: row for row in report.rows}
    drawn = table(*_PAUSES, right=tuple(name for name in _PAUSES if name != "update"))
    for row in report.rows:
        if "stage_s" in row:
            drawn.add_row(*(shown(row) for shown in _PAUSES.values()))
    copied, served = of["memcpy"], of["throughput"]
    console.print("")
    console.print(drawn)
    console.print(
        f"memcpy of a shard: {copied['ms']:.1f} ms, median {copied['median_ms']:.1f} ms, {copied['gb_per_s']:.2f} GB/s each"
    )
    console.print(
        f"{served['streams']} streams: {served['staging_tokens_per_s']:.0f} tokens/s while staging, "
        f"{served['tokens_per_s']:.0f} without"
    )


def _milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.0f}" if row[name] else "-"


_VLLM: _Columns = {
    "update": lambda row: row["kind"],
    "s": lambda row: f"{row['s']:.2f}",
    "pause ms": _milliseconds("pause_ms"),
    "median": _milliseconds("median_pause_ms"),
    "gap ms": _milliseconds("gap_ms"),
    "median gap": _milliseconds("median_gap_ms"),
    "while staging": _milliseconds("staging_gap_ms"),
    "step ms": _milliseconds("step_ms"),
}


def _draw_vllm_rows(console: Console, report: Report) -> None:
    draw_tables(console, report, [(_VLLM, report.rows)])


_UPDATES: _Columns = {
    "update": lambda row: row["kind"],
    "cold s": lambda row: f"{row['cold_s']:.3f}",
    "s": lambda row: f"{row['s']:.3f}",
    "median s": lambda row: f"{row['median_s']:.3f}",
    "two memcpys s": lambda row: f"{row['memcpys_s']:.3f}",
    "over them": lambda row: f"{row['over_memcpys']:.2f}",
    "medians": lambda row: f"{row['median_over_memcpys']:.2f}",
    "by two threads": lambda row: f"{row['over_two_threads']:.2f}",
    "of one piece": lambda row: f"{row['over_one_piece']:.2f}",
    "kept s": lambda row: f"{row['publish_s']:.3f}",
    "noticed s": lambda row: f"{row['noticed_s']:.3f}",
    "staged s": lambda row: f"{row['stage_s'] + row['verify_s']:.3f}",
    "committed ms": lambda row: f"{row['commit_s'] * 1e3:.1f}",
}
_RIVALS: _Columns = {
    "rival": lambda row: row["kind"],
    **{name: _UPDATES[name] for name in ("cold s", "s", "median s", "two memcpys s", "over them")},
    "ours s": lambda row: f"{row['ours_s']:.3f}",
    "over ours": lambda row: f"{row['over_ours']:.2f}",
    "medians": lambda row: f"{row['median_over_ours']:.2f}",
}


def _draw_ipc_rows(console: Console, report: Report) -> None:
    measured = [row for row in report.rows if "s" in row]
    ours, rivals = ([row for row in measured if ("over_ours" in row) is rival] for rival in (False, True))
    draw_tables(console, report, [(_UPDATES, ours), (_RIVALS, rivals)])


_FANS: _Columns = {
    "version to": lambda row: row["kind"],
    "rounds": lambda row: str(row["rounds"]),
    "s": lambda row: f"{row['s']:.2f}",
    "median s": lambda row: f"{row['median_s']:.2f}",
    "over one host": lambda row: f"{row['over_one']:.3f}",
    "over the link": lambda row: f"{row['over_link']:.3f}",
    "publisher sent": lambda row: f"{row['sent_over_version']:.3f} ×",
}


def _draw_fanout_rows(console: Console, report: Report) -> None:
    drawn = table(*_FANS, right=tuple(_FANS)[1:])
    for row in report.rows:
        drawn.add_row(*(shown(row) for shown in _FANS.values()))
    console.print("")
    console.print(drawn)


def _draw_targets(console: Console, report: Report) -> None:
    drawn = table("target", "value", "limit", "", right=("value", "limit"))
    for name, target in report.targets.items():
        verdict = "ok" if target.ok else "MISSED" if target.asserted else "missed, not asserted"
        verdict += f": {target.why}" if target.why and not target.ok else ""
        drawn.add_row(name, f"{target.value:.3f}", f"{'≤' if target.at == 'most' else '≥'} {target.limit:g}", verdict)
    console.print("")
    console.print(drawn)
    for note in report.notes:
        console.print(note)
