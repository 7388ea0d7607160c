"""A relay: a shelf that fills a store of its own from other depots, and gives every piece on as soon as it is verified."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.depot.holding import Holding
from weightcast.depot.mirror_listening import ANSWER_S, Listening
from weightcast.depot.mirror_upstreams import Upstreams
from weightcast.depot.mirroring import CONNECTIONS, GIVE_UP_S, Fetching
from weightcast.depot.partial import PartialVersion
from weightcast.depot.stored import StoredShelf
from weightcast.errors import (
    AnyPath,
    Conflict,
    Corrupt,
    InvalidInput,
    StoreBusy,
    UpdateCancelled,
    VersionNotFound,
    WeightcastError,
)
from weightcast.store import layout
from weightcast.store.catalog import Catalog
from weightcast.store.files import make_dir
from weightcast.store.lock import exclusive
from weightcast.store.pruning import prune
from weightcast.store.version_file import write_version_file
from weightcast.transports.http.access import Access
from weightcast.transports.http.shares import open_client
from weightcast.wire.depot import Newest, Offer
from weightcast.wire.manifest import Manifest

log = logs.get(__name__)

KEEP_LAST = 3
STALL_S = 3.0
POLL_S = 5.0
_LOOK_S = 0.1
_PAUSE_S = 0.5
_JOIN_S = 30.0
_MAX_PROBLEMS = 16


class Mirror:
    """Follows other depots, the nearest first, and serves what it has and what is on its way. A shelf; any thread may call.

    Its store is an ordinary one with the very files of the publisher, kept to the last `keep_last` versions (None: all) and
    those that `protect` names. It belongs to the mirror: the store's lock is held while a version comes. A version that was
    interrupted, also by the end of the process, goes on with the pieces that are there.

    New versions are taken one after the other, each with the bases that it needs and that are not here. One that cannot be
    had whole and proved is given up: `problems` says why, and whoever waits for a byte of it is told so. It is tried again
    when an upstream has it whole; but not if its bytes were wrong everywhere.

    An upstream that sends nothing for `stall_s` is asked whether it is there at all; a version of which nothing has come for
    `give_up_s` is given up. The nearest upstream is listened to; the others are asked every `poll_s` what it has missed.
    """

    def __init__(
        self,
        store_path: AnyPath,
        urls: Sequence[str],
        *,
        access: Access | None = None,
        connections: int = CONNECTIONS,
        keep_last: int | None = KEEP_LAST,
        protect: Callable[[], Collection[str]] = lambda: (),
        stall_s: float = STALL_S,
        give_up_s: float = GIVE_UP_S,
        poll_s: float = POLL_S,
    ) -> None:
        if connections < 1 or (keep_last is not None and keep_last < 1):
            raise InvalidInput(f"connections={connections} and keep_last={keep_last} of a mirror must be 1 or more.")
        if not (stall_s > 0 and give_up_s > 0 and poll_s > 0):
            raise InvalidInput(f"stall_s={stall_s}, give_up_s={give_up_s} and poll_s={poll_s} of a mirror must be positive.")
        clients = [open_client(url, access=access, connections=connections + 2, stall_s=stall_s) for url in urls]
        self._upstreams = Upstreams(clients, patience_s=2 * stall_s)
        self.path = Path(store_path)
        self._connections, self._give_up_s = connections, give_up_s
        self._keep_last, self._protect = keep_last, protect
        self._catalog, self._stored = Catalog(self.path), StoredShelf(self.path)
        self._changed = threading.Condition()
        self._coming: dict[str, PartialVersion] = {}
        self._target: PartialVersion | None = None  # of those that come, the one that will be the newest
        self._problems: dict[str, str] = {}
        self._stop = threading.Event()
        self._listening = Listening(self._upstreams, self._catalog, stop=self._stop, poll_s=poll_s)
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()
        log.info("mirror started", store=self.path, urls=list(urls), keep_last=keep_last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- the shelf -------------------------------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """What there is and what is on its way, in the order of publication."""
        with self._changed:
            coming = {version: partial.offer for version, partial in self._coming.items()}
        here = {offer.version: offer for offer in self._stored.offers()}
        return sorted((coming | here).values(), key=lambda offer: offer.sequence)

    def newest(self) -> Newest | None:
        """The version to take: one that is on its way counts, as it can be read while it comes."""
        with self._changed:
            target = self._target
        if target is None:
            return self._stored.newest()
        return Newest(target.manifest.version, target.manifest.sequence, target.manifest.root_digest)

    def wait_newer(self, after: str, *, deadline: Deadline) -> Newest | None:
        """The newest version once it is another than `after`; None if it is not before the deadline, or this is closed."""
        while True:
            found = self.newest()
            if found is not None and found.version != after:
                return found
            if deadline.remaining() <= 0 or self._stop.is_set():
                return None
            with self._changed:
                self._changed.wait(min(_LOOK_S, deadline.remaining()))

    @contextmanager
    def holding(self, version: str) -> Iterator[Holding]:
        """A version, here or on its way here. Raises `VersionNotFound`."""
        with self._changed:
            partial = self._coming.get(version)
        if partial is not None:
            yield partial
            return
        with self._stored.holding(version) as stored:
            yield stored

    def problems(self) -> dict[str, str]:
        """What is wrong now: by the URL of an upstream that fails, or by the version that was given up."""
        with self._changed:
            noted = dict(self._problems)
        return self._upstreams.problems() | noted

    def close(self) -> None:
        """Stop, hang up and let go of everything. What has come of a version stays for the next time. Safe twice."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._upstreams.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_S)
        self._upstreams.close()  # what was opened in the meantime
        self._stored.close()

    # -- taking versions -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                heard = self._listening.hear(self._stored.newest())
                if heard is not None:
                    self._take(*heard)
            except UpdateCancelled:
                continue  # it closes
            except Exception as error:
                log.exception("mirror crashed", store=self.path)
                self._note("mirror", error)  # and go on with what comes next
                self._stop.wait(_PAUSE_S)

    def _take(self, newest: Newest, source: int) -> None:
        """Fetch a version with what it is built on, and make it the newest one here."""
        with logs.updating("mirror"):
            self._take_all(newest, source)

    def _take_all(self, newest: Newest, source: int) -> None:
        try:
            make_dir(self.path)
            chain = self._chain(newest, source)
            log.info("version heard", version=newest.version, url=self._upstreams.all[source].url, missing=len(chain))
            with self._locked():
                if chain:
                    self._fetch(chain)
                else:  # it is here already
                    write_version_file(self.path, version=newest.version, step=self._catalog.manifest(newest.version).step)
                self._prune()
        except UpdateCancelled:
            raise
        except WeightcastError as error:
            log.error("version given up", version=newest.version, error=error)
            self._listening.given_up(newest, error)
            self._note(newest.version, error)
            return
        self._listening.taken()
        with self._changed:
            self._problems.clear()
            self._changed.notify_all()

    def _chain(self, newest: Newest, source: int) -> list[Manifest]:
        """The manifests of what must be fetched, the base before the delta on it."""
        chain: list[Manifest] = []
        version, root = newest.version, newest.root_digest
        while not self._has(version, root):
            deadline = Deadline.after(ANSWER_S, cancelled=self._stop)
            manifest = self._upstreams.manifest(version, root, first=source, deadline=deadline)
            chain.insert(0, manifest)
            if manifest.kind == "full" or manifest.base is None:
                break
            version, root = manifest.base.version, manifest.base.root_digest
            if any(version == later.version for later in chain):
                raise Conflict(f"the bases of version {newest.version} come back to {version}, and never to a full version.")
        return chain

    def _has(self, version: str, root: str) -> bool:
        try:
            found = self._catalog.manifest(version).root_digest
        except VersionNotFound:
            return False
        except Corrupt as error:
            log.warning("version fetched again", version=version, error=error)
            return False
        if found != root:
            raise Conflict(
                f"{self.path} has a version {version} with root digest {found}, and upstream it is {root}. A version never "
                "changes: remove the one here, or publish under another id."
            )
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's lock; whoever has it is waited for until this closes."""
        while True:
            self._check_open()
            lock = exclusive(layout.lock_path(self.path), Deadline.after(_LOOK_S))
            try:
                lock.__enter__()
            except StoreBusy as error:
                self._note("mirror", error)
                continue
            break
        with self._changed:
            self._problems.pop("mirror", None)
        try:
            yield
        finally:
            lock.__exit__(None, None, None)

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise UpdateCancelled("the mirror was closed.")

    def _fetch(self, chain: Sequence[Manifest]) -> None:
        """Offer all of a chain at once, so that others can begin with it, and fetch one version after the other."""
        partials = [PartialVersion(self.path, manifest) for manifest in chain]
        with self._changed:
            self._coming = {partial.manifest.version: partial for partial in partials}
            self._target = partials[-1]
            self._changed.notify_all()
        try:
            for partial in partials:
                partial.open()
            for partial in partials:
                self._fetch_one(partial, newest=partial is partials[-1])
        except BaseException as error:
            told = error if isinstance(error, WeightcastError) else Conflict(f"the relay failed: {error!r}")
            for partial in partials:
                if not partial.complete:
                    partial.give_up(told)
            raise
        finally:
            with self._changed:
                self._coming, self._target = {}, None
                self._changed.notify_all()

    def _fetch_one(self, partial: PartialVersion, *, newest: bool) -> None:
        began, manifest = time.monotonic(), partial.manifest
        fetching = Fetching(
            partial, self._upstreams, stop=self._stop, connections=self._connections, give_up_s=self._give_up_s
        )
        fetching.run()
        fetched_s = time.monotonic() - began
        partial.seal(newest=newest)
        log.info(
            "version mirrored",
            version=manifest.version,
            kind=manifest.kind,
            nbytes=sum(partial.files.values()),
            fetched_nbytes=sum(fetching.nbytes.values()),
            upstreams=len(fetching.nbytes),
            fetch_ms=logs.ms(fetched_s),
            seal_ms=logs.ms(time.monotonic() - began - fetched_s),
            store=self.path,
        )

    def _prune(self) -> None:
        if self._keep_last is not None:
            prune(self._catalog, keep_last=self._keep_last, keep_full_every=None, protect=self._protect(), dry_run=False)

    def _note(self, what: str, error: BaseException) -> None:
        with self._changed:
            self._problems.pop(what, None)
            self._problems[what] = str(error)
            while len(self._problems) > _MAX_PROBLEMS:
                del self._problems[next(iter(self._problems))]
