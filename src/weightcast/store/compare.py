"""Checking versions and comparing them, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from weightcast.errors import Corrupt, StorageFailed, WeightcastError
from weightcast.store.byte_file import ByteFile
from weightcast.store.catalog import Catalog
from weightcast.store.chain import resolve
from weightcast.store.payload import read_payload, read_payloads
from weightcast.store.reader import Reader, VersionReader, sized_file
from weightcast.store.state_reader import open_version
from weightcast.tensors.digest import DEFAULT, bytes_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import BLOCK_NBYTES, from_bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import tensor_hasher
from weightcast.tensors.ulp import bits, distance
from weightcast.wire.manifest import Manifest, ShareFile, TensorEntry

Progress = Callable[[int], None]


def no_progress(nbytes: int) -> None:
    """Ignore how far the work has come."""


@dataclass
class VerifyReport:
    """What verifying a version found. `problems` is empty exactly when every byte is as published."""

    version: str
    tensors: int = 0
    nbytes: int = 0
    root_digest: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems


def verify_version(catalog: Catalog, manifest: Manifest, progress: Progress = no_progress) -> VerifyReport:
    """Read every byte of a version and compare it with the manifest. All problems are reported, not the first.

    A delta is verified as the state it leads to, so everything that it is built on is read too. If that is wrong, and the
    cause lies in a version that it is built on, only that version is named, with its first problem.
    """
    report = VerifyReport(version=manifest.version, root_digest=manifest.root_digest)
    directory = catalog.directory(manifest.version)
    if manifest.kind == "full":
        _verify_parts(directory, manifest, report, progress)
    else:
        _verify_delta(catalog, manifest, report, progress)
        if report.problems and not _payload_problems(directory, manifest):
            report.problems = _damaged_bases(catalog, manifest) or report.problems
    _verify_files(directory, manifest, report)
    return report


def _payload_problems(directory: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the payload of a delta, apart from its base."""
    try:
        for payload in manifest.payloads:
            read_payload(directory, payload, manifest.algorithm or DEFAULT)
    except (Corrupt, StorageFailed) as error:
        return [str(error)]
    return []


def _damaged_bases(catalog: Catalog, manifest: Manifest) -> list[str]:
    """The first version that a delta is built on whose own files are wrong; empty if none is."""
    try:
        chain = resolve(catalog, manifest.version)
    except WeightcastError:  # a base that is missing, or another one: this is reported as it is
        return []
    full = VerifyReport(version=chain.full.version)
    _verify_parts(catalog.directory(full.version), chain.full, full, no_progress)
    found = [(full.version, full.problems)]
    found += [(one.version, _payload_problems(catalog.directory(one.version), one)) for one in chain.deltas[:-1]]
    version, problems = next((one for one in found if one[1]), ("", []))
    more = f" And {len(problems) - 1} more problem(s)." if len(problems) > 1 else ""
    return [f"it is built on {version}, which is damaged: {problems[0]}{more}"] if problems else []


def _verify_parts(directory: Path, manifest: Manifest, report: VerifyReport, progress: Progress) -> None:
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    if manifest.shares:  # a box may lie in several files, of which one is read below
        report.problems += [problem for share in manifest.shares for problem in _piece_problems(directory, manifest, share)]
        if report.problems:
            return
    with VersionReader(directory, manifest) as reader:
        unreadable: set[int] = set()
        for index in range(len(manifest.parts)):
            try:
                reader.open_part(index)
            except (Corrupt, StorageFailed) as error:
                unreadable.add(index)
                report.problems.append(str(error))
        for entry in reader.in_order():
            if entry.part not in unreadable:
                _verify_tensor(reader, entry, buffer, report, progress)


def _piece_problems(directory: Path, manifest: Manifest, share: ShareFile) -> list[str]:
    """What is wrong with the file of one of several publishers."""
    path, wrong = directory / share.file, []
    try:
        with sized_file(path, share.nbytes) as opened:
            for piece in manifest.pieces(share.file):
                found = bytes_digest(opened.read(piece.stop - piece.start, piece.start), manifest.algorithm or DEFAULT)
                if found != piece.digest:
                    wrong.append(f"{path}: bytes {piece.start} to {piece.stop} have digest {found}, not {piece.digest}.")
    except (Corrupt, StorageFailed) as error:
        return [str(error)]
    return wrong


def _verify_delta(catalog: Catalog, manifest: Manifest, report: VerifyReport, progress: Progress) -> None:
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    try:
        read_payloads(catalog.directory(manifest.version), manifest)
        reader = open_version(catalog, manifest.version)
    except WeightcastError as error:  # also a base that is missing, or another one: without it there is no state
        report.problems.append(str(error))
        return
    with reader:
        for entry in reader.in_order():
            _verify_tensor(reader, entry, buffer, report, progress)


def _verify_files(directory: Path, manifest: Manifest, report: VerifyReport) -> None:
    for file in manifest.files:
        try:
            with ByteFile(directory / file.file) as opened:
                found = bytes_digest(opened.read(min(opened.nbytes, file.nbytes + 1), 0), manifest.algorithm or DEFAULT)
        except (Corrupt, StorageFailed) as error:
            report.problems.append(str(error))
            continue
        if found != file.digest:
            report.problems.append(f"{directory / file.file}: expected {file.digest}, found {found}.")


def _verify_tensor(reader: Reader, entry: TensorEntry, buffer: memoryview, report: VerifyReport, progress: Progress) -> None:
    manifest = reader.manifest
    hasher = tensor_hasher(entry.sum_spec, entry.proof) if entry.proof else None
    try:
        for start in range(0, entry.nbytes, len(buffer)):
            block = buffer[: entry.nbytes - start]
            reader.read_into(entry, start, block)
            if hasher is not None:
                hasher.update(block)
            progress(len(block))
    except (Corrupt, StorageFailed) as error:
        report.problems.append(f"tensor {entry.name}: {error}")
        return
    if hasher is not None and hasher.digest() != entry.proof:
        file = manifest.payloads[0].file if manifest.kind == "delta" else manifest.places(entry)[0].places[0].file
        report.problems.append(f"tensor {entry.name} in {file}: expected {entry.proof}, found {hasher.digest()}.")
        return
    report.tensors += 1
    report.nbytes += entry.nbytes


@dataclass(frozen=True)
class TensorDiff:
    """How one tensor differs between two versions.

    For `changed`, distances are in units in the last place (integers: in ones) over the elements that changed.
    """

    name: str
    kind: Literal["added", "removed", "reshaped", "changed"]
    before: str = ""
    after: str = ""
    elements: int = 0
    changed: int = 0
    max_ulp: int = 0
    mean_ulp: float = 0.0
    one_ulp: int = 0


@dataclass(frozen=True)
class VersionDiff:
    """How version `b` differs from version `a`. Tensors that are equal are only counted."""

    a: str
    b: str
    same: int
    tensors: list[TensorDiff]

    @property
    def equal(self) -> bool:
        """True if both hold the same tensors, bit for bit."""
        return not self.tensors


def diff_versions(a: Reader, b: Reader, progress: Progress = no_progress) -> VersionDiff:
    """Compare two versions element by element; tensors whose digests agree are not read."""
    before, after = a.manifest.by_name(), b.manifest.by_name()
    diffs: list[TensorDiff] = []
    same = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            kind: Literal["added", "removed"] = "added" if old is None else "removed"
            diffs.append(TensorDiff(name, kind, _describe(old), _describe(new)))
            continue
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            diffs.append(TensorDiff(name, "reshaped", _describe(old), _describe(new)))
        elif _proved_equal(old, new):
            same += 1
        else:
            diff = _diff_tensor(name, (a, old), (b, new))
            same += not diff.changed
            diffs += [diff] if diff.changed else []
        progress(new.nbytes)
    return VersionDiff(a=a.manifest.version, b=b.manifest.version, same=same, tensors=diffs)


def _proved_equal(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether their sums or digests say so. Sums depend on the name, so those of two names cannot be compared."""
    return bool((a.digest and a.digest == b.digest) or (a.sum and a.sum == b.sum and a.name == b.name))


def _describe(entry: TensorEntry | None) -> str:
    return entry.spec.describe() if entry else ""


def _diff_tensor(name: str, a: tuple[Reader, TensorEntry], b: tuple[Reader, TensorEntry]) -> TensorDiff:
    (old_reader, old), (new_reader, new) = a, b
    old_buffer, new_buffer = memoryview(bytearray(BLOCK_NBYTES)), memoryview(bytearray(BLOCK_NBYTES))
    dtype = DType.F32 if old.dtype is DType.C64 else old.dtype  # complex elements are compared as pairs
    changed = one = largest = 0
    total = 0.0
    for start in range(0, old.nbytes, BLOCK_NBYTES):
        size = min(BLOCK_NBYTES, old.nbytes - start)
        old_reader.read_into(old, start, old_buffer[:size])
        new_reader.read_into(new, start, new_buffer[:size])
        block = TensorSpec(name=name, dtype=dtype, shape=(size // dtype.itemsize,))
        x, y = from_bytes(old_buffer[:size], block), from_bytes(new_buffer[:size], block)
        moved = np.flatnonzero(bits(x) != bits(y))
        if len(moved):
            ulps = distance(bits(x)[moved].view(x.dtype), bits(y)[moved].view(y.dtype), dtype)
            changed += len(moved)
            one += int((ulps == 1).sum())
            largest = max(largest, int(ulps.max()))
            total += float(ulps.sum(dtype=np.float64))
    return TensorDiff(
        name=name,
        kind="changed",
        before=_describe(old),
        after=_describe(new),
        elements=old.nbytes // dtype.itemsize,
        changed=changed,
        max_ulp=largest,
        mean_ulp=total / changed if changed else 0.0,
        one_ulp=one,
    )
