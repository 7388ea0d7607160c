"""Bit patterns as integers that grow with the value."""

import numpy as np
import pytest

from weightcast.tensors.dtypes import DType
from weightcast.tensors.ulp import distance, ordered

SMALL_FLOATS = [DType.F8_E4M3, DType.F8_E5M2, DType.F16, DType.BF16]


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_order_follows_value_and_every_pattern_has_its_own_number(dtype):
    width = 8 * dtype.itemsize
    patterns = np.arange(1 << width, dtype=f"u{dtype.itemsize}").view(dtype.numpy)
    numbers = ordered(patterns, dtype)
    assert len(np.unique(numbers)) == 1 << width
    with np.errstate(invalid="ignore"):  # signalling NaNs
        finite = np.isfinite(patterns.astype(np.float64))
    by_number = patterns[finite][np.argsort(numbers[finite])].astype(np.float64)
    assert (np.diff(by_number) >= 0).all()
    assert numbers.max() - numbers.min() == (1 << width) - 1


@pytest.mark.parametrize(("dtype", "step"), [(DType.F32, np.nextafter), (DType.F16, np.nextafter)])
def test_neighbours_are_one_apart(dtype, step, rng):
    old = rng.standard_normal(1000).astype(dtype.numpy)
    new = step(old, np.full_like(old, np.inf))
    assert (distance(old, new, dtype) == 1).all()


def test_zeros_of_both_signs_are_one_apart_and_a_sign_flip_is_far():
    old, new = np.array([0.0, 1.0], np.float32), np.array([-0.0, -1.0], np.float32)
    assert distance(old, new, DType.F32).tolist() == [1, 2 * 0x3F800000 + 1]


@pytest.mark.parametrize("dtype", [DType.U8, DType.I8, DType.U16, DType.I32, DType.BOOL])
def test_integers_are_as_far_apart_as_their_values(dtype):
    old, new = np.array([0, 1], dtype.numpy), np.array([1, 0], dtype.numpy)
    assert distance(old, new, dtype).tolist() == [1, 1]
