"""Which versions may go. Pure: decides, and leaves the deleting to the store."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weightcast.errors import InvalidInput
from weightcast.wire.manifest import Manifest


def plan_retention(
    manifests: Sequence[Manifest],
    *,
    keep_last: int,
    keep_full_every: int | None,
    newest: str | None,
    protect: Collection[str],
) -> dict[str, str]:
    """The versions to keep, each with the reason. `manifests` come in the order of publication.

    Kept are the last `keep_last`, a full version at every `keep_full_every` publications, the version that version.yaml
    names, what `protect` names (replicas that have not acknowledged a later version), and every base that a kept delta
    needs, all the way to a full version.
    """
    if keep_last < 1:
        raise InvalidInput(f"keep_last must be at least 1, not {keep_last}: a store keeps its newest version.")
    if keep_full_every is not None and keep_full_every < 1:
        raise InvalidInput(f"keep_full_every must be at least 1, not {keep_full_every}.")
    keep = {manifest.version: f"one of the last {keep_last}" for manifest in manifests[-keep_last:]}
    if keep_full_every is not None:
        due = 0
        for manifest in manifests:
            if manifest.kind == "full" and manifest.sequence >= due:
                keep.setdefault(manifest.version, f"a full version every {keep_full_every}")
                due = manifest.sequence + keep_full_every
    by_version = {manifest.version: manifest for manifest in manifests}
    if newest in by_version:
        keep.setdefault(newest, "version.yaml names it")
    for version in protect:
        if version in by_version:
            keep.setdefault(version, "protected by the caller")
    walked: set[str] = set()
    for version in list(keep):
        needed: Manifest | None = by_version[version]
        while needed is not None and needed.version not in walked:
            walked.add(needed.version)
            base = by_version.get(needed.base.version) if needed.kind == "delta" and needed.base is not None else None
            if base is not None:
                keep.setdefault(base.version, f"base of {needed.version}")
            needed = base
    return keep
