"""Deltas restore every bit: every pattern of small elements, the odd ones of large, any layout, any size."""

import importlib.util
import resource

import ml_dtypes
import numpy as np
import pytest
from delta_samples import ODD_32, chunks_of, copied, equal_deltas, lanes_of, pair, same, state_chains
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast import delta
from weightcast.delta.container import PACKINGS, read_table
from weightcast.delta.memory import memory_of
from weightcast.delta.sparse import Delta, TensorDelta
from weightcast.errors import InvalidInput, MissingExtra, UnsupportedTensor
from weightcast.tensors.boxes import Box
from weightcast.tensors.dtypes import DType
from weightcast.tensors.kernels import _kernels, installed, kernels
from weightcast.tensors.lanes import LaneKind
from weightcast.tensors.spec import TensorSpec

BACKENDS = ("compiled", "numpy")
EIGHT = [DType.F8_E4M3, DType.F8_E5M2, DType.F8_E8M0, DType.U8, DType.I8]
SIXTEEN = [DType.BF16, DType.F16, DType.I16, DType.U16]
THIRTY_TWO = [DType.F32, DType.I32, DType.U32]
SIXTY_FOUR = [DType.F64, DType.I64, DType.U64, DType.C64]


@pytest.fixture
def small_chunks():
    with chunks_of(1000):
        yield


def check_round_trip(base, new, packing, backend=None):
    """Encode, decode, apply, take back; nothing that is only read may change."""
    untouched = copied(base)
    packed = delta.encode(base, new, packing=packing, backend=backend, threads=1)
    sparse = delta.decode(packed, base if packing == "classes" else None, backend=backend, threads=1)
    target = copied(base)
    edit = delta.apply(target, sparse)
    assert same(target, new)
    edit.undo({name: memory_of(name, array) for name, array in target.items()})
    assert same(target, base)
    delta.apply(target, packed)
    assert same(target, new)
    assert same(base, untouched)
    return packed


# -- every pattern -------------------------------------------------------------------------------------------------


def in_pieces(array, lanes=4000):
    """Tensors so small that they stay sparse, however much of them changes."""
    return {f"t{at}": array[at : at + lanes] for at in range(0, len(array), lanes)}


@pytest.mark.untraced
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_every_16_bit_pattern_survives_as_old_and_as_new_value(dtype, packing, backend, rng):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for changed in (1, 1, 1, 0.5, 0.2, 0.05):
        old, new = rng.permutation(patterns), rng.permutation(patterns)
        new = np.where(rng.random(len(new)) < changed, new, old)
        old, new = old.view(dtype.numpy), new.view(dtype.numpy)
        check_round_trip({"w": old}, {"w": new}, packing, backend)
        check_round_trip(in_pieces(old), in_pieces(new), packing, backend)


@pytest.mark.untraced
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", EIGHT)
def test_every_pair_of_8_bit_patterns_survives(dtype, packing, backend, rng):
    order = rng.permutation(1 << 16)
    every = np.arange(256, dtype=np.uint8)
    old, new = np.repeat(every, 256)[order].view(dtype.numpy), np.tile(every, 256)[order].view(dtype.numpy)
    check_round_trip({"w": old}, {"w": new}, packing, backend)
    check_round_trip(in_pieces(old), in_pieces(new), packing, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", THIRTY_TWO)
def test_odd_and_random_32_bit_patterns_survive(dtype, packing, backend, rng):
    odd = np.concatenate([ODD_32, ODD_32 + np.uint32(1), rng.integers(0, 1 << 32, 30, dtype=np.uint32)])
    old, new = np.repeat(odd, len(odd)), np.tile(odd, len(odd))
    check_round_trip(
        {"few": old[:4000].view(dtype.numpy), "all": old.view(dtype.numpy)},
        {"few": new[:4000].view(dtype.numpy), "all": new.view(dtype.numpy)},
        packing,
        backend,
    )


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", SIXTY_FOUR)
def test_both_halves_of_64_bit_elements_survive(dtype, packing, rng):
    odd = np.concatenate([ODD_32, rng.integers(0, 1 << 32, 20, dtype=np.uint32)])
    pairs = np.stack(np.meshgrid(odd, odd), -1).reshape(-1, 2)
    old = pairs[rng.permutation(len(pairs))].reshape(-1).view(dtype.numpy)
    new = pairs[rng.permutation(len(pairs))].reshape(-1).view(dtype.numpy)
    check_round_trip({"w": old, "few": old[:1000]}, {"w": new, "few": new[:1000]}, packing)
    one = old.copy()
    one[17] = new[17]
    check_round_trip({"w": old}, {"w": one}, packing)


@pytest.mark.parametrize("packing", PACKINGS)
def test_booleans_survive(packing, rng):
    old, new = pair(rng, DType.BOOL, (77,), density=0.3)
    check_round_trip({"mask": old}, {"mask": new}, packing)


def test_a_step_as_wide_as_the_lane_is_one_of_the_large_steps(rng):
    """The step −2^(b−1) has no opposite of its own; undoing and inverting it must still come back."""
    for dtype, old, new in [(DType.I8, 127, 255), (DType.I16, 32767, 65535), (DType.I32, 2**31 - 1, 2**32 - 1)]:
        base = {"w": np.array([0, old], lanes_of(dtype)).view(dtype.numpy)}
        state = {"w": np.array([0, new], lanes_of(dtype)).view(dtype.numpy)}
        sparse = delta.decode(delta.encode(base, state), base)
        assert int(sparse.tensors["w"].steps[1]) == -(1 << (8 * dtype.itemsize - 1))
        target = copied(base)
        delta.apply(target, sparse)
        delta.apply(target, delta.invert(sparse))
        assert same(target, base)
        check_round_trip(base, state, "classes")


# -- every layout --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", list(DType))
def test_scalars_empty_and_single_elements_of_every_dtype_survive(dtype, packing, rng):
    shapes = {"scalar": (), "empty": (0,), "also empty": (3, 0, 2), "one": (1,), "ones": (1, 1, 1), "few": (3, 5)}
    pairs = {name: pair(rng, dtype, shape, density=1) for name, shape in shapes.items()}
    base, new = ({name: both[side] for name, both in pairs.items()} for side in (0, 1))
    packed = check_round_trip(base, new, packing)
    assert {one.name for one in delta.inspect(packed).tensors if one.form == "skip"} == {"empty", "also empty"}


def layouts(array):
    """The same elements in the same order under other strides."""
    big = np.zeros(tuple(2 * size for size in array.shape), dtype=array.dtype)
    big[tuple(slice(None, None, 2) for _ in array.shape)] = array
    return {
        "plain": array.copy(),
        "fortran": np.asfortranarray(array),
        "every other": big[tuple(slice(None, None, 2) for _ in array.shape)],
        "backwards": np.ascontiguousarray(array[::-1])[::-1],
    }


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("density", [0.01, 1.0])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F8_E4M3, DType.F32])
def test_strides_change_neither_the_bytes_nor_the_result(dtype, density, packing, rng, small_chunks):
    old, new = pair(rng, dtype, (37, 50, 3), density=density)
    expected = delta.encode({"w": old}, {"w": new}, packing=packing)
    for name, base in layouts(old).items():
        for other in layouts(new).values():
            assert delta.encode({"w": base}, {"w": other}, packing=packing) == expected, name
        target = {"w": base}
        edit = delta.apply(target, expected)
        assert same(target, {"w": new}), name
        edit.undo({"w": memory_of("w", base)})
        assert same(target, {"w": old}), name


@pytest.mark.parametrize("density", [0.01, 1.0])
def test_a_strided_vector_can_be_taken_back(density, rng):
    old, new = pair(rng, DType.BF16, (500,), density=density)
    room = np.zeros(1000, old.dtype)
    target = {"w": room[::2]}
    target["w"][...] = old
    edit = delta.apply(target, delta.encode({"w": old}, {"w": new}))
    assert same(target, {"w": new})
    edit.undo({"w": memory_of("w", target["w"])})
    assert same(target, {"w": old})
    assert not room[1::2].any()


def test_strided_64_bit_elements_are_encoded_and_refused_as_a_target(rng):
    old, new = pair(rng, DType.F64, (30, 40), density=0.1)
    packed = delta.encode({"w": old}, {"w": new})
    assert delta.encode({"w": np.asfortranarray(old)}, {"w": np.asfortranarray(new)}) == packed
    with pytest.raises(UnsupportedTensor, match="not contiguous"):
        delta.apply({"w": np.asfortranarray(old)}, packed)


@pytest.mark.parametrize("packing", PACKINGS)
def test_many_tiny_tensors_share_a_chunk(packing, rng):
    base, new = {}, {}
    for number in range(1500):
        dtype = [DType.BF16, DType.F32, DType.U8][number % 3]
        base[f"t{number}"], new[f"t{number}"] = pair(rng, dtype, (number % 7 + 1,), density=0.3)
    packed = check_round_trip(base, new, packing)
    assert len(read_table(memoryview(packed)).chunks) == 3


# -- several chunks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_tensors_of_several_chunks_survive(packing, backend, rng, small_chunks):
    base, new = {}, {}
    for number, (dtype, lanes, density) in enumerate(
        [(DType.BF16, 4321, 0.05), (DType.BF16, 10, 1), (DType.F64, 1777, 0.1), (DType.BF16, 999, 0), (DType.F32, 2001, 0.5),
         (DType.BF16, 1000, 0.01), (DType.BF16, 1001, 0.01), (DType.U8, 3000, 0)]
    ):  # fmt: skip
        base[f"t{number}"], new[f"t{number}"] = pair(rng, dtype, (lanes,), density=density)
    packed = check_round_trip(base, new, packing, backend)
    assert len(read_table(memoryview(packed)).chunks) > 8


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_tensor_larger_than_a_real_chunk_survives(packing, rng):
    lanes = (1 << 23) + 5
    old = np.zeros(lanes, np.uint16)
    old[: 1 << 20] = rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = old.copy()
    new[[0, 5, 1 << 20, (1 << 23) - 1, 1 << 23, lanes - 1]] += 1
    base, state = ({"w": array.view(ml_dtypes.bfloat16)} for array in (old, new))
    packed = delta.encode(base, state, packing=packing)
    assert [block.lanes for chunk in read_table(memoryview(packed)).chunks for block in chunk.blocks] == [1 << 23, 5]
    delta.apply(base, packed)
    assert same(base, state)


@pytest.mark.parametrize("density", [0.06, 0.3, 1.0])
def test_blocks_of_one_tensor_may_have_different_forms(density, rng):
    old, new = pair(rng, DType.F32, (20_000,), density=0.001)
    new = new.copy()
    new[5000:10_000] = old[5000:10_000] + rng.normal(0, 1e-9, 5000).astype(np.float32) * (rng.random(5000) < density)
    new[10_000:15_000] = np.frombuffer(rng.bytes(20_000), np.float32)
    for packing in PACKINGS:
        with chunks_of(5000):
            packed = check_round_trip({"w": old}, {"w": new}, packing)
        assert delta.inspect(packed).tensors[0].form == "mixed"


# -- more lanes than 32 bits count -----------------------------------------------------------------------------------

WIDE = (1 << 32) + 12_345


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_tensor_of_more_than_2_to_the_32_lanes_survives_in_little_memory():
    before = resident_nbytes()
    base, new = np.zeros(WIDE, np.uint8), np.zeros(WIDE, np.uint8)  # pages that are only read are not there
    changed = np.array([7, (1 << 32) - 1, 1 << 32, WIDE - 2, WIDE - 1])
    new[changed] = [1, 2, 3, 128, 255]
    packed = delta.encode({"w": base}, {"w": new}, packing="gaps", base_root="", new_root="")
    sparse = delta.decode(packed)
    assert sparse.tensors["w"].indices.dtype == np.uint64
    assert sparse.tensors["w"].indices.tolist() == changed.tolist()
    edit = delta.apply({"w": base}, sparse)
    assert base[changed].tolist() == [1, 2, 3, 128, 255]
    again = delta.Edit.from_journal(edit.to_journal())
    again.undo({"w": memory_of("w", base)})
    assert base[changed].tolist() == [0] * 5
    assert resident_nbytes() - before < 1 << 30  # the two arrays have 8 GiB


def wide_delta(indices, steps):
    spec = TensorSpec("w", DType.U8, (WIDE,))
    return Delta({"w": spec}, {"w": TensorDelta(spec, np.array(indices, np.uint64), np.array(steps, np.int8))})


def test_wide_indices_fold_invert_slice_and_pack():
    a = wide_delta([5, 1 << 32, WIDE - 1], [1, 2, 3])
    b = wide_delta([6, 1 << 32, WIDE - 1], [9, -2, -128])
    folded = delta.fold(a, b).tensors["w"]
    assert folded.indices.dtype == np.uint64
    assert (folded.indices.tolist(), folded.steps.tolist()) == ([5, 6, WIDE - 1], [1, 9, -125])
    inverted = delta.invert(a).tensors["w"]
    assert (inverted.indices.tolist(), inverted.steps.tolist()) == ([5, 1 << 32, WIDE - 1], [-1, -2, -3])
    assert not delta.fold(a, delta.invert(a)).tensors
    tail = delta.slice(a, {"w": Box(((1 << 32) - 1,), (12_346,))}).tensors["w"]
    assert tail.indices.dtype == np.uint32
    assert (tail.indices.tolist(), tail.steps.tolist()) == ([1, 12_345], [2, 3])
    again = delta.decode(delta.pack(a)).tensors["w"]
    assert again.indices.dtype == np.uint64
    assert (again.indices.tolist(), again.steps.tolist()) == ([5, 1 << 32, WIDE - 1], [1, 2, 3])


# -- the same bytes, whoever encodes -------------------------------------------------------------------------------


@pytest.mark.untraced
@settings(max_examples=60)
@given(
    chain=state_chains(),
    packing=st.sampled_from(PACKINGS),
    threads=st.integers(2, 5),
    chunk=st.sampled_from([64, 1000, 1 << 23]),
)
def test_neither_the_backend_nor_threads_change_a_byte(chain, packing, threads, chunk):
    base, new = chain
    with chunks_of(chunk):
        packed = check_round_trip(base, new, packing, "compiled")
        assert packed == delta.encode(base, new, packing=packing, backend="numpy", threads=1)
        assert packed == delta.encode(base, new, packing=packing, backend="compiled", threads=threads)
        assert packed == delta.encode(base, new, packing=packing, backend="numpy", threads=threads)
        decoded = [
            delta.decode(packed, base, backend=backend, threads=count) for backend in BACKENDS for count in (1, threads)
        ]
        for one in decoded[1:]:
            assert equal_deltas(one, decoded[0])


@st.composite
def sparse_changes(draw):
    """Lanes, and two lists of sorted indices with steps, some of which cancel."""
    width, wide = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    size = draw(st.integers(1, 200))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lanes = np.frombuffer(rng.bytes(size * width), f"u{width}").copy()
    lists = []
    for _ in range(2):
        indices = np.flatnonzero(rng.random(size) < draw(st.sampled_from([0, 0.1, 0.6, 1])))
        steps = np.frombuffer(rng.bytes(len(indices) * width), f"i{width}").copy()
        if draw(st.booleans()):
            steps[...] = draw(st.sampled_from([-1, 1, -(1 << (8 * width - 1))]))
        steps[steps == 0] = 1
        lists.append((indices.astype(np.uint64 if wide else np.uint32), steps))
    return lanes, *lists


@settings(max_examples=100)
@given(sample=sparse_changes(), signed=st.booleans())
def test_both_backends_merge_move_and_scatter_alike(sample, signed):
    lanes, a, b = sample
    kind = LaneKind(lanes.itemsize, signed_magnitude=signed)
    both = [kernels(backend) for backend in BACKENDS]
    steps = np.zeros((2, len(lanes)), a[1].dtype)
    steps[0, a[0]], steps[1, b[0]] = a[1], b[1]
    expected = steps[0] + steps[1]
    for one in both:
        changes = np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])
        indices, merged = one.fold(changes, np.array([len(a[0]), len(a[0]) + len(b[0])]))
        assert (indices.dtype, merged.dtype) == (a[0].dtype, a[1].dtype)
        assert indices.tolist() == np.flatnonzero(expected).tolist()
        assert merged.tolist() == expected[expected != 0].tolist()
    values = [one.moved(lanes, *a, kind)[1] for one in both]
    assert values[0].dtype == values[1].dtype == lanes.dtype
    assert values[0].tolist() == values[1].tolist()
    written = [lanes.copy(), lanes.copy()]
    for one, array in zip(both, written, strict=True):
        one.scatter(array, a[0], values[0])
    assert written[0].tolist() == written[1].tolist()
    for one in both:
        before, after = one.moved(written[0], a[0], -a[1], kind)
        assert before.tolist() == written[0][a[0]].tolist()
        assert after.tolist() == lanes[a[0]].tolist()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_encoder_copies_what_is_only_lent_to_it(threads, rng):
    """A trainer that streams its tensors through one buffer."""
    pairs = {f"t{number}": pair(rng, DType.BF16, (3000,), density=0.05) for number in range(5)}
    base, new = ({name: both[side] for name, both in pairs.items()} for side in (0, 1))
    buffer, pieces = np.zeros(3000, np.uint16), []
    with chunks_of(1000), delta.Encoder(pieces.append, packing="classes", threads=threads) as encoding:
        for name, array in base.items():
            buffer[:] = new[name].view(np.uint16)
            spec = TensorSpec(name, DType.BF16, (3000,))
            old = array.view(np.uint16)
            encoding.add(spec, lambda a, b, old=old: old[a:b], lambda a, b: buffer[a:b], borrowed=True)
            buffer[:] = 0
        with pytest.raises(InvalidInput, match="given twice"):
            encoding.add_unchanged(spec)
        encoding.finish(base_root="", new_root="")
        assert encoding.nbytes == sum(map(len, pieces))
    target = copied(base)
    delta.apply(target, b"".join(pieces))
    assert same(target, new)


def test_without_numba_there_are_still_kernels(monkeypatch, rng):
    assert delta.warm_up() == "compiled"
    old, new = pair(rng, DType.BF16, (500,), density=0.1)
    packed = delta.encode({"w": old}, {"w": new})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for found in (installed, _kernels):
        found.cache_clear()
    try:
        assert delta.warm_up() == "numpy"
        assert delta.encode({"w": old}, {"w": new}) == packed
        with pytest.raises(MissingExtra, match=r"weightcast\[fast\]"):
            delta.encode({"w": old}, {"w": new}, backend="compiled")
    finally:
        for found in (installed, _kernels):
            found.cache_clear()


def test_a_decoded_delta_does_not_borrow_the_buffer_it_came_in(rng):
    """Senders reuse their buffers."""
    for density, far in [(0.01, False), (1, False), (1, True)]:
        old, new = pair(rng, DType.F32, (8000,), density=density, far=far)
        buffer = bytearray(delta.encode({"w": old}, {"w": new}))
        sparse = delta.decode(buffer, {"w": old})
        buffer[:] = bytes(len(buffer))
        target = {"w": old.copy()}
        delta.apply(target, sparse)
        assert same(target, {"w": new})


def test_without_a_place_for_compiled_code_kernels_are_compiled_all_the_same(monkeypatch, caplog):
    jit = pytest.importorskip("weightcast.tensors.kernels.jit")
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.FunctionCache._impl_class, "_locator_classes", [])
    jit.can_cache.cache_clear()
    try:
        double = jit.compiled(jit.I64(jit.I64))(lambda number: 2 * number)
        assert double(21) == 42
        assert "compiled anew" in caplog.text
    finally:
        jit.can_cache.cache_clear()
