"""Sources of the tests' own: versions that lie in shared memory, and live streams whose digests come at the end."""

import mmap
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace

from weightcast.errors import SourceFailed, VersionNotFound
from weightcast.tensors.digest import array_digest
from weightcast.tensors.dtypes import from_numpy
from weightcast.tensors.flat import Piece, flat_bytes
from weightcast.tensors.sums import array_sum
from weightcast.wire.manifest import Manifest, TensorEntry, compute_root, summed_names


def manifest_of(version, tensors, *, tied=None, digests=True):
    """The sealed manifest of a full version. Without `digests` its tensors have sums alone, as those of a stream."""
    summed_as = summed_names(tied or {})
    entries = tuple(
        summed(
            TensorEntry(
                name=name, dtype=from_numpy(array.dtype), shape=array.shape, part=0, offset=0, nbytes=array.nbytes,
                digest=array_digest(array) if digests else "", summed_as=summed_as.get(name, ""),
            ),
            array,
        )
        for name, array in tensors.items()
    )  # fmt: skip
    return Manifest(
        version=version, sequence=0, step=0, kind="full", created_s=0.0, algorithm="xxh3-128",
        root_digest=compute_root(entries, "xxh3-128"), parts=(), tensors=entries, tied=tied or {},
    )  # fmt: skip


def summed(entry, array):
    """The entry of a tensor with its sum."""
    return replace(entry, sum=str(array_sum(entry.sum_spec, array)))


def unsealed(manifest):
    """The same before any digest is known."""
    return replace(manifest, root_digest="", tensors=tuple(replace(entry, digest="", sum="") for entry in manifest.tensors))


class Slab:
    """Versions in anonymous shared memory. `during` is called when the memory is lent, `after` when it is given back.

    Without `digests` their tensors have sums alone.
    """

    url = "slab://"

    def __init__(self, *, digests=True, **versions):
        self.manifests, self.arrays, self.closed, self.asked = {}, {}, 0, []
        self._digests = digests
        self.during = self.after = lambda: None
        for version, tensors in versions.items():
            self.add(version, tensors)

    def add(self, version, tensors, *, tied=None):
        """Publish a version."""
        memory = mmap.mmap(-1, max(1, sum(array.nbytes + 64 for array in tensors.values())))
        whole, at, arrays = np.frombuffer(memory, np.uint8), 0, {}
        for name, array in tensors.items():
            arrays[name] = whole[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            arrays[name][...] = array
            at += -(-array.nbytes // 64) * 64
        self.manifests[version] = manifest_of(version, tensors, tied=tied, digests=self._digests)
        self.arrays[version] = arrays

    def newest(self):
        return next(reversed(self.manifests))

    def manifest(self, version, *, deadline):
        deadline.check("asking")
        if self.closed:
            raise SourceFailed("the slab is gone")
        if version not in self.manifests:
            raise VersionNotFound(version, self.url, self.manifests)
        return self.manifests[version]

    def holds(self, manifest):
        return manifest.sealed

    @contextmanager
    def mapped(self, manifest, *, deadline, names=None):
        deadline.check("mapping")
        self.asked.append(None if names is None else set(names))
        lent = {}
        for name, array in self.arrays[manifest.version].items():
            if names is None or name in names:
                lent[name] = array.view()
                lent[name].flags.writeable = False
        self.during()
        yield lent
        self.after()

    def pieces(self, manifest, *, deadline, names=None):
        for name, array in self.arrays[manifest.version].items():
            if array.nbytes and (names is None or name in names):
                yield Piece(name, 0, flat_bytes(array).data)

    def close(self):
        self.closed += 1


class Stream:
    """A version that is sent once, in pieces of `size`. `tamper` may change them; `sealed` is what is said of it after."""

    url = "stream://"

    def __init__(self, tensors, version="v", *, size=1000, rng=None, tamper=None, sealed=None, tied=None):
        self.sealed = manifest_of(version, tensors, tied=tied, digests=False)
        self.told = sealed or self.sealed
        self._tensors, self._size, self._rng, self._tamper = tensors, size, rng, tamper or (lambda piece: piece)
        self.begun = self.ended = False

    def newest(self):
        return self.sealed.version

    def manifest(self, version, *, deadline):
        deadline.check("asking")
        if version != self.sealed.version:
            raise VersionNotFound(version, self.url, [self.sealed.version])
        return self.told if self.ended else unsealed(self.sealed)

    def holds(self, manifest):
        return False

    def mapped(self, manifest, *, deadline, names=None):
        raise AssertionError("a stream has nothing to map")

    def pieces(self, manifest, *, deadline, names=None):
        if self.begun:
            raise SourceFailed("the stream is over")
        self.begun = True
        digests = {entry.name: entry.sum for entry in self.sealed.tensors}
        pieces = []
        for name, array in self._tensors.items():
            data = np.ascontiguousarray(array).tobytes()
            if names is None or name in names:
                pieces += [Piece(name, at, memoryview(data)[at : at + self._size]) for at in range(0, len(data), self._size)]
        if self._rng is not None:
            pieces = [pieces[index] for index in self._rng.permutation(len(pieces))]
        last = {piece.tensor: at for at, piece in enumerate(pieces)}
        for at, piece in enumerate(pieces):
            sent = self._tamper(piece._replace(digest=digests[piece.tensor]) if last[piece.tensor] == at else piece)
            if sent is not None:
                yield sent
        self.ended = True

    def close(self):
        pass
