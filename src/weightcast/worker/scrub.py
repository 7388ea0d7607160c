"""The scrubber: compares live memory with the sums of what was committed, block by block, beside the running model.

A commit proves what it changes. Foreign writes and bit rot in the rest of the memory are found here, within one pass.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightcast import logs
from weightcast.errors import DigestMismatch
from weightcast.tensors.flat import flat_bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, add_up, range_sum
from weightcast.worker.fit import Landing
from weightcast.worker.targets.base import live_proof

if TYPE_CHECKING:
    from weightcast.worker.holding import Holding
    from weightcast.worker.serving import Served

log = logs.get(__name__)

BLOCK_NBYTES = 16 << 20
_STEP_NBYTES = 1 << 20  # after so many bytes a commit that waits is let through
_LEAST_PASS_S = 1.0  # small models are not read more often than this
_IDLE_S = 0.2
_NICE = 10

Growth = Mapping[str, Mapping[int, Sum]]
"""By how much a commit makes the sums of blocks grow: by the name of the tensor and the number of the block."""


class _Interrupted(Exception):
    """A commit wants the memory."""


@dataclass(frozen=True)
class ScrubReport:
    """`period_s` is how long the last pass took, `clean` the Unix time at which it ended without a finding; 0: none yet."""

    period_s: float = 0.0
    clean: float = 0.0
    passes: int = 0


class Scrubber:
    """Reads the live memory of one model, in a thread of its own once it is started.

    The sums of the blocks of a tensor are learnt in the first pass after a whole version was committed, in which the tensor
    as a whole is compared with its manifest. Commits by delta keep them up to date.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding_of = weakref.ref(holding)  # which owns this: memory is given back without the garbage collector
        self._served: Served | None = None
        self._known: dict[str, list[Sum]] = {}
        self._fresh: list[Sum] = []  # of the blocks of the present tensor that were read in this pass
        self._tensor, self._block = 0, 0
        self._began = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.report = ScrubReport()

    def start(self, share: float, damaged: Callable[[DigestMismatch], None]) -> None:
        """Read all the time, with at most this share of one core. The thread calls `damaged` once for each version.

        It ends with `stop`, with this process, or when nothing else refers to this scrubber.
        """
        self.stop()
        self._stop.clear()
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._stop, share, damaged), name="scrub", daemon=True
        )
        _started.add(self)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Safe twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._thread = None

    def rest_after(self, damaged: Callable[[DigestMismatch], None], share: float) -> float:
        """Read one block; gives the seconds to rest after it."""
        passes, began = self.report.passes, time.thread_time()
        try:
            worked = self.step()
        except DigestMismatch as error:
            worked = False
            log.error("live weights damaged", error=error)
            try:
                damaged(error)
            except Exception:
                log.exception("damage not reported")
        rest_s = (time.thread_time() - began) * (1 / share - 1) if worked else _IDLE_S
        return max(rest_s, _LEAST_PASS_S - self.report.period_s) if self.report.passes != passes else rest_s

    def follow(self, before: Served | None, served: Served, growth: Growth | None) -> None:
        """A commit counts now. `growth`: what it added to the sums of `before`; None: everything was written anew."""
        with self._lock:
            if growth is None or before is None or self._served is not before or _specs(before) != _specs(served):
                self._forget(served)
                return
            self._served = served
            for number, landing in enumerate(served.plan.landings):
                name = landing.slot.spec.name
                for block, more in growth.get(landing.entry.name, {}).items():
                    for sums in (self._known.get(name), self._fresh if number == self._tensor else None):
                        if sums is not None and block < len(sums):
                            sums[block] += more

    def step(self) -> bool:
        """Read one block. False if there is nothing to read now. Raises `DigestMismatch` that names the tensor."""
        holding = self._holding_of()
        if holding is None or not holding.lifecycle.begin_reading():
            return False
        lifecycle = holding.lifecycle
        try:
            with self._lock:
                served = holding.served
                if served is None or not served.proved or not served.plan.landings:
                    return False
                if served is not self._served:  # it was rolled back, recovered, or is the first
                    self._forget(served)
                self._read(served.plan.landings[self._tensor], lambda: lifecycle.hurry)
                if self._tensor == len(served.plan.landings):
                    self._end_pass()
        except _Interrupted:
            return True
        except DigestMismatch:  # nothing may be built on these weights, nor count them as those of the version
            if holding.served is not None:
                holding.served = replace(holding.served, proved=False)
            raise
        finally:
            lifecycle.end_reading()
        return True

    def _read(self, landing: Landing, hurry: Callable[[], bool]) -> None:
        entry, name = landing.entry, landing.slot.spec.name

        def check() -> None:
            if hurry():
                raise _Interrupted

        slot = landing.slot
        live = slot.live() if slot.on_host and entry.sum else None
        if live is None or not live.flags.c_contiguous:
            self._compare(name, entry.proof, live_proof(slot, entry.sum_spec, entry.proof, check))
            self._next_tensor()
            return
        flat, known = flat_bytes(live), self._known.get(name)
        start = self._block * BLOCK_NBYTES
        total = Sum()
        for at in range(start, min(start + BLOCK_NBYTES, len(flat)), _STEP_NBYTES):
            check()
            total += range_sum(entry.sum_spec, at, flat[at : min(at + _STEP_NBYTES, start + BLOCK_NBYTES)], in_passing=True)
        if known is not None and len(flat):
            self._compare(f"{name}, block {self._block} of {len(known)}", str(known[self._block]), str(total))
        self._fresh.append(total)
        self._block += 1
        if self._block * BLOCK_NBYTES >= len(flat):
            self._compare(name, entry.sum, str(add_up(self._fresh)))
            self._known[name] = self._fresh
            self._next_tensor()

    def _compare(self, name: str, expected: str, found: str) -> None:
        if found != expected:
            version = self._served.manifest.version if self._served is not None else ""
            where = f"live weights of version {version}, which were changed after their commit"
            raise DigestMismatch(where, [(name, expected, found)])

    def _next_tensor(self) -> None:
        self._tensor, self._block, self._fresh = self._tensor + 1, 0, []

    def _end_pass(self) -> None:
        now = time.monotonic()
        self.report = ScrubReport(now - self._began, time.time(), self.report.passes + 1)
        self._tensor, self._began = 0, now

    def _forget(self, served: Served | None) -> None:
        self._served, self._known, self._fresh = served, {}, []
        self._tensor, self._block, self._began = 0, 0, time.monotonic()


def _specs(served: Served) -> list[TensorSpec]:
    """What the blocks of the slots are summed as: of several names of a slot, it is that of the first in the manifest."""
    return [landing.entry.sum_spec for landing in served.plan.landings]


def _run(
    scrubber_of: weakref.ref[Scrubber], stop: threading.Event, share: float, damaged: Callable[[DigestMismatch], None]
) -> None:
    """Between two blocks nothing here keeps the model alive."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    rest_s = 0.0
    while not stop.wait(rest_s):
        scrubber = scrubber_of()
        if scrubber is None:
            return
        rest_s = scrubber.rest_after(damaged, share)
        del scrubber


_started: weakref.WeakSet[Scrubber] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside of compiled code while the interpreter ends would abort the process."""
    for scrubber in list(_started):
        scrubber.stop()
