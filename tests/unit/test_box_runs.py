"""The stretches of bytes that a box is made of."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightcast.tensors.boxes import Box, box_runs, run_nbytes
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    start = [draw(st.integers(0, size)) for size in shape]
    return tuple(shape), Box(tuple(start), tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, start, strict=True)))


@given(boxes())
def test_the_runs_of_a_box_are_its_bytes_in_order(drawn):
    shape, box = drawn
    spec = TensorSpec("t", DType.I32, shape)
    whole = np.arange(spec.numel, dtype=np.int32).reshape(shape)
    data, runs = whole.tobytes(), list(box_runs(spec, box))
    cut = whole[(*(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True)), ...)]
    assert b"".join(data[at : at + nbytes] for at, nbytes in runs) == cut.tobytes()
    assert {nbytes for _, nbytes in runs} <= {run_nbytes(spec, box)}
    assert all(at + nbytes < after for (at, nbytes), (after, _) in pairwise(runs))


def test_whole_rows_are_one_run():
    spec = TensorSpec("t", DType.BF16, (8, 3, 5))
    assert list(box_runs(spec, Box((2, 0, 0), (4, 3, 5)))) == [(60, 120)]
    assert len(list(box_runs(spec, Box((2, 0, 0), (4, 3, 4))))) == 12
