"""The tables and lines of `weightcast store`."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from weightcast.cli.output import size, table
from weightcast.delta import DeltaReport
from weightcast.store.compare import TensorDiff, VerifyReport
from weightcast.wire.manifest import Manifest


def describe_delta(console: Console, manifest: Manifest, changes: DeltaReport) -> None:
    """What a delta version changes, in a few lines."""
    leads_from = f"{manifest.base.version} ({manifest.base.root_digest})" if manifest.base else ""
    share = changes.nbytes / manifest.nbytes if manifest.nbytes else 0.0
    console.print(f"base         {leads_from}")
    console.print(f"tensors      {len(manifest.tensors)}, {size(manifest.nbytes)}")
    console.print(f"payload      {size(changes.nbytes)}, {share:.3%} of the state, packed as {changes.packing}")
    console.print(
        f"changes      {changes.changes}, {changes.density:.4%} of all, {changes.bytes_per_change:.2f} bytes for each"
    )


def tensor_table(manifest: Manifest, changes: DeltaReport | None) -> Table:
    """Every tensor of a version, and those tied to another."""
    columns = ("tensor", "dtype", "shape", "size", *(("form", "changed") if changes else ("part",)), "digest")
    drawn = table(*columns, right=("size", "part", "changed"))
    by_name = {tensor.name: tensor for tensor in changes.tensors} if changes else {}
    for entry in manifest.tensors:
        found = by_name.get(entry.name)
        middle = [found.form, f"{found.density:.4%}"] if found else [str(entry.part + 1)]
        shape = ", ".join(map(str, entry.shape))
        drawn.add_row(entry.name, entry.dtype, f"[{shape}]", size(entry.nbytes), *middle, entry.proof)
    for name, holder in manifest.tied.items():
        drawn.add_row(name, *[""] * (len(columns) - 2), f"= {holder}")
    return drawn


def delta_facts(changes: DeltaReport) -> dict[str, object]:
    """The same for programs."""
    tensors = [{**asdict(tensor), "density": tensor.density} for tensor in changes.tensors]
    return {**asdict(changes), "changes": changes.changes, "density": changes.density, "tensors": tensors}


def verdict(report: VerifyReport) -> str:
    """A version that was verified, in a line."""
    if report.ok:
        return f"{report.version}: ok, {report.tensors} tensors, {size(report.nbytes)}, root {report.root_digest}"
    return f"{report.version}: DAMAGED, {len(report.problems)} problem(s)"


def diff_row(tensor: TensorDiff) -> list[str]:
    """How a tensor differs, as a row."""
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


def base(manifest: Manifest) -> str | None:
    """What a delta leads from; nothing for a full version."""
    return manifest.base.version if manifest.base else None


def payload_nbytes(manifest: Manifest) -> int:
    """The size of a delta; 0 for a full version."""
    return manifest.payload_nbytes
