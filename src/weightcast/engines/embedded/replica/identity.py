"""Which version a checkpoint directory holds: what its version file says, and the digest of its bytes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.errors import NotFound, ReplicaFailed, StorageFailed, VersionNotSet, WeightcastError
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.files import read_small
from weightcast.store.version_file import read_version_file
from weightcast.tensors.digest import array_digest, bytes_digest, root_digest

Stamps = tuple[tuple[str, int, int, int], ...]

_CONFIG_NBYTES = 16 << 20


@dataclass(frozen=True)
class Identity:
    """A version, the root digest of its tensors and the digest of its config.json, which says what they mean.

    `stamps` tell, cheaply, whether the files were touched since.
    """

    directory: Path
    version: str
    root_digest: str
    config_digest: str
    stamps: Stamps = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.version if self.version == self.root_digest else f"{self.version} ({self.root_digest})"

    def check_untouched(self) -> None:
        """Raise `ReplicaFailed` if a file of weights was written or replaced since its bytes were read."""
        now = _stamps(self.directory)
        if now != self.stamps:
            names = sorted({name for name, *_ in set(now) ^ set(self.stamps)})
            raise ReplicaFailed(
                f"{self.directory} changed while version {self} was loaded from it: {', '.join(names)}. Never write into a "
                "checkpoint that is served; publish the new one elsewhere."
            )


async def identify(directory: Path) -> Identity:
    """Read every byte of a checkpoint and say what it is. Cancelling ends the reading at the next tensor.

    The version is that of the directory's version file, or, if it has none, the root digest.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(_identify, directory, stop)
    finally:
        stop.set()


async def confirm(committed: Identity) -> Identity:
    """The identity of the directory now. Raises `NotFound` if it is not the committed version any more."""
    gone = f"the committed version {committed} is gone from {committed.directory}"
    try:
        found = await identify(committed.directory)
    except WeightcastError as error:
        raise NotFound(f"{gone}: {error}") from error
    if found != committed:
        raise NotFound(
            f"{gone}, which holds {found} now, or another config.json: put the committed one back, or start the server anew."
        )
    return found


def _identify(directory: Path, stop: threading.Event) -> Identity:
    stamps = _stamps(directory)  # before the first byte is read, so that no change goes unseen
    checkpoint = Checkpoint(directory)
    digests = []
    for name, array in checkpoint.tensors():
        if stop.is_set():
            raise ReplicaFailed(f"reading {directory} was given up.")
        digests.append((checkpoint.specs[name], array_digest(array)))
    root = root_digest(digests)
    try:
        version = read_version_file(directory).version
    except VersionNotSet:
        version = root
    return Identity(
        directory=directory, version=version, root_digest=root, config_digest=_config_digest(directory), stamps=stamps
    )


def _config_digest(directory: Path) -> str:
    try:
        return bytes_digest(read_small(directory / "config.json", _CONFIG_NBYTES))
    except FileNotFoundError:
        return ""


def _stamps(directory: Path) -> Stamps:
    try:
        found = [(path.name, path.stat()) for path in sorted(directory.glob("*.safetensors"))]
    except OSError as error:
        raise StorageFailed("look at the checkpoint", directory, error) from error
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)
