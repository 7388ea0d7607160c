"""Digests read bytes, stream, and never touch what they read."""

import hashlib

import blake3
import numpy as np
import pytest
import xxhash

from weightcast.errors import InvalidInput
from weightcast.tensors.digest import ALGORITHMS, Hasher, algorithm_of, array_digest, bytes_digest, root_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec

REFERENCE = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3.blake3, "md5": hashlib.md5}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_digest_is_that_of_the_raw_bytes(algorithm, rng):
    array = rng.standard_normal((33, 17)).astype(np.float32)
    expected = f"{algorithm}:{REFERENCE[algorithm](array.tobytes()).hexdigest()}"
    assert array_digest(array, algorithm) == expected
    assert array_digest(np.asfortranarray(array), algorithm) == expected
    streamed = Hasher(algorithm)
    for row in array:
        streamed.update(row.tobytes())
    assert streamed.digest() == expected
    assert algorithm_of(expected) == algorithm


def test_hashing_changes_neither_the_array_nor_its_flags(rng):
    array = rng.standard_normal(1000)
    copy = array.copy()
    array.flags.writeable = False
    array_digest(array)
    assert (array == copy).all()
    assert not array.flags.writeable


def test_nan_payloads_and_signed_zeros_count():
    patterns = np.array([0x7FC00000, 0x7FC00001, 0x80000000, 0], dtype=np.uint32).view(np.float32)
    assert len({array_digest(patterns[i : i + 1]) for i in range(4)}) == 4


def test_the_root_digest_covers_names_dtypes_shapes_and_bytes_but_not_their_order():
    def root(*items):
        return root_digest([(TensorSpec(name, dtype, shape), digest) for name, dtype, shape, digest in items])

    a, b = ("a", DType.F32, (2, 3), "xxh3-128:00"), ("b", DType.BF16, (6,), "xxh3-128:11")
    assert root(a, b) == root(b, a)
    variants = [
        (a,), (b,), (a, b), (a, ("b", DType.F16, (6,), "xxh3-128:11")), (a, ("b", DType.BF16, (2, 3), "xxh3-128:11")),
        (a, ("b", DType.BF16, (6,), "xxh3-128:12")), (a, ("c", DType.BF16, (6,), "xxh3-128:11")),
    ]  # fmt: skip
    assert len({root(*variant) for variant in variants}) == len(variants)


def test_an_unknown_algorithm_is_refused_with_the_choices():
    with pytest.raises(InvalidInput, match="xxh3-128, blake3, md5"):
        bytes_digest(b"", "crc")
    with pytest.raises(InvalidInput, match="xxh3-128"):
        algorithm_of("crc:00")
