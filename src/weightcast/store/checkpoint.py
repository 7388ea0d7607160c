"""Checkpoint directories as other tools write them: safetensors files, with or without an index, and small files beside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from weightcast import logs
from weightcast.errors import InvalidInput, NotFound, PartCorrupt
from weightcast.store.files import read_small
from weightcast.store.layout import INDEX, MANIFEST
from weightcast.store.safetensors_file import SafetensorsFile
from weightcast.store.streaming import Proof, Readable, Readables, stream_arrays
from weightcast.store.version_file import TXT_NAME, YAML_NAME
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import is_file_name

log = logs.get(__name__)

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pdparams", ".npz"}
_NOT_OURS = {INDEX, MANIFEST, YAML_NAME, TXT_NAME}
_FILE_LIMIT_NBYTES = 64 << 20


class Checkpoint:
    """A directory of safetensors files. Every header is read and checked on opening; the tensors stay on the medium."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise NotFound(f"{directory} is not a directory.")
        self._files = sorted(directory.glob("*.safetensors"))
        if not self._files:
            raise NotFound(f"{directory} holds no .safetensors files: save the checkpoint as safetensors first.")
        self.specs: dict[str, TensorSpec] = {}
        for path in self._files:
            with SafetensorsFile(path) as file:
                twice = sorted(self.specs.keys() & file.places.keys())
                if twice:
                    raise InvalidInput(f"{path} holds tensors that another file holds too: {', '.join(twice)}.")
                self.specs |= {name: place.spec for name, place in file.places.items()}
        self._check_index()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Every tensor, in the order it lies in its file. An array is borrowed: valid until the next one is asked for."""
        return stream_arrays(self._readables(), Proof(str(self.directory), ()))

    def _readables(self) -> Readables:
        for path in self._files:
            with SafetensorsFile(path) as file:
                for place in file.places.values():
                    yield Readable(place.spec, partial(file.read_tensor, place))

    def files(self) -> Iterator[tuple[str, bytes]]:
        """The small files that make the directory a checkpoint: config, tokenizer and the like."""
        for path in sorted(self.directory.iterdir()):
            if not path.is_file() or path.suffix in _WEIGHTS or path.name in _NOT_OURS or path.name.endswith(".index.json"):
                continue
            if not is_file_name(path.name) or path.stat().st_size > _FILE_LIMIT_NBYTES:
                log.warning("file skipped", path=path, why="its name or size is not that of a small file of a checkpoint")
                continue
            yield path.name, read_small(path, _FILE_LIMIT_NBYTES)

    def _check_index(self) -> None:
        path = self.directory / INDEX
        try:
            listed = json.loads(read_small(path, _FILE_LIMIT_NBYTES))["weight_map"].keys()
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PartCorrupt(path, f"it is not an index of a checkpoint: {type(error).__name__}: {error}") from error
        missing, unlisted = sorted(listed - self.specs.keys()), sorted(self.specs.keys() - listed)
        if missing or unlisted:
            raise PartCorrupt(path, f"it does not match the files: missing {missing}, not listed {unlisted}")
