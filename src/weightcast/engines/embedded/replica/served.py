"""What a replica serves, and where it can be had again; and which version a source offers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.base import TransferMode
from weightcast.engines.embedded.messages import Vote
from weightcast.errors import DeadlineExceeded, InvalidInput, NotFound, SourceFailed, WeightcastError
from weightcast.store.files import read_small
from weightcast.tensors.digest import bytes_digest
from weightcast.transports.base import AcknowledgingReceiver
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.transports.legacy_config import MODES, with_options
from weightcast.transports.registry import open_receiver
from weightcast.wire.manifest import Manifest
from weightcast.worker.route import choose_version
from weightcast.worker.sealing import differences

log = logs.get(__name__)

_CONFIG_NBYTES = 16 << 20
_ACKNOWLEDGE_S = 5.0
_HTTP = ("http", "https", "shares+http", "shares+https")
_SCHEMES: dict[TransferMode, tuple[str, ...]] = {
    "snapshot": ("snapshot",), "ipc": ("ipc",), "http": _HTTP, "rdma": ("nixl",), "gdr": ("nixl",),
}  # fmt: skip
_NETWORK = (*_HTTP, "nixl")


@dataclass(frozen=True)
class Served:
    """A version as the front end knows it: the manifest that all ranks were given, and its source.

    `proved` is false where the caller declined the checksum. `draft` tells whether it fed the draft model too.
    """

    manifest: Manifest
    source: str
    proved: bool = True
    draft: bool = False
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
        same = (self.manifest.version, self.manifest.root_digest) == (manifest.version, manifest.root_digest)
        return same and self.proved and bool(manifest.root_digest)


def sealed(coming: Served, manifest: Manifest, votes: Sequence[Vote]) -> Served:
    """A version that came as a live stream, now that its source describes it in full and all ranks have told what they got.

    `SourceFailed` lists everything in which they disagree.
    """
    problems = differences(coming.manifest, manifest) or [
        f"rank {rank} got {', '.join(vote.roots) or 'no digest'}, and it is {manifest.root_digest}"
        for rank, vote in enumerate(votes)
        if vote.roots != (manifest.root_digest,)
    ]
    if problems:
        raise SourceFailed(
            f"{coming.source} does not describe {coming.version} as the ranks got it: {'; '.join(problems)}. Nothing was "
            "changed."
        )
    return replace(coming, manifest=manifest)


def checkpoint_url(directory: str) -> str:
    """A directory with a checkpoint, as a source."""
    return f"checkpoint://{quote(directory)}"


def check_transfer(source: str, mode: TransferMode) -> None:
    """Refuse a way of transfer that this source does not have."""
    scheme = urlsplit(source).scheme if "://" in source else "file"
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

    if urlsplit(served.source).scheme in _NETWORK:
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
