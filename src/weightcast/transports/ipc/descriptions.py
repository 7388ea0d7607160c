"""Manifests on their way from publishers to receivers: written, checked, and made one if there are several publishers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from weightcast.errors import SourceFailed, UnsupportedTensor
from weightcast.wire.manifest import (
    Manifest,
    check_version_id,
    compute_root,
    merged_base,
    payload_problems,
    repeats,
    tensor_problems,
    tie_problems,
)

encode_description = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Manifest).decode


def decode_description(data: bytes, where: str) -> Manifest:
    """The manifest that a publisher sent, or `SourceFailed` with everything that is wrong with it."""
    try:
        manifest = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceFailed(f"{where} sent a description that cannot be read: {error}.") from error
    problems = list(_problems(manifest))
    if problems:
        raise SourceFailed(f"{where} describes version {manifest.version!r} wrongly: {'; '.join(problems)}.")
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    check_version_id(manifest.version)
    if manifest.kind != "full" or manifest.algorithm is None:
        yield "it must be a full version with digests"
    yield from tensor_problems(manifest.tensors, manifest.algorithm, summed=manifest.sealed, placed=False)
    yield from repeats("tensor", [*(entry.name for entry in manifest.tensors), *manifest.tied])
    yield from (f"{entry.name!r} starts at {entry.offset}" for entry in manifest.tensors if entry.offset < 0)
    yield from tie_problems(manifest)
    yield from payload_problems(manifest)
    if manifest.sealed and manifest.root_digest != _root(manifest):
        yield "the root digest does not follow from the tensors"


def _root(manifest: Manifest) -> str | None:
    try:
        return compute_root(manifest.tensors, manifest.algorithm)
    except UnsupportedTensor:  # reported with the tensor itself
        return None


def merged(parts: Sequence[Manifest], url: str) -> Manifest:
    """One version of what each trainer rank has published of it. `part` of a tensor is the rank that has it."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    others = [(rank, part.algorithm) for rank, part in enumerate(parts) if part.algorithm != first.algorithm]
    differing = [f"rank {rank} uses {algorithm}, not {first.algorithm}" for rank, algorithm in others]
    names = [name for part in parts for name in (*(entry.name for entry in part.tensors), *part.tied)]
    problems = differing + list(repeats("tensor", names))
    if problems:
        raise SourceFailed(f"the trainer ranks of {url} contradict each other about {first.version}: {'; '.join(problems)}.")
    tensors = tuple(replace(entry, part=rank) for rank, part in enumerate(parts) for entry in part.tensors)
    sealed = all(part.sealed for part in parts)
    base = merged_base(tensors, [part.base for part in parts])
    return replace(
        first,
        tensors=tensors,
        tied={name: holder for part in parts for name, holder in part.tied.items()},
        root_digest=compute_root(tensors, first.algorithm) if sealed else "",
        base=base,
        payloads=() if base is None else tuple(payload for part in parts for payload in part.payloads),
    )
