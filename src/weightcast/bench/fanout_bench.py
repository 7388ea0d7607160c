"""The bench of fan-out: one version from a publisher to many hosts, each of which mirrors the one before it.

Hosts are network namespaces whose links are capped in both directions, so that it is the network that takes the time. What
all hosts take stands beside what one takes in the same run, and what the publisher's link carried beside the version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from weightcast import logs
from weightcast.bench.fanout_hosts import Hosts, Round
from weightcast.bench.fanout_network import Network, lacking
from weightcast.bench.ipc_tensors import tensor_shapes
from weightcast.bench.report import Report, Row, Target, this_machine
from weightcast.bench.scratch import ended_in_order, scratch_dir
from weightcast.bench.timing import Timing
from weightcast.errors import InvalidInput

log = logs.get(__name__)

Progress = Callable[[str], None]

HOSTS = 8
LARGE_NBYTES = (
    192 << 20
)  # from here on limits are asserted: a piece is 1 MiB, and each host is one piece behind the one before
LIMIT_OVER_ONE = 1.25
LIMIT_SENT = 2.0
_SIZES = 2  # tensors of the publisher and its store, and for each host its store and two sets of tensors
_HOST_SIZES = 4
_BUSY = 0.9  # of all cores: above it the network is not what limits
_STAT = Path("/proc/stat")
_MEMINFO = Path("/proc/meminfo")
_PROCESSES_NBYTES = 256 << 20
_SLACK_S = 120.0


@dataclass(frozen=True)
class FanoutSettings:
    """What is measured. `rate_bits` is what each link carries per second, in each direction."""

    hosts: int = HOSTS
    nbytes: int = 256 << 20
    rate_bits: int = 200_000_000
    rounds: int = 2
    kill: bool = True
    seed: int = 0


def run_fanout_bench(settings: FanoutSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Raises `InvalidInput` where there can be no network, or not enough memory."""
    if settings.hosts < 2:
        raise InvalidInput(f"a fan-out needs at least 2 hosts, not {settings.hosts}.")
    tensor_shapes(settings.nbytes)  # refuses before anything is made
    why_not = lacking()
    if why_not:
        raise InvalidInput(f"bench fanout joins network namespaces by capped links: {why_not}.")
    _check_memory(settings)
    link_s = settings.nbytes * 8 / settings.rate_bits
    with (
        ended_in_order(),
        scratch_dir() as scratch,
        Network(settings.hosts + 1, rate_bits=settings.rate_bits) as network,
        Hosts(network, scratch, nbytes=settings.nbytes, seed=settings.seed, timeout_s=20 * link_s + _SLACK_S) as hosts,
    ):
        measured = _measure(hosts, settings, progress)
    rows = _rows(measured, settings)
    return Report(
        bench="fanout",
        machine=this_machine(),
        settings=asdict(settings),
        rows=rows,
        targets=_targets(rows, settings),
        notes=_notes(rows, measured, settings),
    )


@dataclass(frozen=True)
class _Measured:
    """Rounds with one host, before and after those with all, one with a relay killed, and how busy cores were with all."""

    one: Sequence[Round]
    all: Sequence[Round]
    killed: Round | None
    busy: float


def _measure(hosts: Hosts, settings: FanoutSettings, progress: Progress) -> _Measured:
    progress("warming up")
    hosts.round(settings.hosts)
    one = _rounds(hosts, 1, settings, progress)
    progress("mirroring what was missed")
    hosts.follow(settings.hosts)
    busy, total = _spent()
    all_of_them = _rounds(hosts, settings.hosts, settings, progress)
    busy, total = _spent()[0] - busy, _spent()[1] - total
    hosts.check(range(settings.hosts))
    killed = None
    if settings.kill:
        dead = killed_host(settings.hosts)
        progress(f"{settings.hosts} hosts, the relay of host {dead + 1} is killed")
        killed = hosts.round(settings.hosts, kill=dead)
        hosts.check([index for index in range(settings.hosts) if index != dead])
    one += _rounds(hosts, 1, settings, progress)  # again: the machine may have become slower or faster
    return _Measured(one, all_of_them, killed, busy / max(total, 1))


def _rounds(hosts: Hosts, count: int, settings: FanoutSettings, progress: Progress) -> list[Round]:
    rounds = []
    for number in range(settings.rounds):
        progress(f"{count} host{'s' if count > 1 else ''}: round {number + 1} of {settings.rounds}")
        rounds.append(hosts.round(count))
    return rounds


def killed_host(hosts: int) -> int:
    """The one whose relay is killed: in the middle of the chain, and never its end, which nobody depends on."""
    return (hosts - 1) // 2


def _check_memory(settings: FanoutSettings) -> None:
    sizes, processes = _SIZES + _HOST_SIZES * settings.hosts, 1 + 2 * settings.hosts
    needed = settings.nbytes * sizes + processes * _PROCESSES_NBYTES // 2
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if available is not None and available < needed:
        raise InvalidInput(
            f"{settings.hosts} hosts with {settings.nbytes} bytes each take {needed} bytes of memory: {sizes} times as much "
            f"and some for {processes} processes. {available} are available: take fewer --hosts or a smaller --size."
        )


def _spent() -> tuple[int, int]:
    """Time that all cores were busy so far, and all their time."""
    if not _STAT.exists():
        return 0, 0
    times = [int(ticks) for ticks in _STAT.read_text().splitlines()[0].split()[1:9]]
    return sum(times) - times[3] - times[4], sum(times)


# -- the report ----------------------------------------------------------------------------------------------------------


def _rows(measured: _Measured, settings: FanoutSettings) -> list[Row]:
    one = _row("1 host", measured.one, settings)
    rows = [one, _row(f"{settings.hosts} hosts", measured.all, settings, one)]
    if measured.killed is not None:
        dead = killed_host(settings.hosts) + 1
        rows.append(_row(f"{settings.hosts} hosts, relay {dead} killed half-way", [measured.killed], settings, one))
    return rows


def _row(kind: str, rounds: Sequence[Round], settings: FanoutSettings, one: Row | None = None) -> Row:
    total, version = Timing(tuple(taken.last_s for taken in rounds)), rounds[0].nbytes
    fastest = min(rounds, key=lambda taken: taken.last_s)
    return {
        "kind": kind,
        "hosts": len(fastest.seconds),
        "rounds": len(rounds),
        "s": total.minimum,
        "median_s": total.median,
        "over_one": total.minimum / one["s"] if one is not None else 1.0,
        "over_link": total.minimum / (version * 8 / settings.rate_bits),
        "sent_over_version": max(taken.sent_nbytes / taken.nbytes for taken in rounds),
        "host_s": list(fastest.seconds),
        "noticed_s": list(fastest.noticed_s),
        "nbytes": version,
        "all_s": list(total.seconds),
        "all_sent_nbytes": [taken.sent_nbytes for taken in rounds],
    }


def _targets(rows: Sequence[Row], settings: FanoutSettings) -> dict[str, Target]:
    why = ""
    if settings.nbytes < LARGE_NBYTES:
        why = f"the version is smaller than {LARGE_NBYTES >> 20} MiB: what does not grow with it counts too much"
    elif settings.hosts > HOSTS:
        why = f"the limit is for {HOSTS} hosts, and each is one piece behind the one before"
    everyone = rows[1]
    return {
        f"{settings.hosts}_hosts.over_one": Target(everyone["over_one"], LIMIT_OVER_ONE, "most", asserted=not why, why=why),
        "publisher.sent_over_version": Target(everyone["sent_over_version"], LIMIT_SENT, "most", asserted=not why, why=why),
    }


def _notes(rows: Sequence[Row], measured: _Measured, settings: FanoutSettings) -> list[str]:
    nbytes = rows[0]["nbytes"]
    notes = [
        f"{nbytes} bytes, every element of which differs from one version to the next; links of "
        f"{settings.rate_bits / 1e6:g} Mbit/s in each direction, which take {nbytes * 8 / settings.rate_bits:.2f} s",
        "a time is from when the version was published in the publisher's store until the last host had it committed by "
        "swap, every digest compared by its relay (piece by piece, and tensor by tensor) and by its receiver; the fastest "
        "of all rounds; those with one host were taken before and after those with all",
        "what the publisher sent is counted at its link, headers and answers to requests included; the most of all rounds",
        f"cores of this machine were {measured.busy:.0%} busy while all hosts received"
        + (": then it is they that limit, and not the links. Take a lower --rate" if measured.busy > _BUSY else "")
        + f"; load now {os.getloadavg()[0]:.2f}",
    ]
    if measured.killed is not None:
        everyone, killed = rows[1], rows[2]
        notes.append(
            f"with a relay killed by SIGKILL when half of the version was sent, the others had it "
            f"{killed['s'] - everyone['s']:+.2f} s later than all with none; the receiver of that host is left out"
        )
    return notes
