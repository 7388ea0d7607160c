"""Which version an update is about, and the way there: from a full version or from what the model holds, through deltas."""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.clock import Deadline
from weightcast.errors import BaseVersionMismatch, Conflict, SourceFailed, VerificationUnavailable, VersionNotFound
from weightcast.transports.base import Provider, Receiver, delta_use
from weightcast.wire.manifest import BaseRef, Manifest, check_version_id, is_digest

NO_DELTA = "there is no delta from what the model holds"


@dataclass(frozen=True)
class Route:
    """The way to a version: `full` (None: what the model holds), and then these deltas, in order."""

    manifest: Manifest
    full: Manifest | None
    deltas: tuple[Manifest, ...] = ()


def choose_version(receiver: Receiver, version: str | None, *, verify_checksum: bool, deadline: Deadline) -> Manifest:
    """The manifest of the version that was asked for, or of the source's newest. Nothing is changed by a refusal.

    A provider may call its versions what it likes, as they have no directory; elsewhere a name must be a version id, or the
    digest of a checkpoint that has no other name.
    """
    wanted = version or receiver.newest()
    if not isinstance(receiver, Provider) and not is_digest(wanted):
        check_version_id(wanted)
    manifest = receiver.manifest(wanted, deadline=deadline)
    if manifest.version != wanted:
        raise SourceFailed(
            f"version {wanted} was asked for, and {receiver.url} offers {manifest.version}. Nothing was changed."
        )
    if verify_checksum and manifest.algorithm is None:
        raise VerificationUnavailable(
            f"{receiver.url} holds no digests for {wanted}, so its bytes cannot be verified. Convert it to a version "
            "(weightcast snapshot convert), or pass verify_checksum=False to take it on trust."
        )
    return manifest


def plan_route(receiver: Receiver, manifest: Manifest, *, held: Manifest | None, deadline: Deadline) -> Route:
    """Follow a delta's bases to what the model holds, or else to the nearest full version.

    From what is held it takes fewer bytes than from the full version, as the deltas are the last of the same chain. With
    `deltas=never` nothing is built on what the model holds. Raises `BaseVersionMismatch` if a base is not at the source, or
    is there with other bytes.
    """
    if delta_use(receiver) == "never":
        held = None
    deltas: list[Manifest] = []
    whole: Route | None = None
    nbytes, at = 0, manifest
    while at.base is not None:
        if at.kind == "full" and whole is None:  # the deltas beside it may lead there from what is held
            whole = Route(manifest, at, tuple(deltas))
        if whole is not None and (held is None or nbytes > manifest.nbytes):
            return whole
        deltas.insert(0, at)
        nbytes += at.payload_nbytes
        if held is not None and _is_base(held, at.base):
            return Route(manifest, None, tuple(deltas))
        try:
            at = _base_at(receiver, at, at.base, held, deadline)
        except BaseVersionMismatch:
            if whole is None:
                raise
            return whole
    return whole or Route(manifest, at, tuple(deltas))


def insist_on_deltas(receiver: Receiver, manifest: Manifest, held: Manifest | None, why: str) -> None:
    """Refuse a version that would be fetched whole, if the source was opened with `deltas=always`. A model that holds no
    version yet takes its first one whole.
    """
    if held is not None and delta_use(receiver) == "always":
        raise Conflict(
            f"version {manifest.version} of {receiver.url} cannot be reached by deltas from {held.version}: {why}. Nothing "
            "was changed, as the source was opened with deltas=always. With deltas=auto the full version is fetched."
        )


def _is_base(held: Manifest, base: BaseRef) -> bool:
    """The root digest says which state it is; the same state may be known by several names."""
    return bool(base.root_digest) and held.root_digest == base.root_digest


def _base_at(receiver: Receiver, delta: Manifest, base: BaseRef, held: Manifest | None, deadline: Deadline) -> Manifest:
    refusal = BaseVersionMismatch(
        version=delta.version,
        base=base.version,
        base_root=base.root_digest,
        serving=held.version if held else None,
        serving_root=held.root_digest if held else None,
    )
    try:
        found = receiver.manifest(base.version, deadline=deadline)
    except VersionNotFound as error:
        raise refusal from error
    if not _is_base(found, base):
        raise refusal
    if found.sequence >= delta.sequence:
        raise SourceFailed(f"{receiver.url} has {delta.version} as a delta on {base.version}, which was published after it.")
    return found
