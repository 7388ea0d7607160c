"""Applying is all, proved, or nothing: on NumPy and torch, whatever the layout, whoever is wrong."""

import ml_dtypes
import numpy as np
import pytest
import torch
from delta_forgery import Forged
from delta_samples import copied, pair, same

from weightcast import delta
from weightcast.delta import states
from weightcast.delta.container import PACKINGS
from weightcast.delta.memory import HostMemory, memory_of
from weightcast.delta.sparse import Delta, TensorDelta
from weightcast.delta.torch_memory import TorchMemory
from weightcast.errors import (
    BaseVersionMismatch,
    CommitFailed,
    DeltaCorrupt,
    DeltaDoesNotFit,
    InvalidInput,
    UnsupportedTensor,
    WeightcastError,
)
from weightcast.tensors.bridges import host_array, spec_of
from weightcast.tensors.digest import ALGORITHMS, array_digest, root_digest
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import array_sum


@pytest.fixture
def sample(rng):
    """base, new, and a delta by classes."""
    pairs = {
        "w": pair(rng, DType.BF16, (60, 50), density=0.02),
        "b": pair(rng, DType.F32, (50,), density=0.5),
        "q": pair(rng, DType.F8_E4M3, (7000,), density=1),
        "n": pair(rng, DType.I64, (), density=1),
    }
    base, new = ({name: both[side].copy() for name, both in pairs.items()} for side in (0, 1))
    return base, new, delta.encode(base, new)


def as_torch(array):
    """A torch tensor with the same bits, in memory of its own."""
    names = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
    dtype = names.get(array.dtype.name)
    if dtype is None:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.copy().view(f"i{array.dtype.itemsize}")).view(dtype)


def bits_of(tensors):
    return {name: np.ascontiguousarray(host_array(name, tensor)).tobytes() for name, tensor in tensors.items()}


# -- what it does --------------------------------------------------------------------------------------------------


def test_apply_returns_the_way_back(sample):
    base, new, packed = sample
    target = copied(base)
    edit = delta.apply(target, packed)
    assert same(target, new)
    memories = {name: memory_of(name, array) for name, array in target.items()}
    for _ in range(3):
        edit.undo(memories)
        assert same(target, base)
        edit.finish(memories)
        assert same(target, new)
    assert edit.nbytes > 0


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads, sample):
    base, new, packed = sample
    target = copied(base)
    delta.apply(target, packed, threads=threads)
    assert same(target, new)


def test_the_delta_and_its_buffer_stay_as_they_are(sample):
    base, _, packed = sample
    buffer = bytearray(packed)
    delta.apply(copied(base), memoryview(buffer))
    assert buffer == packed
    sparse = delta.decode(packed, base)
    before = delta.pack(sparse)
    delta.apply(copied(base), sparse)
    assert delta.pack(sparse) == before


# -- torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
def test_torch_tensors_are_changed_in_place(packing, sample):
    base, new, _ = sample
    target = {name: as_torch(array) for name, array in base.items()}
    places = {name: tensor.data_ptr() for name, tensor in target.items()}
    edit = delta.apply(target, delta.encode(target, {name: as_torch(array) for name, array in new.items()}, packing=packing))
    assert bits_of(target) == bits_of(new)
    assert {name: tensor.data_ptr() for name, tensor in target.items()} == places
    edit.undo({name: memory_of(name, tensor) for name, tensor in target.items()})
    assert bits_of(target) == bits_of(base)


def test_a_delta_of_arrays_applies_to_torch_parameters(sample):
    base, new, packed = sample
    target = {name: as_torch(array) for name, array in base.items()}
    target["w"], target["b"] = torch.nn.Parameter(target["w"]), torch.nn.Parameter(target["b"])
    delta.apply(target, packed)
    assert bits_of(target) == bits_of(new)


@pytest.mark.parametrize("density", [0.02, 1])
def test_strided_and_transposed_parameters_are_changed_where_they_are(density, rng):
    old, new = pair(rng, DType.BF16, (40, 30), density=density)
    packed = delta.encode({"w": old}, {"w": new})
    room = torch.zeros(80, 60, dtype=torch.bfloat16)
    layouts = {
        "transposed": as_torch(np.ascontiguousarray(old.T)).t(),
        "strided": room[::2, ::2],
        "a slice of a fused parameter": torch.zeros(100, 30, dtype=torch.bfloat16)[50:90],
    }
    for name, tensor in layouts.items():
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        parameter.copy_(as_torch(old))
        edit = delta.apply({"w": parameter}, packed)
        assert bits_of({"w": parameter}) == bits_of({"w": new}), name
        assert parameter.data_ptr() == tensor.data_ptr()
        edit.undo({"w": memory_of("w", parameter)})
        assert bits_of({"w": parameter}) == bits_of({"w": old}), name
    assert not room[1::2].any()


@pytest.mark.parametrize("density", [0.02, 1])
def test_memory_under_two_names_is_changed_once(density, rng):
    """Tied weights: adding the steps twice would be wrong, writing the values twice is not."""
    old, new = pair(rng, DType.BF16, (40, 30), density=density)
    tied = as_torch(old)
    target = {"embed": tied, "head": tied, "view": tied[:20], "turned": tied.t()}
    state = {"embed": new, "head": new, "view": new[:20], "turned": new.T}
    edit = delta.apply(target, delta.encode(target, state))
    assert bits_of(target) == bits_of(state)
    edit.undo({name: memory_of(name, tensor) for name, tensor in target.items()})
    assert bits_of({"w": tied}) == bits_of({"w": old})


TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.float16, torch.bfloat16,
    torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("density", [0.05, 1])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_memory_on_a_device_is_read_and_written_by_torch(dtype, density, rng):
    """TorchMemory on the host: the same code as on a device."""
    spec = spec_of("w", torch.empty(0, dtype=dtype))
    old, new = pair(rng, spec.dtype, (30, 20), density=density)
    tensor = torch.from_numpy(old.copy().view(np.uint8)).view(dtype).reshape(30, 20)
    sparse = delta.decode(delta.encode({"w": old}, {"w": new}), {"w": old})
    memories = {"w": TorchMemory(spec_of("w", tensor), tensor)}
    edit = delta.prepare(memories, sparse)
    assert bits_of({"w": tensor}) == bits_of({"w": old})
    edit.finish(memories)
    assert bits_of({"w": tensor}) == bits_of({"w": new})
    edit.undo(memories)
    assert bits_of({"w": tensor}) == bits_of({"w": old})
    delta.Edit.from_journal(edit.to_journal()).finish(memories)  # out of a read-only buffer, and without a warning
    assert bits_of({"w": tensor}) == bits_of({"w": new})


@pytest.mark.parametrize("shape", [(), (0,), (30, 20), (3, 700_001), (2048, 1030)])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_memory_on_a_device_is_summed_by_torch(dtype, shape, rng):
    spec = spec_of("w", torch.empty(shape, dtype=dtype))
    array = rng.integers(0, 256, size=spec.nbytes, dtype=np.uint8).view(spec.dtype.numpy).reshape(shape)
    tensor = torch.frombuffer(bytearray(array.tobytes() or bytes(8)), dtype=dtype, count=array.size or 1)[
        : array.size
    ].reshape(shape)
    looked = []
    assert TorchMemory(spec, tensor).total(spec, lambda: looked.append(1)) == array_sum(spec, array)
    assert len(looked) == -(-(spec.nbytes // min(2, spec.dtype.itemsize) // 2048) // 1024)
    if len(shape) == 2 and spec.dtype.itemsize < 8:
        turned = TensorSpec("t", spec.dtype, shape[::-1])
        assert TorchMemory(turned, tensor.t()).total(turned, lambda: None) == array_sum(turned, array.T)


@pytest.mark.parametrize("transposed", [False, True])
def test_both_memories_read_and_write_alike(rng, transposed):
    old, _ = pair(rng, DType.F32, (10, 7))
    array = old.T.copy().T if transposed else old.copy()
    tensor = torch.from_numpy(old.T.copy()).t() if transposed else torch.from_numpy(old.copy())
    spec = TensorSpec("w", DType.F32, (10, 7))
    memories = [TorchMemory(spec, tensor), HostMemory(spec, array)]
    indices, values = np.array([0, 5, 69], np.uint32), np.array([1, 2, 0xFFFFFFFF], np.uint32)
    for memory in memories:
        before = memory.read(indices)
        memory.write(indices, values)
        assert before.tolist() == old.reshape(-1).view(np.uint32)[indices].tolist()
        assert memory.read(indices).tolist() == values.tolist()
        whole = memory.read(None)
        memory.write(None, np.zeros(70, np.uint32))
        assert not memory.read(None).any()
        assert whole[indices].tolist() == values.tolist(), "what was read is a copy"


def test_device_memory_of_64_bit_elements_that_is_not_contiguous_is_refused():
    tensor = torch.zeros(4, 6, dtype=torch.float64).t()
    with pytest.raises(UnsupportedTensor, match="not contiguous"):
        TorchMemory(spec_of("w", tensor), tensor)


def test_a_delta_that_can_neither_be_applied_nor_undone_hands_over_its_edit(sample, monkeypatch):
    base, new, packed = sample
    target = copied(base)
    real, writes = HostMemory.write, []

    def write(memory, indices, values):
        writes.append(memory.spec.name)
        if len(writes) in (3, 4):  # the third tensor, and the first of those to put back
            raise OSError("device lost")
        real(memory, indices, values)

    monkeypatch.setattr(HostMemory, "write", write)
    with pytest.raises(CommitFailed, match="as often as it takes") as caught:
        delta.apply(target, packed)
    assert not same(target, base)
    assert not same(target, new)
    memories = {name: memory_of(name, array) for name, array in target.items()}
    for way, state in (("undo", base), ("finish", new), ("undo", base)):
        getattr(caught.value.edit, way)(memories)
        assert same(target, state)


# -- refusals ------------------------------------------------------------------------------------------------------


def refused(error, target, given, **matching):
    """Refused, and the target is as it was."""
    before = bits_of(target)
    with pytest.raises(error, **matching) as caught:
        delta.apply(target, given)
    assert bits_of(target) == before
    return caught.value


def test_another_base_is_refused_by_its_root(sample):
    base, new, packed = sample
    for given in (packed, delta.decode(packed, base)):
        error = refused(BaseVersionMismatch, copied(new), given)
        for state in (base, new):
            assert states.state_root(states.ArrayState(state), delta.inspect(packed).base_root) in str(error)
        other = copied(base)
        other["n"][...] += 1  # one lane in another tensor
        refused(BaseVersionMismatch, other, given)


def test_a_base_that_the_caller_answers_for_is_still_proved_by_the_result(sample):
    base, new, packed = sample
    gaps = delta.encode(base, new, packing="gaps")
    for given in (packed, gaps, delta.decode(packed, base)):
        target = copied(base)
        target["n"][...] += 1
        before = copied(target)
        with pytest.raises(DeltaCorrupt):
            delta.apply(target, given, check_base=False)
        assert same(target, before)
    target = copied(base)
    delta.apply(target, packed, check_base=False)
    assert same(target, new)


def test_every_tensor_that_does_not_fit_is_listed(sample):
    base, _, packed = sample
    target = copied(base)
    del target["n"]
    target["extra"] = np.zeros(3)
    target["b"] = target["b"].reshape(5, 10)
    target["w"] = target["w"].view(np.int16)
    for given in (packed, delta.decode(packed, base)):
        error = refused(DeltaDoesNotFit, target, given)
        assert [(one.kind, one.name) for one in error.mismatches] == [
            ("shape", "b"), ("unexpected", "extra"), ("missing", "n"), ("shape", "w"),
        ]  # fmt: skip
        assert "F32[50] is needed, F32[5, 10] is there" in str(error)
        assert "BF16[60, 50] is needed, I16[60, 50] is there" in str(error)


def test_states_that_do_not_match_are_not_encoded(sample):
    base, new, _ = sample
    wrong = {**new, "w": new["w"].T}
    del wrong["b"]
    with pytest.raises(DeltaDoesNotFit) as caught:
        delta.encode(base, wrong)
    assert [(one.kind, one.name) for one in caught.value.mismatches] == [("missing", "b"), ("shape", "w")]


def test_classes_are_not_decoded_without_a_base(sample):
    base, _, packed = sample
    with pytest.raises(InvalidInput, match="along its base"):
        delta.decode(packed)
    with pytest.raises(DeltaDoesNotFit):
        delta.decode(packed, {**base, "w": base["w"].T})


def test_classes_along_another_base_are_refused_or_wrong_but_never_out_of_bounds(sample, rng):
    """`decode` does not look at roots; what it finds along another base must still be a delta, or a refusal."""
    base, _, packed = sample
    for _ in range(20):
        other = {name: rng.permutation(array.reshape(-1)).reshape(array.shape) for name, array in base.items()}
        try:
            sparse = delta.decode(packed, other)
        except DeltaCorrupt:
            continue
        assert all(one.indices is None or int(one.indices[-1]) < one.spec.numel * 2 for one in sparse.tensors.values())


def test_memory_that_cannot_be_changed_in_place_is_refused(sample):
    base, _, packed = sample
    target = copied(base)
    target["b"].flags.writeable = False
    refused(UnsupportedTensor, target, packed, match="'b' is read-only")
    target = copied(base)
    target["n"] = target["n"][()]  # a NumPy scalar
    refused(UnsupportedTensor, target, packed, match="scalar")
    target = {name: torch.empty(array.shape, dtype=torch.float32, device="meta") for name, array in base.items()}
    with pytest.raises(UnsupportedTensor, match="no storage"):
        delta.apply(target, packed)


def test_a_lazy_conjugate_is_refused_because_writing_to_it_would_be_lost(rng):
    old, new = pair(rng, DType.C64, (10,), density=1)
    lazy = torch.from_numpy(old.conj().copy()).conj()
    sparse = delta.decode(delta.encode({"w": old}, {"w": new}, base_root="", new_root=""), {"w": old})
    refused(UnsupportedTensor, {"w": lazy}, sparse, match="lazy")


def test_objects_that_are_no_tensors_are_refused(sample):
    _, _, packed = sample
    with pytest.raises(UnsupportedTensor):
        delta.apply({"w": [1, 2, 3]}, packed)


def test_roots_that_are_no_digests_are_not_written(sample):
    base, new, _ = sample
    for root in ("step_1", "sums:", "sums:" + "0" * 31, "sums:" + "0" * 33, "sum:" + "0" * 32, "sums:" + "A" * 32):
        with pytest.raises(InvalidInput, match=f"'{root}' is not a root digest"):
            delta.encode(base, new, base_root=root)
        with pytest.raises(InvalidInput, match=f"'{root}' is not a root digest"):
            delta.encode(base, new, new_root=root)


def test_a_name_that_is_too_long_for_the_table_is_refused():
    longest = {"ä" * 32767: np.zeros(3, np.uint8)}
    delta.apply(longest, delta.encode(longest, {name: array + 1 for name, array in longest.items()}))
    assert longest["ä" * 32767].tolist() == [1, 1, 1]
    with pytest.raises(InvalidInput, match="65536 bytes"):
        delta.encode({"ä" * 32768: np.zeros(3)}, {"ä" * 32768: np.ones(3)})


def test_indices_outside_of_a_tensor_are_refused(rng):
    spec = TensorSpec("w", DType.F32, (10,))
    wrong = Delta({"w": spec}, {"w": TensorDelta(spec, np.array([3, 10], np.uint32), np.array([1, 1], np.int32))})
    refused(UnsupportedTensor, {"w": np.zeros(10, np.float32)}, wrong, match="lane 10 lies outside")


# -- proof of the result -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_delta_that_does_not_lead_where_it_says_is_undone(packing, kind, sample):
    base, new, _ = sample
    forged = Forged.of(delta.encode(base, new, packing=packing))
    forged.roots[1] = forged.roots[0]
    target = copied(base) if kind == "numpy" else {name: as_torch(array) for name, array in base.items()}
    refused(DeltaCorrupt, target, forged.sealed(), match="it was undone")
    refused(DeltaCorrupt, target, delta.decode(forged.sealed(), base), match="it was undone")


def test_an_undo_covers_strided_and_tied_memory(rng):
    old, new = pair(rng, DType.F32, (40, 30), density=1)
    room = np.zeros((40, 60), np.float32)
    target = {"a": room[:, ::2], "same": room[:, ::2], "row": room[0, ::2]}
    target["a"][...] = old
    state = {"a": new, "same": new, "row": new[0]}
    forged = Forged.of(delta.encode(target, state))
    forged.roots[1] = "xxh3-128:" + "0" * 32
    refused(DeltaCorrupt, target, forged.sealed(), match="undone")
    assert not room[:, 1::2].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_algorithm_proves_the_result(algorithm, sample):
    base, new, _ = sample
    roots = [states.state_root(states.ArrayState(state), algorithm) for state in (base, new)]
    digests = [(spec_of(name, array), array_digest(array, algorithm)) for name, array in base.items()]
    assert roots[0] == root_digest(digests, algorithm)  # the same as that of the store
    packed = delta.encode(base, new, base_root=roots[0], new_root=roots[1])
    target = copied(base)
    delta.apply(target, packed)
    assert same(target, new)
    refused(BaseVersionMismatch, target, packed)


def test_a_failure_in_the_middle_of_writing_is_undone(sample, monkeypatch):
    base, _, packed = sample
    target = copied(base)
    write, calls = HostMemory.write, []

    def failing(self, indices, values):
        calls.append(self.spec.name)
        if len(calls) == 3:
            raise OSError("a bus error, or a signal")
        write(self, indices, values)

    monkeypatch.setattr(HostMemory, "write", failing)
    with pytest.raises(OSError, match="bus error"):
        delta.apply(target, packed)
    assert same(target, base)
    assert len(calls) == 3 + len(base)


def test_every_refusal_is_an_error_of_ours(sample):
    base, _, packed = sample
    for target in (copied(base), {}, {**base, "more": np.zeros(1)}):
        for data in (b"", packed[:-1], packed + b"\0", packed[:100]):
            with pytest.raises(WeightcastError):
                delta.apply(target, data)


def test_bf16_bits_are_never_converted():
    """Signalling NaNs and negative zeros go through torch and back as they are."""
    old = np.array([0x7F81, 0xFF81, 0x8000, 0x0000, 0x7FFF, 0x0001], np.uint16)
    new = np.array([0x7F82, 0x7F81, 0x0000, 0x8000, 0xFFFF, 0x8001], np.uint16)
    target = {"w": as_torch(old.view(ml_dtypes.bfloat16))}
    delta.apply(target, delta.encode({"w": old.view(ml_dtypes.bfloat16)}, {"w": new.view(ml_dtypes.bfloat16)}))
    assert bits_of(target)["w"] == new.tobytes()
