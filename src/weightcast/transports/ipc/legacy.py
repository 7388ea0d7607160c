"""The legacy metadata file of shared memory, `<dir>/ipc_metas_<device id>`: which tensor lies where in which memory.

It is a pickled dict (JSON of the same shape is read too): name -> [handle as latin-1 text, byte offset, byte size, dtype
index, dims, lod, device index]. The handle of a GPU is the 64 bytes of CUDA IPC. Host memory has no handle in the legacy
format: there the text is the msgpack of a `LegacyHandle`. The device index is the writer's and means nothing elsewhere.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from weightcast.errors import InvalidInput, PartCorrupt, SnapshotInvalid, SourceFailed, UnsupportedTensor
from weightcast.store.byte_file import ByteFile
from weightcast.store.files import refusals
from weightcast.store.pickles.machine import Machine, Window
from weightcast.store.snapshot.names import check_device_id
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.ipc.cuda_driver import IPC_HANDLE_NBYTES
from weightcast.transports.ipc.device import Handle
from weightcast.wire.manifest import Manifest, check_version_id

FIELDS = 7
MAX_NBYTES = 64 << 20  # a quarter of a million tensors
_MAX_DIMS = 32
_MAX_INT = 1 << 63

# phi::DataType of Paddle, as `_share_cuda` of 2.3 and later writes it. It is not the VarType of its saved programs.
DTYPE_INDEX: dict[DType, int] = {
    DType.BOOL: 1,
    DType.U8: 2,
    DType.I8: 3,
    DType.U16: 4,
    DType.I16: 5,
    DType.U32: 6,
    DType.I32: 7,
    DType.U64: 8,
    DType.I64: 9,
    DType.F32: 10,
    DType.F64: 11,
    DType.C64: 12,
    DType.F16: 15,
    DType.BF16: 16,
    DType.F8_E4M3: 17,
    DType.F8_E5M2: 18,
}
_DTYPES = {index: dtype for dtype, index in DTYPE_INDEX.items()}


class LegacyHandle(msgspec.Struct, frozen=True, kw_only=True):
    """How to open a memory. With a `place`, the directory of a publisher of ours, that one is asked for the version as its
    manifest of number `sequence` lays it out, and keeps it while it is read. Without, `handle` is a bare CUDA handle, and
    nobody watches over the memory.
    """

    place: str
    handle: Handle
    version: str = ""
    root_digest: str = ""
    sequence: int = 0


@dataclass(frozen=True)
class LegacyTensor:
    """A tensor of the file: its bytes are `offset` bytes into the memory of `source`."""

    spec: TensorSpec
    offset: int
    source: LegacyHandle


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LegacyHandle).decode


def legacy_path(directory: Path, device_id: str) -> Path:
    """Where the file of a device id is."""
    return directory / f"ipc_metas_{check_device_id(device_id)}"


# -- reading -----------------------------------------------------------------------------------------------------------


def read_legacy(path: Path) -> dict[str, LegacyTensor]:
    """What the file lists. Nothing in it is executed and nothing is opened.

    Raises `SnapshotInvalid` with everything that is wrong, or `PickleRefused` for a pickle that holds more than names, texts
    and numbers.
    """
    entries = _load(path)
    problems: list[str] = []
    tensors: dict[str, LegacyTensor] = {}
    handles: dict[str, LegacyHandle] = {}
    for name, entry in entries.items():
        try:
            if not isinstance(name, str):
                raise _Wrong(f"the name {name!r} is not a text")
            tensors[str(name)] = _tensor(str(name), entry, handles)
        except (_Wrong, UnsupportedTensor) as error:
            problems.append(f"{name!r}: {error}")
    if not entries:
        problems.append("it lists no tensors")
    if len({source if source.place else None for source in handles.values()}) > 1:
        problems.append("its tensors are of more than one publication")
    if problems:
        raise SnapshotInvalid(path, problems)
    return _with_sizes(tensors)


class _Wrong(Exception):
    """What is wrong with one entry; collected, never raised out of here."""


def _load(path: Path) -> Mapping[object, object]:
    try:
        file = ByteFile(path)
    except PartCorrupt as error:
        raise SourceFailed(f"{error} The trainer writes it when it has published; start it first.") from error
    with file:
        if file.nbytes > MAX_NBYTES:
            raise SnapshotInvalid(path, [f"it has {file.nbytes} bytes; {MAX_NBYTES} are allowed"])
        first = file.read(1, 0) if file.nbytes else b""
        if first == b"\x80":
            found = Machine(Window(file, 0, file.nbytes), {}).run()
        else:
            found = _load_json(path, file.read(file.nbytes, 0))
    if not isinstance(found, dict):
        raise SnapshotInvalid(path, [f"it holds a {type(found).__name__}, not a dict of tensors"])
    return found


def _load_json(path: Path, data: bytes) -> object:
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SnapshotInvalid(path, [f"it is neither a pickle of protocol 2 to 5 nor JSON: {error}"]) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is listed twice")
    return found


def _tensor(name: str, entry: object, handles: dict[str, LegacyHandle]) -> LegacyTensor:
    if not isinstance(entry, list | tuple) or len(entry) != FIELDS:
        size = f" of {len(entry)}" if isinstance(entry, list | tuple) else ""
        raise _Wrong(f"it is a {type(entry).__name__}{size}, not a list of {FIELDS} elements")
    text, offset, nbytes, index, dims, lod, device = entry
    problems = list(_problems(offset, nbytes, index, dims, lod, device))
    try:
        source = _source(text, handles)
    except _Wrong as error:
        problems.append(str(error))
    if problems:
        raise _Wrong("; ".join(problems))
    spec = TensorSpec(name=name, dtype=_DTYPES[index], shape=tuple(dims))
    if spec.nbytes != nbytes:
        raise _Wrong(f"it is {spec.describe()}, which is {spec.nbytes} bytes and not {nbytes}")
    if source.place and offset + nbytes > source.handle.nbytes:
        raise _Wrong(f"it ends at byte {offset + nbytes} of a memory of {source.handle.nbytes} bytes")
    return LegacyTensor(spec, offset, source)


def _problems(offset: object, nbytes: object, index: object, dims: object, lod: object, device: object) -> Iterator[str]:
    for what, value in (("offset", offset), ("size", nbytes), ("device index", device)):
        if not _is_count(value):
            yield f"its {what} {_shown(value)} is not a whole number from 0 to 2^63"
    if not _is_count(index) or index not in _DTYPES:
        yield f"its dtype index {_shown(index)} is none of {', '.join(map(str, sorted(_DTYPES)))}"
    if not isinstance(dims, list | tuple) or len(dims) > _MAX_DIMS or not all(map(_is_count, dims)):
        yield f"its dims are not a list of at most {_MAX_DIMS} whole numbers from 0 to 2^63"
    if not isinstance(lod, list | tuple) or lod:
        yield "it has a level of detail, which weights do not have"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_INT


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, int | float) or value is None else f"of type {type(value).__name__}"


def _source(text: object, handles: dict[str, LegacyHandle]) -> LegacyHandle:
    """What a text says, found out once."""
    if not isinstance(text, str):
        raise _Wrong("its handle is not a text")
    found = handles.get(text)
    if found is None:
        found = handles[str(text)] = _parsed_handle(text)
    return found


def _parsed_handle(text: str) -> LegacyHandle:
    try:
        data = text.encode("latin-1")
        if len(data) == IPC_HANDLE_NBYTES:  # one of ours is longer
            return LegacyHandle(place="", handle=Handle(kind="cuda", id=0, nbytes=0, data=data))
        found = _decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _Wrong(f"its handle is neither one of CUDA nor one of weightcast: {error}") from error
    if not Path(found.place).is_absolute() or "\0" in found.place:
        raise _Wrong(f"its handle names no publisher, but the place {found.place!r}")
    try:
        check_version_id(found.version)
    except InvalidInput as error:
        raise _Wrong(f"its handle names no version: {error}") from error
    return found


def _with_sizes(tensors: dict[str, LegacyTensor]) -> dict[str, LegacyTensor]:
    """A CUDA handle does not say how large its memory is: at least so large that all tensors are in it."""
    ends: dict[bytes, int] = {}
    for tensor in tensors.values():
        data = tensor.source.handle.data
        ends[data] = max(ends.get(data, 0), tensor.offset + tensor.spec.nbytes)

    def sized(tensor: LegacyTensor) -> LegacyTensor:
        if tensor.source.place:
            return tensor
        handle = replace(tensor.source.handle, nbytes=ends[tensor.source.handle.data])
        return LegacyTensor(tensor.spec, tensor.offset, replace(tensor.source, handle=handle))

    return {name: sized(tensor) for name, tensor in tensors.items()}


# -- writing -----------------------------------------------------------------------------------------------------------


def write_legacy(path: Path, manifest: Manifest, *, place: Path, handle: Handle, device_index: int = 0) -> None:
    """Say in the legacy form where a version lies that a publisher at `place` holds in the memory of `handle`.

    The offsets of the manifest count from the start of that memory. The file is replaced in one step and is for this user.
    """
    entries = manifest.by_name()
    missing = [f"{name} is {entry.dtype}" for name, entry in entries.items() if entry.dtype not in DTYPE_INDEX]
    outside = [name for name, entry in entries.items() if not 0 <= entry.offset <= handle.nbytes - entry.nbytes]
    if missing or outside or manifest.kind != "full" or not entries:
        problems = [*missing, *(f"{name} is outside of the memory" for name in outside)]
        raise InvalidInput(
            f"{manifest.kind} version {manifest.version} cannot be written to {path} in the legacy format"
            + "".join(f"\n  {problem}" for problem in problems)
        )
    source = LegacyHandle(
        place=str(place.absolute()),
        handle=handle,
        version=manifest.version,
        root_digest=manifest.root_digest,
        sequence=manifest.sequence,
    )
    text = _encode(source).decode("latin-1")
    listed = {
        name: [text, entry.offset, entry.nbytes, DTYPE_INDEX[entry.dtype], list(entry.shape), [], device_index]
        for name, entry in entries.items()
    }
    _replace(path, b"\x80\x02" + b"".join(_pickled(listed, {})) + b".")


def _pickled(value: object, seen: dict[str, int]) -> Iterator[bytes]:
    """The opcodes of protocol 2 for dicts, lists, texts and numbers. A text that comes again is fetched, not repeated."""
    if isinstance(value, dict):
        yield b"}("
        for key, item in value.items():
            yield from _pickled(key, seen)
            yield from _pickled(item, seen)
        yield b"u"
    elif isinstance(value, list):
        yield b"]("
        for item in value:
            yield from _pickled(item, seen)
        yield b"e"
    elif isinstance(value, str) and value in seen:
        yield b"j" + struct.pack("<I", seen[value])
    elif isinstance(value, str):
        data = value.encode()
        seen[value] = len(seen)
        yield b"X" + struct.pack("<I", len(data)) + data + b"r" + struct.pack("<I", seen[value])
    else:
        yield b"\x8a\x09" + cast("int", value).to_bytes(9, "little", signed=True)


def _replace(path: Path, data: bytes) -> None:
    with refusals("write", path):
        descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(aside).replace(path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
