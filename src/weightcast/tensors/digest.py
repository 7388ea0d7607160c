"""The only place that hashes. Digests read raw bytes and never touch what they hash.

A digest is written ``algorithm:hex``. Two NaNs with different payloads have different digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, get_args

import blake3
import xxhash

from weightcast.errors import InvalidInput
from weightcast.tensors.flat import Array, Buffer, byte_blocks
from weightcast.tensors.spec import TensorSpec

Algorithm = Literal["xxh3-128", "blake3", "md5"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
DEFAULT: Algorithm = "xxh3-128"
PIECE_NBYTES = 1 << 20  # of a file that are proved by themselves: a rank that wants a slice fetches whole pieces


class _Hash(Protocol):
    def update(self, data: Buffer, /) -> object: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


_NEW: dict[Algorithm, Callable[[], _Hash]] = {
    "xxh3-128": xxhash.xxh3_128,  # twice the speed of memcpy: the default, always on
    "blake3": blake3.blake3,  # where storage is not trusted
    "md5": lambda: hashlib.md5(usedforsecurity=False),  # to compare with legacy debug digests
}


class Hasher:
    """A digest that grows as bytes arrive."""

    def __init__(self, algorithm: Algorithm = DEFAULT) -> None:
        if algorithm not in _NEW:
            raise InvalidInput(f"unknown digest algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}.")
        self.algorithm = algorithm
        self._hash = _NEW[algorithm]()
        self.update: Callable[[Buffer], object] = self._hash.update
        """Take in the next bytes."""

    def digest(self) -> str:
        """The digest of what was taken in so far."""
        return f"{self.algorithm}:{self._hash.hexdigest()}"

    def raw(self) -> bytes:
        """The same in bytes."""
        return self._hash.digest()


def algorithm_of(digest: str) -> Algorithm:
    """The algorithm that a written digest names."""
    name = digest.partition(":")[0]
    for algorithm in ALGORITHMS:
        if algorithm == name:
            return algorithm
    raise InvalidInput(f"{digest!r} is not a digest: it must start with one of {', '.join(ALGORITHMS)}.")


def bytes_digest(data: Buffer, algorithm: Algorithm = DEFAULT) -> str:
    """The digest of a buffer."""
    hasher = Hasher(algorithm)
    hasher.update(data)
    return hasher.digest()


def digest_nbytes(algorithm: Algorithm) -> int:
    """How many bytes a digest has where it is not written as text."""
    return len(Hasher(algorithm).raw())


class PieceHasher:
    """The digests of the pieces of a file, as its bytes come."""

    def __init__(self, algorithm: Algorithm = DEFAULT, piece_nbytes: int = PIECE_NBYTES) -> None:
        self._algorithm, self._piece_nbytes, self._filled = algorithm, piece_nbytes, 0
        self._hasher = Hasher(algorithm)
        self._digests: list[bytes] = []

    def update(self, data: Buffer) -> None:
        """Take in the next bytes."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: self._piece_nbytes - self._filled]
            self._hasher.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._piece_nbytes:
                self._digests.append(self._hasher.raw())
                self._hasher, self._filled = Hasher(self._algorithm), 0

    def digests(self) -> bytes:
        """All of them, one after the other; the last piece may be shorter than the others."""
        return b"".join([*self._digests, *([self._hasher.raw()] if self._filled else [])])


def piece_digests(data: Buffer, algorithm: Algorithm = DEFAULT, piece_nbytes: int = PIECE_NBYTES) -> bytes:
    """The digests of the pieces of a file that is in memory."""
    hasher = PieceHasher(algorithm, piece_nbytes)
    hasher.update(data)
    return hasher.digests()


def raw_digest(data: Buffer) -> bytes:
    """The 16 bytes of a buffer's xxh3-128, for binary formats."""
    return bytes.fromhex(bytes_digest(data, "xxh3-128").partition(":")[2])


def array_digest(array: Array, algorithm: Algorithm = DEFAULT) -> str:
    """The digest of an array's bytes in C order, whatever its strides; a transposed array is hashed block by block."""
    hasher = Hasher(algorithm)
    for block in byte_blocks(array, nbytes=64 << 20):
        hasher.update(block.data)
    return hasher.digest()


def root_digest(tensors: Iterable[tuple[TensorSpec, str]], algorithm: Algorithm = DEFAULT) -> str:
    """One digest over a whole state: every tensor's name, dtype, shape and digest, in the order of their names.

    Each field is preceded by its length, so no two states can spell the same bytes.
    """
    hasher = Hasher(algorithm)
    for spec, digest in sorted(tensors, key=lambda item: item[0].name):
        for text in (spec.name, spec.dtype.value, ",".join(map(str, spec.shape)), digest):
            field = text.encode()
            hasher.update(len(field).to_bytes(8, "little") + field)
    return hasher.digest()
