"""Pickled state dicts of Paddle and torch, read without running them and without importing either.

    Paddle   a pickle of a dict: name -> NumPy array; uint16 means BF16. `StructuredToParameterName@@` is dropped.
    torch    the zip file that torch.save writes: data.pkl and one member per storage, not compressed.

A file can only make tensors. Whatever else it asks for is refused by name with `PickleRefused`; a file that is damaged ends
in `PartCorrupt`. The bytes of the tensors stay in the file until they are asked for. There are no digests in such files,
so a flipped byte inside of a tensor goes unnoticed here.
"""

from __future__ import annotations

import codecs
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from weightcast.errors import PartCorrupt, StorageFailed, UnsupportedTensor
from weightcast.store.byte_file import ByteFile
from weightcast.store.pickles.machine import Blob, Machine, Window
from weightcast.store.pickles.numpy_arrays import NumpyGlobals, StoredTensor, named_tensors
from weightcast.store.pickles.torch_tensors import TorchGlobals
from weightcast.tensors.flat import Array, Bytes, flat_bytes, from_bytes
from weightcast.tensors.spec import TensorSpec

ZIP_MAGIC = b"PK\x03\x04"
_OLD_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_PADDLE_NAMES = "StructuredToParameterName@@"
_PADDLE_SPLIT = "UnpackBigParamInfor@@"
_STRETCH_NBYTES = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, 22 bytes that the central directory repeats, name and extra lengths


def load_pickle(path: Path) -> PickledTensors:
    """Open a pickled state dict. Reads the names, dtypes and shapes; the tensors stay in the file."""
    return PickledTensors(path)


class PickledTensors:
    """An open file of pickled tensors. `specs` is in the order of the file. Iterating gives (name, array), one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: tuple[str, Bytes] | None = None
        self._file = ByteFile(path)
        try:
            self.nbytes = self._file.nbytes
            self._tensors = self._read_tensors()
            self.specs = _specs(path, self._tensors)
        except BaseException:
            self.close()
            raise

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on.

        A tensor that lies in the file in another order, or as text (protocol 2), is held in memory until another is read.
        """
        tensor = self._tensors[name]
        if tensor.in_order:
            self._file.read_into(buffer, tensor.blob.offset + tensor.start + start)
            return
        if self._held is None or self._held[0] != name:
            self._held = None
            self._held = name, flat_bytes(np.ascontiguousarray(self._strided(tensor)))
        np.frombuffer(buffer, dtype=np.uint8)[:] = self._held[1][start : start + len(buffer)]

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        """Every tensor in memory of its own, contiguous."""
        for name, spec in self.specs.items():
            data = bytearray(spec.nbytes)
            self.read_into(name, 0, memoryview(data))
            self._held = None
            yield name, from_bytes(data, spec)

    def close(self) -> None:
        """Close the file and let go of what is held. Safe twice."""
        self._held = None
        self._file.close()

    def __enter__(self) -> PickledTensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _strided(self, tensor: StoredTensor) -> Array:
        if tensor.blob.utf8:
            data = self._decoded(tensor.blob)[tensor.start :]
        else:
            data = bytearray(tensor.span_nbytes)
            self._file.read_into(memoryview(data), tensor.blob.offset + tensor.start)
        elements: Array = np.frombuffer(data, dtype=np.uint8).view(tensor.dtype.numpy)
        strides = tuple(stride * tensor.dtype.itemsize for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(elements, tensor.shape, strides, writeable=False)

    def _decoded(self, blob: Blob) -> bytearray:
        """The bytes that protocol 2 wrote as latin-1 text, decoded stretch by stretch."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        data = bytearray()
        try:
            for start in range(0, blob.stored_nbytes, _STRETCH_NBYTES):
                stretch = self._file.read(min(_STRETCH_NBYTES, blob.stored_nbytes - start), blob.offset + start)
                data += decoder.decode(stretch).encode("latin-1")
            decoder.decode(b"", final=True)
        except UnicodeError as error:
            raise PartCorrupt(self.path, f"array data that was written as text cannot be read: {error}") from error
        return data

    def _read_tensors(self) -> dict[str, StoredTensor]:
        start = self._file.read(min(self.nbytes, len(_OLD_TORCH_MAGIC)), 0)
        if start.startswith(ZIP_MAGIC):
            return self._read_torch()
        if start == _OLD_TORCH_MAGIC:
            raise PartCorrupt(
                self.path, "it was written by torch in its old form, which is not a zip file: save it again with torch.save"
            )
        return self._read_paddle()

    def _read_paddle(self) -> dict[str, StoredTensor]:
        window = Window(self._file, 0, self.nbytes)
        state = Machine(window, NumpyGlobals(window).table()).run()
        if window.rest_nbytes:
            raise PartCorrupt(self.path, f"{window.rest_nbytes} bytes follow the end of its pickle")
        if isinstance(state, dict) and _PADDLE_SPLIT in state:
            raise PartCorrupt(
                self.path, "Paddle split its large parameters: save it again with paddle.save(..., protocol=4)"
            )
        return named_tensors(self.path, state, drop=(_PADDLE_NAMES,))

    def _read_torch(self) -> dict[str, StoredTensor]:
        members = self._members()
        roots = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise PartCorrupt(self.path, "it is a zip file, but not one that torch.save wrote: it has no data.pkl")
        order = members.get(f"{roots[0]}/byteorder")
        if order is not None:
            place = self._place(order)
            if self._file.read(min(place.stored_nbytes, 16), place.offset) != b"little":
                raise PartCorrupt(self.path, "its tensors are not little-endian")
        pickle = self._place(members[f"{roots[0]}/data.pkl"])

        def find_blob(key: str) -> Blob | None:
            member = members.get(f"{roots[0]}/data/{key}")
            return self._place(member) if member else None

        window = Window(self._file, pickle.offset, pickle.offset + pickle.stored_nbytes)
        torch_globals = TorchGlobals(self.path, find_blob)
        state = Machine(window, torch_globals.table(), torch_globals.load_persistent).run()
        return named_tensors(self.path, state, drop=())

    def _members(self) -> dict[str, zipfile.ZipInfo]:
        # zipfile only reads the list of members; what it may raise on a damaged one is not documented, this is what it does.
        damaged = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError, EOFError, LookupError)
        try:
            with os.fdopen(os.dup(self._file.fd), "rb") as file, zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except damaged as error:
            raise PartCorrupt(self.path, f"it is not a whole zip file: {error}") from error
        except OSError as error:
            raise StorageFailed("read", self.path, error) from error
        members = {info.filename: info for info in infos}
        if len(members) != len(infos):
            raise PartCorrupt(self.path, "its zip directory lists a member twice")
        return members

    def _place(self, member: zipfile.ZipInfo) -> Blob:
        """Where the bytes of a member lie. Only plain stored members have such a place."""
        name = member.filename
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.compress_size != member.file_size:
            raise PartCorrupt(self.path, f"its zip member {name!r} is compressed or encrypted: torch.save writes neither")
        if not 0 <= member.header_offset <= self.nbytes - _LOCAL_HEADER.size:
            raise PartCorrupt(self.path, f"its zip member {name!r} lies outside of the file")
        header = self._file.read(_LOCAL_HEADER.size, member.header_offset)
        magic, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        start = member.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if magic != ZIP_MAGIC or start + member.file_size > self.nbytes:
            raise PartCorrupt(self.path, f"its zip member {name!r} lies outside of the file")
        return Blob(start, member.file_size)


def _specs(path: Path, tensors: dict[str, StoredTensor]) -> dict[str, TensorSpec]:
    try:
        return {name: TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape) for name, tensor in tensors.items()}
    except UnsupportedTensor as error:
        raise PartCorrupt(path, f"its pickle has a tensor without a proper name: {error}") from error
