"""One host copy for several processes: the first of them keeps it and shares its memory, the others ask it.

They meet at a name in the kernel's abstract namespace of sockets, which ends with its owner and leaves nothing behind: if
the keeper dies, whoever asks next becomes the keeper.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from weightcast.clock import Deadline
from weightcast.delta.edit import Edit, TensorEdit
from weightcast.engines.host.answering import Keeper, MakeCopy
from weightcast.engines.host.copy import Fits, FormerArrays, StagedVersion, Wanted
from weightcast.engines.host.line import (
    LONGEST_S,
    Patience,
    address_of,
    connect_to,
    receive,
    receive_with_descriptors,
    send,
)
from weightcast.errors import SourceFailed, WeightcastError, rebuilt
from weightcast.tensors.flat import Array, Bytes
from weightcast.wire.decoding import decode
from weightcast.wire.host_copy import Lying, StageAsked, StageTold
from weightcast.wire.manifest import FORMAT, Manifest
from weightcast.wire.seal import unseal

_GRACE_S = 10.0
_JOURNAL_S = 30.0
_JOURNAL_NBYTES = 1 << 40  # memory is the limit
_BREATH_S = 0.02


@dataclass(eq=False)
class _Borrowed(StagedVersion):
    """A version in the keeper's memory, which he leaves alone for as long as the line is open."""

    line: socket.socket = field(kw_only=True)


class SharedHostCopy:
    """Versions for one of several processes on this host that ask for the same `name`. Any thread may call.

    `make_copy` makes the copy in the process that becomes the keeper, and `fits` is what it checks a version by for all.
    `grace_s` is how long the keeper is waited for beyond a deadline, to say what happened.
    """

    def __init__(self, name: str, make_copy: MakeCopy, fits: Fits, *, grace_s: float = _GRACE_S) -> None:
        self._address = address_of(name)
        self._make_copy, self._fits, self._grace_s = make_copy, fits, grace_s
        self._keeper: Keeper | None = None
        self._borrowed: weakref.WeakSet[_Borrowed] = weakref.WeakSet()
        self._lock = threading.Lock()  # never held for long

    def stage(self, wanted: Wanted, *, fits: Fits, deadline: Deadline) -> StagedVersion:
        """See `HostVersions`: staged here if this is the keeper, else by the keeper."""
        met = self._met(deadline)
        if isinstance(met, Keeper):
            return met.copy.stage(wanted, fits=fits, deadline=deadline)
        try:
            borrowed = self._asked(met, wanted, deadline)
            fits(borrowed.manifest)
        except BaseException:
            met.close()
            raise
        weakref.finalize(borrowed, met.close).atexit = False
        with self._lock:
            self._borrowed.add(borrowed)
        return borrowed

    def commit(self, staged: StagedVersion) -> None:
        """See `HostVersions`. What the keeper's own rank commits counts for all."""
        if isinstance(staged, _Borrowed):
            staged.line.close()
        elif (keeper := self._keeper) is not None:
            keeper.copy.commit(staged)

    def abandon(self, staged: StagedVersion) -> None:
        """See `HostVersions`."""
        if isinstance(staged, _Borrowed):
            staged.line.close()
        elif (keeper := self._keeper) is not None:
            keeper.copy.abandon(staged)

    def close(self) -> None:
        """Stop keeping, or let go of what was borrowed."""
        with self._lock:
            keeper, self._keeper = self._keeper, None
            borrowed = list(self._borrowed)
            self._borrowed.clear()
        for one in borrowed:
            one.line.close()
        if keeper is not None:
            keeper.close()

    def _met(self, deadline: Deadline) -> Keeper | socket.socket:
        """The keeper, if it is this process, or else a line to it."""
        while True:
            with self._lock:
                if self._keeper is not None:
                    return self._keeper
                try:
                    line = connect_to(self._address)
                    if line is not None:
                        return line
                    self._keeper = Keeper.open(self._address, self._make_copy, self._fits)
                    if self._keeper is not None:
                        return self._keeper
                except BlockingIOError:  # its backlog is full
                    pass
            deadline.check("waiting for the process that keeps the host's copy")
            time.sleep(_BREATH_S)

    def _asked(self, line: socket.socket, wanted: Wanted, deadline: Deadline) -> _Borrowed:
        asked = StageAsked(
            source=wanted.source, version=wanted.version, verify_checksum=wanted.verify_checksum,
            timeout=min(deadline.remaining(), LONGEST_S),
        )  # fmt: skip
        patience = Patience(f"waiting for the process that keeps {wanted.source}", deadline, self._grace_s)
        try:
            send(line, msgspec.json.encode(asked), patience.check)
            return _told(line, patience)
        except WeightcastError:  # some are errors of the system as well
            raise
        except OSError as error:
            raise SourceFailed(
                f"the process that keeps the host's copy of {wanted.source} went away: {error}. Try again."
            ) from error
        except (msgspec.MsgspecError, ValueError, LookupError) as error:
            raise SourceFailed(
                f"the process that keeps the host's copy of {wanted.source} told what makes no sense: {error}. "
                "Do all ranks run the same release?"
            ) from error


def _told(line: socket.socket, patience: Patience) -> _Borrowed:
    message, descriptors = receive_with_descriptors(line, patience.check)
    try:
        told = decode(message, StageTold)
        if told.code is not None:
            raise rebuilt(told.code, told.message)
        slabs = [_map(fd, nbytes) for fd, nbytes in zip(descriptors, told.slabs, strict=True)]
    finally:
        for fd in descriptors:
            os.close(fd)
    manifest, former = (
        unseal(data, "the host copy", Manifest, newest=FORMAT) if (data := receive(line, patience.check)) else None
        for _ in range(2)
    )
    if manifest is None:
        raise SourceFailed("the process that keeps the host's copy told of nothing.")
    arrays = _arrays(manifest, told.tensors, slabs)
    before: Mapping[str, Array] = {}
    if former is not None:
        before = _arrays(former, told.former, slabs) if told.former else FormerArrays(arrays, partial(_ask_edits, line))
    return _Borrowed(manifest, arrays, before, former, line=line)


def _ask_edits(line: socket.socket) -> Sequence[TensorEdit]:
    """What a version was written over, from the keeper, who holds it for as long as the line is open."""
    patience = Patience("waiting for what the host's copy held before", Deadline.after(_JOURNAL_S))
    try:
        line.settimeout(_JOURNAL_S)
        line.sendall(b"?")
        return Edit.from_journal(receive(line, patience.check, _JOURNAL_NBYTES)).tensors
    except OSError as error:
        raise SourceFailed(f"the process that keeps the host's copy went away: {error}.") from error


def _arrays(manifest: Manifest, places: Mapping[str, Lying], slabs: list[Bytes]) -> dict[str, Array]:
    found = {}
    for entry in manifest.tensors:
        place = places[entry.name]
        flat = slabs[place.slab][place.offset : place.offset + entry.nbytes] if entry.nbytes else np.empty(0, np.uint8)
        found[entry.name] = flat.view(entry.dtype.numpy).reshape(entry.shape)
    return found


def _map(descriptor: int, nbytes: int) -> Bytes:
    """A private mapping: frameworks want memory that can be written, and what they wrote would not reach the keeper.

    It is a new one for each version: pages that were written to would not show what comes into them later.
    """
    mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(mapping, dtype=np.uint8)
