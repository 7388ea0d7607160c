"""What the tests of the host copy share: states that change a little, a store with them, and looking at what is staged."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.engines.host.copy import HostCopy, HostVersions, StagedVersion, Wanted
from weightcast.engines.host.keeper import SharedHostCopy
from weightcast.engines.host.shared import SharedBuffers
from weightcast.tensors.flat import Array
from weightcast.wire.manifest import Manifest
from weightcast.worker.buffers import Buffers

WAIT_S = 20.0
State = dict[str, np.ndarray]


def state(number: int, *, seed: int = 0, side: int = 50) -> State:
    """The weights after so many steps; each step changes a few elements. Some tensors are odd."""
    rng = np.random.default_rng(seed)
    found: State = {
        "embed": rng.standard_normal((side, 40)).astype(np.float32),
        **{f"layer.{at}": rng.integers(-100, 100, (30, 20), dtype=np.int16) for at in range(4)},
        "odd": rng.integers(0, 255, 777, dtype=np.uint8),
        "scalar": np.array(0.5, np.float32),
        "empty": np.empty((0, 3), np.float32),
        "nothing": np.empty((4, 0), np.int16),
    }
    for step in range(1, number + 1):
        found["embed"][step % side, 3] += 1
        found["layer.1"][step % 30, :] += 1
        found["odd"][step] ^= 0xFF
    found["head"] = found["embed"]
    return found


def published(path: Path, kinds: str = "fddfd", side: int = 50) -> Store:
    """A store with step_0, step_1, ...: full versions and deltas."""
    shutil.copytree(Path(_template(kinds, side).name) / "store", path)
    return Store(path)


@functools.cache
def _template(kinds: str, side: int) -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="wc-store-")
    store = Store(Path(directory.name) / "store")
    for number, kind in enumerate(kinds):
        store.publish(f"step_{number}", state(number, side=side), mode="delta" if kind == "d" else "full")
    return directory


def wanted(source: Store | str, version: str | int | None = None, **options: object) -> Wanted:
    url = source if isinstance(source, str) else f"file://{source.path}"
    return Wanted(url, f"step_{version}" if isinstance(version, int) else version, **options)  # type: ignore[arg-type]


def anything(manifest: Manifest) -> None:
    """A model that every version fits."""


def stage(copy: HostVersions, source: Store | str, version: str | int | None = None, **options: object) -> StagedVersion:
    return copy.stage(wanted(source, version, **options), fits=anything, deadline=Deadline.after(WAIT_S))


def bring(copy: HostVersions, source: Store | str, version: str | int | None = None, **options: object) -> StagedVersion:
    staged = stage(copy, source, version, **options)
    copy.commit(staged)
    return staged


def bits(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items() if name != "head"}


def places(arrays: Mapping[str, Array]) -> set[int]:
    return {array.ctypes.data for array in arrays.values() if array.nbytes}


def damage(store: Store, version: int, file: str = "*.bin") -> None:
    """Flip a bit of the data in the largest file of a version."""
    path = max((store.path / "versions" / f"step_{version}").glob(file), key=lambda one: one.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-min(1500, len(data) // 4)] ^= 1
    path.write_bytes(data)


def memfds() -> tuple[int, int]:
    """How many pieces of shared memory this process has open, and mapped."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    maps = Path("/proc/self/maps").read_text()
    return sum("memfd:weightcast" in one for one in targets), len(re.findall("memfd:weightcast", maps))


class Counted(Buffers):
    """Buffers that know what they handed out, and hand out nothing while `closed`."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.version_nbytes, self.taken_nbytes, self.places = nbytes, 0, set()
        self.gate, self.asked = threading.Event(), threading.Event()
        self.gate.set()

    def take(self, spec, *, zeroed=False):
        self.asked.set()
        assert self.gate.wait(WAIT_S)
        array = super().take(spec, zeroed=zeroed)
        self.taken_nbytes += spec.nbytes
        self.places |= places({spec.name: array})
        return array


@contextmanager
def copy_in(kind: str, made: list[Buffers]) -> Iterator[HostCopy]:
    """A host copy in memory of its own or in shared memory, whose buffers are noted."""

    def make(nbytes: int) -> Buffers:
        made.append(Counted(nbytes) if kind == "own" else SharedBuffers(nbytes))
        return made[-1]

    one = HostCopy(name="engine", make_buffers=make)
    yield one
    one.close()


def check_held(copy: HostCopy, store: Store, number: int) -> None:
    """The version that counts, and all bits of it."""
    assert copy.held.version == f"step_{number}"
    again = stage(copy, store, number)
    assert again.former_manifest == again.manifest == copy.held
    assert bits(again.arrays) == bits(again.former) == bits(state(number))
    copy.abandon(again)
    assert copy.held.version == f"step_{number}"


@contextmanager
def keepers(name: str, grace_s: float = 0.3) -> Iterator[Callable[..., SharedHostCopy]]:
    """Makes what ranks have."""
    made = []

    def make(fits=anything, name=name, make_copy=lambda make: HostCopy(name="engine", make_buffers=make)):
        made.append(SharedHostCopy(name, make_copy, fits, grace_s=grace_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Running:
    """A call in a thread of its own."""

    def __init__(self, call, *args, **options) -> None:
        self._found, self._error = None, None
        self._thread = threading.Thread(target=self._run, args=(call, args, options), daemon=True)
        self._thread.start()

    def _run(self, call, args, options):
        try:
            self._found = call(*args, **options)
        except BaseException as error:
            self._error = error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self):
        self._thread.join(WAIT_S)
        assert self.over, "it did not end"
        if self._error is not None:
            raise self._error
        return self._found
