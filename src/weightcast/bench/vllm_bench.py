"""The bench of vLLM: how long a running `vllm serve` is updated, and how long it cannot compute, beside its own reload.

The pause of an update is the time in which the engine could not compute a step: how long the calls that commit a staged
version take where nothing else is asked of it, and how long its own `reload_weights` takes in the same way. What a user
sees is measured by a stream of tokens: the longest gap between two of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from weightcast import logs
from weightcast.bench.pause_model import publish_versions
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir
from weightcast.bench.vllm_served import TokenStream, vllm_program, vllm_served
from weightcast.clock import Deadline
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput, ReplicaFailed
from weightcast.fleet.vllm_server import VllmServer

log = logs.get(__name__)

Progress = Callable[[str], None]
Kind = Literal["full", "delta", "reload"]

OF_A_RELOAD = 0.5
_LAYER_NBYTES = 2 * (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 3072 * 1024)
_STEADY = 8  # tokens before an update, which tell how long a step takes
_UPDATE_S = 300.0
_LOOK_S = 0.05
# What one round does, and whether the stream rests meanwhile.
_ROUND: tuple[tuple[Kind, str, bool], ...] = (
    ("full", "a", True), ("full", "b", False), ("delta", "b1", True), ("delta", "b2", False),
    ("reload", "a", True), ("reload", "a", False),
)  # fmt: skip


@dataclass(frozen=True)
class VllmSettings:
    """What is measured: a dense model of about so many bytes in BF16."""

    nbytes: int = 512 << 20
    rounds: int = 2
    seed: int = 0


@dataclass(frozen=True)
class _Taken:
    """One update: how long it took in all; the pause, if nothing else was asked meanwhile, or the longest gap between two
    tokens, if a stream was; the longest gap while it was staged; and how long a token takes otherwise.
    """

    kind: Kind
    seconds: float
    pause_s: float | None
    gap_s: float | None
    staging_gap_s: float
    step_s: float


def run_vllm_bench(settings: VllmSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `MissingExtra` without vLLM."""
    layers = round(settings.nbytes / _LAYER_NBYTES)
    if layers < 1:
        raise InvalidInput(f"a model of {settings.nbytes} bytes is too small: take {_LAYER_NBYTES} or more.")
    vllm_program()  # before anything is made
    with scratch_dir() as scratch, ended_in_order():
        model, store = scratch / "model", scratch / "store"
        progress("making a model")
        nbytes = init_checkpoint(model, "small", seed=settings.seed, dtype="bfloat16", **_config(layers))
        publish_versions(model, store, seed=settings.seed, progress=progress)
        before = os.getloadavg()[0]
        progress("starting vllm serve")
        with vllm_served(model, scratch) as port:
            taken = _measured(port, model, store, settings.rounds, progress)
    rows = [_row(kind, [one for one in taken if one.kind == kind]) for kind in ("full", "delta", "reload")]
    return Report(
        bench="vllm",
        machine=this_machine(),
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows),
        notes=[
            f"{nbytes} bytes in BF16, {layers} layers; a delta changes one element in a hundred of every tensor",
            f"fastest of the rounds; the first update, into fresh memory, took {taken[0].seconds:.2f} s; "
            f"load of the machine {before:.2f} before, {os.getloadavg()[0]:.2f} after",
            "gap: in a stream of short requests, during the commit or the reload; after a commit it includes a step that is "
            "computed again, and the keys and values of up to 20 tokens, which a reload leaves as they were",
            "staging runs beside the stream and slows it down: the longest gap meanwhile is shown apart",
        ],
    )


def _config(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip


def _measured(port: int, model: Path, store: Path, rounds: int, progress: Progress) -> list[_Taken]:
    server, stream, taken = VllmServer(f"http://127.0.0.1:{port}"), TokenStream(port), []
    try:
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for kind, version, quiet in _ROUND:
                source = str(model) if kind == "reload" else f"file://{store}"
                taken.append(_update(stream, server, kind, version, source, quiet=quiet))
    finally:
        stream.close()
    return taken


def _update(stream: TokenStream, server: VllmServer, kind: Kind, version: str, source: str, *, quiet: bool) -> _Taken:
    step_s, began = _steady(stream), time.monotonic()
    if kind != "reload":
        _stage(server, version, source)
    staged = time.monotonic()
    with stream.quiet() if quiet else nullcontext():
        changing = time.monotonic()
        if kind == "reload":  # vLLM's own way: from disk, which is in the page cache, into the running model
            server.collective_rpc("reload_weights", {"weights_path": source}, deadline=Deadline.after(_UPDATE_S))
        else:
            server.start()
            server.update({"version": version, "source": source})
            server.finish(version)
        ended = time.monotonic()
    stream.wait_for(2)
    return _Taken(
        kind,
        seconds=staged - began + ended - changing,
        pause_s=ended - changing if quiet else None,
        gap_s=None if quiet else stream.longest_gap(changing, ended),
        staging_gap_s=stream.longest_gap(began, staged),
        step_s=step_s,
    )


def _stage(server: VllmServer, version: str, source: str) -> None:
    """Beside the stream, and wait for it."""
    server.stage(version, source)
    deadline = Deadline.after(_UPDATE_S)
    while (status := server.status()[0]).state == "STAGING":
        deadline.check(f"staging {version}")
        time.sleep(_LOOK_S)
    if status.error is not None:
        raise ReplicaFailed(f"vllm serve could not stage {version}: {status.error.message}")


def _steady(stream: TokenStream) -> float:
    """How long a token takes when nothing else happens."""
    stream.wait_for(_STEADY)
    return statistics.median(after - before for before, after in pairwise(stream.arrivals[-_STEADY:]))


def _row(kind: str, taken: list[_Taken]) -> Row:
    pauses = [one.pause_s for one in taken if one.pause_s is not None]
    gaps = [one.gap_s for one in taken if one.gap_s is not None]
    return {
        "kind": kind,
        "rounds": len(pauses),
        "s": min(one.seconds for one in taken),
        "pause_ms": min(pauses) * 1e3,
        "median_pause_ms": statistics.median(pauses) * 1e3,
        "gap_ms": min(gaps) * 1e3,
        "median_gap_ms": statistics.median(gaps) * 1e3,
        "staging_gap_ms": statistics.median(one.staging_gap_s for one in taken) * 1e3,
        "step_ms": statistics.median(one.step_s for one in taken) * 1e3,
    }


def _targets(rows: list[Row]) -> dict[str, Target]:
    full, delta, reload = rows
    why = "a gap has a step in it that is computed twice, whatever the size of the update"

    def of_a_reload(row: Row, figure: str, *, asserted: bool) -> Target:
        value = row[figure] / reload[figure]
        return Target(value, OF_A_RELOAD, "most", asserted=asserted, why="" if asserted else why)

    return {
        "delta.pause_over_reload": of_a_reload(delta, "pause_ms", asserted=True),
        "full.pause_over_reload": of_a_reload(full, "pause_ms", asserted=True),
        "delta.gap_over_reload": of_a_reload(delta, "gap_ms", asserted=False),
        "full.gap_over_reload": of_a_reload(full, "gap_ms", asserted=False),
    }
