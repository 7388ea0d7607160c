"""Versions that a trainer lends: receivers read its own tensors where they lie, and it may not change them meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from weightcast.clock import Deadline
from weightcast.depot.leases import Lease
from weightcast.errors import Conflict, InvalidInput, NotFound
from weightcast.publish.drafting import Draft, Files
from weightcast.publish.memory_parts import MemoryPart, part_files
from weightcast.tensors.bridges import host_array, spec_of
from weightcast.tensors.digest import Algorithm, PieceHasher
from weightcast.tensors.flat import byte_blocks, flat_bytes
from weightcast.tensors.sums import Digests, TensorHasher
from weightcast.wire.manifest import encode_manifest


def hashed(
    tensors: Mapping[str, object], *, algorithm: Algorithm, threads: int, deadline: Deadline, summed_as: Mapping[str, str]
) -> dict[str, Digests]:
    """The digests of tensors where they lie."""
    names = deque(tensors)
    digests: dict[str, Digests] = {}

    def work() -> None:
        while True:
            try:
                name = names.popleft()
            except IndexError:  # nothing is left to do
                return
            spec = spec_of(name, tensors[name])
            hasher = TensorHasher(replace(spec, name=summed_as.get(name, name)), algorithm)
            for block in byte_blocks(host_array(name, tensors[name])):
                hasher.update(block.data)
                deadline.check(f"hashing {name}")
            digests[name] = hasher.finish()

    with ThreadPoolExecutor(threads, thread_name_prefix="lend") as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    return digests


def part_pieces(part: MemoryPart, header: bytes, tensors: Mapping[str, object], algorithm: Algorithm) -> bytes:
    """The digests of the pieces of a part whose tensors lie elsewhere."""
    hasher = PieceHasher(algorithm)
    hasher.update(header)
    for place in part.places:
        for block in byte_blocks(host_array(place.spec.name, tensors[place.spec.name])):
            hasher.update(block.data)
    return hasher.digests()


class LentHolding:
    """A version that is lent. Its parts are made up: a header, and then the tensors' own memory."""

    ranks = 1

    def __init__(self, files: Files, draft: Draft, lease: Lease) -> None:
        self.manifest = files.manifest
        self.encoded = encode_manifest(files.manifest)
        self.nbytes = files.manifest.nbytes
        self._small, self._tensors, self._lease = files.small, draft.tensors(), lease
        self._parts = dict(zip(part_files(draft.parts), zip(draft.parts, files.headers, strict=True), strict=True))

    @property
    def active(self) -> bool:
        """Whether it may still be read."""
        return self._lease.active

    @property
    def files(self) -> Mapping[str, int]:
        """Parts and small files with their sizes."""
        parts = {name: part.nbytes for name, (part, _) in self._parts.items()}
        return parts | {name: len(data) for name, data in self._small.items()}

    def views(self, file: str, start: int, stop: int, *, deadline: Deadline) -> list[memoryview]:  # noqa: ARG002 - all is here
        """The bytes of a range where they lie."""
        if not self.active:
            raise NotFound(f"the lease of version {self.manifest.version} has ended. Take the version from another source.")
        nbytes = self.files.get(file)
        if nbytes is None:
            raise NotFound(f"version {self.manifest.version} has no file {file!r}.")
        if not 0 <= start <= stop <= nbytes:
            raise InvalidInput(f"{file} has {nbytes} bytes, and none from {start} to {stop}.")
        if file in self._small:
            return [memoryview(self._small[file])[start:stop]]
        part, header = self._parts[file]
        return [] if start == stop else self._stretches(part, header, start, stop)

    sendable = views

    def _stretches(self, part: MemoryPart, header: bytes, start: int, stop: int) -> list[memoryview]:
        views = [memoryview(header)[start:stop]] if start < len(header) else []
        places = [place for place in part.places if place.spec.nbytes]
        first = max(0, bisect_right([place.offset for place in places], start) - 1)
        for place in places[first:]:
            begin, end = max(start, place.offset), min(stop, place.offset + place.spec.nbytes)
            if begin < end:
                name = place.spec.name
                views.append(self._bytes(name)[begin - place.offset : end - place.offset])
            elif place.offset >= stop:
                break
        return views

    def _bytes(self, name: str) -> memoryview:
        tensor = self._tensors[name]
        if getattr(getattr(tensor, "device", None), "type", "cpu") != "cpu":
            raise Conflict(f"tensor {name!r} of {self.manifest.version} is lent on a device: read it by nixl://.")
        return flat_bytes(host_array(name, tensor)).data.toreadonly()
