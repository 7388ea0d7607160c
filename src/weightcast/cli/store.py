"""`weightcast store`: look at versions, check, compare, fold and prune them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from weightcast.cli.output import emit, json_option, progress, short, size, table
from weightcast.delta import DeltaReport, inspect
from weightcast.errors import WeightcastError
from weightcast.store import layout
from weightcast.store.compare import TensorDiff, VerifyReport
from weightcast.store.payload import read_payload
from weightcast.store.store import Store
from weightcast.wire.manifest import Manifest

_STORE = click.argument("path", metavar="STORE", type=click.Path(path_type=Path))


@click.group()
def store() -> None:
    """Look at the versions of a store, check, compare, fold and prune them."""


@store.command(short_help="List versions in the order of publication.")
@_STORE
@json_option
def ls(path: Path, as_json: bool) -> None:
    """List the versions of STORE in the order of publication. * marks the newest."""
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
            "base": _base(listing.manifest),
            "payload_nbytes": listing.manifest.payload.nbytes if listing.manifest.payload else None,
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
                _base(manifest) or "", str(len(manifest.tensors)), size(manifest.nbytes),
                size(manifest.payload.nbytes) if manifest.payload else "", published, short(manifest.root_digest),
            )  # fmt: skip
        console.print(drawn if listings else f"no versions in {path}")

    emit(as_json, rows, human)


@store.command(short_help="Show what a version holds.")
@_STORE
@click.argument("version", required=False)
@json_option
def show(path: Path, version: str | None, as_json: bool) -> None:
    """Show what VERSION of STORE holds (default: the newest). For a delta: what changes, and in which form it is packed."""
    opened = Store(path)
    manifest = opened.manifest(version or opened.newest())
    changes = inspect(read_payload(layout.version_dir(path, manifest.version), manifest)) if manifest.payload else None

    def human(console: Console) -> None:
        console.print(f"version      {manifest.version}   step {manifest.step}   {manifest.kind}   #{manifest.sequence}")
        console.print(f"root digest  {manifest.root_digest}")
        if changes is None:
            console.print(f"tensors      {len(manifest.tensors)}, {size(manifest.nbytes)} in {len(manifest.parts)} part(s)")
        else:
            _describe_delta(console, manifest, changes)
        if manifest.files:
            console.print(f"files        {', '.join(file.file for file in manifest.files)}")
        console.print(_tensor_table(manifest, changes))

    extra = {"delta": _delta_facts(changes)} if changes is not None else {}
    emit(as_json, {**msgspec.to_builtins(manifest), **extra}, human)


def _describe_delta(console: Console, manifest: Manifest, changes: DeltaReport) -> None:
    base = f"{manifest.base.version} ({manifest.base.root_digest})" if manifest.base else ""
    share = changes.nbytes / manifest.nbytes if manifest.nbytes else 0.0
    console.print(f"base         {base}")
    console.print(f"tensors      {len(manifest.tensors)}, {size(manifest.nbytes)}")
    console.print(f"payload      {size(changes.nbytes)}, {share:.3%} of the state, packed as {changes.packing}")
    console.print(
        f"changes      {changes.changes}, {changes.density:.4%} of all, {changes.bytes_per_change:.2f} bytes for each"
    )


def _tensor_table(manifest: Manifest, changes: DeltaReport | None) -> Table:
    columns = ("tensor", "dtype", "shape", "size", *(("form", "changed") if changes else ("part",)), "digest")
    drawn = table(*columns, right=("size", "part", "changed"))
    by_name = {tensor.name: tensor for tensor in changes.tensors} if changes else {}
    for entry in manifest.tensors:
        found = by_name.get(entry.name)
        middle = [found.form, f"{found.density:.4%}"] if found else [str(entry.part + 1)]
        shape = ", ".join(map(str, entry.shape))
        drawn.add_row(entry.name, entry.dtype, f"[{shape}]", size(entry.nbytes), *middle, entry.digest)
    for name, holder in manifest.tied.items():
        drawn.add_row(name, *[""] * (len(columns) - 2), f"= {holder}")
    return drawn


def _delta_facts(changes: DeltaReport) -> dict[str, object]:
    tensors = [{**asdict(tensor), "density": tensor.density} for tensor in changes.tensors]
    return {**asdict(changes), "changes": changes.changes, "density": changes.density, "tensors": tensors}


@store.command(short_help="Read every byte and compare it with what was published.")
@_STORE
@click.argument("versions", metavar="[VERSION]...", nargs=-1)
@json_option
def verify(path: Path, versions: tuple[str, ...], as_json: bool) -> None:
    """Read every byte of the VERSIONs of STORE (default: all) and compare it with what was published.

    Exit status 1 if anything is wrong; every problem is listed.
    """
    opened = Store(path)
    listings = {listing.version: listing for listing in opened.listings()}
    chosen = list(versions) or list(listings)
    total = sum(item.manifest.nbytes for name, item in listings.items() if name in chosen and item.manifest)
    with progress("verify", total, as_json=as_json) as advance:
        reports = [opened.verify(version, progress=advance) for version in chosen]

    def human(console: Console) -> None:
        for report in reports:
            console.print(_verdict(report))
            for problem in report.problems:
                console.print(f"  {problem}")
        if not reports:
            console.print(f"no versions in {path}")

    emit(as_json, [{**asdict(report), "ok": report.ok} for report in reports], human)
    if not all(report.ok for report in reports):
        click.get_current_context().exit(1)


def _verdict(report: VerifyReport) -> str:
    if report.ok:
        return f"{report.version}: ok, {report.tensors} tensors, {size(report.nbytes)}, root {report.root_digest}"
    return f"{report.version}: DAMAGED, {len(report.problems)} problem(s)"


@store.command(short_help="Compare two versions element by element.")
@_STORE
@click.argument("a")
@click.argument("b")
@json_option
def diff(path: Path, a: str, b: str, as_json: bool) -> None:
    """Compare versions A and B of STORE: which tensors differ, in how many elements, and how far.

    Distances are in units in the last place (ULP). Exit status 1 if the versions differ.
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
            drawn.add_row(*_diff_row(tensor))
        console.print(drawn)
        console.print(f"{len(found.tensors)} tensors differ, {found.same} are equal")

    emit(as_json, asdict(found), human)
    if not found.equal:
        click.get_current_context().exit(1)


def _diff_row(tensor: TensorDiff) -> list[str]:
    if tensor.kind != "changed":
        return [tensor.name, f"{tensor.kind} {tensor.before} {tensor.after}".strip(), "", "", "", "", "", ""]
    return [
        tensor.name,
        tensor.before,
        str(tensor.changed),
        str(tensor.elements),
        f"{tensor.changed / tensor.elements:.3%}",
        f"{tensor.one_ulp / tensor.changed:.1%}",
        f"{tensor.mean_ulp:.1f}",
        str(tensor.max_ulp),
    ]


@store.command(short_help="Make a delta version lead from an older base in one step.")
@_STORE
@click.argument("version", required=False)
@click.option("--onto", metavar="BASE", help="The version to lead from (default: the full version it is built on).")
@json_option
def fold(path: Path, version: str | None, onto: str | None, as_json: bool) -> None:
    """Rewrite the delta VERSION of STORE (default: the newest) so that it leads from an older base in one step.

    Its id, its tensors and its root digest stay. The replaced payload stays too, until gc removes it.

    \b
    example:  weightcast store fold /mnt/weights step_119 --onto step_100
    """
    opened = Store(path)
    chosen = version or opened.newest()
    before = opened.manifest(chosen)
    after = opened.fold(chosen, onto=onto)

    def human(console: Console) -> None:
        if after == before:
            console.print(f"nothing to fold: {chosen} leads from {_base(after)} in one step")
        else:
            console.print(
                f"folded {chosen}: a delta of {size(_payload_nbytes(after))} on {_base(after)}, "
                f"before of {size(_payload_nbytes(before))} on {_base(before)}"
            )

    summary = {
        "version": chosen,
        "folded": after != before,
        "base": _base(after),
        "base_before": _base(before),
        "payload_nbytes": _payload_nbytes(after),
        "payload_nbytes_before": _payload_nbytes(before),
        "root_digest": after.root_digest,
    }
    emit(as_json, summary, human)


def _base(manifest: Manifest) -> str | None:
    return manifest.base.version if manifest.base else None


def _payload_nbytes(manifest: Manifest) -> int:
    return manifest.payload.nbytes if manifest.payload else 0


@store.command(short_help="Remove old versions and garbage.")
@_STORE
@click.option(
    "--keep-last", type=click.IntRange(min=1), default=3, show_default=True, help="Keep this many newest versions."
)
@click.option(
    "--keep-full-every", type=click.IntRange(min=1), help="Also keep a full version at every so many publications."
)
@click.option("--protect", multiple=True, metavar="VERSION", help="Keep this version too; may be given several times.")
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
    of this store they serve.
    """
    report = Store(path).gc(
        keep_last=keep_last,
        keep_full_every=keep_full_every,
        protect=protect,
        ignore_receivers=ignore_receivers,
        dry_run=dry_run,
    )

    def human(console: Console) -> None:
        verb = "would remove" if report.dry_run else "removed"
        console.print(f"{verb} {', '.join(report.removed) or 'no version'}; freed {size(report.freed_nbytes)}")
        if report.garbage:
            console.print(f"{verb} garbage: {', '.join(report.garbage)}")
        for version, reason in report.kept.items():
            console.print(f"kept {version}: {reason}")

    emit(as_json, asdict(report), human)


@store.command(short_help="Turn version.txt into version.yaml.")
@_STORE
@json_option
def migrate(path: Path, as_json: bool) -> None:
    """Turn the legacy version.txt of STORE (or of a checkpoint directory) into version.yaml."""
    found = Store(path).migrate()

    def human(console: Console) -> None:
        console.print(
            f"{found.path} now says {found.version}" if found else f"nothing to migrate: {path} has no version.txt"
        )

    emit(as_json, {"version": found.version, "step": found.step, "path": str(found.path)} if found else None, human)
