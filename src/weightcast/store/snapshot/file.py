"""One file of a snapshot, whatever is inside: safetensors, a Paddle pickle or a torch file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from weightcast.store.byte_file import ByteFile
from weightcast.store.pickles.state_dict import ZIP_MAGIC, PickledTensors, load_pickle
from weightcast.store.safetensors_file import SafetensorsFile
from weightcast.tensors.spec import TensorSpec


class SnapshotFile:
    """An open file. `specs` is in the order in which reading is fastest; `header` and `metadata` are empty for pickles."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.header = b""
        self._file: SafetensorsFile | PickledTensors = load_pickle(path) if _is_pickle(path) else SafetensorsFile(path)
        self.nbytes = self._file.nbytes
        if isinstance(self._file, PickledTensors):
            self.specs = self._file.specs
        else:
            self.specs = {name: place.spec for name, place in self._file.places.items()}
            self.metadata, self.header = self._file.metadata, self._file.header

    def read_into(self, spec: TensorSpec, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on."""
        if isinstance(self._file, PickledTensors):
            self._file.read_into(spec.name, start, buffer)
        else:
            self._file.read_tensor(self._file.places[spec.name], start, buffer)

    def close(self) -> None:
        """Close the file. Safe twice."""
        self._file.close()

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _is_pickle(path: Path) -> bool:
    """Look at the first bytes. The header length of a safetensors file may begin like a pickle, but `{` follows it."""
    with ByteFile(path) as file:
        start = file.read(min(9, file.nbytes), 0)
    return start[4:] != b"\0\0\0\0{" and start.startswith((b"\x80", ZIP_MAGIC))
