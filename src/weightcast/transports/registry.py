"""The one table of transports. Adding one is a file and a line here; first load, update and recovery all look here."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import get_args
from urllib.parse import SplitResult, parse_qs, unquote

from weightcast.errors import InvalidInput, UnknownSource, WeightcastError
from weightcast.store.snapshot import DEFAULT_SHARED_DIR
from weightcast.store.store import Store
from weightcast.transports.base import DeltaUse, Receiver
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.transports.file import FileReceiver
from weightcast.transports.ipc.place import read_token
from weightcast.transports.snapshot import SnapshotReceiver
from weightcast.wire.decoding import split_url
from weightcast.wire.manifest import Packing

Source = str | PathLike[str] | Store | Receiver
Options = dict[str, str]

_MAX_OPTIONS = 64


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

    _refuse_unknown("ipc", options, known={"token_file", "uid"})
    token = read_token(Path(options["token_file"])) if "token_file" in options else None
    uid = options.get("uid")
    if uid is not None and not (uid.isascii() and uid.isdecimal() and len(uid) <= 10):
        raise InvalidInput(f"uid={uid[:40]} of an ipc:// source must be the number of a user: `id -u NAME` prints it.")
    return IpcReceiver(path, token=token, uid=None if uid is None else int(uid))


def _open_legacy_ipc(path: Path, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - the file is a device's
    from weightcast.transports.ipc.legacy_receiver import LegacyIpcReceiver  # noqa: PLC0415 - ZeroMQ is an extra

    _refuse_unknown("legacy-ipc", options, known={"id", "device"})
    if "id" not in options:
        raise InvalidInput("a legacy-ipc:// source needs the device id: legacy-ipc:///path?id=0.")
    return LegacyIpcReceiver(path, options["id"], device=options.get("device"))


def _open_http(location: SplitResult, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - the same for every rank
    from weightcast.transports.http.options import KNOWN, parse_options  # noqa: PLC0415 - other sources need no network
    from weightcast.transports.http.receiver import HttpReceiver  # noqa: PLC0415

    _refuse_unknown(location.scheme, options, known=set(KNOWN))
    urls, access, settings = parse_options(location, options)
    return HttpReceiver(urls, access=access, **settings)


def _open_shares(location: SplitResult, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - the same for every rank
    from weightcast.transports.http.shares import OPTIONS, SharesReceiver  # noqa: PLC0415 - other sources need no network

    _refuse_unknown(location.scheme, options, known=set(OPTIONS))
    return SharesReceiver.open(location, options)


def _open_nixl(location: SplitResult, options: Options, rank: int) -> Receiver:  # noqa: ARG001 - the same for every rank
    from weightcast.transports.nixl.options import open_nixl  # noqa: PLC0415 - other sources need no network

    return open_nixl(location, options)


Opener = Callable[[SplitResult, Options, int], Receiver]


def _on_this_host(opener: Callable[[Path, Options, int], Receiver]) -> Opener:
    """The opener of a source that is a directory."""

    def open_path(location: SplitResult, options: Options, rank: int) -> Receiver:
        if location.netloc not in ("", "localhost") or not location.path:
            raise InvalidInput(f"{location.geturl()!r} must name a directory on this host: {location.scheme}:///path.")
        return opener(Path(unquote(location.path)), options, rank)

    return open_path


_SCHEMES: dict[str, Opener] = {
    "file": _on_this_host(_open_file),
    "checkpoint": _on_this_host(_open_checkpoint),
    "ipc": _on_this_host(_open_ipc),
    "legacy-ipc": _on_this_host(_open_legacy_ipc),
    "snapshot": _on_this_host(_open_snapshot),
    "http": _open_http,
    "https": _open_http,
    "shares+http": _open_shares,
    "shares+https": _open_shares,
    "nixl": _open_nixl,
    "shares+nixl": _open_nixl,
}
_LOCAL_SCHEMES = frozenset({"file", "checkpoint", "ipc", "legacy-ipc", "snapshot"})  # directories on this host
_DELTA_SCHEMES = frozenset({"file", "http", "https", "ipc", "shares+http", "shares+https", "nixl", "shares+nixl"})
_DELTA_OPTIONS = {"deltas": get_args(DeltaUse), "packing": get_args(Packing)}  # that sources of these schemes take


def missing_directory(source: str) -> Path | None:
    """The directory of a source that does not exist yet; None if it does, or if the source is not a directory of files.

    Raises `UnknownSource` or `InvalidInput` for a source that can never be opened. Nothing is asked over the network.
    """
    scheme = split_url(source).scheme if "://" in source else "file"
    try:
        open_receiver(source, rank=0).close()
    except InvalidInput:
        raise
    except WeightcastError:
        if scheme not in _LOCAL_SCHEMES:
            raise  # else its directory, or a file in it, may come later
    if scheme not in ("file", "checkpoint", "snapshot"):
        return None
    path = Path(unquote(split_url(source).path)) if "://" in source else Path(source)
    return None if path.is_dir() else path


def open_receiver(source: Source, *, rank: int) -> Receiver:
    """The receiving end for a source: a URL, a directory, a store, or a receiver that is used as it is."""
    if isinstance(source, Store):
        return FileReceiver(source)
    if isinstance(source, str | PathLike) and "\0" in unquote(str(source)):
        raise InvalidInput(f"{str(source)[:200]!r} has a null byte, which no path and no URL can have.")
    if isinstance(source, PathLike) or (isinstance(source, str) and "://" not in source):
        return FileReceiver.open(Path(source))
    if not isinstance(source, str):
        return source
    location = split_url(source)
    opener = _SCHEMES.get(location.scheme)
    if opener is None:
        raise UnknownSource(source, _SCHEMES)
    try:
        found = parse_qs(location.query, strict_parsing=bool(location.query), max_num_fields=_MAX_OPTIONS)
    except ValueError as error:
        raise InvalidInput(f"{source!r} has options that cannot be read: {error}.") from error
    options = {key: values[-1] for key, values in found.items()}
    chosen = {name: options.pop(name) for name in _DELTA_OPTIONS if location.scheme in _DELTA_SCHEMES and name in options}
    for name, value in chosen.items():
        if value not in _DELTA_OPTIONS[name]:
            raise InvalidInput(f"{name}={value} of {location.scheme}:// must be one of {', '.join(_DELTA_OPTIONS[name])}.")
    receiver = opener(location, options, rank)
    for name, value in chosen.items():  # `delta_use` and `packing_use` read them; most receivers bring none
        setattr(receiver, name, value)
    return receiver


def _refuse_unknown(scheme: str, options: Options, known: set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        allowed = ", ".join(sorted(known | (_DELTA_OPTIONS.keys() if scheme in _DELTA_SCHEMES else set()))) or "none"
        raise InvalidInput(f"unknown option(s) {', '.join(unknown)} for {scheme}://; known: {allowed}.")
