"""The tables of `weightcast bench`, but for those of networks."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from weightcast.bench.report import Machine, Report, Row
from weightcast.cli.bench_network import draw_tables
from weightcast.cli.output import size, table

_Columns = dict[str, Callable[[Row], str]]


def machine_line(machine: Machine) -> str:
    """Where figures were taken."""
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


def draw_delta_rows(console: Console, report: Report) -> None:
    """Sizes, folds and speeds of deltas."""
    for kind, columns in (("size", _SIZES), ("fold", _FOLDS), ("speed", _SPEEDS)):
        rows = [row for row in report.rows if row["kind"] == kind]
        if not rows:
            continue
        drawn = table(*columns, right=tuple(name for name in columns if name not in _WORDS))
        for row in rows:
            drawn.add_row(*(shown(row) for shown in columns.values()))
        console.print("")
        console.print(drawn)


def _publish_and_update(way: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        if row[f"{way}_s"] is None:
            return "-"
        publish, update, total = (1000 * row[f"{way}{name}"] for name in ("_publish_s", "_update_s", "_s"))
        return f"{publish:.0f} + {update:.0f} = {total:.0f}"

    return shown


_CHOICES: _Columns = {
    "dtype": lambda row: row["dtype"],
    "changed": lambda row: f"{row['share']:.1%}",
    "source": lambda row: row["source"],
    "full ms": _publish_and_update("full"),
    "delta ms": _publish_and_update("delta"),
    "auto ms": _publish_and_update("auto"),
    "chosen": lambda row: row["chosen"],
    "over faster": lambda row: f"{row['auto_s'] / row['faster_s']:.2f}",
}


def draw_choice_rows(console: Console, report: Report) -> None:
    """Publishing and one update in each way."""
    drawn = table(*_CHOICES, right=tuple(name for name in _CHOICES if name not in ("dtype", "source", "chosen")))
    for row in report.rows:
        drawn.add_row(*(shown(row) for shown in _CHOICES.values()))
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


def draw_engine_rows(console: Console, report: Report) -> None:
    """Tokens per second beside those of transformers."""
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
}


def draw_pause_rows(console: Console, report: Report) -> None:
    """Pauses of each way to commit, beside copies of memory."""
    of = {row["kind"]: row for row in report.rows}
    drawn = table(*_PAUSES, right=tuple(name for name in _PAUSES if name != "update"))
    for row in report.rows:
        if "stage_s" in row:
            drawn.add_row(*(shown(row) for shown in _PAUSES.values()))
    copied = of["memcpy"]
    console.print("")
    console.print(drawn)
    console.print(
        f"memcpy of a shard: {copied['ms']:.1f} ms, median {copied['median_ms']:.1f} ms, {copied['gb_per_s']:.2f} GB/s each"
    )


def _milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.0f}" if row[name] else "-"


def _phase(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[f'{name}_s'] * 1e3:.0f}" if f"{name}_s" in row else "-"


def _cpu(of: str) -> Callable[[Row], str]:
    """The sum over the processes whose names begin so."""

    def shown(row: Row) -> str:
        taken = [seconds for name, seconds in row.get("cpu_s", {}).items() if name.startswith(of)]
        return f"{sum(taken) * 1e3:.0f}" if taken else "-"

    return shown


_UPDATED: _Columns = {
    "source": lambda row: row["source"],
    "model": lambda row: size(row["nbytes"]),
    "version": lambda row: row["way"],
    "publish ms": _phase("publish"),
    "stage": _phase("stage"),
    "vote": _phase("vote"),
    "order": _phase("order"),
    "pause": _phase("pause"),
    "read back": _phase("read_back"),
    "settle": _phase("settle"),
    "first token": _phase("first_token"),
    "total": _phase("total"),
}
_QUIET: _Columns = {
    **_UPDATED,
    "fetched": lambda row: size(row["bytes"]) if "bytes" in row else "-",
    "CPU ms: front end": _cpu("front end"),
    "ranks": _cpu("rank"),
    "depot": _cpu("depot"),
    "trainers": _cpu("trainer"),
}
_LOADED: _Columns = {
    **_UPDATED,
    "gap: staging": _milliseconds("staging_gap_ms"),
    "commit": _milliseconds("commit_gap_ms"),
    "before": _milliseconds("before_gap_ms"),
    "usual": _milliseconds("usual_gap_ms"),
    "a step": _milliseconds("step_ms"),
}


def draw_update_rows(console: Console, report: Report) -> None:
    """Updates of an idle server and of one with streams, and what they are compared with."""
    words = ("source", "version")
    for loaded, columns in ((False, _QUIET), (True, _LOADED)):
        drawn = table(*columns, right=tuple(name for name in columns if name not in words))
        for row in report.rows:
            if row["kind"] == "update" and row.get("loaded", False) is loaded:
                drawn.add_row(*(shown(row) for shown in columns.values()))
        console.print("")
        console.print(f"{report.settings['streams']} streams:" if loaded else "idle server:")
        console.print(drawn)
    publish = [f"{row['what'].replace('_', ' from ')} {row['s']:.3f} s" for row in report.rows if row["kind"] == "publish"]
    sending = [f"{row['way']} {row['cpu_s'] * 1e3:.1f} ms" for row in report.rows if row["kind"] == "sending"]
    console.print(f"publishing: {', '.join(publish)}")
    console.print(f"CPU of a depot that sends the same bytes: {', '.join(sending)}")
    trainers = [f"{row['ranks']} {row['cpu_s'] * 1e3:.0f} ms" for row in report.rows if row["kind"] == "trainers"]
    console.print(f"CPU of all trainer ranks that publish a delta, by their number: {', '.join(trainers)}")
    for row in report.rows:
        if row["kind"] == "throughput":
            console.print(f"{row['busy_tokens_per_s']:.0f} tokens/s with deltas, {row['tokens_per_s']:.0f} without")


_VLLM: _Columns = {
    "update": lambda row: row["kind"],
    "publish ms": _phase("publish"),
    "stage": _phase("stage"),
    "pause": _phase("pause"),
    "first token": _phase("first_token"),
    "total": _phase("total"),
    "fetched": lambda row: size(row["bytes"]),
}
_VLLM_QUIET: _Columns = {**_VLLM, "CPU ms: front end": _cpu("front end"), "engine": _cpu("engine")}
_VLLM_LOADED: _Columns = {**_VLLM, **{name: _LOADED[name] for name in _LOADED if name not in _UPDATED and name != "a step"}}


def draw_vllm_rows(console: Console, report: Report) -> None:
    """Updates of vLLM beside its own reload: of an idle server, and of one with streams."""
    quiet, loaded = ([row for row in report.rows if row["loaded"] is with_streams] for with_streams in (False, True))
    draw_tables(console, report, [(_VLLM_QUIET, quiet), (_VLLM_LOADED, loaded)])


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


def draw_ipc_rows(console: Console, report: Report) -> None:
    """Updates over ipc://, and rivals."""
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


def draw_fanout_rows(console: Console, report: Report) -> None:
    """A version to one host and to many."""
    drawn = table(*_FANS, right=tuple(_FANS)[1:])
    for row in report.rows:
        drawn.add_row(*(shown(row) for shown in _FANS.values()))
    console.print("")
    console.print(drawn)


def draw_targets(console: Console, report: Report) -> None:
    """Which targets are met, and notes."""
    drawn = table("target", "value", "limit", "", right=("value", "limit"))
    for name, target in report.targets.items():
        verdict = "ok" if target.ok else "MISSED" if target.asserted else "missed, not asserted"
        verdict += f": {target.why}" if target.why and not target.ok else ""
        drawn.add_row(name, f"{target.value:.3f}", f"{'≤' if target.at == 'most' else '≥'} {target.limit:g}", verdict)
    console.print("")
    console.print(drawn)
    for note in report.notes:
        console.print(note)
