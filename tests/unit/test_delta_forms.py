"""The encoder takes the cheapest form for each tensor, and `inspect` says which."""

import numpy as np
import pytest
from delta_samples import chunks_of, pair

from weightcast import delta
from weightcast.delta.container import PACKINGS, read_table
from weightcast.errors import DeltaCorrupt
from weightcast.tensors.dtypes import DType


def small_steps(rng, lanes, density=1.0):
    """FP32 weights after an optimizer step: all move, by little."""
    old = rng.normal(0, 0.02, lanes).astype(np.float32)
    steps = np.round(rng.normal(0, 30, lanes)).astype(np.int32) * (rng.random(lanes) < density)
    return old, (old.view(np.int32) + steps.astype(np.int32)).view(np.float32)


@pytest.fixture
def states(rng):
    pairs = {
        "untouched": (np.ones(5000, np.float32),) * 2,
        "few": pair(rng, DType.BF16, (100, 100), density=0.01),
        "all by little": small_steps(rng, 20_000),
        "random": pair(rng, DType.U8, (20_000,), density=1, far=True),
        "random floats": pair(rng, DType.F32, (20_000,), density=1, far=True),
        "empty": (np.zeros((0, 5), np.int8),) * 2,
        "small and all": pair(rng, DType.F32, (1000,), density=1),
    }
    return ({name: both[side] for name, both in pairs.items()} for side in (0, 1))


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_tensor_gets_the_form_that_suits_it(packing, states):
    base, new = states
    packed = delta.encode(base, new, packing=packing)
    report = delta.inspect(packed)
    assert {tensor.name: tensor.form for tensor in report.tensors} == {
        "untouched": "skip",
        "few": "sparse",
        "all by little": "dense",
        "random": "raw",
        "random floats": "raw",
        "empty": "skip",
        "small and all": "sparse",  # a frame of its own would cost more than it saves
    }
    assert report.packing == packing
    assert report.nbytes == len(packed)


@pytest.mark.parametrize("packing", PACKINGS)
def test_inspect_counts_what_changes_without_a_base(packing, states):
    base, new = states
    report = delta.inspect(memoryview(delta.encode(base, new, packing=packing)))
    for tensor in report.tensors:
        unsigned = f"u{base[tensor.name].dtype.itemsize}"
        changed = int((base[tensor.name].view(unsigned) != new[tensor.name].view(unsigned)).sum())
        assert (tensor.dtype, tensor.shape) == (DType(tensor.dtype), base[tensor.name].shape)
        assert (tensor.lanes, tensor.changes) == (base[tensor.name].size, changed)
        assert tensor.density == (changed / base[tensor.name].size if base[tensor.name].size else 0)
    assert report.changes == sum(tensor.changes for tensor in report.tensors)
    assert report.density == report.changes / sum(tensor.lanes for tensor in report.tensors)
    assert report.bytes_per_change == report.nbytes / report.changes


def test_inspect_tells_the_same_of_the_sparse_form(states):
    base, new = states
    packed = delta.encode(base, new)
    sparse = delta.decode(packed, base)
    report, other = delta.inspect(sparse), delta.inspect(packed)
    assert report.packing is None
    assert report.nbytes == sparse.nbytes
    assert (report.base_root, report.new_root) == (other.base_root, other.new_root)
    assert [(one.name, one.changes) for one in report.tensors] == [(one.name, one.changes) for one in other.tensors]
    forms = {one.name: one.form for one in report.tensors}
    assert (forms["untouched"], forms["few"], forms["random"]) == ("skip", "sparse", "dense")


def test_a_delta_between_equal_states_has_nothing_in_it(rng):
    state = {"w": rng.normal(0, 1, 5000).astype(np.float32), "b": np.zeros(0, np.float32)}
    packed = delta.encode(state, state)
    assert not read_table(memoryview(packed)).chunks
    report = delta.inspect(packed)
    assert (report.changes, report.density, report.bytes_per_change) == (0, 0, 0)
    assert not delta.decode(packed).tensors  # nothing to walk along
    assert delta.apply({name: array.copy() for name, array in state.items()}, packed).nbytes == 0
    nothing = delta.encode({}, {})
    assert delta.inspect(nothing).density == 0
    delta.apply({}, nothing)


def test_forms_are_chosen_by_what_they_cost(rng):
    """No form of the same tensor, forced, is smaller than the one that was chosen."""
    for density in (0.001, 0.05, 0.1, 0.3, 1.0):
        for old, new in (small_steps(rng, 30_000, density), pair(rng, DType.F32, (30_000,), density=density, far=True)):
            chosen = len(delta.encode({"w": old}, {"w": new}, packing="gaps"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(delta.encoder, "_DENSE_LANES", 1 << 40)
                sparse = len(delta.encode({"w": old}, {"w": new}, packing="gaps"))
            assert chosen <= sparse
            assert chosen <= old.nbytes + 400


def test_classes_are_smaller_than_gaps_where_exponents_tell(rng):
    """Small weights change often, large ones seldom: what the packing is for."""
    old = (rng.normal(0, 0.02, 400_000).astype(np.float32)).astype(DType.BF16.numpy)
    likely = np.minimum(1, 1e-4 / np.maximum(np.abs(old.astype(np.float32)), 1e-6))
    new = old.copy()
    new.view(np.uint16)[rng.random(len(old)) < likely] += 1
    sizes = {packing: len(delta.encode({"w": old}, {"w": new}, packing=packing)) for packing in PACKINGS}
    changes = delta.inspect(delta.encode({"w": old}, {"w": new})).changes
    assert sizes["classes"] < 0.9 * sizes["gaps"]
    assert sizes["classes"] / changes < 1.5


def test_a_tensor_whose_blocks_differ_is_called_mixed(rng):
    old, new = pair(rng, DType.U8, (10_000,), density=0)
    new = new.copy()
    new[:5000] = np.frombuffer(rng.bytes(5000), np.uint8)
    new[-1] += 1
    with chunks_of(5000):
        report = delta.inspect(delta.encode({"w": old}, {"w": new}))
    assert report.tensors[0].form == "mixed"


def test_inspect_refuses_what_is_not_a_delta():
    with pytest.raises(DeltaCorrupt, match="too short"):
        delta.inspect(b"")
