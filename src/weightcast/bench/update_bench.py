"""The bench of updates: the whole way of a version into a served replica, from `publish` to its first token.

`weightcast serve` with its ranks, `weightcast depot` and the trainers are processes as users start them. Versions of a store
are published beforehand; publishers in memory publish right before each update. Every update is measured on an idle
server: its phases, its bytes and the CPU seconds of every process, less what they take at rest. A full version, a delta
and the longest way behind are measured a second time under streaming clients: the longest gap that one of them sees.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from weightcast import logs
from weightcast.bench.ipc_children import Child, children_of
from weightcast.bench.model_versions import Made, as_bf16, flip_some, make_versions, model_config
from weightcast.bench.report import At, Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir, used_memory
from weightcast.bench.served import ANSWER_S, Serving, TokenStream, depot, served, token_streams
from weightcast.bench.timing import cpu_s
from weightcast.clock import Deadline
from weightcast.delta import warm_up
from weightcast.errors import MissingExtra, SourceFailed, UpdateFailed
from weightcast.store.delta_policy import DeltaPolicy, Keep
from weightcast.store.store import Store
from weightcast.tensors.flat import Array

log = logs.get(__name__)

Progress = Callable[[str], None]
Source = Literal["file", "http", "ipc", "shares"]
SOURCES: tuple[Source, ...] = get_args(Source)
STORED: tuple[Source, ...] = ("file", "http")

DELTA_OF_FULL = 0.5
LAST_OF_FIRST = 1.3
BEHIND_OF_FULL = 3.0
DEPOT_OF_SENDING = 1.5
EXPONENT = 0.1
BUSY_OF_IDLE = 0.85
PUBLISH_OF_FULL = 1.5
PUBLISH_OF_FINDING = 1.3
TRAINERS_OF_ONE = 1.2
TRAINER_RANKS = (1, 2, 4)  # that publish the same model

CLEARED = "delta, caches cleared"  # the default of an update: keys and values are computed anew
SWAPPED = "delta by swap"  # it moves buffers beside the model, so that its pause is the same at any size
PRINTABLE, PROMPT_TOKENS = (32, 127), 16
ANSWER_TOKENS = 1024  # more than come while one update is measured: a new prompt would hold up all streams
PHASES = ("publish_s", "stage_s", "vote_s", "order_s", "pause_s", "read_back_s", "settle_s", "first_token_s")
_ROOM = 4  # times the size of the model: what the files take, with room to spare
_REST_S = 0.2  # after an update, until what it left to do in threads is done
_SENT_AT_ONCE = 4 << 20
_SENDING_S = 0.2  # of plain requests at least, so that their CPU seconds mean something
_TRAINER_S = 300.0
_DELTAS_TIMED = 5  # by trainers without receivers


@dataclass(frozen=True)
class UpdateSettings:
    """What is measured. At the other `sizes`: one full version, one delta and the longest way behind, from the store.

    `every_s` is how often a delta comes in a window of `window_s` over which tokens are counted, `steady_s` how long streams
    run before an update. `directory` is where versions lie meanwhile: None is tmpfs if it has room, else the default one.
    A quick run asserts nothing.
    """

    nbytes: int = 512 << 20
    sizes: tuple[int, ...] = (128 << 20, 2 << 30)
    ranks: int = 2
    trainers: int = 2
    rounds: int = 3
    positions: tuple[int, ...] = (1, 5, 10, 20)
    behind: tuple[int, ...] = (1, 5, 15)
    streams: int = 8
    windows: int = 3
    window_s: float = 4.0
    every_s: float = 1.0
    steady_s: float = 2.0
    seed: int = 0
    directory: str | None = None
    quick: bool = False


QUICK = UpdateSettings(
    nbytes=4 << 20, sizes=(), rounds=1, positions=(1, 2), behind=(1, 2), streams=2, windows=1, window_s=0.5, every_s=0.1,
    steady_s=0.2, quick=True,
)  # fmt: skip


@dataclass(frozen=True)
class What:
    """Which update: from where, at which size, and how the version relates to what is served.

    `way` is "full", "position N" of a chain whose versions are taken in turn, or "N behind".
    """

    source: Source
    nbytes: int
    way: str
    loaded: bool = False


@dataclass(frozen=True)
class Gaps:
    """What streaming clients see of an update, in seconds: the longest gap while it is staged and while it is committed.

    Before it, with nothing to do but answer: the usual gap, and the longest, which is the noise of the machine. Each stream
    gets a token in every step, so the usual gap is also how long a step takes.
    """

    staging_s: float
    commit_s: float
    usual_s: float
    before_s: float

    @property
    def longest_s(self) -> float:
        """Of the whole update."""
        return max(self.staging_s, self.commit_s)


@dataclass(frozen=True)
class Sample:
    """One update. The phases of `seconds` add up to the whole way; `cpu_s` is by process."""

    mode: str
    seconds: Mapping[str, float]
    nbytes: int
    cpu_s: Mapping[str, float]
    gaps: Gaps | None = None

    @property
    def staged_s(self) -> float:
        """From the request until every rank has voted and the commit may begin."""
        return self.seconds["stage_s"] + self.seconds["vote_s"]

    @property
    def receivers_cpu_s(self) -> float:
        """Of the front end and the ranks."""
        return sum(seconds for name, seconds in self.cpu_s.items() if name == "front end" or name.startswith("rank"))


@dataclass
class Round:
    """All that one round measured."""

    updates: dict[What, list[Sample]] = field(default_factory=dict)
    sending_cpu_s: dict[str, float] = field(default_factory=dict)  # by way: that of a depot for the same bytes
    steps_s: dict[int, float] = field(default_factory=dict)  # by size: one that computes what all streams hold
    publishing: dict[str, float] = field(default_factory=dict)
    trainers_cpu_s: dict[int, float] = field(default_factory=dict)  # by trainer ranks: all of them, to publish a delta
    speeds: list[tuple[float, float]] = field(default_factory=list)  # tokens/s with deltas, and without

    def add(self, what: What, sample: Sample) -> None:
        self.updates.setdefault(what, []).append(sample)

    def median(self, what: What, figure: Callable[[Sample], float]) -> float:
        """Of the samples of this round; not a number if there are none."""
        samples = self.updates.get(what)
        return statistics.median(map(figure, samples)) if samples else math.nan


def run_update_bench(settings: UpdateSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `MissingExtra` without what a replica needs."""
    try:
        import torch  # noqa: F401, PLC0415 - an extra
        import uvicorn  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "a package", "serve", "weightcast bench update") from error
    for nbytes in (settings.nbytes, *settings.sizes):
        model_config(nbytes, settings.ranks)  # refuses before anything is made
    progress("compiling kernels")
    warm_up()
    before = os.getloadavg()[0]
    rounds = [Round() for _ in range(settings.rounds)]
    with ended_in_order():
        made = _measure_size(replace(settings, sizes=()), rounds, progress)
        for nbytes in settings.sizes:
            _measure_size(replace(settings, nbytes=nbytes, sizes=(nbytes,)), rounds, progress)
    return Report(
        bench="update",
        machine=this_machine(),
        settings=asdict(settings),
        rows=list(_rows(rounds, settings)),
        targets=_targets(rounds, settings),
        notes=[
            f"{made.nbytes} bytes in BF16 over {settings.ranks} ranks; a delta changes one element in a hundred",
            f"medians of {settings.rounds} rounds, and of ratios within a round; load of the machine {before:.2f} before, "
            f"{os.getloadavg()[0]:.2f} after",
            "stage: look the version up, fetch and decode it; vote: sum it, and compare; order: until the ranks begin to "
            "commit, and until the last says so; read back: compare what was written; settle: let tokens go; "
            "CPU seconds: beyond those at rest",
            "gaps: the longest that a stream has while an update is staged, while it is committed, and before it",
            "streams keep their keys and values over an update, so that a gap is the update's; where these are cleared, a "
            "step is as many prompts as there are streams, as long as what they hold, computed at once",
        ],
    )


def _measure_size(settings: UpdateSettings, rounds: Sequence[Round], progress: Progress) -> Made:
    """All that is measured at one size: everything at the main one, little at others, which have themselves as `sizes`."""
    main = not settings.sizes
    chain = max(settings.behind if not main else (*settings.positions, *settings.behind))
    with scratch_dir(settings.directory, nbytes=_ROOM * settings.nbytes) as scratch, ExitStack() as opened:
        say = _prefixed(progress, f"{settings.nbytes >> 20} MiB")
        made = make_versions(
            scratch, nbytes=settings.nbytes, ranks=settings.ranks, seed=settings.seed, progress=say, deltas=chain
        )
        if main:
            for number, taken in enumerate(rounds, 1):
                say(f"publishing, round {number} of {len(rounds)}")
                taken.publishing = _publishing(made, scratch)
        sockets = opened.enter_context(scratch_dir())  # their paths must be short, and `directory` may be long
        say(f"starting {settings.ranks} ranks")
        options = [
            "--heartbeat", "30",  # ranks that share the cores with clients and trainers stand still for long
            "--source", made.store_dir.as_uri(), "--allow-source", "http://127.0.0.1:*",
            "--allow-source", "shares+http://127.0.0.1:*", "--allow-source", f"ipc://{sockets}/*",
        ]  # fmt: skip
        serving = opened.enter_context(served(made.model_dir, ranks=settings.ranks, scratch=scratch, options=options))
        bench = _Replica(serving, made, settings)
        bench.rest()
        if main:
            trainers: dict[Source, _Trainers] = {
                "ipc": opened.enter_context(_Trainers("ipc", 1, made, sockets, settings.seed)),
                "shares": opened.enter_context(_Trainers("shares", settings.trainers, made, sockets, settings.seed)),
            }
        for number, taken in enumerate(rounds, 1):
            say = _prefixed(progress, f"{settings.nbytes >> 20} MiB, round {number} of {len(rounds)}")
            for source in STORED if main else STORED[:1]:
                bench.measure_stored(source, taken, say, everything=main)
            if main:
                for source, of in trainers.items():
                    bench.measure_trainers(source, of, taken, say)
                for ranks in TRAINER_RANKS:
                    say(f"{ranks} trainer rank(s)")
                    with _Trainers("shares", ranks, made, sockets, settings.seed) as alone:
                        taken.trainers_cpu_s[ranks] = alone.measure_cpu()
            bench.measure_loaded(STORED if main else STORED[:1], taken, say)
            if main:
                bench.measure_speeds(taken, say)
    return made


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda text: progress(f"{prefix}: {text}")


# -- one replica ---------------------------------------------------------------------------------------------------------


class _Replica:
    """A served replica, what it is updated from, and what its processes take at rest."""

    def __init__(self, serving: Serving, made: Made, settings: UpdateSettings) -> None:
        self._serving, self._made, self._settings = serving, made, settings
        self._random = np.random.default_rng(settings.seed)
        self._model = made.model_dir.name
        ranks = {f"rank {number}": pid for number, pid in enumerate(children_of(serving.pid))}
        self._pids = {"front end": serving.pid, **ranks}
        self._idle: dict[str, float] = {}  # CPU seconds per second
        self._token: dict[str, float] = {}  # and of a token that is asked for alone

    # -- what is asked of it ---------------------------------------------------------------------------------------------

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._serving.port, timeout=ANSWER_S)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise UpdateFailed(f"the server answered {response.status} to {path}: {answer}")
        return answer

    def _update(self, version: str, source: str, *, clear_cache: bool = True, commit: str = "auto") -> list[dict[str, Any]]:
        body = {"version": version, "source": source, "clear_cache": clear_cache, "commit": commit}
        result: list[dict[str, Any]] = self._post("/v1/update_weights", body)["result"]
        return result

    def _wanted(self) -> dict[str, Any]:
        prompt = self._random.integers(*PRINTABLE, size=PROMPT_TOKENS).tolist()
        return {"model": self._model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}

    def _first_token(self) -> float:
        """Ask for one token, and tell when it came."""
        self._post("/v1/completions", self._wanted() | {"max_tokens": 1})
        return time.monotonic()

    def rest(self) -> None:
        """Learn what the processes take while nothing happens, and for one token."""
        self._first_token()
        time.sleep(_REST_S)
        before, began = _cpu(self._pids), time.monotonic()
        time.sleep(5 * _REST_S)
        self._idle = _per(_less(_cpu(self._pids), before), time.monotonic() - began)
        rows = []
        for _ in range(5):
            before, began = _cpu(self._pids), time.monotonic()
            self._first_token()
            time.sleep(_REST_S)
            rows.append(self._beyond_rest(_less(_cpu(self._pids), before), time.monotonic() - began))
        self._token = {name: statistics.median(row[name] for row in rows) for name in self._pids}

    def _beyond_rest(self, taken: Mapping[str, float], seconds: float) -> dict[str, float]:
        return {name: one - self._idle.get(name, 0.0) * seconds for name, one in taken.items()}

    # -- one update ------------------------------------------------------------------------------------------------------

    def _measure(self, version: str, source: str, others: Mapping[str, int], publish_s: float) -> Sample:
        """An update of an idle server, and one token right after it."""
        pids = {**self._pids, **others}
        time.sleep(_REST_S)
        before, began = _cpu(pids), time.monotonic()
        results = self._update(version, source)
        first = self._first_token()
        time.sleep(_REST_S)
        cpu = self._beyond_rest(_less(_cpu(pids), before), time.monotonic() - began)
        cpu = {name: one - self._token.get(name, 0.0) for name, one in cpu.items()}
        return _sample(results, cpu, publish_s=publish_s, first_s=first - began)

    def _measure_loaded(
        self, version: str, source: str, streams: Sequence[TokenStream], publish_s: float, way: str = ""
    ) -> Sample:
        """An update under streaming clients. They keep what they have cached, but for `CLEARED`."""
        before = _steady(streams, self._settings.steady_s)
        began = time.monotonic()
        commit = "swap" if way == SWAPPED else "auto"
        results = self._update(version, source, clear_cache=way == CLEARED, commit=commit)
        for stream in streams:
            stream.wait_for(2, version=version)
        tokens = [token for stream in streams for token in stream.tokens if token.at_s > began]
        first = min(token.at_s for token in tokens if token.version == version)
        sample = _sample(results, {}, publish_s=publish_s, first_s=first - began)
        staged, now = began + sample.staged_s, time.monotonic()
        staging_s, commit_s = (max(_gaps(streams, *span), default=0.0) for span in ((began, staged), (staged, now)))
        return replace(sample, gaps=Gaps(staging_s, commit_s, statistics.median(before), max(before)))

    # -- what is measured ------------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self, source: Source) -> Iterator[tuple[str, dict[str, int]]]:
        """A source on the store, and the processes that it takes. A depot is a new one, which has no
        version open yet.
        """
        if source == "file":
            yield self._made.store_dir.as_uri(), {}
            return
        with depot(self._made.store_dir) as serving:
            self._idle["depot"] = 0.0
            yield serving.url, {"depot": serving.pid}

    def _what(self, source: Source, way: str, *, loaded: bool = False) -> What:
        return What(source, self._settings.nbytes, way, loaded)

    def measure_stored(self, source: Source, taken: Round, say: Progress, *, everything: bool) -> None:
        """A full version, its chain in turn, and from behind. `everything`: else one of each."""
        settings, publish_s = self._settings, self._made.publish_s

        def take(version: str, way: str, url: str, others: Mapping[str, int]) -> None:
            say(f"{source}, {way}")
            taken.add(self._what(source, way), self._measure(version, url, others, publish_s[version]))

        last = max(settings.positions) if everything else 1
        with self._open(source) as (url, others):
            self._warm(url)
            take("b", "full", url, others)
            for number in range(1, last + 1):
                if number in settings.positions:
                    take(f"b{number}", f"position {number}", url, others)
                else:
                    say(f"{source}, position {number}")
                    self._update(f"b{number}", url)
        with self._open(source) as (url, others):
            self._warm(url)
            for number in settings.behind if everything else settings.behind[-1:]:
                take("b", "full", url, others)
                take(f"b{number}", f"{number} behind", url, others)
            if others:
                say("plain requests to the depot")
                chain = [f"b{number}" for number in range(1, max(settings.behind) + 1)]
                first, behind = settings.positions[0], settings.behind[-1]
                ways = {"full": ["b"], f"position {first}": chain[:1], f"{behind} behind": chain[:behind]}
                for way, versions in ways.items():
                    nbytes = round(taken.median(self._what(source, way), lambda one: one.nbytes))
                    taken.sending_cpu_s[way] = self._sending(url, others["depot"], nbytes, versions)

    def _warm(self, url: str) -> None:
        """One update of each kind, to versions that are not measured."""
        for version in ("a", "a1", "a3"):
            self._update(version, url)

    def _sending(self, url: str, pid: int, nbytes: int, versions: Sequence[str]) -> float:
        """CPU seconds of a depot that sends so many bytes by plain requests, half to each of two ranks, and the manifests of
        these versions to all processes that need them: the last one to the front end, all to the ranks.
        """
        files = sorted((self._made.store_dir / "versions" / "b").glob("*.safetensors"))
        ranges = [
            (path.name, start, min(path.stat().st_size, start + _SENT_AT_ONCE))
            for path in files
            for start in range(0, path.stat().st_size, _SENT_AT_ONCE)
        ]
        ranks = self._settings.ranks
        before, began, times = cpu_s(pid), time.monotonic(), 0
        while not times or time.monotonic() - began < _SENDING_S:
            for rank in range(-1, ranks):  # -1: the front end
                connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
                for version in versions[-1:] if rank < 0 else versions:
                    _get(connection, f"/versions/{version}/manifest.json")
                left = 0 if rank < 0 else nbytes // ranks
                for name, start, stop in ranges[max(0, rank) * len(ranges) // ranks :] + ranges:
                    if left <= 0:
                        break
                    last = min(stop, start + left) - 1
                    left -= _get(connection, f"/versions/b/{name}", {"range": f"bytes={start}-{last}"})
                connection.close()
            times += 1
        return (cpu_s(pid) - before) / times

    def measure_trainers(self, source: Source, trainers: _Trainers, taken: Round, say: Progress) -> None:
        """A full version from the memory of trainers; and deltas in turn, if they publish such."""
        for _ in range(2):  # fill all slots: the first touch of memory takes several times as long
            trainers.publish("full")
            self._update(trainers.version, trainers.url)
        say(f"{source}, full")
        publish_s = trainers.publish("full")
        others = trainers.pids
        taken.add(self._what(source, "full"), self._measure(trainers.version, trainers.url, others, publish_s))
        publish_s = trainers.publish("full")
        with token_streams(self._serving.port, self._wanted, self._settings.streams) as streams:
            sample = self._measure_loaded(trainers.version, trainers.url, streams, publish_s)
            taken.add(self._what(source, "full", loaded=True), sample)
        for number in range(1, max(self._settings.positions) + 1):
            say(f"{source}, position {number}")
            publish_s = trainers.publish("delta")
            if trainers.kind != "delta":  # it has none: nothing more to measure
                return
            sample = self._measure(trainers.version, trainers.url, others, publish_s)
            if number in self._settings.positions:
                taken.add(self._what(source, f"position {number}"), sample)

    def measure_loaded(self, sources: Sequence[Source], taken: Round, say: Progress) -> None:
        """A full version, a delta, and the longest way behind, under streams."""
        first, behind = self._settings.positions[0], self._settings.behind[-1]
        for source in sources:
            with self._open(source) as (url, _):
                self._warm(url)
                self._take_loaded(source, "b", "full", url, taken, say)
                self._take_loaded(source, f"b{first}", f"position {first}", url, taken, say)
                self._take_loaded(source, "b", "full", url, taken, say)
                self._take_loaded(source, f"b{behind}", f"{behind} behind", url, taken, say)
        url = self._made.store_dir.as_uri()
        for version in ("b", "b1"):  # the first swap by a delta copies the model, the next one has the buffers of the last
            self._update(version, url, commit="swap")
        self._take_loaded("file", "b2", SWAPPED, url, taken, say)
        self._update("b", url)
        length = self._take_loaded("file", f"b{first}", CLEARED, url, taken, say)
        taken.steps_s[self._settings.nbytes] = statistics.median(self._step(length) for _ in range(5))

    def _take_loaded(self, source: Source, version: str, way: str, url: str, taken: Round, say: Progress) -> int:
        """Returns how many tokens a stream had when the update was over, its prompt included."""
        say(f"{source}, {way}, {self._settings.streams} streams")
        publish_s = self._made.publish_s[version]
        with token_streams(self._serving.port, self._wanted, self._settings.streams) as streams:
            sample = self._measure_loaded(version, url, streams, publish_s, way)
            length = PROMPT_TOKENS + len(streams[0].tokens)
        taken.add(self._what(source, way, loaded=True), sample)
        return length

    def _step(self, length: int) -> float:
        """Seconds until the answers to as many prompts as there are streams, one token each, of this length."""
        body = self._wanted() | {"max_tokens": 1}
        prompts = self._random.integers(*PRINTABLE, size=(self._settings.streams, length)).tolist()
        began = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self._post("/v1/completions", body | {"prompt": prompt}), prompts))
        return time.monotonic() - began

    def measure_speeds(self, taken: Round, say: Progress) -> None:
        """Tokens per second of all streams, with a delta every second and without, in turn."""
        settings, url = self._settings, self._made.store_dir.as_uri()
        chain = max((*settings.positions, *settings.behind))
        self._update("b", url)
        number = 0
        with token_streams(self._serving.port, self._wanted, self._settings.streams) as streams:
            for window in range(settings.windows):
                say(f"tokens/s, window {window + 1} of {settings.windows}")
                idle = _speed(streams, time.monotonic() + settings.window_s)
                began, had = time.monotonic(), _count(streams)
                while time.monotonic() - began < settings.window_s:
                    due, number = time.monotonic() + settings.every_s, number % chain + 1
                    self._update(f"b{number}", url, clear_cache=False)  # from the end of the chain it is a full one
                    time.sleep(max(0.0, due - time.monotonic()))
                busy = (_count(streams) - had) / (time.monotonic() - began)
                taken.speeds.append((busy, idle))


def _get(connection: http.client.HTTPConnection, path: str, headers: Mapping[str, str] | None = None) -> int:
    """Fetch something, and tell how many bytes it has."""
    connection.request("GET", path, headers=headers or {})
    response = connection.getresponse()
    body = response.read()
    if response.status not in (http.client.OK, http.client.PARTIAL_CONTENT):
        raise SourceFailed(f"the depot answered {response.status} to {path}: {body[:200]!r}")
    return len(body)


def _cpu(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: cpu_s(pid) for name, pid in pids.items()}


def _less(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds - before[name] for name, seconds in after.items()}


def _per(taken: Mapping[str, float], seconds: float) -> dict[str, float]:
    return {name: one / seconds for name, one in taken.items()}


def _sample(results: Sequence[Mapping[str, Any]], cpu: Mapping[str, float], *, publish_s: float, first_s: float) -> Sample:
    """`first_s` is from the request to the first token. A phase lasts until its slowest rank is done."""
    one = results[0]
    pause_s = max(result["pause_s"] for result in results)
    seconds = {
        "publish_s": publish_s,
        "stage_s": one["lookup_s"] + one["stage_s"],
        "vote_s": one["verify_s"] + one["wait_s"],
        "order_s": one["commit_s"] - pause_s,
        "pause_s": pause_s,
        "read_back_s": one["proof_s"],
        "settle_s": one["settle_s"],
        "first_token_s": first_s - one["total_s"],
    }
    return Sample(one["mode"], seconds, sum(result["bytes"] for result in results), cpu)


def _steady(streams: Sequence[TokenStream], seconds: float) -> list[float]:
    """Let the streams run for a while, and tell their gaps."""
    began = time.monotonic()
    time.sleep(seconds)
    while not (gaps := _gaps(streams, began, time.monotonic())):
        streams[0].wait_for(2)
    return gaps


def _gaps(streams: Sequence[TokenStream], since: float, until: float) -> list[float]:
    return [gap for stream in streams for gap in stream.gaps(since, until, within_requests=True)]


def _count(streams: Sequence[TokenStream]) -> int:
    return sum(len(stream.tokens) for stream in streams)


def _speed(streams: Sequence[TokenStream], until: float) -> float:
    began, had = time.monotonic(), _count(streams)
    time.sleep(until - began)
    return (_count(streams) - had) / (time.monotonic() - began)


# -- trainers ------------------------------------------------------------------------------------------------------------


class _Trainers:
    """Trainer ranks in processes of their own, which publish together. `version` is the newest, `kind` what it is."""

    def __init__(self, source: Source, ranks: int, made: Made, sockets: Path, seed: int) -> None:
        self._source, self._made, self._sockets, self._seed = source, made, sockets, seed
        self._children = [Child("weightcast.bench.update_trainer") for _ in range(ranks)]
        self._number = 0
        self.version, self.kind, self.url = "", "", ""
        self.cpu_s = 0.0  # of all ranks, for the newest version

    def __enter__(self) -> _Trainers:
        try:
            deadline = Deadline.after(_TRAINER_S)
            for rank, child in enumerate(self._children):
                child.tell(
                    "begin", kind=self._source, directory=str(self._sockets / "ipc"), store=str(self._made.store_dir),
                    version="b", rank=rank, ranks=len(self._children), seed=self._seed,
                )  # fmt: skip
            urls = [str(child.hear(deadline)["url"]) for child in self._children]
        except BaseException:
            self.__exit__()
            raise
        hosts = ",".join(url.removeprefix("http://") for url in urls)
        self.url = urls[0] if self._source == "ipc" else f"shares+http://{hosts}"
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.end()

    @property
    def pids(self) -> dict[str, int]:
        return {f"trainer {rank}": child.pid for rank, child in enumerate(self._children)}

    def publish(self, change: Literal["full", "delta"]) -> float:
        """Publish the next version. Returns the seconds that the slowest rank took."""
        self._number += 1
        self.version = f"{self._source}_{self._number}"
        for child in self._children:
            child.tell("publish", version=self.version, change=change)
        answers = [child.hear(Deadline.after(_TRAINER_S)) for child in self._children]
        self.kind = str(answers[0]["kind"])
        self.cpu_s = sum(float(answer["cpu_s"]) for answer in answers)
        return max(float(answer["publish_s"]) for answer in answers)

    def measure_cpu(self) -> float:
        """CPU seconds of all ranks to publish a delta. What comes first fills all slots, and warms up."""
        for change in ("full", "full", "delta"):
            self.publish(change)
        taken = []
        for _ in range(_DELTAS_TIMED):
            self.publish("delta")
            taken.append(self.cpu_s if self.kind == "delta" else math.nan)
        return statistics.median(taken)


# -- publishing ----------------------------------------------------------------------------------------------------------


def _publishing(made: Made, scratch: Path) -> dict[str, float]:
    """Seconds to publish a full version and a delta to a store beside the versions, and to find the changes with NumPy.

    `delta` reads the last state from the store, `delta_memory` compares with a copy in memory.
    """
    bits = {name: array.view(np.uint16).copy() for name, array in Store(made.store_dir).load("b").items()}
    random, threads = np.random.default_rng(0), min(4, len(os.sched_getaffinity(0)))
    seconds = {}
    seconds["full"], seconds["delta"] = _publish_both(bits, random, scratch, "store", threads)
    _, seconds["delta_memory"] = _publish_both(bits, random, scratch, "memory", threads)
    old = {name: array.copy() for name, array in bits.items()}
    _flip_some(bits, random)
    seconds["find"] = _timed(lambda: _find(old, bits, threads))
    return seconds


def _publish_both(
    bits: Mapping[str, Array], random: np.random.Generator, scratch: Path, keep: Keep, threads: int
) -> tuple[float, float]:
    """Seconds of a full version and of the second delta on it: the first warms up."""
    path = scratch / "published"
    store = Store(path, delta=DeltaPolicy(keep=keep, threads=threads))
    used_memory(scratch, sum(array.nbytes for array in bits.values()))
    full_s = _timed(lambda: store.publish("p0", dict(as_bf16(bits)), "full"))
    _flip_some(bits, random)
    store.publish("p1", dict(as_bf16(bits)), "delta")
    _flip_some(bits, random)
    delta_s = _timed(lambda: store.publish("p2", dict(as_bf16(bits)), "delta"))
    shutil.rmtree(path)
    return full_s, delta_s


def _flip_some(bits: Mapping[str, Array], random: np.random.Generator) -> None:
    for array in bits.values():
        flip_some(array, random)


def _timed(task: Callable[[], object]) -> float:
    began = time.perf_counter()
    result = task()
    taken = time.perf_counter() - began
    del result
    return taken


def _find(old: Mapping[str, Array], new: Mapping[str, Array], threads: int) -> list[Array]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda name: np.flatnonzero(old[name] != new[name]), old))


# -- the report ----------------------------------------------------------------------------------------------------------


def _rows(rounds: Sequence[Round], settings: UpdateSettings) -> Iterator[Row]:
    whats = list(dict.fromkeys(what for taken in rounds for what in taken.updates))
    for what in whats:
        samples = [sample for taken in rounds for sample in taken.updates.get(what, ())]
        yield _update_row(what, samples, [taken.steps_s.get(what.nbytes, math.nan) for taken in rounds])
    for source in ("ipc", "shares"):
        if not any(what.source == source and what.way != "full" for what in whats):
            yield {"kind": "update", "source": source, "nbytes": settings.nbytes, "way": "delta", "missing": "no deltas"}
    for name in ("full", "delta", "delta_memory", "find"):
        yield {"kind": "publish", "what": name, "s": statistics.median(taken.publishing[name] for taken in rounds)}
    for ranks in rounds[0].trainers_cpu_s:
        yield {"kind": "trainers", "ranks": ranks, "cpu_s": statistics.median(one.trainers_cpu_s[ranks] for one in rounds)}
    for way in rounds[0].sending_cpu_s:
        yield {"kind": "sending", "way": way, "cpu_s": statistics.median(taken.sending_cpu_s[way] for taken in rounds)}
    speeds = [speed for taken in rounds for speed in taken.speeds]
    busy, idle = (statistics.median(one) for one in zip(*speeds, strict=True))
    yield {"kind": "throughput", "streams": settings.streams, "busy_tokens_per_s": busy, "tokens_per_s": idle}


def _update_row(what: What, samples: Sequence[Sample], steps: Sequence[float]) -> Row:
    row: dict[str, Any] = {
        "kind": "update", **asdict(what), "mode": samples[0].mode, "samples": len(samples),
        **{phase: statistics.median(one.seconds[phase] for one in samples) for phase in PHASES},
        "staged_s": statistics.median(one.staged_s for one in samples),
        "total_s": statistics.median(sum(one.seconds.values()) for one in samples),
        "bytes": round(statistics.median(one.nbytes for one in samples)),
    }  # fmt: skip
    if samples[0].cpu_s:
        row["cpu_s"] = {name: statistics.median(one.cpu_s[name] for one in samples) for name in samples[0].cpu_s}
    gaps = [one.gaps for one in samples if one.gaps is not None]
    if gaps:
        names = ("longest", "staging", "commit", "usual", "before")
        row |= {f"{name}_gap_ms": statistics.median(getattr(one, f"{name}_s") for one in gaps) * 1e3 for name in names}
        row["step_ms"] = statistics.median(steps) * 1e3 if what.way == CLEARED else row["usual_gap_ms"]
    return row


@dataclass(frozen=True)
class _Ratio:
    """What one round says of a target. `why` is what it is not asserted for."""

    name: str
    value: float
    limit: float
    at: At = "most"
    why: str = ""


def _targets(rounds: Sequence[Round], settings: UpdateSettings) -> dict[str, Target]:
    by_name: dict[str, list[_Ratio]] = {}
    for taken in rounds:
        for ratio in _ratios(taken, settings):
            by_name.setdefault(ratio.name, []).append(ratio)
    targets = {}
    for name, ratios in by_name.items():
        why = "a quick run" if settings.quick else ratios[0].why
        value = statistics.median(ratio.value for ratio in ratios)
        targets[name] = Target(value, ratios[0].limit, ratios[0].at, asserted=not why, why=why)
    return targets


def _ratios(taken: Round, settings: UpdateSettings) -> Iterator[_Ratio]:
    positions, behind = [f"position {number}" for number in settings.positions], f"{settings.behind[-1]} behind"
    for source in STORED:

        def staged(way: str, source: Source = source) -> float:
            return taken.median(What(source, settings.nbytes, way), lambda one: one.staged_s)

        def used(way: str, source: Source = source) -> float:
            return taken.median(What(source, settings.nbytes, way), lambda one: one.receivers_cpu_s)

        for way in positions:
            yield _Ratio(f"{source}, {way}: staging over a full version's", staged(way) / staged("full"), DELTA_OF_FULL)
        first, last = positions[0], positions[-1]
        yield _Ratio(f"{source}, {last}: staging over that of {first}", staged(last) / staged(first), LAST_OF_FIRST)
        yield _Ratio(f"{source}, {behind}: staging over a full version's", staged(behind) / staged("full"), BEHIND_OF_FULL)
        cpu = statistics.median(used(way) / used("full") for way in positions)
        yield _Ratio(f"{source}, delta: CPU of the receivers over a full version's", cpu, DELTA_OF_FULL)
    for way, sending_s in taken.sending_cpu_s.items():
        depot_s = taken.median(What("http", settings.nbytes, way), lambda one: one.cpu_s["depot"])
        yield _Ratio(f"http, {way}: CPU of the depot over that of sending the bytes", depot_s / sending_s, DEPOT_OF_SENDING)
    yield from _gap_ratios(taken, settings, grows=("full", behind), stays=(positions[0], SWAPPED))
    speed = statistics.median(busy / idle for busy, idle in taken.speeds)
    yield _Ratio("tokens/s with a delta every second, over those without", speed, BUSY_OF_IDLE, "least")
    s = taken.publishing
    yield _Ratio("publishing a delta over a full version, in the same store", s["delta"] / s["full"], PUBLISH_OF_FULL)
    for ranks in TRAINER_RANKS[1:]:
        ratio = taken.trainers_cpu_s[ranks] / taken.trainers_cpu_s[1]
        yield _Ratio(f"CPU of all trainer ranks together at {ranks} ranks over that of one", ratio, TRAINERS_OF_ONE)
    found = s["delta_memory"] / s["find"]
    yield _Ratio("publishing a delta from memory over finding the changes with NumPy", found, PUBLISH_OF_FINDING)


def _gap_ratios(taken: Round, settings: UpdateSettings, *, grows: Sequence[str], stays: Sequence[str]) -> Iterator[_Ratio]:
    for what in taken.updates:
        if what.loaded:
            cleared = "how long it takes to compute keys and values anew depends on the model" if what.way == CLEARED else ""
            step_s = taken.steps_s[what.nbytes] if cleared else None
            name = f"{what.source}, {what.way}, {what.nbytes >> 20} MiB: longest gap over usual gap + pause + step"
            yield _Ratio(name, taken.median(what, partial(_gap_ratio, step_s=step_s)), 1.0, why=cleared)
    sizes = sorted({settings.nbytes, *settings.sizes})
    if len(sizes) > 1:
        for way in (*stays, *grows):
            why = "" if way in stays else "its pause is that of writing more, which grows"
            exponent = _exponent(taken, way, sizes)
            yield _Ratio(f"file, {way}: exponent of the longest gap over the size", exponent, EXPONENT, why=why)


def _gap_ratio(sample: Sample, step_s: float | None) -> float:
    """Without `step_s` a step takes as long as usual."""
    if sample.gaps is None:
        return math.nan
    usual_s = sample.gaps.usual_s
    return sample.gaps.longest_s / (usual_s + sample.seconds["pause_s"] + (usual_s if step_s is None else step_s))


def _exponent(taken: Round, way: str, sizes: Sequence[int]) -> float:
    """The slope of the longest gap over the size of the model, both as logarithms."""
    gaps = [
        taken.median(What("file", nbytes, way, loaded=True), lambda one: one.gaps.longest_s if one.gaps else math.nan)
        for nbytes in sizes
    ]
    return float(np.polyfit(np.log(sizes), np.log(gaps), 1)[0])
