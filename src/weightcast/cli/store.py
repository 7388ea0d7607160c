"""`weightcast store`: look at versions, check, compare, fold and prune them."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
from rich.console import Console

from weightcast.cli.completion import directories
from weightcast.cli.completion import versions as version_names
from weightcast.cli.help import Group
from weightcast.cli.output import emit, json_option, progress, short, size, table
from weightcast.cli.store_tables import base, delta_facts, describe_delta, diff_row, payload_nbytes, tensor_table, verdict
from weightcast.delta import inspect
from weightcast.errors import VersionNotSet, WeightcastError
from weightcast.store import layout
from weightcast.store.compare import VerifyReport
from weightcast.store.payload import read_payloads
from weightcast.store.store import Store
from weightcast.store.version_file import YAML_NAME

_STORE = click.argument("path", metavar="STORE", type=click.Path(path_type=Path), shell_complete=directories)


@click.group(cls=Group, short_help="Look at the versions of a store, check, compare, fold and prune them.")
def store() -> None:
    """Look at the versions of a store, check, compare, fold and prune them.

    STORE is a directory that `weightcast publish`, a trainer's `Store` or a mirroring depot fills. All commands but `fold`,
    `gc` and `migrate` only read it, and none of them disturbs a publisher or an engine that uses it.

    Exit status:
      0  done, or nothing wrong
      1  versions are damaged (verify) or differ (diff), the store is in use, or the storage failed
      2  the call itself is wrong: no such store or version

    Examples:
      weightcast store ls /mnt/weights
      weightcast store verify /mnt/weights step_119
      weightcast store diff /mnt/weights step_118 step_119
      weightcast store gc /mnt/weights --keep-last 5 --dry-run
    """


@store.command(short_help="List versions in the order of publication.")
@_STORE
@json_option
def ls(path: Path, as_json: bool) -> None:
    """List the versions of STORE in the order of publication.

    `*` marks the newest, which engines take unless they are told otherwise, and `!` one whose manifest is damaged. For a
    delta the base is shown that it leads from, and how large it is beside the whole state.

    Exit status:
      0  listed, also if versions are damaged: `weightcast store verify` judges them
      2  no store there

    Examples:
      weightcast store ls /mnt/weights
      weightcast store ls /mnt/weights --json | jq -r '.[-1].version'
    """
    opened = Store(path)
    listings = opened.listings()
    try:
        newest = opened.newest() if listings else None
    except WeightcastError as error:
        click.echo(f"warning: {error}", err=True)
        newest = None
    rows = [
        {
            "version": listing.version,
            "newest": listing.version == newest,
            "step": listing.manifest.step,
            "kind": listing.manifest.kind,
            "tensors": len(listing.manifest.tensors),
            "nbytes": listing.manifest.nbytes,
            "base": base(listing.manifest),
            "payload_nbytes": listing.manifest.payload_nbytes or None,
            "created_s": listing.manifest.created_s,
            "root_digest": listing.manifest.root_digest,
        }
        if listing.manifest
        else {"version": listing.version, "error": listing.error}
        for listing in listings
    ]

    def human(console: Console) -> None:
        columns = ("", "version", "step", "kind", "base", "tensors", "size", "payload", "published", "root digest")
        drawn = table(*columns, right=("step", "tensors", "size", "payload"))
        for listing in listings:
            manifest = listing.manifest
            if manifest is None:
                drawn.add_row("!", listing.version, "", "damaged", "", "", "", "", "", "see: weightcast store verify")
                continue
            published = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_s))
            drawn.add_row(
                "*" if listing.version == newest else "", manifest.version, str(manifest.step), manifest.kind,
                base(manifest) or "", str(len(manifest.tensors)), size(manifest.nbytes),
                size(manifest.payload_nbytes) if manifest.payloads else "", published, short(manifest.root_digest),
            )  # fmt: skip
        console.print(drawn if listings else f"no versions in {path}")

    emit(as_json, rows, human)


@store.command(short_help="Show what a version holds.")
@_STORE
@click.argument("version", required=False, shell_complete=version_names)
@json_option
def show(path: Path, version: str | None, as_json: bool) -> None:
    """Show what VERSION of STORE holds: every tensor with its dtype, shape, size and digest.

    Without VERSION the newest is shown. For a delta: which base it leads from, how much changes, and in which form each
    tensor is packed. With --json this is the manifest itself.

    Exit status:
      0  shown
      1  the manifest or the delta is damaged
      2  no such store or version

    Examples:
      weightcast store show /mnt/weights
      weightcast store show /mnt/weights step_119 --json | jq '.tensors | length'
    """
    opened = Store(path)
    manifest = opened.manifest(version or opened.newest())
    packed = read_payloads(layout.version_dir(path, manifest.version), manifest) if manifest.kind == "delta" else []
    changes = inspect(*packed) if packed else None

    def human(console: Console) -> None:
        console.print(f"version      {manifest.version}   step {manifest.step}   {manifest.kind}   #{manifest.sequence}")
        console.print(f"root digest  {manifest.root_digest}")
        if changes is None:
            console.print(f"tensors      {len(manifest.tensors)}, {size(manifest.nbytes)} in {len(manifest.parts)} part(s)")
        else:
            describe_delta(console, manifest, changes)
        if manifest.files:
            console.print(f"files        {', '.join(file.file for file in manifest.files)}")
        console.print(tensor_table(manifest, changes))

    extra = {"delta": delta_facts(changes)} if changes is not None else {}
    emit(as_json, {**msgspec.to_builtins(manifest), **extra}, human)


@store.command(short_help="Read every byte and compare it with what was published.")
@_STORE
@click.argument("versions", metavar="[VERSION]...", nargs=-1, shell_complete=version_names)
@json_option
def verify(path: Path, versions: tuple[str, ...], as_json: bool) -> None:
    """Read every byte of the VERSIONs of STORE and compare it with what was published.

    Without a VERSION all are verified, and that version.yaml names one of them. The digests of parts, of tensors and of the
    whole state are computed again; a delta is applied to its base and the state that comes out is proved. Every problem is
    listed, not only the first. Of a delta that is built on a damaged version, that version is named.

    Exit status:
      0  every byte is as it was published
      1  something is wrong
      2  no such store or version

    Examples:
      weightcast store verify /mnt/weights
      weightcast store verify /mnt/weights step_118 step_119 --json
    """
    opened = Store(path)
    listings = {listing.version: listing for listing in opened.listings()}
    chosen = list(versions) or list(listings)
    total = sum(item.manifest.nbytes for name, item in listings.items() if name in chosen and item.manifest)
    with progress("verify", total, as_json=as_json) as advance:
        reports = [opened.verify(version, progress=advance) for version in chosen]
    reports += [] if versions else _check_newest(opened, listings)

    def human(console: Console) -> None:
        for report in reports:
            console.print(verdict(report))
            for problem in report.problems:
                console.print(f"  {problem}")
        if not reports:
            console.print(f"no versions in {path}")

    emit(as_json, [{**asdict(report), "ok": report.ok} for report in reports], human)
    if not all(report.ok for report in reports):
        click.get_current_context().exit(1)


def _check_newest(opened: Store, present: Collection[str]) -> list[VerifyReport]:
    """Whether the version file names a version that is there. A store without a version file is fine."""
    path = opened.path / YAML_NAME
    try:
        newest = opened.newest()
    except VersionNotSet:
        return []
    except WeightcastError as error:
        return [VerifyReport(version=YAML_NAME, problems=[str(error)])]
    if newest in present:
        return []
    problem = f"{path} names {newest}, which is not there. Name another: Store({str(opened.path)!r}).announce(VERSION)."
    return [VerifyReport(version=YAML_NAME, problems=[problem])]


@store.command(short_help="Compare two versions element by element.")
@_STORE
@click.argument("a", shell_complete=version_names)
@click.argument("b", shell_complete=version_names)
@json_option
def diff(path: Path, a: str, b: str, as_json: bool) -> None:
    """Compare versions A and B of STORE: which tensors differ, in how many elements, and how far.

    Distances are in units in the last place (ULP): how many representable numbers lie between the old value and the new.
    One ULP is the smallest step that a weight can make.

    Exit status:
      0  the versions are equal, bit for bit
      1  they differ
      2  no such store or version

    Examples:
      weightcast store diff /mnt/weights step_118 step_119
    """
    opened = Store(path)
    with progress("diff", opened.manifest(b).nbytes, as_json=as_json) as advance:
        found = opened.diff(a, b, progress=advance)

    def human(console: Console) -> None:
        if found.equal:
            console.print(f"{a} and {b} are equal: {found.same} tensors")
            return
        columns = ("tensor", "what", "changed", "of", "share", "at 1 ULP", "mean ULP", "max ULP")
        drawn = table(*columns, right=columns[2:])
        for tensor in found.tensors:
            drawn.add_row(*diff_row(tensor))
        console.print(drawn)
        console.print(f"{len(found.tensors)} tensors differ, {found.same} are equal")

    emit(as_json, asdict(found), human)
    if not found.equal:
        click.get_current_context().exit(1)


@store.command(short_help="Make a delta version lead from an older base in one step.")
@_STORE
@click.argument("version", required=False, shell_complete=version_names)
@click.option(
    "--onto",
    metavar="BASE",
    shell_complete=version_names,
    help="The version to lead from.  [default: the full version it is built on]",
)
@json_option
def fold(path: Path, version: str | None, onto: str | None, as_json: bool) -> None:
    """Rewrite the delta VERSION of STORE so that it leads from an older base in one step.

    Without VERSION the newest is folded. A replica that starts from the base then applies one delta instead of a chain. Its
    id, its tensors and its root digest stay. The replaced payload stays too, until `gc` removes it.

    Exit status:
      0  folded, or it leads from there in one step already
      1  the store is in use by a publisher, or a delta of the chain is damaged
      2  no such store or version, a full version, or a BASE that is not in its chain

    Examples:
      weightcast store fold /mnt/weights step_119 --onto step_100
    """
    opened = Store(path)
    chosen = version or opened.newest()
    before = opened.manifest(chosen)
    with progress(f"fold {chosen}", before.nbytes, as_json=as_json) as advance:
        after = opened.fold(chosen, onto=onto, progress=advance)

    def human(console: Console) -> None:
        if after == before:
            console.print(f"nothing to fold: {chosen} leads from {base(after)} in one step")
        else:
            console.print(
                f"folded {chosen}: a delta of {size(payload_nbytes(after))} on {base(after)}, "
                f"before of {size(payload_nbytes(before))} on {base(before)}"
            )

    summary = {
        "version": chosen,
        "folded": after != before,
        "base": base(after),
        "base_before": base(before),
        "payload_nbytes": payload_nbytes(after),
        "payload_nbytes_before": payload_nbytes(before),
        "root_digest": after.root_digest,
    }
    emit(as_json, summary, human)


@store.command(short_help="Remove old versions and garbage.")
@_STORE
@click.option(
    "--keep-last", type=click.IntRange(min=1), default=3, show_default=True, help="Keep this many newest versions."
)
@click.option(
    "--keep-full-every",
    type=click.IntRange(min=1),
    help="Also keep a full version at every so many publications.  [default: none]",
)
@click.option(
    "--protect",
    multiple=True,
    metavar="VERSION",
    shell_complete=version_names,
    help="Keep this version too; may be given several times.",
)
@click.option("--ignore-receivers", is_flag=True, help="Keep nothing only because a receiver told a depot it serves it.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@json_option
def gc(
    path: Path,
    keep_last: int,
    keep_full_every: int | None,
    protect: tuple[str, ...],
    ignore_receivers: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove old versions of STORE, payloads that a fold replaced, and what interrupted publishes left behind.

    The newest version and the bases of kept deltas always stay. So do, for an hour, versions that receivers told a depot
    of this store they serve. It says of every version that stays why it does.

    Exit status:
      0  done
      1  the store is in use by a publisher, or the storage failed
      2  no such store

    Examples:
      weightcast store gc /mnt/weights --keep-last 5 --dry-run
      weightcast store gc /mnt/weights --keep-last 5 --keep-full-every 100 --protect step_100
    """
    report = Store(path).gc(
        keep_last=keep_last,
        keep_full_every=keep_full_every,
        protect=protect,
        ignore_receivers=ignore_receivers,
        dry_run=dry_run,
    )

    def human(console: Console) -> None:
        verb, freed, keep = ("would remove", "would free", "would keep") if report.dry_run else ("removed", "freed", "kept")
        console.print(f"{verb} {', '.join(report.removed) or 'no version'}; {freed} {size(report.freed_nbytes)}")
        if report.garbage:
            console.print(f"{verb} garbage: {', '.join(report.garbage)}")
        for version, reason in report.kept.items():
            console.print(f"{keep} {version}: {reason}")

    emit(as_json, asdict(report), human)


@store.command(short_help="Turn version.txt into version.yaml.")
@_STORE
@json_option
def migrate(path: Path, as_json: bool) -> None:
    """Turn the legacy version.txt of STORE, or of a checkpoint directory, into version.yaml.

    Both name the version that a directory holds; version.txt is still read, with a warning.

    Exit status:
      0  done, or there was no version.txt
      1  version.txt cannot be read or names no version, or the storage failed

    Examples:
      weightcast store migrate /mnt/weights
    """
    found = Store(path).migrate()

    def human(console: Console) -> None:
        console.print(
            f"{found.path} now says {found.version}" if found else f"nothing to migrate: {path} has no version.txt"
        )

    emit(as_json, {"version": found.version, "step": found.step, "path": str(found.path)} if found else None, human)
