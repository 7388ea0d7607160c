"""Which receivers serve which version of a store: what retention keeps, and what deltas are made on."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, WeightcastError
from weightcast.store import layout
from weightcast.store.files import read_small, replace_synced
from weightcast.store.lock import exclusive
from weightcast.wire.depot import Ack, Acknowledged
from weightcast.wire.manifest import check_version_id, is_digest
from weightcast.wire.seal import seal, unseal

log = logs.get(__name__)

TTL_S = 3600.0
MAX_RECEIVERS = 4096
REFRESH_S = 30.0
MAX_RECEIVERS_PER_CLIENT = 256  # with one address
MAX_PINNED, MAX_PINNED_PER_CLIENT = 64, 16  # versions that acknowledgements keep
PINNED_S = 6 * 3600.0  # no acknowledgement keeps a version for longer after it was published

_FORMAT = 1
_LOCK_NAME = ".receivers.lock"
_LOCK_S = 5.0
_MAX_NBYTES = 16 << 20
_MAX_NAME = 256


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a receiver is: at `version` since `since_s`, and last heard of at `heard_s`, both seconds since the epoch.

    An empty version: it has left. `client` is the address that it was heard from.
    """

    receiver: str
    version: str
    root_digest: str
    since_s: float
    heard_s: float
    client: str = ""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    receivers: tuple[Standing, ...]
    format: int = _FORMAT


class Acks:
    """Remembers receivers for `ttl_s` after they were last heard of. Any thread may call.

    There are no more than `most` of them, and no more than `MAX_RECEIVERS_PER_CLIENT` of one client: those heard of last.
    What they keep from `gc` is bounded too: see `protected`.

    With a store they are kept in a file there, which several depots of one store share: a depot that starts again knows
    them, and so does a `gc` of another process. What a receiver only repeats is written once in `refresh_s`.
    """

    def __init__(
        self, store: Path | None, *, ttl_s: float = TTL_S, most: int = MAX_RECEIVERS, refresh_s: float = REFRESH_S
    ) -> None:
        self._store, self._ttl_s, self._most, self._refresh_s = store, ttl_s, most, refresh_s
        self._lock = threading.Lock()
        self._standings: dict[str, Standing] = {}
        self._written_s = -math.inf
        self._unwritten = self._writing = False
        self._trouble = ""  # why the file could not be read or written the last time: said once
        with self._lock:
            self._merge()

    def note(self, ack: Ack, client: str = "") -> None:
        """A receiver serves a version now; an empty version: none any more. Raises `InvalidInput` for what cannot be.

        `client` is the address that the acknowledgement came from.
        """
        _check(ack)
        with self._lock:
            before = self._standings.get(ack.receiver)
            # never before what was known: the clock may have been put back, and the last word counts
            now = max(time.time(), before.heard_s) if before is not None else time.time()
            repeats = before is not None and (before.version, before.root_digest) == (ack.version, ack.root_digest)
            self._standings[ack.receiver] = Standing(
                receiver=ack.receiver,
                version=ack.version,
                root_digest=ack.root_digest,
                since_s=before.since_s if before is not None and repeats else now,
                heard_s=now,
                client=client,
            )
            self._forget(now)
            if not repeats or time.monotonic() - self._written_s >= self._refresh_s:
                self._unwritten = True
        if not repeats:
            log.info("receiver serves", receiver=ack.receiver, version=ack.version or None, root=ack.root_digest)
        self._write()

    def standings(self) -> list[Standing]:
        """Where receivers are that serve a version, those heard of last first."""
        with self._lock:
            self._merge()
            return sorted((one for one in self._standings.values() if one.version), key=lambda one: -one.heard_s)

    def receivers(self) -> list[Acknowledged]:
        """The same, as it is told."""
        now = time.time()
        return [
            Acknowledged(one.receiver, one.version, one.root_digest, round(max(0.0, now - one.heard_s), 3))
            for one in self.standings()
        ]

    def protected(self) -> set[str]:
        """The versions of the store that receivers are at, and that were published in the last `PINNED_S` seconds.

        At most `MAX_PINNED`, and at most `MAX_PINNED_PER_CLIENT` that the receivers of one client are at: those of the
        receivers that were heard of last.
        """
        versions: set[str] = set()
        of_client: defaultdict[str, set[str]] = defaultdict(set)
        for one in self.standings():
            known = of_client[one.client]
            if one.version in known or len(known) >= MAX_PINNED_PER_CLIENT or not self._is_recent(one.version):
                continue
            known.add(one.version)
            versions.add(one.version)
            if len(versions) == MAX_PINNED:
                break
        return versions

    def _is_recent(self, version: str) -> bool:
        if self._store is None:
            return True
        try:
            return time.time() - layout.manifest_path(self._store, version).stat().st_mtime < PINNED_S
        except OSError:  # it is not there, or not any more
            return False

    def _forget(self, now: float) -> None:
        for one in [one for one in self._standings.values() if now - one.heard_s >= self._ttl_s]:
            del self._standings[one.receiver]
        if len(self._standings) <= min(self._most, MAX_RECEIVERS_PER_CLIENT):
            return
        kept: dict[str, Standing] = {}
        of_client: Counter[str] = Counter()
        for one in sorted(self._standings.values(), key=lambda one: -one.heard_s):
            of_client[one.client] += 1
            if len(kept) < self._most and of_client[one.client] <= MAX_RECEIVERS_PER_CLIENT:
                kept[one.receiver] = one
        self._standings = kept

    def _merge(self) -> None:
        """Take in what other processes wrote; of two words of a receiver the later one counts."""
        now = time.time()
        for one in self._read(self._store) if self._store is not None else ():
            before = self._standings.get(one.receiver)
            far_ahead = one.heard_s - now > self._ttl_s  # by a clock that was wrong: it would be kept for ever
            if not far_ahead and (before is None or before.heard_s < one.heard_s):
                self._standings[one.receiver] = one
        self._forget(now)

    def _read(self, store: Path) -> tuple[Standing, ...]:
        path = store / layout.RECEIVERS
        try:
            return unseal(read_small(path, _MAX_NBYTES), path, _File, newest=_FORMAT).receivers
        except FileNotFoundError:
            return ()
        except WeightcastError as error:
            self._complain(f"what {path} says is not known: {error} It is written anew when a receiver is heard of.")
            return ()

    def _write(self) -> None:
        """Put all into the file, unless another thread is at it: that one then writes once more, for all that came since."""
        while True:
            with self._lock:
                if self._store is None or self._writing or not self._unwritten:
                    return
                self._writing, self._unwritten = True, False
                self._written_s = time.monotonic()
            trouble = self._replace(self._store)
            if trouble and not self._store.is_dir():
                trouble = f"there is no store at {self._store} yet"
            with self._lock:
                self._writing = False
                if trouble:
                    self._written_s = -math.inf  # the next word of anybody tries again
                    self._complain(f"receivers of {self._store} are not kept: {trouble}")

    def _replace(self, store: Path) -> str:
        """Why it failed; empty if it did not. That is no error of the receiver that told."""
        try:
            with exclusive(store / _LOCK_NAME, Deadline.after(_LOCK_S)):
                with self._lock:
                    self._merge()
                    known = tuple(self._standings.values())
                replace_synced(store / layout.RECEIVERS, seal(_File(receivers=known)))
        except WeightcastError as error:
            return str(error)
        return ""

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("receivers file failed", error=trouble)
        self._trouble = trouble


def served_versions(store: Path) -> set[str]:
    """The versions of a store that receivers are at, as its depots noted."""
    return Acks(store).protected()


def _check(ack: Ack) -> None:
    if not 0 < len(ack.receiver) <= _MAX_NAME or not ack.receiver.isprintable():
        raise InvalidInput(f"{ack.receiver[:80]!r} is no name of a receiver: use 1 to {_MAX_NAME} printable characters.")
    if ack.version:
        check_version_id(ack.version)
    if ack.root_digest and not is_digest(ack.root_digest):
        raise InvalidInput(f"{ack.root_digest[:80]!r}, told by {ack.receiver}, is not a digest.")
