"""What a replica serves, and where it can be had again; and which version a source offers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.base import Pin, TransferMode
from weightcast.engines.embedded.messages import RankRead, Vote
from weightcast.errors import (
    DeadlineExceeded,
    InvalidInput,
    ManifestCorrupt,
    NotFound,
    SourceFailed,
    StateCorrupt,
    StorageFailed,
    WeightcastError,
)
from weightcast.store.files import make_dir, put_back, read_small, refusals, replace_synced
from weightcast.tensors.digest import bytes_digest
from weightcast.transports.base import AcknowledgingReceiver
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.transports.legacy_config import MODES, with_options
from weightcast.transports.registry import open_receiver
from weightcast.wire.decoding import split_url
from weightcast.wire.manifest import MAX_MANIFEST_NBYTES, Manifest
from weightcast.wire.seal import seal, unseal
from weightcast.worker.route import choose_version
from weightcast.worker.sealing import differences

log = logs.get(__name__)

_CONFIG_NBYTES = 16 << 20
_ACKNOWLEDGE_S = 5.0
_SHOWN = 4  # differences of one rank in an error
_HTTP = ("http", "https", "shares+http", "shares+https")
_SCHEMES: dict[TransferMode, tuple[str, ...]] = {
    "snapshot": ("snapshot",), "ipc": ("ipc",), "http": _HTTP, "rdma": ("nixl",), "gdr": ("nixl",),
}  # fmt: skip
_NETWORK = (*_HTTP, "nixl")


@dataclass(frozen=True)
class Served:
    """A version as the front end knows it: the manifest that all ranks were given, and its source.

    `proved` is false where the caller declined the checksum; `tensors` are then the digests of the bytes as the ranks read
    them. `draft` tells whether it fed the draft model too.
    """

    manifest: Manifest
    source: str
    proved: bool = True
    draft: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    since: float = field(default_factory=time.time)

    @property
    def version(self) -> str:
        """Its id."""
        return self.manifest.version

    @property
    def root_digest(self) -> str:
        """Of all its tensors; empty if nobody compared them."""
        return self.manifest.root_digest if self.proved else ""

    @cached_property
    def encoded(self) -> bytes:
        """The manifest as it goes to the ranks."""
        return msgspec.json.encode(self.manifest)

    def is_the(self, manifest: Manifest) -> bool:
        """Whether this is that version, bit for bit."""
        return self.manifest.version == manifest.version and self.is_state_of(manifest)

    def is_state_of(self, manifest: Manifest) -> bool:
        """Whether these are the weights of that version, bit for bit and proved, under whatever name."""
        return self.root_digest != "" and self.root_digest == manifest.root_digest and self.manifest.tied == manifest.tied


def sealed(coming: Served, manifest: Manifest) -> Served:
    """A version that came as a live stream, now that its source describes it in full. `SourceFailed` lists what differs."""
    problems = differences(coming.manifest, manifest)
    if problems:
        raise SourceFailed(
            f"{coming.source} does not describe {coming.version} as it did before the ranks read it: {'; '.join(problems)}. "
            "Nothing was changed."
        )
    return replace(coming, manifest=manifest)


def check_reads(feeds: Sequence[Served], votes: Sequence[Vote]) -> dict[str, str]:
    """Compare what the ranks read, each for each of its models, with each other and with what they were to read.

    Raises `SourceFailed` that names every rank that read something else. Returns the digests of what was read without being
    compared with a manifest.
    """
    problems: list[str] = []
    found: dict[str, str] = {}
    for number, wanted in enumerate(feeds):
        expected = RankRead.of(wanted.manifest, wanted.tensors)
        for rank, vote in enumerate(votes):
            read = vote.reads[number] if number < len(vote.reads) else RankRead(version="nothing")
            unlike = read.differences(expected, rank=rank, ranks=len(votes))
            if unlike:
                more = f" and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
                problems.append(f"rank {rank} read from {wanted.source}: {'; '.join(unlike[:_SHOWN])}{more}")
            expected = msgspec.structs.replace(expected, tensors=read.tensors | expected.tensors)
        found |= expected.tensors
    if problems:
        raise SourceFailed(
            f"the ranks did not all read {feeds[0].version}: {'. '.join(problems)}. Nothing was changed. Give every "
            "rank the same version, and update again."
        )
    return found


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """The state file of a server. `config` is the digest of its config.json, `follows` the source that the pin is about."""

    manifest: Manifest
    source: str
    proved: bool
    draft: bool
    tensors: dict[str, str]
    pin: Pin | None
    config: str
    follows: str
    format: int = 1


class StateDir:
    """A directory in which one server keeps the committed version and the pin, so that they outlive its front end."""

    def __init__(self, directory: Path, *, config: str, follows: str) -> None:
        self._path, self._config, self._follows = directory / "state.json", config, follows
        self._written: bytes | None = None  # what the file holds
        make_dir(directory)
        with refusals("lock", directory):
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise InvalidInput(
                    f"the state directory {directory} is used by another server: give each server a directory of its own."
                ) from None

    def read(self) -> tuple[Served, Pin | None] | None:
        """The version that was committed last and the pin; None if nothing was committed yet."""
        try:
            data = read_small(self._path, MAX_MANIFEST_NBYTES)
            state = unseal(data, self._path, _State, newest=1)
        except FileNotFoundError:
            return None
        except ManifestCorrupt as error:
            raise StateCorrupt(self._path, str(error)) from error
        if state.config != self._config:
            raise StateCorrupt(self._path, "it is of a model with another config.json than MODEL_DIR has")
        self._written = data
        served = Served(state.manifest, state.source, state.proved, state.draft, state.tensors)
        pin = state.pin if state.follows == self._follows else None
        if state.pin is not None and pin is None:
            why = "the server follows another source now"
            log.warning("pin removed", version=state.pin.version, away_from=state.pin.away_from, why=why)
        log.info("state restored", version=served.version, source=served.source, pin=pin.why if pin else None)
        return served, pin

    def write(self, served: Served, pin: Pin | None) -> None:
        """Replace the file in one step. Raises `StorageFailed`, and then it is as before."""
        state = _State(
            manifest=served.manifest, source=served.source, proved=served.proved, draft=served.draft,
            tensors=dict(served.tensors), pin=pin, config=self._config, follows=self._follows,
        )  # fmt: skip
        data = seal(state)
        try:
            replace_synced(self._path, data)
        except StorageFailed:
            put_back(self._path, self._written)  # it may have its new name, which only was not made safe
            raise
        self._written = data

    def close(self) -> None:
        """Let another server have the directory. Safe twice."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def checkpoint_url(directory: str) -> str:
    """A directory with a checkpoint, as a source."""
    return f"checkpoint://{quote(directory)}"


def check_transfer(source: str, mode: TransferMode) -> None:
    """Refuse a way of transfer that this source does not have."""
    scheme = split_url(source).scheme if "://" in source else "file"
    if mode != "auto" and scheme not in _SCHEMES[mode]:
        wanted = " or ".join(f"{name}://" for name in _SCHEMES[mode])
        raise InvalidInput(f"transfer_mode {mode!r} goes with a source {wanted}…, and the source is {source!r}.")


def read_by(source: str, mode: TransferMode) -> str:
    """The source, read in this way: whoever asks for an update decides over what the URL says."""
    check_transfer(source, mode)
    return with_options(source, {"mode": mode}, win=True) if mode in MODES else source


async def find_version(source: str, version: str | None, *, verify_checksum: bool, deadline: Deadline) -> Manifest:
    """The manifest of a version, or of the newest one of the source. Read in a thread, which a source that hangs keeps."""

    def read() -> Manifest:
        receiver = open_receiver(source, rank=0)
        try:
            return choose_version(receiver, version, verify_checksum=verify_checksum, deadline=deadline)
        finally:
            receiver.close()

    return await _beside(read, f"asking {source} for {version or 'its newest version'}", deadline)


async def _beside(read: Callable[[], Manifest], what: str, deadline: Deadline) -> Manifest:
    """Wait for a thread until the deadline. It is a daemon: unlike the loop's own threads, nobody waits for its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Manifest] = loop.create_future()

    def tell(outcome: Manifest | Exception) -> None:
        if not done.done():
            done.set_exception(outcome) if isinstance(outcome, Exception) else done.set_result(outcome)

    def run() -> None:
        outcome: Manifest | Exception
        try:
            outcome = read()
        except Exception as error:  # noqa: BLE001 - it is raised where this is awaited
            outcome = error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, outcome)

    threading.Thread(target=logs.carried(run), name="ask-source", daemon=True).start()
    try:
        async with asyncio.timeout(deadline.remaining()):
            return await done
    except TimeoutError:
        raise DeadlineExceeded(what, deadline.seconds) from None


def tell_source(served: Served, name: str) -> None:
    """Tell the source of a version that the replica `name` serves it now. In a thread: nobody waits for the answer."""

    def tell() -> None:
        try:
            with closing(open_receiver(served.source, rank=0)) as receiver:
                if isinstance(receiver, AcknowledgingReceiver):
                    receiver.acknowledge(served.manifest, name, deadline=Deadline.after(_ACKNOWLEDGE_S))
        except WeightcastError as error:
            log.warning("acknowledgement failed", version=served.version, source=served.source, error=error)

    if split_url(served.source).scheme in _NETWORK:
        threading.Thread(target=logs.carried(tell), name="acknowledge", daemon=True).start()


async def find_checkpoint(directory: str, deadline: Deadline) -> Served:
    """The version that a checkpoint directory is. Every byte of it is read."""
    receiver = CheckpointReceiver(Path(directory))
    manifest = await asyncio.to_thread(receiver.identify, deadline=deadline)
    return Served(manifest, checkpoint_url(directory))


def config_digest(directory: Path) -> str:
    """The digest of the config.json that says what the tensors of a checkpoint mean."""
    try:
        return bytes_digest(read_small(directory / "config.json", _CONFIG_NBYTES))
    except FileNotFoundError:
        return ""


def check_config(directory: Path, expected: str) -> None:
    """Raise `NotFound` if a replica that starts again would build another model than before."""
    if config_digest(directory) != expected:
        raise NotFound(
            f"config.json in {directory} is not the one that the replica was started with: put it back, or start the server "
            "anew."
        )
