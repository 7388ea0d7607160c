"""Trainers and receivers of `ipc://` in processes of their own, which can be made to die or to stop at any message.

They come from a fork server that has everything imported, so that a matrix of hundreds of them takes minutes and not hours.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.clock import Deadline
from weightcast.errors import VersionNotFound, WeightcastError
from weightcast.publish.publisher import Publisher
from weightcast.tensors.flat import empty, flat_bytes
from weightcast.transports.ipc.receiver import IpcReceiver

from .ipc_traps import Fault, Trap

BUCKET_NBYTES = 1 << 16
REPLY_S = 40.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["weightcast.publish.publisher", "weightcast.transports.ipc.receiver"])


def weights(seed: int) -> dict[str, np.ndarray]:
    """Half a megabyte: ten tensors or so, eight buckets."""
    rng = np.random.default_rng(seed)
    return {
        **{f"layer.{number}": rng.integers(0, 255, (128, 450), dtype=np.uint8) for number in range(8)},
        "large": rng.standard_normal((3 * BUCKET_NBYTES // 8,)).astype(np.float32),
        "empty": np.empty((0, 3), np.float32),
        "scalar": np.array(seed, np.float32),
        "odd": rng.integers(-128, 127, 777, dtype=np.int8),
    }


def _part(seed: int, rank: int) -> dict[str, np.ndarray]:
    """What one of two trainer ranks has of it."""
    return dict(list(weights(seed).items())[rank::2])


# -- in the child --------------------------------------------------------------------------------------------------------


def _serve(orders: Connection, *served: Callable[..., Any]) -> None:
    """Do what the test says, one thing after the other, until it says no more."""
    handlers = {handler.__name__: handler for handler in (*served, state, fork_sleeper, fork_and_collect)}
    while True:
        try:
            name, *arguments = orders.recv()
        except EOFError:
            return
        try:
            orders.send(("did", handlers[name](*arguments), time.monotonic()))
        except WeightcastError as error:
            orders.send((type(error).__name__, str(error), time.monotonic()))
        except Exception as error:
            orders.send(("wrong", f"{type(error).__name__}: {error}", time.monotonic()))


def state() -> dict[str, Any]:
    """What a process has."""
    maps = Path("/proc/self/maps").read_text()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(entry.readlink()))
    return {
        "memories": maps.count("/memfd:weightcast") + sum("memfd:weightcast" in link for link in links),
        "descriptors": len(links),
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
    }


def fork_sleeper() -> int:
    """A child that outlives whatever happens to this process."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def fork_and_collect() -> None:
    """A child that ends as a Python program does, with everything that it inherited."""
    child = os.fork()
    if child == 0:
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def trainer(orders: Connection, notice: Connection, fault: Fault | None) -> None:
    """A training process: it opens a publisher where it is told to, and publishes or streams what it is told to."""
    if fault is not None:
        Trap(fault, notice).set_for_trainer()
    here: list[Publisher] = []

    def start(root: Path, options: dict[str, Any]) -> None:
        here.append(Publisher(root, **{"bucket_nbytes": BUCKET_NBYTES, "hold_s": 0.5, "stall_s": 0.5, **options}))

    def publish(seed: int) -> float:
        return here[0].publish(f"v{seed}", weights(seed), timeout=20).copy_s

    def stream(seed: int, receivers: int) -> tuple[list[str], list[str]]:
        tensors = weights(seed)
        publication = here[0].stream(f"v{seed}", tensors, receivers=receivers, timeout=20)
        for array in tensors.values():
            array[...] = 77  # it may
        with suppress(WeightcastError):
            publication.wait(timeout=5)
        return publication.taken, publication.dropped

    def receivers() -> int:
        return here[0].receivers

    def publish_part(seed: int, rank: int) -> None:
        here[0].publish(f"v{seed}", _part(seed, rank), timeout=20)

    def stream_part_slowly(seed: int, rank: int) -> None:
        def slowly() -> Iterator[tuple[str, np.ndarray]]:
            for name, tensor in _part(seed, rank).items():
                time.sleep(0.5)
                yield name, tensor

        here[0].stream(f"v{seed}", slowly(), like=_part(seed, rank), timeout=20)

    def overwrite_after(mode: str, seed: int, receivers: int) -> None:
        tensors = weights(seed)
        if mode == "held":
            publication = here[0].publish(f"v{seed}", tensors, timeout=20)
        else:
            publication = here[0].stream(f"v{seed}", tensors, receivers=receivers, timeout=20)
        end = time.monotonic() + 20
        while len(publication.taken) < receivers and time.monotonic() < end:
            for array in tensors.values():
                array[...] = 77

    def close() -> None:
        while here:
            here.pop().close()

    _serve(orders, start, publish, stream, publish_part, stream_part_slowly, overwrite_after, receivers, close)


def receiver(orders: Connection, notice: Connection, fault: Fault | None) -> None:
    """An engine: it reads what it is told to, compares every byte, and keeps its connection between versions."""
    if fault is not None:
        Trap(fault, notice).set_for_receiver()
    here: dict[str, IpcReceiver] = {}

    def start(root: Path) -> None:
        here["receiver"] = IpcReceiver(root)

    def held(seed: int, timeout: float, stray: bool = False) -> str:
        return _read_held(here["receiver"], seed, Deadline.after(timeout), stray=stray)

    def stream(seed: int, timeout: float, stray: bool = False) -> str:
        return _read_stream(here["receiver"], seed, Deadline.after(timeout), stray=stray)

    def attach(timeout: float) -> None:
        with suppress(VersionNotFound):
            here["receiver"].manifest("nothing", deadline=Deadline.after(timeout))

    def wait(version: str, timeout: float) -> str:
        return here["receiver"].wait_newer(version, deadline=Deadline.after(timeout))

    def close() -> None:
        here["receiver"].close()

    _serve(orders, start, attach, held, stream, wait, close)


def _found(one: IpcReceiver, seed: int, deadline: Deadline, *, stray: bool) -> Any:
    while (newest := one.wait_newer(None, deadline=deadline)) != f"v{seed}":
        if int(newest[1:]) > seed:
            raise VersionNotFound(f"v{seed}", one.url, [newest])
        deadline.check(f"waiting for v{seed}")
        time.sleep(0.002)
    if stray:
        with suppress(VersionNotFound):
            one.manifest("nothing", deadline=deadline)
    return one.manifest(f"v{seed}", deadline=deadline)


class _Stray(Exception):
    """Why a transfer is given up."""


def _read_held(one: IpcReceiver, seed: int, deadline: Deadline, *, stray: bool) -> str:
    manifest = _found(one, seed, deadline, stray=stray)
    if stray:
        with suppress(_Stray), one.mapped(manifest, deadline=deadline):
            raise _Stray
    with one.mapped(manifest, deadline=deadline) as arrays:
        found = {name: array.copy() for name, array in arrays.items()}
    return _compared(found, seed)


def _read_stream(one: IpcReceiver, seed: int, deadline: Deadline, *, stray: bool) -> str:
    manifest = _found(one, seed, deadline, stray=stray)
    found = {entry.name: empty(entry.spec) for entry in manifest.tensors}
    pieces = one.pieces(manifest, deadline=deadline)
    for number, piece in enumerate(pieces):
        flat_bytes(found[piece.tensor])[piece.offset : piece.offset + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
        if stray and number == 3:
            pieces.close()
            return "gave up"
    return _compared(found, seed)


def _compared(found: dict[str, np.ndarray], seed: int) -> str:
    """Byte by byte and not by digest: this is about what a receiver gets that compares nothing."""
    expected = weights(seed)
    same = found.keys() == expected.keys() and all(
        found[name].tobytes() == array.tobytes() for name, array in expected.items()
    )
    return "right" if same else "MIXED BYTES"


# -- in the test ---------------------------------------------------------------------------------------------------------


class Peer:
    """A process of its own. `tell` gives an order, `heard` waits for what became of it, `ask` does both."""

    def __init__(self, program: Callable[..., None], fault: Fault | None = None) -> None:
        self._orders, orders = _context.Pipe()
        self._notice, notice = _context.Pipe(duplex=False)
        self._process = _context.Process(target=program, args=(orders, notice, fault), daemon=True)
        self._process.start()
        orders.close()
        notice.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, *order: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead already
            self._orders.send(order)

    def heard(self, timeout: float = REPLY_S) -> tuple[Any, ...]:
        """("did", value, when), or an error's name, its text and when; ("dead",) if there is no answer any more."""
        assert self._orders.poll(timeout), f"process {self.pid} hangs"
        try:
            return self._orders.recv()
        except (EOFError, ConnectionResetError):
            return ("dead",)

    def answered(self, timeout: float) -> bool:
        return self._orders.poll(timeout)

    def ask(self, *order: object, timeout: float = REPLY_S) -> Any:
        """What it did. An error is none of the test's expectations."""
        self.tell(*order)
        answer = self.heard(timeout)
        assert answer[0] == "did", f"{order}: {answer}"
        return answer[1]

    def ask_any(self, *order: object) -> tuple[Any, ...]:
        """What it did, or the error."""
        self.tell(*order)
        return self.heard()

    def sprung(self, timeout: float) -> float | None:
        """When its fault happened; None if it did not."""
        if not self._notice.poll(timeout):
            return None
        with suppress(EOFError):
            return self._notice.recv()
        return None

    def go_on(self) -> None:
        """Once it has stopped: it says that it will a moment before."""
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(10)
        self._orders.close()
        self._notice.close()
        self._process.close()


@contextmanager
def peers() -> Iterator[Callable[..., Peer]]:
    """Makes peers, and ends them all whatever happens."""
    made: list[Peer] = []

    def make(program: Callable[..., None], fault: Fault | None = None) -> Peer:
        made.append(Peer(program, fault))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.end()


def until(fact: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait for a fact."""
    end = time.monotonic() + timeout
    while not fact():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)
