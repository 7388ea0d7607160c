"""States and pairs of states for the tests of deltas."""

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import strategies as st

from weightcast.delta import encoder, slicing, states
from weightcast.tensors.dtypes import DType

ODD_32 = np.array(
    [
        0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FC12345, 0xFF812345,
        0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000,
        0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0xBF800000, 0x3F800001, 0x12345678,
    ],
    dtype=np.uint32,
)  # fmt: skip


def bits(array):
    """The bytes of an array in C order."""
    return np.ascontiguousarray(array).tobytes()


def same(a, b):
    """Whether two states are equal bit for bit."""
    return a.keys() == b.keys() and all(a[name].shape == b[name].shape and bits(a[name]) == bits(b[name]) for name in a)


def copied(state):
    return {name: array.copy() for name, array in state.items()}


def lanes_of(dtype):
    return np.dtype(f"u{dtype.itemsize}")


def pair(rng, dtype, shape, *, density=0.02, far=False):
    """An array and a changed copy of it: by a few units in the last place, or to anything."""
    unsigned = lanes_of(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype is DType.BOOL:
        old = rng.integers(0, 2, count, dtype=np.uint8)
    elif dtype in (DType.BF16, DType.F16, DType.F32):
        old = rng.normal(0, 0.02, count).astype(dtype.numpy).view(unsigned)
    else:
        old = rng.integers(0, 1 << (8 * dtype.itemsize), count, dtype=unsigned, endpoint=False)
    new = old.copy()
    at = np.flatnonzero(rng.random(count) < density)
    if dtype is DType.BOOL:
        new[at] ^= 1
    elif far:
        new[at] = np.frombuffer(rng.bytes(len(at) * dtype.itemsize), dtype=unsigned)
    else:
        new[at] += rng.choice([-2, -1, 1, 1, 40], len(at)).astype(unsigned)
    return old.view(dtype.numpy).reshape(shape), new.view(dtype.numpy).reshape(shape)


@st.composite
def state_chains(draw, length=2, tensors=4, lanes=600):
    """Versions of a state, one after the other: few changes or many, small or large, some tensors untouched or empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    chain = [{} for _ in range(length)]
    for number in range(draw(st.integers(1, tensors))):
        dtype = draw(st.sampled_from(list(DType)))
        odd, plain = st.sampled_from([(), (0,), (1,), (3, 0), (5, lanes // 20, 2)]), st.integers(1, lanes)
        shape = draw(odd | plain.map(lambda size: (size,)))
        now = pair(rng, dtype, shape)[0]
        for state in chain:
            state[f"t{number}"] = now
            density, far = draw(st.sampled_from([0, 0.01, 0.2, 1])), draw(st.booleans())
            now = moved_on(rng, now, dtype, density=density, far=far)
    return chain


def moved_on(rng, array, dtype, *, density, far):
    """A copy with some elements changed."""
    new = array.copy()
    lanes = new.reshape(-1).view(lanes_of(dtype))
    at = np.flatnonzero(rng.random(len(lanes)) < density)
    if dtype is DType.BOOL:
        lanes[at] ^= 1
    elif far:
        lanes[at] = np.frombuffer(rng.bytes(len(at) * dtype.itemsize), dtype=lanes.dtype)
    else:
        lanes[at] += rng.choice([-1, 1, 3], len(at)).astype(lanes.dtype)
    return new


@contextmanager
def chunks_of(lanes):
    """Chunks so small that small tensors have several; these are also cut into slices, where there is a slicing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (encoder, slicing, states):
            patch.setattr(module, "CHUNK_LANES", lanes)
        patch.setattr(slicing, "SLICED_NBYTES", 1)
        yield


def equal_deltas(a, b):
    """Whether two deltas in sparse form are held alike: the same indices and steps, of the same dtypes."""
    if a.specs != b.specs or a.tensors.keys() != b.tensors.keys():
        return False
    return all(equal_tensors(a.tensors[name], b.tensors[name]) for name in a.tensors)


def equal_tensors(a, b):
    if (a.indices is None) != (b.indices is None) or a.steps.dtype != b.steps.dtype:
        return False
    if a.indices is not None and (a.indices.dtype != b.indices.dtype or not np.array_equal(a.indices, b.indices)):
        return False
    return np.array_equal(a.steps, b.steps)
