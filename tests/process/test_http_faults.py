"""Receiving over connections that break, stall and lie, and from depots that are stopped and killed."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from http_depots import depots, expected, memories, publish, soon, version, wrong
from weightcast import LiveModel, Store
from weightcast.errors import AccessRefused, DigestMismatch, SourceFailed, WeightcastError
from weightcast.tensors.digest import PIECE_NBYTES, bytes_digest
from weightcast.transports.base import Range
from weightcast.transports.http import fetching
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.transports.pieces import mend

from .http_proxy import BEFORE_THE_ANSWER, KINDS, Fault, Kind, Proxy

STALL_S = 0.6  # for tests of what stalls
PATIENT_S = 60.0  # for all others: on a busy machine a healthy depot is silent for a while, too
BOUND_S = 20.0  # far below the deadlines of the tests, far above what anything here takes
OTHER = ("step_1", "step_2")
MIB = 3.0
TRANSIENT = ("cut", "truncate", "stall", "drop", "garbage", "status", "delay")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two versions with the same names and shapes, and other bytes."""
    store = Store(tmp_path_factory.mktemp("faults") / "store")
    for step in (1, 2):
        publish(store, f"step_{step}", step, mib=MIB, part_mib=2.0)
    return store


@pytest.fixture(scope="module")
def right(store: Store) -> dict[str, bytes]:
    return expected(store, store.manifest("step_1"))


@pytest.fixture
def stage(store: Store, right: dict[str, bytes]) -> Iterator[Stage]:
    with Stage(store, right) as one:
        yield one


class Stage:
    """Receivers, proxies and depots that are gone at the end: no thread, no socket and no memory of theirs is left."""

    def __init__(self, store: Store, right: dict[str, bytes]) -> None:
        self.store, self.manifest = store, store.manifest("step_1")
        self._stack = ExitStack()
        self.nbytes = sum(entry.nbytes for entry in self.manifest.tensors)
        self.memory, self.right = memories(self.manifest), right

    def __enter__(self) -> Stage:
        gc.collect()
        self._files = _open_files()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("fetch", "ask"))]
        assert not left, f"threads are left: {left}"
        assert _open_files() <= self._files, "sockets or files are left open"

    def depot(self) -> str:
        return self._stack.enter_context(depots(self.store))[0].url

    def proxy(self, *faults: Fault, rate: float | None = None) -> Proxy:
        return self._stack.enter_context(Proxy(self.depot(), *faults, rate=rate))

    def receiver(self, *urls: str, **settings: object) -> HttpReceiver:
        receiver = HttpReceiver(urls, **{"connections": 2, "stall_s": PATIENT_S, **settings})
        return self._stack.enter_context(closing(receiver))

    def land(self, receiver: HttpReceiver) -> list[str]:
        """Receive everything; the tensors whose bytes are not those that were published."""
        for _ in receiver.landings(self.manifest, self.memory, deadline=soon(60)):
            pass
        return wrong(self.memory, self.right)

    def check_untouched(self) -> None:
        """That nothing writes to the memories any more."""
        for array in self.memory.values():
            array[:] = 0x5A
        time.sleep(0.3)
        assert all((array == 0x5A).all() for array in self.memory.values())


def _stall_s(kind: Kind) -> float:
    return STALL_S if kind == "stall" else PATIENT_S


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- faults that pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRANSIENT)
def test_what_breaks_once_is_fetched_from_where_it_broke(stage: Stage, kind: Kind) -> None:
    later = kind in BEFORE_THE_ANSWER  # a single connection asks for all at once, and two go on when a third was sent
    proxy = stage.proxy(Fault(kind, at=stage.nbytes // (4 if later else 2)))
    receiver = stage.receiver(proxy.url, connections=2 if later else 1, stall_s=_stall_s(kind))
    began = time.monotonic()

    assert stage.land(receiver) == []
    assert proxy.faults[0].struck == 1
    assert time.monotonic() - began < BOUND_S
    if kind in ("truncate", "drop", "garbage", "delay"):  # nothing was in the socket that could be lost
        assert proxy.forwarded() == stage.nbytes


def test_a_connection_that_breaks_again_and_again_still_gets_there(stage: Stage) -> None:
    proxy = stage.proxy(*(Fault("truncate", at=at) for at in range(0, stage.nbytes, stage.nbytes // 12)))

    assert stage.land(stage.receiver(proxy.url)) == []
    assert all(fault.struck for fault in proxy.faults)
    assert 0 <= proxy.forwarded() - stage.nbytes < 4096  # no byte twice; a few lines where ranges were asked for together


@pytest.mark.parametrize("kind", ["cut", "truncate", "stall"])
def test_pieces_come_from_where_it_broke_too(stage: Stage, kind: Kind) -> None:
    proxy = stage.proxy(Fault(kind, at=stage.nbytes // 2))
    receiver = stage.receiver(proxy.url, bucket_nbytes=1 << 18, stall_s=_stall_s(kind))
    for piece in receiver.pieces(stage.manifest, deadline=soon(60)):
        stage.memory[piece.tensor][piece.offset : piece.offset + len(piece.data)] = piece.data

    assert wrong(stage.memory, stage.right) == []


# -- faults that stay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("flip", "delay")])
def test_the_only_depot_that_fails_for_good_ends_it_soon_with_its_name(stage: Stage, kind: Kind) -> None:
    at = 0 if kind in BEFORE_THE_ANSWER else stage.nbytes // 2
    proxy = stage.proxy(Fault(kind, at=at, times=math.inf, other=OTHER))
    receiver = stage.receiver(proxy.url, stall_s=_stall_s(kind))
    began = time.monotonic()

    with pytest.raises(SourceFailed, match=proxy.url):
        stage.land(receiver)
    assert time.monotonic() - began < BOUND_S
    stage.check_untouched()
    proxy.faults.clear()
    assert stage.land(receiver) == []  # the next time is a new one


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("flip", "delay")])
def test_another_depot_goes_on_where_one_has_failed(stage: Stage, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "stall":
        monkeypatch.setattr(fetching, "STEAL_S", PATIENT_S / 4)
    broken, good = stage.proxy(Fault(kind, at=200_000, times=math.inf, other=OTHER)), stage.proxy()
    receiver = stage.receiver(broken.url, good.url, connections=1, stall_s=_stall_s(kind))
    began = time.monotonic()

    assert stage.land(receiver) == []
    assert time.monotonic() - began < BOUND_S
    assert good.forwarded() >= stage.nbytes - 2_000_000
    if kind in ("truncate", "drop", "garbage", "status"):  # the others leave bytes in the socket
        assert broken.forwarded() + good.forwarded() == stage.nbytes


def test_when_all_depots_have_failed_each_is_listed_with_its_cause(stage: Stage) -> None:
    cut = stage.proxy(Fault("truncate", times=math.inf))
    other = stage.proxy(Fault("replay", times=math.inf, other=OTHER))
    receiver = stage.receiver(cut.url, other.url, "http://127.0.0.1:1")

    with pytest.raises(SourceFailed) as failed:
        stage.land(receiver)
    text = str(failed.value)
    for url, cause in ((cut.url, "closed"), (other.url, "other bytes"), ("http://127.0.0.1:1", "cannot be reached")):
        assert any(url in line and cause in line for line in text.splitlines()), text
    stage.check_untouched()


def test_a_depot_with_another_token_is_passed_over_and_alone_it_refuses_access(stage: Stage) -> None:
    with depots(stage.store, token="another-token-than-ours") as guarded:
        assert stage.land(stage.receiver(guarded[0].url, stage.depot())) == []
        with pytest.raises(AccessRefused, match=guarded[0].url):
            stage.land(stage.receiver(guarded[0].url))


def test_a_depot_that_goes_away_in_the_middle_is_told(stage: Stage) -> None:
    proxy = stage.proxy(rate=2e6)  # so that there is a middle
    receiver = stage.receiver(proxy.url, connections=1)
    landings = receiver.landings(stage.manifest, stage.memory, deadline=soon(60))
    next(landings)
    proxy.refuse()
    with pytest.raises(SourceFailed, match=proxy.url):
        list(landings)
    stage.check_untouched()


# -- several depots ---------------------------------------------------------------------------------------------------


def test_a_range_that_is_stuck_is_taken_over_by_an_idle_depot_without_waiting_for_the_stall(stage: Stage) -> None:
    stuck, good = stage.proxy(Fault("stall", at=100_000, times=math.inf)), stage.proxy()
    receiver = stage.receiver(stuck.url, good.url, stall_s=30.0, connections=1)
    began = time.monotonic()

    assert stage.land(receiver) == []
    assert time.monotonic() - began < BOUND_S  # one stall alone would be 30 s


def test_a_slow_depot_is_given_less(stage: Stage) -> None:
    slow, fast = stage.proxy(rate=0.4e6), stage.proxy()
    receiver = stage.receiver(slow.url, fast.url, connections=1, stall_s=10.0)

    assert stage.land(receiver) == []
    assert slow.forwarded() < fast.forwarded()


def test_with_a_spread_of_one_the_next_depot_is_used_only_when_the_first_fails(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stage.proxy(), stage.proxy()
    monkeypatch.setattr(fetching, "STEAL_S", PATIENT_S / 4)
    receiver = stage.receiver(first.url, second.url, spread=1)
    assert stage.land(receiver) == []
    assert (first.forwarded(), second.forwarded()) == (stage.nbytes, 0)
    first.faults.append(Fault("truncate", at=500_000, times=math.inf))
    assert stage.land(receiver) == []
    assert second.forwarded() > 0


# -- bytes that lie ---------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_by_the_digest_of_its_piece_and_fetched_again_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "STEAL_S", PATIENT_S / 4)
    bad, good = stage.proxy(Fault("flip", at=stage.nbytes // 2)), stage.proxy()
    receiver = stage.receiver(bad.url, good.url, spread=1)
    broken = stage.land(receiver)
    assert len(broken) == 1
    memory, entry = stage.memory[broken[0]], stage.manifest.transfers()[broken[0]]

    before = bad.forwarded()
    wanted = Range(stage.manifest.parts[entry.part].file, entry.offset, memory)
    again = mend(receiver, stage.manifest, wanted, deadline=soon())
    assert bytes_digest(memory.data) == entry.digest
    assert again <= 3 * PIECE_NBYTES  # the one that was wrong, and the two that it shares with its neighbours
    assert bad.forwarded() + good.forwarded() - before <= 3 * PIECE_NBYTES


@pytest.mark.parametrize("times", [1, math.inf])
def test_a_flipped_bit_is_mended_or_refused_but_never_committed(stage: Stage, times: float) -> None:
    proxy = stage.proxy(Fault("flip", at=stage.nbytes // 2, times=times))
    new = version(1, mib=MIB)
    parameters = {name: np.ones_like(array) for name, array in new.items()}
    with LiveModel(parameters, source=proxy.url) as model:
        if times > 1:
            with pytest.raises(DigestMismatch):
                model.update("step_1")
            assert all((array == 1).all() for array in parameters.values())
            proxy.faults.clear()
        model.update("step_1")
    assert all(parameters[name].tobytes() == array.tobytes() for name, array in new.items())


def test_a_flipped_bit_in_a_manifest_is_the_failure_of_one_depot(stage: Stage) -> None:
    bad, good = stage.proxy(Fault("flip", at=300, path="/manifest", times=math.inf)), stage.proxy()

    assert stage.receiver(bad.url, good.url).manifest("step_1", deadline=soon()) == stage.manifest
    with pytest.raises(WeightcastError, match=bad.url):
        stage.receiver(bad.url).manifest("step_1", deadline=soon())


def test_memory_is_let_go_of_when_the_error_is(stage: Stage) -> None:
    proxy = stage.proxy(Fault("stall", at=stage.nbytes // 2, times=math.inf))
    receiver = stage.receiver(proxy.url, stall_s=STALL_S)
    memory = memories(stage.manifest)
    refs = [weakref.ref(array) for array in memory.values()]
    try:
        list(receiver.landings(stage.manifest, memory, deadline=soon(60)))
    except SourceFailed:
        del memory
    assert not [ref for ref in refs if ref() is not None]


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_a_depot_that_is_killed_or_stopped_in_the_middle_is_routed_around(
    stage: Stage, start: Callable[..., object], deed: signal.Signals
) -> None:
    child = start("depot_process", stage.store.path)
    url = child.stdout.readline().strip()
    proxy = stage.proxy(rate=2e6)  # slow enough that the other one is needed
    receiver = stage.receiver(url, proxy.url, connections=1, stall_s=STALL_S)
    landings = receiver.landings(stage.manifest, stage.memory, deadline=soon(60))
    next(landings)
    os.kill(child.pid, deed)
    began = time.monotonic()
    for _ in landings:
        pass
    assert wrong(stage.memory, stage.right) == []
    assert time.monotonic() - began < BOUND_S

    alone = stage.receiver(url, stall_s=STALL_S)
    began = time.monotonic()
    with pytest.raises(SourceFailed, match=url):
        stage.land(alone)
    assert time.monotonic() - began < BOUND_S
    stage.check_untouched()
    if deed is signal.SIGSTOP:
        os.kill(child.pid, signal.SIGCONT)
        assert stage.land(alone) == []
