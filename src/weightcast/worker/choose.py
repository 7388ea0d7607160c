"""Which version an update is about, and whether it can be taken at all."""

from __future__ import annotations

from weightcast.clock import Deadline
from weightcast.errors import BaseVersionMismatch, SourceFailed, UnsupportedFormat, VerificationUnavailable
from weightcast.transports.base import Receiver
from weightcast.wire.manifest import BaseRef, Manifest, check_version_id


def choose_version(
    receiver: Receiver, version: str | None, *, serving: Manifest | None, verify_checksum: bool, deadline: Deadline
) -> Manifest:
    """The manifest of the version that was asked for, or of the source's newest. Nothing is changed by a refusal."""
    wanted = check_version_id(version or receiver.newest())
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
    if manifest.base is not None:
        _check_base(manifest, manifest.base, serving)
    return manifest


def _check_base(manifest: Manifest, base: BaseRef, serving: Manifest | None) -> None:
    if serving is None or (serving.version, serving.root_digest) != (base.version, base.root_digest):
        raise BaseVersionMismatch(
            version=manifest.version,
            base=base.version,
            base_root=base.root_digest,
            serving=serving.version if serving else None,
            serving_root=serving.root_digest if serving else None,
        )
    raise UnsupportedFormat(f"version {manifest.version} is a delta; this release takes full versions only.")
