"""The bench of vLLM: how long a running `vllm serve` is updated, and how long it cannot compute, beside its own reload.

The pause of an update is the time in which the engine could not compute a step: how long the calls that commit a staged
version take where nothing else is asked of it, and how long its own `reload_weights` takes in the same way; so are the CPU
seconds of all processes of the server. What a user sees is measured by a stream of tokens: the longest gap between two.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from weightcast import logs
from weightcast.bench.ipc_children import descendants_of
from weightcast.bench.model_versions import publish_versions
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir
from weightcast.bench.served import Serving, TokenStream
from weightcast.bench.timing import cpu_s
from weightcast.bench.vllm_served import vllm_program, vllm_served, wanted
from weightcast.clock import Deadline
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput, ReplicaFailed
from weightcast.fleet.vllm_server import VllmServer

log = logs.get(__name__)

Progress = Callable[[str], None]
Kind = Literal["full", "delta", "reload"]

OF_A_RELOAD = 0.5  # the pause
DELTA_OF_A_RELOAD, FULL_OF_A_RELOAD = 1.5, 2.5  # all of it
LARGE_NBYTES = 256 << 20  # below it, what does not grow with the model counts too much
_LAYER_NBYTES = 2 * (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 3072 * 1024)
_STEADY = 8  # tokens before an update, which tell how long a step takes
_UPDATE_S = 300.0
_LOOK_S = 0.05
# What one round does, and whether the stream rests meanwhile: then its phases and its CPU seconds are its own.
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
class _Quiet:
    """An update of an idle server, in seconds: until it is staged, the commit or the reload, and CPU."""

    kind: Kind
    stage_s: float
    pause_s: float
    cpu_s: float


@dataclass(frozen=True)
class _Loaded:
    """An update under a stream, in seconds: the longest gap between two tokens during the commit or the reload, and while it
    was staged; and how long a token takes otherwise.
    """

    kind: Kind
    gap_s: float
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
        with vllm_served(model, scratch) as serving:
            taken = _measured(serving, model, store, settings.rounds, progress)
    rows = [_row(kind, taken) for kind in ("full", "delta", "reload")]
    return Report(
        bench="vllm",
        machine=this_machine(),
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows, large=settings.nbytes >= LARGE_NBYTES),
        notes=[
            f"{nbytes} bytes in BF16, {layers} layers; a delta changes one element in a hundred of every tensor",
            f"fastest of the rounds; load of the machine {before:.2f} before, {os.getloadavg()[0]:.2f} after",
            "gap: in a stream of short requests, during the commit or the reload; after a commit it includes a step that is "
            "computed again, and the keys and values of up to 20 tokens, which a reload leaves as they were",
            "staging runs beside the stream and slows it down: the longest gap meanwhile is shown apart",
            "seconds, and CPU seconds of all processes of the server, are taken without a stream; servers do not tell what "
            "they fetched",
        ],
    )


def _config(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip


def _measured(serving: Serving, model: Path, store: Path, rounds: int, progress: Progress) -> list[_Quiet | _Loaded]:
    server, stream = VllmServer(serving.url), TokenStream(serving.port, wanted)
    pids = [serving.pid, *descendants_of(serving.pid)]
    taken: list[_Quiet | _Loaded] = []
    try:
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for kind, version, quiet in _ROUND:
                source = str(model) if kind == "reload" else f"file://{store}"
                if quiet:
                    with stream.quiet():
                        taken.append(_update_quietly(server, pids, kind, version, source))
                else:
                    taken.append(_update_loaded(stream, server, kind, version, source))
    finally:
        stream.close()
    return taken


def _update_quietly(server: VllmServer, pids: Sequence[int], kind: Kind, version: str, source: str) -> _Quiet:
    used, began = sum(map(cpu_s, pids)), time.monotonic()
    if kind != "reload":
        _stage(server, version, source)
    staged = time.monotonic()
    _change(server, kind, version, source)
    ended = time.monotonic()
    return _Quiet(kind, staged - began, ended - staged, sum(map(cpu_s, pids)) - used)


def _update_loaded(stream: TokenStream, server: VllmServer, kind: Kind, version: str, source: str) -> _Loaded:
    step_s, began = _steady(stream), time.monotonic()
    if kind != "reload":
        _stage(server, version, source)
    staged = time.monotonic()
    _change(server, kind, version, source)
    ended = time.monotonic()
    stream.wait_for(2)
    gap_s, staging_gap_s = (max(stream.gaps(*span), default=0.0) for span in ((staged, ended), (began, staged)))
    return _Loaded(kind, gap_s, staging_gap_s, step_s)


def _change(server: VllmServer, kind: Kind, version: str, source: str) -> None:
    if kind == "reload":  # vLLM's own way: from disk, which is in the page cache, into the running model
        server.collective_rpc("reload_weights", {"weights_path": source}, deadline=Deadline.after(_UPDATE_S))
    else:
        server.start()
        server.update({"version": version, "source": source})
        server.finish(version)


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
    return statistics.median(
        after - before for before, after in pairwise([token.at_s for token in stream.tokens[-_STEADY:]])
    )


def _row(kind: str, taken: Sequence[_Quiet | _Loaded]) -> Row:
    quiet = [one for one in taken if isinstance(one, _Quiet) and one.kind == kind]
    loaded = [one for one in taken if isinstance(one, _Loaded) and one.kind == kind]
    return {
        "kind": kind,
        "rounds": len(quiet),
        "s": min(one.stage_s + one.pause_s for one in quiet),
        "stage_s": statistics.median(one.stage_s for one in quiet),
        "pause_ms": min(one.pause_s for one in quiet) * 1e3,
        "median_pause_ms": statistics.median(one.pause_s for one in quiet) * 1e3,
        "cpu_s": statistics.median(one.cpu_s for one in quiet),
        "gap_ms": min(one.gap_s for one in loaded) * 1e3,
        "median_gap_ms": statistics.median(one.gap_s for one in loaded) * 1e3,
        "staging_gap_ms": statistics.median(one.staging_gap_s for one in loaded) * 1e3,
        "step_ms": statistics.median(one.step_s for one in loaded) * 1e3,
    }


def _targets(rows: list[Row], *, large: bool) -> dict[str, Target]:
    full, delta, reload = rows
    small = "" if large else f"the model is smaller than {LARGE_NBYTES >> 20} MiB"
    why = "a gap has a step in it that is computed twice, whatever the size of the update"

    def of_a_reload(row: Row, figure: str, *, asserted: bool) -> Target:
        value = row[figure] / reload[figure]
        return Target(value, OF_A_RELOAD, "most", asserted=asserted, why="" if asserted else why)

    return {
        "delta.over_reload": Target(delta["s"] / reload["s"], DELTA_OF_A_RELOAD, "most", large, small),
        "full.over_reload": Target(full["s"] / reload["s"], FULL_OF_A_RELOAD, "most", large, small),
        "delta.pause_over_reload": of_a_reload(delta, "pause_ms", asserted=True),
        "full.pause_over_reload": of_a_reload(full, "pause_ms", asserted=True),
        "delta.gap_over_reload": of_a_reload(delta, "gap_ms", asserted=False),
        "full.gap_over_reload": of_a_reload(full, "gap_ms", asserted=False),
    }
