"""The process that keeps the host copy for others: it stages what they ask for, and shares its memory."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.delta.edit import Edit
from weightcast.engines.host.copy import Fits, FormerArrays, HostCopy, MakeBuffers, StagedVersion, Wanted
from weightcast.engines.host.line import Patience, check_user, listen_at, receive, send
from weightcast.engines.host.shared import SharedBuffers
from weightcast.errors import UpdateFailed, WeightcastError
from weightcast.tensors.flat import Array
from weightcast.transports.ipc.host_memory import HostMemory
from weightcast.transports.ipc.lifeline import closed_in_children
from weightcast.wire.decoding import decode
from weightcast.wire.host_copy import Lying, StageAsked, StageTold
from weightcast.wire.manifest import encode_manifest

log = logs.get(__name__)

MakeCopy = Callable[[MakeBuffers], HostCopy]

_QUESTION_S = 5.0  # for a question to come, once somebody has connected
_ANSWER_S = 10.0  # for an answer to be taken
_QUESTION_NBYTES = 1 << 20
_BREATH_S = 0.05


class Keeper:
    """A host copy in shared memory, and threads that answer for it: one that accepts, and one for each process that asks.

    A version that was told to somebody stays in memory, whatever else is staged, until he hangs up.
    """

    def __init__(self, listener: socket.socket, make_copy: MakeCopy, fits: Fits) -> None:
        self._buffers: list[weakref.ref[SharedBuffers]] = []
        self.copy = make_copy(self._make_buffers)
        self._listener, self._fits = listener, fits
        self._lines: set[socket.socket] = set()
        self._ended = threading.Event()
        closed_in_children(self)
        self._thread = threading.Thread(target=self._serve, name="weightcast-keeper", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, address: str, make_copy: MakeCopy, fits: Fits) -> Keeper | None:
        """Become the keeper; None if another process was faster."""
        listener = listen_at(address)
        if listener is None:
            return None
        try:
            return cls(listener, make_copy, fits)
        except BaseException:
            listener.close()
            raise

    def close(self) -> None:
        """Answer nobody any more. What was told stays mapped where it is used."""
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread
        self._thread.join(_ANSWER_S)
        self._listener.close()
        for line in list(self._lines):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self.copy.close()

    def forget(self) -> None:
        """In a child of a fork: close the descriptors, so that nobody waits for this process after its parent's death."""
        self._listener.close()
        for line in self._lines:
            line.close()

    def _make_buffers(self, nbytes: int) -> SharedBuffers:
        made = SharedBuffers(nbytes)
        self._buffers = [one for one in self._buffers if one() is not None] + [weakref.ref(made)]
        return made

    # -- answering -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if self._ended.is_set():
                    return
                log.warning("host copy deaf", error=error)  # no descriptors are left, most likely
                time.sleep(_BREATH_S)
                continue
            self._lines.add(line)
            threading.Thread(target=self._attend, args=(line,), name="weightcast-keeper-line", daemon=True).start()

    def _attend(self, line: socket.socket) -> None:
        try:
            with line:
                check_user(line)
                self._answer(line)
        except (OSError, WeightcastError, msgspec.MsgspecError) as error:
            if not self._ended.is_set():
                log.warning("host copy question failed", error=error)
        finally:
            self.copy.release(line)
            self._lines.discard(line)

    def _answer(self, line: socket.socket) -> None:
        """Hear a question, stage, tell, and leave the memory that was told of alone until the line ends."""
        hearing = Patience("waiting for a question about the host copy", Deadline.after(_QUESTION_S))
        asked = decode(receive(line, hearing.check, _QUESTION_NBYTES), StageAsked)
        wanted = Wanted(asked.source, asked.version, asked.verify_checksum, asked.timeout)
        answer = self._answered(wanted, line)
        telling = Patience(f"telling another process about {wanted.source}", Deadline.after(_ANSWER_S))
        send(line, msgspec.json.encode(answer.told), telling.check, [slab.descriptor for slab in answer.slabs])
        if answer.staged is None:
            return
        for one in (answer.staged.manifest, answer.staged.former_manifest):
            send(line, encode_manifest(one) if one is not None else b"", telling.check)
        arrays, former = answer.staged.arrays, answer.staged.former
        before = former if isinstance(former, FormerArrays) else None
        del answer, former  # only tensors that were reported to a follower are kept
        line.settimeout(None)
        while line.recv(1) and before is not None:  # ends with the process at the other end, if not earlier
            telling = Patience("telling another process what was written over", Deadline.after(_ANSWER_S))
            send(line, Edit(tuple(before.edits.values())).to_journal(), telling.check)
            line.settimeout(None)
        del arrays

    def _answered(self, wanted: Wanted, line: socket.socket) -> _Answer:
        try:
            deadline = Deadline.after(wanted.timeout, cancelled=self._ended)
            staged = self.copy.stage(wanted, fits=self._fits, deadline=deadline, lease=line)
            return _Answer(staged, [buffers for one in self._buffers if (buffers := one()) is not None])
        except WeightcastError as error:
            return _Answer(told=StageTold(code=error.code, message=str(error)))
        except Exception as error:
            log.exception("stage crashed", version=wanted.version, source=wanted.source)
            message = f"staging {wanted.version} failed and changed nothing: {type(error).__name__}: {error}"
            return _Answer(told=StageTold(code=UpdateFailed.code, message=message))


class _Answer:
    """What somebody is told, and what must stay for that: `slabs` keep their descriptors as long as `buffers` are there."""

    def __init__(
        self,
        staged: StagedVersion | None = None,
        buffers: list[SharedBuffers] | None = None,
        told: StageTold | None = None,
    ) -> None:
        self.staged, self._buffers = staged, buffers or []
        self.slabs: list[HostMemory] = []
        self.told = told or StageTold()
        if staged is not None:
            over = isinstance(staged.former, FormerArrays)
            tensors, former = self._places(staged.arrays), {} if over else self._places(staged.former)
            self.told = StageTold(slabs=tuple(slab.nbytes for slab in self.slabs), tensors=tensors, former=former)

    def _places(self, arrays: Mapping[str, Array]) -> dict[str, Lying]:
        return {name: self._place(name, array) for name, array in arrays.items()}

    def _place(self, name: str, array: Array) -> Lying:
        if not array.nbytes:
            return Lying(slab=0, offset=0)
        for buffers in self._buffers:
            found = buffers.locate(array)
            if found is not None:
                slab, offset = found
                if slab not in self.slabs:
                    self.slabs.append(slab)
                return Lying(slab=self.slabs.index(slab), offset=offset)
        raise UpdateFailed(f"tensor {name} does not lie in shared memory, so that other ranks could not see it.")
