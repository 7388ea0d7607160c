"""Tensors of every framework are seen in place."""

import ml_dtypes
import numpy as np
import pytest
import torch

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.bridges import bridge_for, host_array, spec_of
from weightcast.tensors.bridges.torch_bridge import _DTYPES as TORCH_DTYPES
from weightcast.tensors.dtypes import DType, from_numpy
from weightcast.tensors.flat import byte_blocks, flat_bytes


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_has_a_numpy_form_of_the_right_width(dtype):
    assert from_numpy(dtype.numpy) is dtype
    assert dtype.itemsize == np.zeros(1, dtype.numpy).nbytes


@pytest.mark.parametrize("torch_dtype", list(TORCH_DTYPES), ids=str)
def test_a_torch_tensor_is_seen_in_its_own_memory(torch_dtype):
    tensor = torch.zeros(24 * 8, dtype=torch.uint8).view(torch_dtype)
    array = host_array("x", tensor)
    flat_bytes(array)[:8] = 7
    assert tensor.view(torch.uint8)[:8].tolist() == [7] * 8
    assert spec_of("x", tensor).dtype is TORCH_DTYPES[torch_dtype]


def test_packed_four_bit_elements_travel_as_bytes():
    tensor = torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    spec = spec_of("x", tensor)
    assert (spec.dtype, spec.shape, spec.nbytes) == (DType.U8, (3, 4), 12)


def test_a_transposed_torch_tensor_is_seen_with_its_strides():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).t().to(torch.bfloat16).t().contiguous().t()
    array = host_array("x", tensor)
    assert array.shape == (4, 3)
    assert not array.flags.c_contiguous
    array[3, 0] = 99
    assert tensor[3, 0] == 99


def test_a_meta_tensor_has_a_spec_and_no_storage():
    tensor = torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.bfloat16)
    assert spec_of("x", tensor).nbytes == 2 << 40
    with pytest.raises(UnsupportedTensor, match="no storage"):
        host_array("x", tensor)


def test_a_conjugate_view_gives_its_values_not_its_memory():
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    assert host_array("x", tensor).tolist() == [1 - 2j, 3 + 4j]


def test_tied_tensors_have_the_same_memory_key_and_others_do_not():
    weight = torch.zeros(4, 4)
    key = bridge_for(weight).memory_key
    assert key(weight) == key(torch.nn.Parameter(weight))
    assert key(weight) != key(weight.t())
    assert key(weight) != key(weight[:2])
    assert key(weight) != key(weight.clone())


@pytest.mark.parametrize("bad", [np.zeros(2, ">f4"), np.zeros(2, "O"), np.zeros(2, "M8[s]"), "text", [1.0], None])
def test_what_cannot_be_carried_is_refused_by_name(bad):
    with pytest.raises(UnsupportedTensor, match="layers"):
        spec_of("layers.7", bad)


def test_sparse_torch_tensors_are_refused():
    with pytest.raises(UnsupportedTensor, match="layout"):
        spec_of("x", torch.eye(3).to_sparse())


@pytest.mark.parametrize("name", ["", "__metadata__", "a\0b", "a\ud800"])
def test_names_that_no_file_could_hold_are_refused(name):
    with pytest.raises(UnsupportedTensor):
        spec_of(name, np.zeros(1))


@pytest.mark.parametrize("block", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("order", ["C", "F", "sliced", "reversed"])
def test_blocks_are_the_bytes_in_c_order_whatever_the_strides(rng, order, block):
    array = rng.integers(0, 2**16, size=(7, 5, 6), dtype=np.uint16).view(ml_dtypes.bfloat16)
    array = {"C": array, "F": np.asfortranarray(array), "sliced": array[::2, 1:, ::-1], "reversed": array[::-1]}[order]
    assert b"".join(bytes(piece) for piece in byte_blocks(array, block)) == array.tobytes()
