"""`weightcast snapshot`: legacy snapshot files, listed, checked, written and converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from weightcast.cli.completion import directories, versions
from weightcast.cli.help import Group
from weightcast.cli.output import Size, emit, json_option, progress, size, table
from weightcast.errors import InvalidInput
from weightcast.store.snapshot import DEFAULT_SHARED_DIR, Snapshot, list_snapshots, locate, open_snapshot, write_snapshot
from weightcast.store.store import Store
from weightcast.store.version_file import read_version_file
from weightcast.tensors.flat import Array

Command = TypeVar("Command", bound=Callable[..., Any])

_DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path), shell_complete=directories)
_STORE = click.argument("store", type=click.Path(path_type=Path), shell_complete=directories)


def _which(command: Command) -> Command:
    """Options that say whose snapshot it is."""
    command = click.option("--id", "device_id", required=True, help="Device id in the file names: a number or a UUID.")(
        command
    )
    return click.option("--rank", type=click.IntRange(min=0), required=True, help="Rank whose shard it is.")(command)


def _where(command: Command) -> Command:
    """Options of the search for a snapshot."""
    command = click.option(
        "--ignore-bad-names", is_flag=True, help="Pass over files that look like parts but have no part number."
    )(command)
    return click.option(
        "--shared-dir",
        type=click.Path(path_type=Path),
        default=DEFAULT_SHARED_DIR,
        show_default=True,
        help="Directory to search last.",
    )(command)


@click.group(cls=Group, short_help="List, check, write and convert legacy snapshots.")
def snapshot() -> None:
    """Legacy snapshots, one per rank: model_state.tp{rank}.{id}[.part{N}].pdparams files.

    They are read without running anything that is in them: a pickle can build tensors here, and nothing else. Paddle is not
    needed. `weightcast docs snapshots` has the layout and where files are searched.

    Exit status:
      0  done
      1  a file is damaged, or has a name that does not parse (ls)
      2  the call itself is wrong: no snapshot of this rank and id

    Examples:
      weightcast snapshot ls ./model
      weightcast snapshot check ./model --rank 0 --id 0
      weightcast snapshot convert ./model /mnt/weights step_100 --rank 0 --id 0
    """


@snapshot.command(short_help="List snapshots by rank and device id.")
@_DIRECTORY
@json_option
def ls(directory: Path, as_json: bool) -> None:
    """List the snapshots in DIR by rank and device id, with their files and sizes. No file is opened.

    Exit status:
      0  listed
      1  files have names that do not parse: they are listed, too
      2  DIR is not a directory

    Examples:
      weightcast snapshot ls ./model
    """
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is not a directory.")
    found = list_snapshots(directory)
    rows = [
        {
            "rank": item.rank,
            "id": item.device_id,
            "nbytes": item.nbytes,
            "files": [{"file": file.path.name, "kind": file.name.kind, "nbytes": file.nbytes} for file in item.files],
        }
        for item in found.snapshots
    ]

    def human(console: Console) -> None:
        drawn = table("rank", "id", "files", "size", "first file", right=("rank", "files", "size"))
        for item in found.snapshots:
            drawn.add_row(str(item.rank), item.device_id, str(len(item.files)), size(item.nbytes), item.files[0].path.name)
        console.print(drawn if rows else f"no snapshots in {directory}")
        for path in found.bad_names:
            console.print(f"not a name of this layout: {path.name}")

    emit(as_json, {"snapshots": rows, "bad_names": [path.name for path in found.bad_names]}, human)
    if found.bad_names:
        click.get_current_context().exit(1)


@snapshot.command(short_help="Read a snapshot and prove every byte.")
@_DIRECTORY
@_which
@_where
@json_option
def check(directory: Path, rank: int, device_id: str, shared_dir: Path, ignore_bad_names: bool, as_json: bool) -> None:
    """Find the snapshot of a rank, read every byte of it and compare it with its manifest.

    Without a manifest beside the files only their structure can be checked, and the answer says so. It also says where the
    files were found: in DIR, or in one of the places that the legacy system searches after it.

    Exit status:
      0  whole
      1  damaged
      2  no such snapshot; all places that were searched are listed

    Examples:
      weightcast snapshot check ./model --rank 0 --id 0
    """
    opened = _open(directory, rank, device_id, shared_dir, ignore_bad_names)
    with progress("check", opened.nbytes, as_json=as_json) as advance:
        for _, array in opened.tensors():
            advance(array.nbytes)
    located = opened.located
    proved = opened.algorithm is not None

    def human(console: Console) -> None:
        how = f"every byte proved by {opened.algorithm}" if proved else "structure only: there is no manifest with digests"
        console.print(
            f"ok: {len(opened.specs)} tensors, {size(opened.nbytes)}, version {opened.version or 'not recorded'}; {how}"
        )
        for file in located.files:
            console.print(f"  level {located.level}: {file.path}")

    summary = {
        "version": opened.version,
        "rank": rank,
        "id": device_id,
        "level": located.level,
        "kind": located.kind,
        "files": [str(file.path) for file in located.files],
        "tensors": len(opened.specs),
        "nbytes": opened.nbytes,
        "proved": proved,
    }
    emit(as_json, summary, human)


@snapshot.command(short_help="Write a version in the legacy layout.")
@_STORE
@click.argument("version", shell_complete=versions)
@_DIRECTORY
@_which
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Ranks that the snapshots are for; it is recorded.")
@click.option("--part-size", type=Size(), help="Split into parts of at most this size.  [default: one file]")
@json_option
def write(
    store: Path, version: str, directory: Path, rank: int, device_id: str, ranks: int, part_size: int | None, as_json: bool
) -> None:
    """Write VERSION of STORE into DIR as the snapshot of a rank, for systems that read the legacy layout.

    Exit status:
      0  written
      1  the version is damaged, or the storage failed
      2  no such store or version

    Examples:
      weightcast snapshot write /mnt/weights step_100 ./model --rank 0 --ranks 2 --id 0 --part-size 1GiB
    """
    opened = Store(store)
    total = opened.manifest(version).nbytes
    with progress(f"write {version}", total, as_json=as_json) as advance, opened.reader(version) as reader:
        written = write_snapshot(
            directory,
            _reported(reader.tensors(), advance),
            rank=rank,
            ranks=ranks,
            device_id=device_id,
            version=version,
            part_nbytes=part_size,
        )

    def human(console: Console) -> None:
        console.print(f"wrote {version}: {len(written.tensors)} tensors in {len(written.files)} file(s) to {directory}")

    files = [{"file": file.file, "nbytes": file.nbytes} for file in written.files]
    emit(as_json, {"version": version, "rank": rank, "ranks": ranks, "id": device_id, "files": files}, human)


@snapshot.command(short_help="Publish a snapshot as a version.")
@_DIRECTORY
@_STORE
@click.argument("version", required=False)
@_which
@_where
@json_option
def convert(
    directory: Path,
    store: Path,
    version: str | None,
    rank: int,
    device_id: str,
    shared_dir: Path,
    ignore_bad_names: bool,
    as_json: bool,
) -> None:
    """Publish the snapshot of a rank in DIR as VERSION of STORE.

    VERSION defaults to the one recorded in the files, else to the one that version.yaml in DIR names. A full version is
    written, and proved on the way if the snapshot has a manifest.

    Exit status:
      0  published
      1  the snapshot is damaged, a version of this name exists, or the storage failed
      2  no such snapshot, or another VERSION than the files record

    Examples:
      weightcast snapshot convert ./model /mnt/weights step_100 --rank 0 --id 0
    """
    opened = _open(directory, rank, device_id, shared_dir, ignore_bad_names)
    chosen = version or opened.version or read_version_file(directory).version
    if opened.version not in (None, chosen):
        raise InvalidInput(f"the files record version {opened.version}, so they cannot be published as {chosen}.")
    with progress(f"convert {chosen}", opened.nbytes, as_json=as_json) as advance:
        manifest = Store(store).publish(chosen, _reported(opened.tensors(), advance), "full")

    def human(console: Console) -> None:
        console.print(
            f"published {chosen}: {len(manifest.tensors)} tensors, {size(manifest.nbytes)}, root {manifest.root_digest}"
        )

    emit(as_json, {"version": chosen, "tensors": len(manifest.tensors), "root_digest": manifest.root_digest}, human)


def _open(directory: Path, rank: int, device_id: str, shared_dir: Path, ignore_bad_names: bool) -> Snapshot:
    located = locate(directory, rank=rank, device_id=device_id, shared_dir=shared_dir, ignore_bad_names=ignore_bad_names)
    return open_snapshot(located)


def _reported(tensors: Iterator[tuple[str, Array]], advance: Callable[[int], None]) -> Iterator[tuple[str, Array]]:
    for name, array in tensors:
        yield name, array
        advance(array.nbytes)
