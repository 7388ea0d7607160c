"""Sums of tensors: what they are, that parts and changes add up to them, and that no mistake in a delta goes unnoticed."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import slow_sums
from delta_samples import bits, lanes_of, moved_on, pair

from weightcast import delta
from weightcast.delta.edit import edit_tensor
from weightcast.delta.memory import memory_of
from weightcast.errors import InvalidInput
from weightcast.tensors import sums
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.digest import array_digest
from weightcast.tensors.dtypes import DType, from_numpy
from weightcast.tensors.kernels import Summing, kernels, sum_tables
from weightcast.tensors.lanes import kind_of, lane_count, lane_range
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import (
    RunningSum,
    Sum,
    TensorHasher,
    add_up,
    array_proof,
    array_sum,
    box_sum,
    change_sum,
    is_sum,
    range_sum,
    root_of_sums,
    tensor_hasher,
)
from weightcast.wire.manifest import TensorEntry, compute_root, summed_names

BACKENDS = ("numpy", "compiled")
WIDTHS = {1: DType.F8_E4M3, 2: DType.BF16, 4: DType.F32, 8: DType.F64}
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (15,), (16,), (17,), (31, 5), (2047,), (2048,), (2049,), (3, 1365), (9, 8, 100)]


def random_array(rng, dtype, shape):
    """Any bits at all: NaNs with payloads, infinities, zeros of both signs."""
    data = rng.integers(0, 256, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, dtype=np.uint8)
    if dtype is DType.BOOL:
        data &= 1
    return data.view(dtype.numpy).reshape(shape)


def lanes(array):
    """All lanes of an array."""
    dtype = from_numpy(array.dtype)
    return lane_range(array, dtype, 0, lane_count(TensorSpec("w", dtype, array.shape)))


def slow(spec, array):
    return slow_sums.tensor_sum(spec.name, spec.dtype.value, spec.shape, bits(array))


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """All sums by the kernels of one backend."""
    chosen = kernels(request.param)
    monkeypatch.setattr(sums, "kernels_for", lambda _: chosen)
    return chosen


# -- what they are -------------------------------------------------------------------------------------------------

GOLDEN = {
    "bytes": (np.arange(5, dtype=np.uint8), "sum:ef8d08bd5a65d6a3c2270f1cb20bb408"),
    "signs": (np.array([[-128, -1], [0, 127]], np.int8), "sum:ee8134cd7d232d2f287de35fbb9fe611"),
    "flags": (np.array([True, False, True]), "sum:36b7778c237622de044bbc44994331f2"),
    "half": (
        np.array([[0x3F80, 0xBF80, 0x0000], [0x8000, 0x7FC1, 0x7F80]], np.uint16).view(DType.BF16.numpy),
        "sum:35435767b8f7e6c982ba78c5fafbe1ec",
    ),
    "float": (np.array([1.0, -2.5, 0.0, -0.0, 3.25e-38], np.float32), "sum:4bee57cf4c8edb4e4fb3df4761702329"),
    "long": (np.array(-(1 << 40), np.int64), "sum:0c82acfc7354b96ec6b66b10a67f2df6"),
    "double": (np.array([[1.0], [np.inf]]), "sum:dbe023e14523b517279ecf87d87e6fbc"),
    "complex": (np.array([1 - 2j], np.complex64), "sum:9a0e7dcb1c12a4b9a386b13607813219"),
    "blocks": ((np.arange(5000) * 40503 % 65536).astype(np.uint16).reshape(5, 1000), "sum:73ec5547416666b884b797a595fdbf14"),
    "ünïcode": (np.zeros((2, 2), np.float16), "sum:9692862e1f315b41a1fff9b025f50773"),
    "none": (np.empty((0, 4), np.float32), "sum:00000000000000000000000000000000"),
}
GOLDEN_ROOT = "sums:2628800060df8961df6505218db95496"


@pytest.mark.parametrize("name", GOLDEN)
def test_the_sums_of_small_tensors_are_what_they_have_always_been(name, backend):
    array, written = GOLDEN[name]
    spec = TensorSpec(name, from_numpy(array.dtype), array.shape)
    assert str(array_sum(spec, array)) == written
    assert slow(spec, array) == written


def test_the_root_of_small_tensors_is_what_it_has_always_been():
    tensors = [(TensorSpec(name, from_numpy(array.dtype), array.shape), text) for name, (array, text) in GOLDEN.items()]
    assert root_of_sums(tensors) == root_of_sums(tensors[::-1]) == GOLDEN_ROOT
    assert slow_sums.root((spec.name, spec.dtype.value, spec.shape, text) for spec, text in tensors) == GOLDEN_ROOT
    entries = tuple(
        TensorEntry(name=spec.name, dtype=spec.dtype, shape=spec.shape, part=0, offset=0, nbytes=0, digest="", sum=text)
        for spec, text in tensors
    )
    assert compute_root(entries, "xxh3-128") == compute_root(entries, "blake3") == GOLDEN_ROOT


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_and_shape_is_summed_as_the_other_implementation_does(dtype, backend, rng):
    for number, shape in enumerate(SHAPES):
        spec, array = TensorSpec(f"t{number}", dtype, shape), random_array(rng, dtype, shape)
        assert str(array_sum(spec, array)) == slow(spec, array)
    assert array_sum(TensorSpec("none", dtype, (4, 0)), random_array(rng, dtype, (4, 0))) == Sum()


def test_the_tables_are_those_of_the_other_implementation_and_keep_their_promise():
    tables = sum_tables.TABLES.view(np.uint16)
    assert [tuple(lane) for lane in tables.T.tolist()] == slow_sums.table()
    words = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    for lane in range(0, sum_tables.LANES, 31):
        a, b, c, d = sum_tables.TABLES[:, lane]
        for factor, other in product((words ^ a, words ^ b), (words + c, words + d)):
            assert not ((factor == -32768) & (other == -32768)).any()


def test_no_two_words_at_a_place_have_the_same_products():
    """Else one could stand for the other, whatever the tensor."""
    words = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    for lane in range(0, sum_tables.LANES, 64):
        a, b, c, d = sum_tables.TABLES[:, lane]
        x, y, p, q = (factor.astype(np.int64) for factor in (words ^ a, words ^ b, words + c, words + d))
        one, other = (x * p << 32) + y * q, (x * q << 32) + y * p
        order = np.lexsort((one, other))
        assert not ((np.diff(one[order]) == 0) & (np.diff(other[order]) == 0)).any()


def test_name_dtype_and_shape_are_part_of_what_is_summed():
    array = np.arange(6, dtype=np.uint16)
    specs = [
        TensorSpec("w", DType.U16, (6,)),
        TensorSpec("v", DType.U16, (6,)),
        TensorSpec("w1", DType.U16, (6,)),
        TensorSpec("w", DType.I16, (6,)),
        TensorSpec("w", DType.F16, (6,)),
        TensorSpec("w", DType.U16, (2, 3)),
        TensorSpec("w", DType.U16, (3, 2)),
        TensorSpec("w", DType.U16, (1, 6)),
        TensorSpec("wU", DType.U16, (6,)),
    ]
    found = {array_sum(spec, array.view(spec.dtype.numpy).reshape(spec.shape)) for spec in specs}
    assert len(found) == len(specs)


def test_all_bits_count_and_so_does_where_they_are(rng):
    for dtype in WIDTHS.values():
        spec, array = TensorSpec("w", dtype, (40,)), random_array(rng, dtype, (40,))
        found = {array_sum(spec, array)}
        flat = array.view(np.uint8)
        for at, bit in product(range(len(flat)), range(8)):
            flat[at] ^= 1 << bit
            found.add(array_sum(spec, array))
            flat[at] ^= 1 << bit
        assert len(found) == 1 + 8 * len(flat)


def test_tied_bytes_are_summed_under_the_smallest_of_their_names_whichever_holds_them(rng):
    array, names = rng.standard_normal((8, 3)), ("embed", "a.head", "zzz")
    spec = TensorSpec("a.head", DType.F64, (8, 3))
    for holder in names:
        tied = {name: holder for name in names if name != holder}
        summed_as = summed_names(tied).get(holder, "")
        entry = TensorEntry(
            name=holder, dtype=DType.F64, shape=(8, 3), part=0, offset=0, nbytes=192, digest="", summed_as=summed_as
        )
        assert (summed_as or holder, entry.sum_spec) == ("a.head", spec)
        total = array_sum(entry.sum_spec, array)
        assert total == array_sum(spec, array)
        assert (total == array_sum(entry.spec, array)) == (holder == "a.head")


# -- as they are written -------------------------------------------------------------------------------------------


def test_a_sum_is_read_as_it_was_written(rng):
    for _ in range(100):
        one = Sum(*(int(number) for number in rng.integers(0, 1 << 64, 2, dtype=np.uint64)))
        assert is_sum(str(one))
        assert Sum.parse(str(one)) == one
    assert str(Sum()) == "sum:" + "0" * 32
    assert str(Sum(1, (1 << 64) - 1)) == "sum:0000000000000001ffffffffffffffff"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sum",
        "sum:",
        "0" * 32,
        "sum:" + "0" * 31,
        "sum:" + "0" * 33,
        "sum:" + "0" * 31 + "g",
        "sum:" + "A" * 32,
        "SUM:" + "0" * 32,
        "sums:" + "0" * 32,
        "xxh3-128:" + "0" * 32,
        " sum:" + "0" * 32,
        "sum:" + "0" * 32 + "\n",
        "sum:" + " " * 32,
        "sum:+" + "0" * 31,
        "sum:0x" + "0" * 30,
        "sum:" + "0" * 15 + "_" + "0" * 16,
        "sum:" + "٣" * 32,
        "sum:" + "0" * 16 + ":" + "0" * 15,
    ],
)
def test_other_text_is_no_sum(text):
    assert not is_sum(text)
    with pytest.raises(InvalidInput, match="is not a sum"):
        Sum.parse(text)


def test_sums_are_added_and_taken_away_modulo_two_to_the_64th(rng):
    numbers = rng.integers(0, 1 << 64, (20, 2), dtype=np.uint64)
    some = [Sum(int(one), int(other)) for one, other in numbers]
    total = add_up(some)
    assert (total.one, total.other) == tuple(int(number) % (1 << 64) for number in numbers.astype(object).sum(axis=0))
    assert total - add_up(some[5:]) == add_up(some[:5])
    assert Sum() - Sum(1, 2) == Sum((1 << 64) - 1, (1 << 64) - 2)
    assert add_up([]) == Sum()


# -- both backends -------------------------------------------------------------------------------------------------


def both(method, *arguments):
    """The answer of both backends, which must be the same."""
    one, other = (getattr(kernels(backend), method)(*arguments) for backend in BACKENDS)
    assert one == other
    return Sum(*one)


@pytest.mark.parametrize("dtype", list(DType))
def test_both_backends_sum_alike(dtype, rng):
    width = min(dtype.itemsize, 2)
    for length in (0, 1, 15, 16, 17, 33, 2047, 2048, 2049, 8191, 8192, 8193, 20_000, 300_001):
        spec = TensorSpec("w", dtype, (length,))
        words = random_array(rng, dtype, (length,)).view(f"u{width}")
        seeds = sums._seeds(spec)
        for start in (0, 1, 7, 2047, 2048, 12_345, (1 << 32) - 9, (1 << 32) + 5, (1 << 45) + 3):
            both("sum_rows", words[np.newaxis], start, 0, seeds)


@pytest.mark.parametrize("width", [1, 2])
def test_both_backends_sum_rows_with_any_strides_steps_and_alignment(width, rng):
    spec = TensorSpec("w", WIDTHS[width], (1 << 40,))
    seeds = sums._seeds(spec)
    for rows, length in [(1, 1), (3, 1), (100, 1), (5, 16), (7, 33), (3, 2050), (2, 9001), (70, 3000), (0, 4), (4, 0)]:
        for between, odd in ((0, 0), (1, 0), (3, 1), (64, 1)):
            memory = rng.integers(0, 256, rows * (length + between) * width + odd, dtype=np.uint8)
            matrix = memory[odd:].view(f"u{width}").reshape(rows, length + between)[:, :length]
            for first, step in ((0, length), (2040, 4096), ((1 << 33) + 11, 9999), (77, 0)):
                found = both("sum_rows", matrix, first, step, seeds)
                upside_down = both("sum_rows", matrix[::-1], first + step * (rows - 1), -step, seeds) if rows else Sum()
                assert found == upside_down
                one_by_one = [
                    both("sum_rows", matrix[row : row + 1], first + row * step, 0, seeds) for row in range(min(rows, 7))
                ]
                assert rows > 7 or add_up(one_by_one) == found


@pytest.mark.parametrize("dtype", list(WIDTHS.values()))
@pytest.mark.parametrize("first", [0, 3, 2047, 5000, (1 << 32) - 3, (1 << 32) + 1, (1 << 41) + 2049])
def test_indices_count_beyond_32_bits(dtype, first, rng):
    """The other implementation has numbers of any size. `first` counts words."""
    width = min(dtype.itemsize, 2)
    spec = TensorSpec("w", dtype, (1 << 42,))
    data = rng.integers(0, 256, 400 * width, dtype=np.uint8)
    expected = slow_sums.range_sum("w", dtype.value, spec.shape, first, data.tobytes())
    assert str(both("sum_rows", data.view(f"u{width}")[np.newaxis], first, 0, sums._seeds(spec))) == expected
    assert str(range_sum(spec, first * width, data)) == expected
    assert str(range_sum(spec, first * width, data.tobytes())) == expected


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("index", [np.uint32, np.uint64])
def test_both_backends_sum_changes_alike(width, index, rng):
    seeds = sums._seeds(TensorSpec("w", WIDTHS[width], (1 << 40,)))
    for count in (0, 1, 2, 17, 5000):
        limit = 1 << (32 if index is np.uint32 else 38)
        for highest in (count + 1, 5000 + count, limit - 1):
            places = np.sort(
                rng.choice(highest, count, replace=False) if highest < 1 << 20 else rng.integers(0, highest, count)
            )
            before, after = (rng.integers(0, 1 << (8 * width), count, dtype=f"u{width}") for _ in range(2))
            found = both("sum_changes", places.astype(index), before, after, seeds)
            assert both("sum_changes", places.astype(index), after, before, seeds) == Sum() - found
            order = rng.permutation(count)
            assert both("sum_changes", places[order].astype(index), before[order], after[order], seeds) == found
            assert both("sum_changes", places.astype(index), after, after, seeds) == Sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(DType))
def test_what_is_found_is_summed_in_passing(dtype, backend, rng):
    """`first` counts lanes. Some blocks have more changes than there is room for at first."""
    kind, find = kind_of(dtype), kernels(backend).find
    words = max(1, kind.nbytes // 2)
    seeds = sums._seeds(TensorSpec("w", dtype, (1 << 40,)))
    for lanes, one_in in product((0, 1, 63, 64, 65, 2048, 2049, 9001), (2, 70)):
        old = rng.integers(0, 1 << (8 * kind.nbytes), lanes, dtype=kind.unsigned)
        new = np.where(rng.integers(0, one_in, lanes) == 0, old ^ kind.unsigned.type(5), old)
        changed = np.flatnonzero(old != new)
        for first in (0, 1, 1023, 2047, 2048, (1 << 32) + 5):
            found = find(old, new, kind, Summing(first, True, True, seeds))
            whole = both("sum_rows", new.view(f"u{min(kind.nbytes, 2)}")[np.newaxis], first * words, 0, seeds)
            grown = both("sum_changes", (changed + first).astype(np.uint64), old[changed], new[changed], seeds)
            assert (Sum(*found.whole), Sum(*found.grown)) == (whole, grown)
            assert np.array_equal(found.indices, changed)
            assert Sum(*find(old, new, kind, Summing(first, False, True, seeds)).grown) == grown
            assert Sum(*find(old, new, kind, Summing(first, True, False, seeds)).whole) == whole
        assert find(old, new, kind)[2:] == ((0, 0), (0, 0))


@pytest.mark.parametrize("first", [(1 << 31) - 2, (1 << 32) - 2, (1 << 32) + 7, 1 << 38])
@pytest.mark.parametrize("dtype", list(WIDTHS.values()))
def test_changes_beyond_32_bits_add_up(dtype, first, rng):
    """`first` counts lanes, which are one or two words."""
    spec, kind = TensorSpec("w", dtype, (1 << 40,)), kind_of(dtype)
    before, after = (rng.integers(0, 1 << (8 * kind.nbytes), 40, dtype=kind.unsigned) for _ in range(2))
    growth = range_sum(spec, first * kind.nbytes, after.view(np.uint8)) - range_sum(
        spec, first * kind.nbytes, before.view(np.uint8)
    )
    places = np.arange(first, first + 40, dtype=np.uint64)
    assert both("sum_changes", places, before, after, sums._seeds(spec)) == growth
    assert change_sum(spec, places, before, after) == growth


# -- parts add up --------------------------------------------------------------------------------------------------


def tiles(rng, shape):
    """Boxes that cover a shape once, in any order; some have no elements."""

    def divided(chosen, dim):
        if dim == len(shape):
            return [Box(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen))]
        edges = sorted([0, shape[dim], *rng.integers(0, shape[dim] + 1, rng.integers(0, 3)).tolist()])
        return [box for edge in pairwise(edges) for box in divided((*chosen, edge), dim + 1)]

    found = divided((), 0)
    return [found[at] for at in rng.permutation(len(found))]


def laid_out(rng, array):
    """The same elements in memory of another layout."""
    way = int(rng.integers(0, 5))
    if way == 0:
        return array.copy()
    if way == 1:
        return array.T.copy().T
    if way == 2:
        wide = np.empty((*array.shape[:-1], array.shape[-1] * 2 + 1), array.dtype) if array.ndim else array.copy()
        if array.ndim:
            wide[..., ::2][..., : array.shape[-1]] = array
            return wide[..., ::2][..., : array.shape[-1]]
        return wide
    if way == 3:
        return np.flip(np.flip(array).copy())
    axes = rng.permutation(array.ndim)
    return array.transpose(axes).copy().transpose(np.argsort(axes))


@pytest.mark.parametrize("dtype", list(DType))
def test_the_boxes_of_any_cut_add_up_to_the_whole(dtype, rng):
    kernels("compiled")  # from here on all are summed by it; the next test compares the backends
    shapes = [
        (),
        (0,),
        (1,),
        (300,),
        (0, 7),
        (7, 0),
        (1, 50),
        (50, 1),
        (13, 17),
        (3, 2100),
        (5, 6, 7),
        (2, 3, 4, 5),
        (4, 1, 6),
    ]
    for shape in shapes:
        spec, array = TensorSpec("w", dtype, shape), random_array(rng, dtype, shape)
        whole = array_sum(spec, array)
        for _ in range(6):
            boxes, there = tiles(rng, shape), laid_out(rng, array)
            assert there.tobytes() == array.tobytes()
            assert array_sum(spec, there) == whole
            assert add_up(box_sum(spec, box, laid_out(rng, box_of(there, box))) for box in boxes) == whole
            assert add_up(box_sum(spec, box, box_of(there, box)) for box in boxes) == whole


@pytest.mark.parametrize("dtype", list(WIDTHS.values()))
def test_boxes_are_summed_as_the_other_implementation_does(dtype, backend, rng):
    """Row by row, with the rows where they lie in the tensor."""
    shape = (6, 5, 37)
    spec, array = TensorSpec("w", dtype, shape), random_array(rng, dtype, shape)
    words = dtype.itemsize // min(dtype.itemsize, 2)
    for _ in range(10):
        low, high = np.sort(rng.integers(0, np.array(shape) + 1, (2, 3)), axis=0).tolist()
        box = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
        rows = [(i, j) for i in range(low[0], high[0]) for j in range(low[1], high[1])]
        expected = add_up(
            Sum.parse(
                slow_sums.range_sum(
                    "w", dtype.value, shape, ((i * 5 + j) * 37 + low[2]) * words, bits(array[i, j, low[2] : high[2]])
                )
            )
            for i, j in rows
        )
        assert box_sum(spec, box, box_of(array, box)) == expected
        assert box_sum(spec, box, box_of(array.T.copy().T, box)) == expected


def test_large_boxes_are_summed_in_groups_of_rows_and_ask_between_them(rng, monkeypatch):
    monkeypatch.setattr(sums, "_AT_ONCE", 1000)
    asked = []
    for dtype, shape in product(WIDTHS.values(), [(40, 70), (3, 20, 31), (9000,)]):
        spec, array = TensorSpec("w", dtype, shape), random_array(rng, dtype, shape)
        whole = array_sum(spec, array, partial(asked.append, 1))
        assert str(whole) == slow(spec, array)
        boxes = tiles(rng, shape)
        assert add_up(box_sum(spec, box, box_of(array, box), partial(asked.append, 2)) for box in boxes) == whole
        assert array_sum(spec, array.T.copy().T) == whole
    assert min(asked.count(1), asked.count(2)) > 50


@pytest.mark.parametrize("dtype", list(DType))
def test_stretches_of_any_length_add_up_to_the_whole(dtype, rng):
    for shape in ((), (0, 3), (1,), (11, 9), (2049,), (70, 61)):
        spec, array = TensorSpec("w", dtype, shape), random_array(rng, dtype, shape)
        data, whole = bits(array), array_sum(spec, array)
        for most in (1, 3, 40, 5000):
            if len(data) > 1000 * most:
                continue
            running, both_kinds = RunningSum(spec), TensorHasher(spec, "xxh3-128")
            at = 0
            while at < len(data):
                size = int(rng.integers(0, most + 1))
                given = (bytes, bytearray, memoryview)[int(rng.integers(0, 3))](data[at : at + size])
                running.update(given)
                both_kinds.update(given)
                at += size
            assert running.digest() == str(whole)
            assert both_kinds.finish() == (array_digest(array), str(whole))


@pytest.mark.parametrize("dtype", list(WIDTHS.values()))
def test_ranges_of_whole_words_add_up_and_others_are_refused(dtype, rng):
    spec, array = TensorSpec("w", dtype, (5000,)), random_array(rng, dtype, (5000,))
    flat, width = array.view(np.uint8), min(dtype.itemsize, 2)
    edges = [0, *(np.sort(rng.integers(0, len(flat) // width, 9)) * width).tolist(), len(flat)]
    assert add_up(range_sum(spec, a, flat[a:b]) for a, b in pairwise(edges)) == array_sum(spec, array)
    assert range_sum(spec, 40, b"") == Sum()
    for offset, nbytes in ((1, 2), (2, 3), (1, 1)):
        if width == 1:
            range_sum(spec, offset, flat[:nbytes])
        else:
            with pytest.raises(InvalidInput, match="split a word"):
                range_sum(spec, offset, flat[:nbytes])


def test_a_proof_is_of_the_kind_of_what_it_is_compared_with(rng):
    spec, array = TensorSpec("w", DType.F32, (30, 20)), rng.standard_normal((30, 20)).astype(np.float32)
    total = str(array_sum(spec, array))
    for expected in (total, array_digest(array), array_digest(array, "blake3")):
        assert array_proof(spec, array.T.copy().T, expected) == expected
        hasher = tensor_hasher(spec, expected)
        hasher.update(bits(array))
        assert hasher.digest() == expected
    assert array_proof(replace(spec, name="v"), array, total) != total
    assert TensorHasher(spec, None).finish() == ("", str(Sum()))


# -- changes add up ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType))
def test_a_change_makes_a_sum_grow_by_its_own(dtype, backend, rng):
    for shape, density, far in product([(), (1,), (5000,), (70, 61)], (0, 0.01, 1), (False, True)):
        old, new = pair(rng, dtype, shape, density=density, far=far)
        spec = TensorSpec("w", dtype, shape)
        growth = array_sum(spec, new) - array_sum(spec, old)
        before, after = lanes(old), lanes(new)
        for index in (np.uint32, np.uint64):
            changed = np.flatnonzero(before != after).astype(index)
            assert change_sum(spec, changed, before[changed], after[changed]) == growth
            some = np.union1d(changed, rng.integers(0, len(before), 20)).astype(index)  # those that stay add nothing
            assert change_sum(spec, some, before[some], after[some]) == growth
            half = len(some) // 2
            parts = (
                change_sum(spec, some[part], before[some[part]], after[some[part]])
                for part in (slice(half), slice(half, None))
            )
            assert add_up(parts) == growth


@pytest.mark.parametrize("dtype", list(DType))
def test_changes_that_are_folded_make_it_grow_by_both(dtype, rng):
    first = random_array(rng, dtype, (3000,))
    second = moved_on(rng, first, dtype, density=0.05, far=False)
    third = moved_on(rng, second, dtype, density=0.05, far=True)
    third.view(lanes_of(dtype))[:50] = first.view(lanes_of(dtype))[:50]  # some are taken back
    states = [{"w": array.copy()} for array in (first, second, third)]
    steps = [delta.decode(delta.encode(a, b), a) for a, b in pairwise(states)]
    spec = TensorSpec("w", dtype, (3000,))

    def growth(change, state):
        edit = edit_tensor(memory_of("w", state["w"]), change.tensors["w"])
        places = np.arange(lane_count(spec), dtype=np.uint32) if edit.indices is None else edit.indices
        return change_sum(spec, places, edit.before, edit.after)

    grown = [growth(step, state) for step, state in zip(steps, states, strict=False)]
    assert array_sum(spec, first) + grown[0] == array_sum(spec, second)
    assert add_up(grown) == growth(delta.fold(*steps), states[0]) == array_sum(spec, third) - array_sum(spec, first)
    back = growth(delta.invert(delta.fold(*steps)), states[2])
    assert back == Sum() - add_up(grown)


def test_roots_of_packed_deltas_are_those_of_the_states(rng):
    states = [{}, {}]
    for dtype in DType:
        for state, array in zip(states, pair(rng, dtype, (40, 11), density=0.1), strict=True):
            state[dtype.value] = array
    states[0]["none"] = states[1]["none"] = np.empty((0, 2), np.float32)
    told = delta.inspect(delta.encode(*states))
    roots = [
        root_of_sums(
            (spec, str(array_sum(spec, array)))
            for spec, array in (
                (TensorSpec(name, from_numpy(array.dtype), array.shape), array) for name, array in state.items()
            )
        )
        for state in states
    ]
    assert (told.base_root, told.new_root) == tuple(roots)


# -- mistakes ------------------------------------------------------------------------------------------------------

CORRUPTIONS = 100_000
PER_STATE = 500  # corruptions of one delta, before another one is made


class Staged:
    """The changes of a delta to two tensors of the same shape, as they are about to be written."""

    def __init__(self, rng, dtype, size):
        self.kind = kind_of(dtype)
        self.specs = [TensorSpec(name, dtype, (size,)) for name in ("layers.0.w", "layers.1.w")]
        self.base, self.edits = [], []
        for _ in self.specs:
            old = lanes(random_array(rng, dtype, (size,)))
            places = np.sort(rng.choice(len(old), 40, replace=False)).astype(np.uint32)
            steps = rng.choice([-2, -1, 1, 2, 300], len(places)).astype(self.kind.unsigned)
            self.base.append(old)
            self.edits.append((places, old[places], old[places] + steps))
        self.grown = [change_sum(spec, *edit) for spec, edit in zip(self.specs, self.edits, strict=True)]
        every = np.arange(len(self.base[0]), dtype=np.uint32)
        self.free = np.setdiff1d(every, self.edits[0][0])  # what does not change in the first
        alone = np.setdiff1d(self.edits[0][0], self.edits[1][0])
        self.only_first = np.searchsorted(self.edits[0][0], alone)  # changes of the first that the second does not have

    def notices(self, tensor, places, before, after):
        """Whether these changes are told from the right ones by what they add."""
        return change_sum(self.specs[tensor], places, before, after) != self.grown[tensor]


def one_unit_off(staged, draw):
    places, before, after = staged.edits[0]
    wrong = after.copy()
    wrong[draw(len(wrong))] += staged.kind.unsigned.type(1 if draw(2) else -1 % (1 << (8 * staged.kind.nbytes)))
    return staged.notices(0, places, before, wrong)


def random_bits(staged, draw):
    places, before, after = staged.edits[0]
    wrong = after.copy()
    wrong[draw(len(wrong))] ^= staged.kind.unsigned.type(1 + draw((1 << (8 * staged.kind.nbytes)) - 1))
    return staged.notices(0, places, before, wrong)


def one_bit(staged, draw):
    places, before, after = staged.edits[0]
    wrong = after.copy()
    wrong[draw(len(wrong))] ^= staged.kind.unsigned.type(1 << draw(8 * staged.kind.nbytes))
    return staged.notices(0, places, before, wrong)


def two_swapped(staged, draw):
    places, before, after = staged.edits[0]
    one, other = draw(len(after)), draw(len(after))
    while after[one] == after[other]:
        one, other = draw(len(after)), draw(len(after))
    wrong = after.copy()
    wrong[one], wrong[other] = after[other], after[one]
    return staged.notices(0, places, before, wrong)


def moved_elsewhere(staged, draw):
    """The step is right, and added to another element."""
    places, before, after = (array.copy() for array in staged.edits[0])
    at, there = draw(len(places)), staged.free[draw(len(staged.free))]
    step = after[at] - before[at]
    places[at], before[at] = there, staged.base[0][there]
    after[at] = before[at] + step
    return staged.notices(0, places, before, after)


def to_the_neighbour(staged, draw):
    """As off by one: the next element that does not change takes it."""
    places, before, after = (array.copy() for array in staged.edits[0])
    at = draw(len(places))
    step, there = after[at] - before[at], staged.free[np.searchsorted(staged.free, places[at]) % len(staged.free)]
    places[at], before[at] = there, staged.base[0][there]
    after[at] = before[at] + step
    return staged.notices(0, places, before, after)


def dropped(staged, draw):
    at = draw(len(staged.edits[0][0]))
    return staged.notices(0, *(np.delete(array, at) for array in staged.edits[0]))


def added(staged, draw):
    places, before, after = staged.edits[0]
    there = staged.free[draw(len(staged.free))]
    was = staged.base[0][there]
    will = was ^ staged.kind.unsigned.type(1 + draw((1 << (8 * staged.kind.nbytes)) - 1))
    return staged.notices(0, np.append(places, there), np.append(before, was), np.append(after, will))


def in_the_other_tensor(staged, draw):
    """Both tensors are wrong then, and both are noticed."""
    at = staged.only_first[draw(len(staged.only_first))]
    place, step = staged.edits[0][0][at], staged.edits[0][2][at] - staged.edits[0][1][at]
    was = staged.base[1][place]
    places, before, after = staged.edits[1]
    taken = staged.notices(1, np.append(places, place), np.append(before, was), np.append(after, was + step))
    return taken and staged.notices(0, *(np.delete(array, at) for array in staged.edits[0]))


def all_shifted(staged, draw):
    """Every value is right, and is written where another belongs."""
    places, before, after = staged.edits[0]
    return staged.notices(0, places, before, np.roll(after, 1 + draw(len(after) - 1)))


MISTAKES = [
    one_unit_off,
    random_bits,
    one_bit,
    two_swapped,
    moved_elsewhere,
    to_the_neighbour,
    dropped,
    added,
    in_the_other_tensor,
    all_shifted,
]


@pytest.mark.untraced
def test_no_mistake_in_the_changes_of_a_delta_goes_by_unnoticed():
    """Changes are compared as a commit compares them: by how much they make the sums of their tensors grow."""
    kernels("compiled")
    rng = np.random.default_rng(2024)
    dtypes = [DType.BF16, DType.F32, DType.F8_E4M3, DType.F16, DType.F64, DType.I8]
    made, missed = 0, []
    with np.errstate(over="ignore"):
        for round_number in range(CORRUPTIONS // PER_STATE):
            dtype = dtypes[round_number % len(dtypes)]
            staged = Staged(rng, dtype, int(rng.choice([300, 5000, 70_000])))
            assert not staged.notices(0, *staged.edits[0])  # the right ones are taken
            numbers = iter(rng.random(8 * PER_STATE).tolist())
            for number in range(PER_STATE):
                mistake = MISTAKES[number % len(MISTAKES)]
                if not mistake(staged, lambda below, numbers=numbers: int(next(numbers) * below)):
                    missed.append((mistake.__name__, dtype, round_number))
                made += 1
    assert (made, missed) == (CORRUPTIONS, [])
