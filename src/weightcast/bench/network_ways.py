"""Who moves bytes over a network in the bench: ourselves, bare TCP and bare NIXL as limits, and others as rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast.bench.ipc_rivals import RIVALS as RIVALS_HERE
from weightcast.bench.ipc_rivals import ROUND_S, Moves, Rival
from weightcast.bench.network_tcp import STREAMS
from weightcast.clock import Deadline
from weightcast.errors import WeightcastError

Progress = Callable[[str], None]

WARM_UP = 2  # rounds after the first, cold one: the second set of buffers is touched in them
CHUNKS = (64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20)
_SHAPE_ROUNDS = 3
_OURS = "weightcast.bench.network_ours"
# UCX over TCP alone, as if there were two hosts; otherwise it would copy from one process to the other.
_UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}

TCP = Rival("raw TCP", "weightcast.bench.network_tcp", (), together=True)
READ = Rival("raw NIXL READ", "weightcast.bench.network_nixl", ("nixl_cu12",), together=True, environment=_UCX)
HTTP = Rival("http", _OURS, (), roles=("trainer", "http"), together=True)
STORED = Rival("http, from a store", _OURS, (), roles=("store", "http"), together=True)
NIXL = Rival("nixl", _OURS, ("nixl_cu12",), roles=("trainer", "nixl"), together=True, environment=_UCX, grace_s=15.0)
LENT = replace(NIXL, kind="nixl, lent", roles=("lender", "gdr"))
RIVALS = (
    RIVALS_HERE[0],
    Rival("Mooncake TCP", "weightcast.bench.network_mooncake", ("mooncake",)),
    Rival(
        "Ray, two nodes",
        "weightcast.bench.network_ray",
        ("ray",),
        roles=("trainer",),
        environment={"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TMPDIR": "{directory}"},
        grace_s=30.0,
    ),
)
_INSTALLED_AS = {"nixl_cu12": "nixl-cu12", "mooncake": "mooncake-transfer-engine-non-cuda"}
INSTALL = {
    "nixl_cu12": "pip install 'weightcast[nixl]'",
    "mooncake": "pip install mooncake-transfer-engine-non-cuda, and install Debian's libibverbs1",
    "ray": "pip install 'weightcast[bench]'",
    "torch": "pip install 'weightcast[bench]'",
}


def missing(way: Rival) -> str:
    """What has to be installed before it can be measured; empty if it can."""
    lacking = way.lacking
    return f"{way.kind} needs {', '.join(lacking)}: {'; '.join(INSTALL[one] for one in lacking)}" if lacking else ""


def versions_of(way: Rival) -> dict[str, str]:
    """The packages that it is made of, by the names they are installed under."""
    names = [_INSTALLED_AS.get(package, package) for package in way.packages if find_spec(package) is not None]
    return {name: metadata.version(name) for name in names}


@dataclass
class Rounds:
    """What the rounds of one took, in their order: a cold one, those that warm up, and those that count.

    `told` is what the receiver said of each that counts.
    """

    cold_s: float = 0.0
    steady_s: list[float] = field(default_factory=list)
    told: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Shape:
    """How bare TCP is used."""

    streams: int
    chunk_nbytes: int


class Mover:
    """One that moves bytes, started and warm. A context manager. `failed` is the error that it ended with."""

    def __init__(self, way: Rival, *, nbytes: int, seed: int, directory: Path) -> None:
        self.way = way
        self._moves = Moves(way, nbytes=nbytes, seed=seed, directory=directory)
        self.cold_s = 0.0
        self.failed: BaseException | None = None

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(self._moves)
            self.cold_s = self._moves.round()
            for _ in range(WARM_UP):
                self._moves.round()
            self._warmed()
            opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._moves.__exit__(kind, error, trace)

    def _warmed(self) -> None:
        """What else has to be done before rounds count."""

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Remember that an error is this one's, and nobody else's."""
        try:
            yield
        except WeightcastError as error:
            self.failed = error
            raise

    def round(self) -> tuple[float, dict[str, float]]:
        """The seconds of another version, and what the receiver told of it."""
        with self._noted():
            return self._moves.round(), self._moves.told

    def check(self) -> None:
        """Prove that the receiver has the trainer's bytes."""
        with self._noted():
            self._moves.check()


class TcpMover(Mover):
    """Bare TCP, a stream at its best: with as much at a time as was fastest. What two streams take is told beside it."""

    def __init__(self, *, nbytes: int, seed: int, directory: Path) -> None:
        super().__init__(TCP, nbytes=nbytes, seed=seed, directory=directory)
        self.tried: dict[Shape, float] = {}
        self.shapes: list[Shape] = []

    def _warmed(self) -> None:
        for streams, chunk in product(range(1, STREAMS + 1), CHUNKS):
            shape = Shape(streams, chunk)
            self.tried[shape] = min(self._shaped(shape) for _ in range(_SHAPE_ROUNDS))
        for streams in range(1, STREAMS + 1):
            self.shapes.append(min((one for one in self.tried if one.streams == streams), key=self.tried.__getitem__))

    def _shaped(self, shape: Shape) -> float:
        self._moves.ask_all("shape", Deadline.after(ROUND_S), streams=shape.streams, chunk=shape.chunk_nbytes)
        return self._moves.round()

    def round(self) -> tuple[float, dict[str, float]]:
        """One stream, and then two."""
        with self._noted():
            one, two = (self._shaped(shape) for shape in self.shapes)
        return one, {"two_streams_s": two}


def interleaved(movers: Sequence[Mover], *, rounds: int, progress: Progress) -> dict[str, Rounds]:
    """Let all of them move in turn, A B C A B C …, so that what others do to the machine hits all alike; check them at the
    end. By kind.
    """
    taken = {mover.way.kind: Rounds(mover.cold_s) for mover in movers}
    for number in range(rounds):
        for mover in movers:
            progress(f"{mover.way.kind}: round {number + 1} of {rounds}")
            seconds, told = mover.round()
            taken[mover.way.kind].steady_s.append(seconds)
            taken[mover.way.kind].told.append(told)
    for mover in movers:
        mover.check()
    return taken
