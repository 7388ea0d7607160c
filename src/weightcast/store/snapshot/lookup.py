"""Which legacy files are the snapshot of a rank: four places, tried in one order, the first hit wins.

    1  model_dir     model_state.tp{rank}.{id}.part{N}.pdparams   in the order of N
    2  model_dir     model_state.tp{rank}.{id}.pdparams
    3  model_dir     model_state.tp0{id}.pdparams                 carries rank 0 whatever the rank is
    4  shared_dir    the name of 2, then the name of 3            never parts

A manifest of ours whose files are all gone stops the search: what lies further down is older.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from weightcast import logs
from weightcast.errors import SnapshotInvalid, SnapshotNotFound
from weightcast.store.files import refusals
from weightcast.store.snapshot.names import (
    SnapshotName,
    check_device_id,
    check_rank,
    legacy_name,
    looks_like_part,
    looks_like_snapshot,
    manifest_name,
    parse,
    single_name,
)

log = logs.get(__name__)

DEFAULT_SHARED_DIR = Path("/shared_ipc_meta")


@dataclass(frozen=True)
class LocatedFile:
    """One file of a snapshot. `part` is the number in its name; the label is for logs and says where it came from."""

    path: Path
    label: str
    part: int | None = None


@dataclass(frozen=True)
class Located:
    """What was found, and everything that was looked for on the way. `files` are in the order of loading.

    `shadowed` are files of the same rank and id in the same directory that the order of the search passes over.
    """

    rank: int
    device_id: str
    level: Literal[1, 2, 3, 4]
    kind: Literal["parts", "single", "legacy"]
    directory: Path
    files: tuple[LocatedFile, ...]
    manifest: Path | None
    tried: tuple[Path, ...]
    shadowed: tuple[Path, ...] = ()


def locate(
    model_dir: Path,
    *,
    rank: int,
    device_id: str,
    shared_dir: Path = DEFAULT_SHARED_DIR,
    ignore_bad_names: bool = False,
) -> Located:
    """Find the snapshot of a rank. The choice is logged, the same one once, and returned; nothing is opened.

    Raises `SnapshotNotFound` with everything that was tried, or `SnapshotInvalid` with every part that is missing, there
    twice or badly named. With `ignore_bad_names` bad names are logged and left aside.
    """
    found = _search(model_dir, check_rank(rank), check_device_id(device_id), shared_dir, ignore_bad_names)
    _log_choice(found)
    return found


@lru_cache(maxsize=64)  # a follower looks every second
def _log_choice(found: Located) -> None:
    rank, device_id = found.rank, found.device_id
    for path in found.shadowed:
        log.warning("snapshot file ignored", path=path, why="parts of the same name lie beside it and come first")
    log.info(
        "snapshot located",
        rank=rank,
        device_id=device_id,
        place=found.level,
        kind=found.kind,
        files=len(found.files),
        manifest=found.manifest is not None,
        path=found.directory,
    )
    if found.kind == "legacy" and rank != 0:
        log.warning(
            "snapshot doubtful",
            rank=rank,
            device_id=device_id,
            path=found.files[0].path,
            why="the name carries rank 0: make sure it holds this rank's shard",
        )


def _search(model_dir: Path, rank: int, device_id: str, shared_dir: Path, ignore_bad_names: bool) -> Located:
    single, legacy, sealed = single_name(rank, device_id), legacy_name(device_id), manifest_name(rank, device_id)
    tried = [model_dir / f"{single.removesuffix('.pdparams')}.part*.pdparams"]

    names = _names_in(model_dir)
    parts = _parts(model_dir, names, rank, device_id, ignore_bad_names)
    if parts:
        shadowed = tuple(model_dir / name for name in (single,) if name in names)
        manifest = model_dir / sealed if sealed in names else None
        return Located(rank, device_id, 1, "parts", model_dir, tuple(parts), manifest, tuple(tried), shadowed)
    places: tuple[tuple[Literal[2, 4], Path, str], ...] = ((2, model_dir, "snapshot"), (4, shared_dir, "snapshot-shared"))
    for level, directory, label in places:
        names = _names_in(directory)
        manifest = directory / sealed if sealed in names else None
        tried.append(directory / single)
        if single in names:
            file = LocatedFile(tried[-1], label)
            return Located(rank, device_id, level, "single", directory, (file,), manifest, tuple(tried))
        if manifest is not None:
            raise SnapshotInvalid(directory, [f"{sealed} is there, but none of the files that it lists"])
        tried.append(directory / legacy)
        if legacy in names:
            file = LocatedFile(tried[-1], f"{label}-legacy")
            return Located(rank, device_id, 3 if level == 2 else 4, "legacy", directory, (file,), None, tuple(tried))
    raise SnapshotNotFound(rank, device_id, tried)


def _names_in(directory: Path) -> set[str]:
    """The names in a directory, never by pattern: its own path may hold any character. Empty if there is none."""
    with refusals("list", directory):
        try:
            return {path.name for path in directory.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return set()


def _parts(directory: Path, names: set[str], rank: int, device_id: str, ignore_bad_names: bool) -> list[LocatedFile]:
    problems: list[str] = []
    numbered: list[tuple[int, str]] = []
    for name in sorted(names):
        parsed = parse(name)
        if parsed is not None and parsed.kind == "part" and (parsed.rank, parsed.device_id) == (rank, device_id):
            numbered.append((parsed.part or 0, name))
        elif looks_like_part(name, rank, device_id):
            if ignore_bad_names:
                log.warning(
                    "snapshot file ignored", path=directory / name, why="it looks like a part but has no part number"
                )
            else:
                problems.append(f"{name} looks like a part but has no part number; rename or remove it")
    numbered.sort()
    counts = Counter(number for number, _ in numbered)
    problems += [f"part {number} is there {count} times" for number, count in counts.items() if count > 1]
    if numbered:
        first, last = min(1, numbered[0][0]), numbered[-1][0]
        if last - first > 2 * len(numbered) + 100:
            problems.append(f"most of the parts {first} to {last} are missing: {len(counts)} are there")
        else:
            problems += [f"part {number} is missing" for number in range(first, last) if number not in counts]
    if problems:
        raise SnapshotInvalid(directory, problems)
    return [LocatedFile(directory / name, f"snapshot-part{number}", number) for number, name in numbered]


@dataclass(frozen=True)
class ListedFile:
    """One file of the layout, what its name says and its size."""

    path: Path
    name: SnapshotName
    nbytes: int


@dataclass(frozen=True)
class ListedSnapshot:
    """All files of one rank and device id in a directory, in the order of their kinds and part numbers."""

    rank: int
    device_id: str
    files: tuple[ListedFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True)
class SnapshotList:
    """The snapshots of a directory, and the files that mean to belong to one but whose names do not parse."""

    snapshots: tuple[ListedSnapshot, ...]
    bad_names: tuple[Path, ...]


def list_snapshots(directory: Path) -> SnapshotList:
    """Everything of this layout in a directory, by rank and device id. Nothing is opened or judged."""
    found: dict[tuple[int, str], list[ListedFile]] = {}
    bad_names: list[Path] = []
    for file_name in sorted(_names_in(directory)):
        path, name = directory / file_name, parse(file_name)
        if name is not None:
            with refusals("read", path):
                found.setdefault((name.rank, name.device_id), []).append(ListedFile(path, name, path.lstat().st_size))
        elif looks_like_snapshot(file_name):
            bad_names.append(path)
    order = ("part", "single", "legacy", "manifest")
    return SnapshotList(
        snapshots=tuple(
            ListedSnapshot(
                rank, device_id, tuple(sorted(files, key=lambda file: (order.index(file.name.kind), file.name.part or 0)))
            )
            for (rank, device_id), files in sorted(found.items())
        ),
        bad_names=tuple(bad_names),
    )
