"""Writing a checkpoint directory in one step: it is there whole, or not at all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weightcast.errors import InvalidInput
from weightcast.store import layout
from weightcast.store.files import make_dir, refusals, remove_dir, rename, sync_dir, write_synced
from weightcast.store.part_series import PartSeries
from weightcast.tensors.bridges import host_array, spec_of
from weightcast.tensors.digest import DEFAULT

PART_NBYTES = 4 << 30


def write_checkpoint_dir(
    directory: Path,
    *,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, object]],
    files: Mapping[str, bytes],
    part_nbytes: int = PART_NBYTES,
) -> int:
    """Write config, tensors (as they come; none is kept) and small files; returns the bytes of the tensors.

    `directory` must not exist, or be empty. It is written aside and renamed, so a failure leaves nothing behind.
    """
    directory = directory.resolve()
    check_vacant(directory)
    make_dir(directory.parent)
    with refusals("make a directory beside", directory):
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=directory.parent))
    try:
        with refusals("open up", aside):
            aside.chmod(0o755)
        nbytes = _write_tensors(aside, tensors, part_nbytes)
        for name, data in {"config.json": _json(config), **files}.items():
            write_synced(aside / name, data)
        sync_dir(aside)
        check_vacant(directory)
        rename(aside, directory)
    except BaseException:
        remove_dir(aside)
        raise
    sync_dir(directory.parent)
    return nbytes


def check_vacant(directory: Path) -> None:
    """Raise `InvalidInput` unless a checkpoint can be written here."""
    with refusals("look at", directory):
        if directory.is_dir() and not any(directory.iterdir()):
            return
        if directory.exists():
            raise InvalidInput(f"{directory} exists and is not an empty directory: remove it or choose another one.")


def _write_tensors(directory: Path, tensors: Iterable[tuple[str, object]], part_nbytes: int) -> int:
    parts = PartSeries(
        lambda index: directory / layout.unsealed_part_name(index), part_nbytes=part_nbytes, algorithm=DEFAULT
    )
    try:
        for name, tensor in tensors:
            parts.add(spec_of(name, tensor), host_array(name, tensor))
        parts.finish()
    finally:
        parts.close()
    count = len(parts.parts)
    names = [layout.part_name(index, count) for index in range(count)] if count > 1 else ["model.safetensors"]
    for part, name in zip(parts.parts, names, strict=True):
        rename(directory / part.file, directory / name)
    nbytes = sum(entry.nbytes for entry in parts.entries)
    if count > 1:
        weight_map = {entry.name: names[entry.part] for entry in parts.entries}
        write_synced(directory / layout.INDEX, _json({"metadata": {"total_size": nbytes}, "weight_map": weight_map}))
    return nbytes


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=2).encode()
