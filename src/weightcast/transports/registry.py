"""The one table of transports. Adding one is a file and a line here; first load, update and recovery all look here."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from weightcast.errors import InvalidInput, UnknownSource
from weightcast.store.snapshot import DEFAULT_SHARED_DIR
from weightcast.store.store import Store
from weightcast.transports.base import Receiver
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.transports.file import FileReceiver
from weightcast.transports.ipc.place import read_token
from weightcast.transports.snapshot import SnapshotReceiver

Source = str | PathLike[str] | Store | Receiver
Options = dict[str, str]


def _open_file(path: Path, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - a store is the same for every rank
    _refuse_unknown("file", options, known=set())
    return FileReceiver.open(path)


def _open_checkpoint(path: Path, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - the same for every rank
    _refuse_unknown("checkpoint", options, known=set())
    return CheckpointReceiver(path)


def _open_snapshot(path: Path, options: Options, rank: int) -> Receiver:
    _refuse_unknown("snapshot", options, known={"id", "shared_dir"})
    if "id" not in options:
        raise InvalidInput("a snapshot:// source needs the device id: snapshot:///path?id=0.")
    shared_dir = Path(options.get("shared_dir", DEFAULT_SHARED_DIR))
    return SnapshotReceiver(path, rank=rank, device_id=options["id"], shared_dir=shared_dir)


def _open_ipc(path: Path, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - the same for every rank
    from weightcast.transports.ipc.receiver import IpcReceiver  # noqa: PLC0415 - ZeroMQ is an extra

    _refuse_unknown("ipc", options, known={"token_file"})
    token = read_token(Path(options["token_file"])) if "token_file" in options else None
    return IpcReceiver(path, token=token)


def _open_legacy_ipc(path: Path, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - the file is a device's
    from weightcast.transports.ipc.legacy_receiver import LegacyIpcReceiver  # noqa: PLC0415 - ZeroMQ is an extra

    _refuse_unknown("legacy-ipc", options, known={"id", "device"})
    if "id" not in options:
        raise InvalidInput("a legacy-ipc:// source needs the device id: legacy-ipc:///path?id=0.")
    return LegacyIpcReceiver(path, options["id"], device=options.get("device"))


_SCHEMES: dict[str, Callable[[Path, Options, int], Receiver]] = {
    "file": _open_file,
    "checkpoint": _open_checkpoint,
    "ipc": _open_ipc,
    "legacy-ipc": _open_legacy_ipc,
    "snapshot": _open_snapshot,
}


def open_receiver(source: Source, *, rank: int) -> Receiver:
    """The receiving end for a source: a URL, a directory, a store, or a receiver that is used as it is."""
    if isinstance(source, Store):
        return FileReceiver(source)
    if isinstance(source, PathLike) or (isinstance(source, str) and "://" not in source):
        return FileReceiver.open(Path(source))
    if not isinstance(source, str):
        return source
    parts = urlsplit(source)
    opener = _SCHEMES.get(parts.scheme)
    if opener is None:
        raise UnknownSource(source, _SCHEMES)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidInput(f"{source!r} must name a directory on this host: {parts.scheme}:///path.")
    try:
        options = {key: values[-1] for key, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
    except ValueError as error:
        raise InvalidInput(f"{source!r} has options that cannot be read: {error}.") from error
    return opener(Path(unquote(parts.path)), options, rank)


def _refuse_unknown(scheme: str, options: Options, known: set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        allowed = ", ".join(sorted(known)) or "none"
        raise InvalidInput(f"unknown option(s) {', '.join(unknown)} for {scheme}://; known: {allowed}.")
