"""The bench of vLLM: the way of an update of a running `vllm serve`, beside its own reload from disk.

Every update is measured on an idle server: its phases, its bytes and the CPU seconds of every process, less what they take
at rest. The pause is the time in which the engine could not compute a step: the calls that commit a staged version, or all
of `reload_weights`. Every kind is measured a second time under streaming clients: the longest gap that one of them sees.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from weightcast import logs
from weightcast.bench.ipc_children import descendants_of
from weightcast.bench.model_versions import publish_versions
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir
from weightcast.bench.served import Client, Serving, TokenStream, token_streams
from weightcast.bench.timing import cpu_s
from weightcast.bench.update_bench import Gaps
from weightcast.bench.vllm_served import MODEL, vllm_program, vllm_served, wanted
from weightcast.clock import Deadline
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import InvalidInput, ReplicaFailed
from weightcast.fleet.vllm_server import VllmServer

log = logs.get(__name__)

Progress = Callable[[str], None]
Kind = Literal["full", "delta", "reload"]
KINDS: tuple[Kind, ...] = get_args(Kind)

DELTA_OF_A_RELOAD, FULL_OF_A_RELOAD = 1.5, 2.5  # until it is committed
PAUSE_OF_A_RELOAD = GAP_OF_A_RELOAD = 0.5
PHASES = ("publish_s", "stage_s", "pause_s", "first_token_s")
LARGE_NBYTES = 256 << 20  # below it, what does not grow with the model counts too much
_LAYER_NBYTES = 2 * (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 3072 * 1024)
_UPDATE_S = 300.0
_LOOK_S = 0.01
_REST_S = 1.0
_PROMPT = [5, 6, 7, 8]
# The first updates take fresh memory, and are not measured.
_WARM: tuple[tuple[Kind, str], ...] = (("full", "a"), ("full", "b"), ("delta", "b1"), ("delta", "b2"), ("reload", "a"))
_IDLE: tuple[tuple[Kind, str], ...] = (("full", "b"), ("delta", "b1"), ("delta", "b2"), ("delta", "b3"), ("reload", "a"))
_LOADED: tuple[tuple[Kind, str], ...] = (("full", "b"), ("delta", "b1"), ("reload", "a"))


@dataclass(frozen=True)
class VllmSettings:
    """What is measured: a dense model of about so many bytes in BF16. Streams run for `steady_s` before each update."""

    nbytes: int = 512 << 20
    rounds: int = 3
    streams: int = 1
    steady_s: float = 2.0
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """One update. The phases of `seconds` add up to the whole way; `cpu_s` is by process."""

    seconds: Mapping[str, float]
    nbytes: int
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    gaps: Gaps | None = None

    @property
    def update_s(self) -> float:
        """From the request until it is committed."""
        return self.seconds["stage_s"] + self.seconds["pause_s"]


@dataclass
class Round:
    """All that one round measured, on an idle server and under streams."""

    idle: dict[Kind, list[Sample]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    loaded: dict[Kind, list[Sample]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


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
        publish_s = publish_versions(model, store, seed=settings.seed, progress=progress, deltas=len(_IDLE) - 2)
        before = os.getloadavg()[0]
        progress("starting vllm serve")
        with vllm_served(model, scratch, requests=settings.streams) as serving:
            rounds = _Server(serving, model, store, nbytes, publish_s).measure(settings, progress)
    return Report(
        bench="vllm",
        machine=this_machine(),
        settings=asdict(settings),
        rows=[row for kind in KINDS for row in rows_of(kind, rounds)],
        targets=targets_of(rounds, large=settings.nbytes >= LARGE_NBYTES),
        notes=[
            f"{nbytes} bytes in BF16, {layers} layers; a delta changes one element in a hundred of every tensor",
            f"medians of {settings.rounds} rounds, and of ratios within a round; load of the machine {before:.2f} before, "
            f"{os.getloadavg()[0]:.2f} after",
            "stage: until the server says that it is staged; pause: the calls that commit, or the reload; CPU seconds: "
            "until then, beyond those at rest",
            "gaps: the longest that a stream of short requests has while an update is staged, while it is committed, and "
            "before it, those between two requests included",
        ],
    )


def _config(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip


class _Server:
    """A server, what it is updated from, and what its processes take at rest."""

    def __init__(self, serving: Serving, model: Path, store: Path, nbytes: int, publish_s: Mapping[str, float]) -> None:
        self._port, self._server = serving.port, VllmServer(serving.url)
        self._model, self._store, self._nbytes, self._publish_s = model, store, nbytes, publish_s
        engines = {f"engine {number}": pid for number, pid in enumerate(descendants_of(serving.pid))}
        self._pids = {"front end": serving.pid, **engines}
        self._at_rest: dict[str, float] = {}  # CPU seconds per second

    def measure(self, settings: VllmSettings, progress: Progress) -> list[Round]:
        progress("warming up")
        self._first_token()
        for kind, version in _WARM:
            self._update(kind, version)
        time.sleep(_REST_S)  # until what the last one left to do in threads is done
        before, began = self._cpu(), time.monotonic()
        time.sleep(_REST_S)
        self._at_rest = {name: taken / (time.monotonic() - began) for name, taken in self._since(before).items()}
        rounds = [Round() for _ in range(settings.rounds)]
        for number, taken in enumerate(rounds, 1):
            for kind, version in _IDLE:
                progress(f"round {number} of {len(rounds)}: {kind}")
                taken.idle[kind].append(self._update(kind, version))
            with token_streams(self._port, wanted, settings.streams) as streams:
                for kind, version in _LOADED:
                    progress(f"round {number} of {len(rounds)}: {kind}, {settings.streams} streams")
                    taken.loaded[kind].append(self._update_loaded(kind, version, streams, settings.steady_s))
        return rounds

    def _update(self, kind: Kind, version: str) -> Sample:
        """An update of an idle server, and one token right after it."""
        before, began = self._cpu(), time.monotonic()
        staged = self._stage(kind, version)
        self._change(kind, version)
        ended, cpu = time.monotonic(), self._since(before)
        cpu = {name: taken - self._at_rest.get(name, 0.0) * (ended - began) for name, taken in cpu.items()}
        first = self._first_token()
        return self._sample(kind, version, (began, staged, ended, first), cpu)

    def _update_loaded(self, kind: Kind, version: str, streams: Sequence[TokenStream], steady_s: float) -> Sample:
        time.sleep(steady_s)
        began = time.monotonic()
        before = [gap for stream in streams for gap in stream.gaps(began - steady_s, began)]
        staged = self._stage(kind, version)
        self._change(kind, version)
        ended = time.monotonic()
        for stream in streams:
            stream.wait_for(2)
        first = min(token.at_s for stream in streams for token in stream.tokens if token.at_s > ended)
        staging_s, commit_s = (
            max(gap for stream in streams for gap in stream.gaps(*span)) for span in ((began, staged), (staged, ended))
        )
        gaps = Gaps(0.0 if kind == "reload" else staging_s, commit_s, statistics.median(before), max(before))
        return replace(self._sample(kind, version, (began, staged, ended, first), {}), gaps=gaps)

    def _sample(
        self, kind: Kind, version: str, times: tuple[float, float, float, float], cpu: Mapping[str, float]
    ) -> Sample:
        began, staged, ended, first = times
        if kind == "reload":
            publish_s, nbytes = 0.0, self._nbytes
        else:
            publish_s, nbytes = self._publish_s[version], sum(rank.nbytes or 0 for rank in self._server.status())
        return Sample(
            dict(zip(PHASES, (publish_s, staged - began, ended - staged, first - ended), strict=True)), nbytes, cpu
        )

    def _stage(self, kind: Kind, version: str) -> float:
        """Stage a version beside the engine. Tells when that is done; a reload has nothing to stage."""
        if kind != "reload":
            self._server.stage(version, f"file://{self._store}")
            deadline = Deadline.after(_UPDATE_S)
            while (status := self._server.status()[0]).state == "STAGING":
                deadline.check(f"staging {version}")
                time.sleep(_LOOK_S)
            if status.error is not None:
                raise ReplicaFailed(f"vllm serve could not stage {version}: {status.error.message}")
        return time.monotonic()

    def _change(self, kind: Kind, version: str) -> None:
        if kind == "reload":  # vLLM's own way: from disk, which is in the page cache, into the running model
            source = {"weights_path": str(self._model)}
            self._server.collective_rpc("reload_weights", source, deadline=Deadline.after(_UPDATE_S))
        else:
            self._server.start()
            self._server.update({"version": version, "source": f"file://{self._store}"})
            self._server.finish(version)

    def _first_token(self) -> float:
        """Ask for one token, and tell when it came."""
        with closing(Client(self._port, MODEL, width=1)) as client:  # a new one: vLLM closes connections that rest
            client.generate([_PROMPT], tokens=1)
            return time.monotonic()

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._pids.items()}

    def _since(self, before: Mapping[str, float]) -> dict[str, float]:
        return {name: taken - before[name] for name, taken in self._cpu().items()}


def rows_of(kind: Kind, rounds: Sequence[Round]) -> list[Row]:
    """An idle server, and one with streams."""
    rows: list[Row] = []
    for loaded in (False, True):
        samples = [one for taken in rounds for one in (taken.loaded if loaded else taken.idle)[kind]]
        row: dict[str, Any] = {
            "kind": kind, "loaded": loaded, "samples": len(samples),
            **{phase: statistics.median(one.seconds[phase] for one in samples) for phase in PHASES},
            "s": statistics.median(one.update_s for one in samples),
            "total_s": statistics.median(sum(one.seconds.values()) for one in samples),
            "bytes": round(statistics.median(one.nbytes for one in samples)),
        }  # fmt: skip
        if not loaded:
            row["cpu_s"] = {name: statistics.median(one.cpu_s[name] for one in samples) for name in samples[0].cpu_s}
        for name in ("longest", "staging", "commit", "usual", "before") if loaded else ():
            gaps = [getattr(one.gaps, f"{name}_s") for one in samples]
            row[f"{name}_gap_ms"] = statistics.median(gaps) * 1e3
        rows.append(row)
    return rows


def targets_of(rounds: Sequence[Round], *, large: bool) -> dict[str, Target]:
    """Each a median over the rounds of what one round says."""

    def over_reload(kind: Kind, figure: Callable[[Sample], float], *, loaded: bool = False) -> float:
        ratios = []
        for taken in rounds:
            of = taken.loaded if loaded else taken.idle
            ratios.append(statistics.median(map(figure, of[kind])) / statistics.median(map(figure, of["reload"])))
        return statistics.median(ratios)

    small = "" if large else f"the model is smaller than {LARGE_NBYTES >> 20} MiB"
    why = "after a commit keys and values of running requests are computed again, which a reload leaves as they were"
    targets = {}
    limits: dict[Kind, float] = {"delta": DELTA_OF_A_RELOAD, "full": FULL_OF_A_RELOAD}
    for kind, limit in limits.items():
        value = over_reload(kind, lambda one: one.update_s)
        targets[f"{kind}.over_reload"] = Target(value, limit, "most", large, small)
        value = over_reload(kind, lambda one: one.seconds["pause_s"])
        targets[f"{kind}.pause_over_reload"] = Target(value, PAUSE_OF_A_RELOAD, "most")
        value = over_reload(kind, lambda one: one.gaps.longest_s if one.gaps else math.nan, loaded=True)
        targets[f"{kind}.gap_over_reload"] = Target(value, GAP_OF_A_RELOAD, "most", asserted=False, why=why)
    return targets
