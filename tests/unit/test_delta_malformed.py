"""Nothing in a packed delta is believed: damage, and bytes that were made to lie, are refused and touch nothing."""

import struct
import time
import tracemalloc
from contextlib import suppress
from functools import partial

import delta_reader
import numpy as np
import pytest
import xxhash
import zstandard
from delta_forgery import Forged, Streams, sealed, text, zipped
from delta_samples import chunks_of, copied, pair, same
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast import delta
from weightcast.delta import container, encoder
from weightcast.delta.container import PACKINGS
from weightcast.delta.decoder import decode_chunks
from weightcast.delta.runs import slice_runs
from weightcast.delta.states import block_lanes
from weightcast.errors import BaseVersionMismatch, DeltaCorrupt, DeltaDoesNotFit, UnsupportedFormat
from weightcast.tensors.boxes import Box, Held
from weightcast.tensors.dtypes import DType
from weightcast.tensors.kernels import kernels
from weightcast.tensors.spec import TensorSpec

REFUSALS = (DeltaCorrupt, UnsupportedFormat, BaseVersionMismatch, DeltaDoesNotFit)


def sample_states(rng):
    """A sparse tensor with large steps, a second one in the same chunk, one that is dense and one that is raw."""
    a, b = pair(rng, DType.BF16, (400, 5), density=0.04), pair(rng, DType.BF16, (30,), density=0.3, far=True)
    dense, raw = pair(rng, DType.F32, (300,), density=1), pair(rng, DType.U8, (64,), density=1, far=True)
    pairs = {"a": a, "b": b, "dense": dense, "raw": raw, "same": (np.zeros(3, np.int64),) * 2}
    return ({name: both[side].copy() for name, both in pairs.items()} for side in (0, 1))


@pytest.fixture(scope="module")
def samples():
    """base, new, and the delta in both packings; all forms are in it."""
    base, new = sample_states(np.random.default_rng(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_DENSE_LANES", 60)
        packed = {packing: delta.encode(base, new, packing=packing) for packing in PACKINGS}
    for one in packed.values():
        assert [tensor.form for tensor in delta.inspect(one).tensors] == ["sparse", "sparse", "dense", "raw", "skip"]
    return base, new, packed


def bytes_of(state):
    return {name: array.tobytes() for name, array in state.items()}


def check_refused(data, base, refusals=REFUSALS, **matching):
    """Refused by everything that reads it, and nothing is touched."""
    target, snapshot = copied(base), copied(base)
    with pytest.raises(refusals, **matching):
        delta.apply(target, data)
    assert same(target, snapshot)
    with pytest.raises(refusals, **matching):
        delta.decode(data, base, threads=1)
    assert same(base, snapshot)


@pytest.mark.parametrize("packing", PACKINGS)
def test_tampering_without_a_change_gives_the_same_bytes(packing, samples):
    """The tools of this file do what they say, so a refusal below is for the lie and not for the seal."""
    _, _, packed = samples
    forged = Forged.of(packed[packing])
    forged.frames[0] = Streams.of(forged.frames[0]).frame()
    assert forged.sealed() == packed[packing]


@pytest.mark.untraced
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_flip_of_any_byte_is_refused(flip, packing, samples):
    base, _, packed = samples
    data = bytearray(packed[packing])
    target, snapshot = copied(base), copied(base)
    for at in range(len(data)):
        data[at] ^= flip
        with pytest.raises(REFUSALS):
            delta.apply(target, bytes(data), threads=1)
        data[at] ^= flip
    assert same(target, snapshot)
    delta.apply(target, bytes(data))


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_length_but_the_whole_is_refused(packing, samples):
    base, _, packed = samples
    data = packed[packing]
    target, snapshot = copied(base), copied(base)
    for length in range(len(data)):
        with pytest.raises(DeltaCorrupt):
            delta.apply(target, data[:length], threads=1)
    for extra in (b"\0", b"wcdelta\n", data):
        with pytest.raises(DeltaCorrupt):
            delta.apply(target, data + extra)
    assert same(target, snapshot)


@pytest.mark.parametrize("number", [0, 3, 65535])
def test_another_format_number_is_named(number, samples):
    base, _, packed = samples
    data = packed["gaps"]
    check_refused(data[:8] + struct.pack("<H", number) + data[10:], base, UnsupportedFormat, match=f"format {number}")


# -- a table that lies ---------------------------------------------------------------------------------------------


def put(column, at, value):
    def lie(forged):
        getattr(forged, column)[at] = value(getattr(forged, column)[at]) if callable(value) else value

    return lie


def tensor(at, place, value):
    def lie(forged):
        forged.tensors[at][place] = value

    return lie


def again(forged):
    """The first chunk is listed twice."""
    for column in ("counts", "forms", "frames"):
        getattr(forged, column).insert(0, getattr(forged, column)[0])
    for column in ("owners", "inside", "starts", "lanes", "changes"):
        setattr(forged, column, getattr(forged, column)[:2] + getattr(forged, column))


def swap_frames(forged):
    forged.frames[1], forged.frames[2] = forged.frames[2], forged.frames[1]


def no_blocks(forged):
    forged.counts.append(0)
    forged.forms.append(0)
    forged.frames.append(b"")


def two_blocks_of_one(form):
    def lie(forged):
        forged.counts[1], forged.counts[0] = 2, 1
        forged.forms[1] = form

    return lie


def shifted_bounds(forged):
    """Both blocks of the first chunk are of one tensor, and overlap by a lane."""
    forged.owners[:2], forged.starts[:2], forged.lanes[:2] = [0, 0], [0, 999], [1000, 1000]


def claim(**claims):
    return lambda forged: forged.claims.update(claims)


def rooted(at, value):
    return put("roots", at, value)


TABLE_LIES = {
    "one change too many": put("changes", 0, lambda n: n + 1),
    "one change too few": put("changes", 0, lambda n: n - 1),
    "no changes": put("changes", 0, 0),
    "a change moved to the other block": lambda f: f.changes.__setitem__(slice(0, 2), [f.changes[0] - 1, f.changes[1] + 1]),
    "more changes than lanes": put("changes", 0, 2001),
    "as many changes as fit into 32 bits": put("changes", 0, 2**32 - 1),
    "too few changes in a dense block": put("changes", 2, 299),
    "too few changes in a raw block": put("changes", 3, lambda n: n - 1),
    "no lanes": put("lanes", 0, 0),
    "a lane too many": put("lanes", 0, 2001),
    "as many lanes as fit into 32 bits": put("lanes", 0, 2**32 - 1),
    "fewer lanes in a dense block": put("lanes", 2, 299),
    "fewer lanes in a raw block": put("lanes", 3, 63),
    "a block that starts outside": put("starts", 0, 1),
    "a start of 62 bits": put("starts", 0, 2**62 - 1),
    "a start of 64 bits": put("starts", 0, 2**64 - 1),
    "a start that wraps round with its lanes": put("starts", 0, 2**64 - 2000),
    "another tensor": put("owners", 0, 2),
    "another tensor of the same kind": put("owners", 0, 1),
    "a tensor that is not there": put("owners", 0, 5),
    "a tensor number of 32 bits": put("owners", 0, 2**32 - 1),
    "kinds that are mixed": put("owners", 1, 3),
    "blocks that overlap": shifted_bounds,
    "a chunk that is there twice": again,
    "frames that are exchanged": swap_frames,
    "no blocks": put("counts", 0, 0),
    "a chunk without blocks": no_blocks,
    "more blocks than there are": put("counts", 0, 3),
    "as many blocks as fit into 32 bits": put("counts", 0, 2**32 - 1),
    "two blocks in a dense chunk": two_blocks_of_one(1),
    "two blocks in a raw chunk": two_blocks_of_one(2),
    "sparse read as dense": put("forms", 0, 1),
    "dense read as sparse": put("forms", 1, 0),
    "dense read as raw": put("forms", 1, 2),
    "raw read as dense": put("forms", 2, 1),
    "raw read as sparse": put("forms", 2, 0),
    "an unknown form": put("forms", 0, 3),
    "a form of 8 bits": put("forms", 0, 255),
    "a frame that is empty": put("frames", 0, b""),
    "a frame of a few bytes": put("frames", 0, b"\1\2\3"),
    "a dense frame that is empty": put("frames", 1, b""),
    "frame sizes that leave a hole": lambda f: setattr(f, "sizes", [len(f.frames[0]) - 1, *map(len, f.frames[1:])]),
    "frame sizes beyond the end": lambda f: setattr(f, "sizes", [2**61, *map(len, f.frames[1:])]),
    "frame sizes that wrap round": lambda f: setattr(f, "sizes", [2**64 - 1, *map(len, f.frames[1:])]),
    "a name twice": tensor(1, 0, "a"),
    "no name": tensor(0, 0, ""),
    "a reserved name": tensor(0, 0, "__metadata__"),
    "a name with a zero byte": tensor(0, 0, "a\0"),
    "a name that is not UTF-8": tensor(0, 0, b"\xff\xfe"),
    "an unknown dtype": tensor(0, 1, "F4"),
    "an empty dtype": tensor(0, 1, ""),
    "a huge dimension": tensor(0, 2, [2**63, 2]),
    "a size that wraps round": tensor(0, 2, [2**32, 2**32, 2**32]),
    "255 huge dimensions": tensor(0, 2, [2**64 - 1] * 255),
    "as many tensors as fit into 32 bits": claim(tensors=2**32 - 1),
    "a tensor too many": claim(tensors=6),
    "a tensor too few": claim(tensors=4),
    "as many chunks as fit into 32 bits": claim(chunks=2**32 - 1),
    "a chunk too many": claim(chunks=4),
    "a chunk too few": claim(chunks=2),
    "a base root that is no digest": rooted(0, "nonsense"),
    "a new root that is no digest": rooted(1, "crc32:00000000"),
    "a root that is not UTF-8": rooted(0, b"\xc3("),
    "an unknown packing": lambda f: setattr(f, "packing", 2),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("lie", TABLE_LIES)
def test_a_table_that_lies_is_refused(lie, packing, samples):
    base, _, packed = samples
    forged = Forged.of(packed[packing])
    TABLE_LIES[lie](forged)
    check_refused(forged.sealed(), base, DeltaCorrupt)


@pytest.mark.parametrize(
    "change",
    [tensor(0, 2, [5, 400]), tensor(0, 2, [2000]), tensor(4, 1, "F64"), tensor(4, 0, "other"), tensor(4, 2, [2**40, 0])],
    ids=["transposed", "flattened", "another dtype", "another name", "another shape"],
)
def test_a_table_for_other_tensors_does_not_fit(change, samples):
    base, _, packed = samples
    for one in packed.values():
        forged = Forged.of(one)
        change(forged)
        check_refused(forged.sealed(), base, DeltaDoesNotFit)


def test_a_table_that_is_not_one_frame_of_the_stated_size_is_refused(samples):
    base, _, packed = samples
    forged = Forged.of(packed["gaps"])
    table = forged.table()
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(table)
    for stored, decoded in [
        (zipped(table), len(table) + 1), (zipped(table), len(table) - 1), (zipped(table), 0), (zipped(table), 2**32 - 1),
        (table, len(table)), (b"", 0), (zipped(b""), 0), (without_size, len(table)), (without_size, 2**32 - 1),
        (zipped(table) + b"\0", len(table)), (zipped(table) * 2, len(table)), (zipped(table)[:-1], len(table)),
        (zipped(table + b"\0"), len(table) + 1), (zipped(table[:-1]), len(table) - 1),
    ]:  # fmt: skip
        check_refused(sealed(table, forged.frames, 0, stored=stored, decoded=decoded), base, DeltaCorrupt)


def test_every_shorter_table_is_refused(samples):
    base, _, packed = samples
    forged = Forged.of(packed["gaps"])
    table = forged.table()
    for length in range(len(table)):
        with pytest.raises(DeltaCorrupt):
            delta.decode(sealed(table[:length], forged.frames, 0), base)


# -- boxes that lie ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sliced():
    """Tensors cut along columns: sparse, with elements of two lanes, dense; one cut along rows, and one without dimensions.

    All old lanes of a tensor are equal and in each row all columns change that an even number has. So any two boxes of a
    tensor with as many rows and columns can be exchanged, and those that overlap change lanes twice.
    """
    shapes = {"a": (10, 12), "b": (3, 4, 8), "dense": (10, 16), "rows": (8, 5), "scalar": ()}
    base = {name: np.ones(shape, np.float64 if name == "b" else np.float32) for name, shape in shapes.items()}
    new = copied(base)
    for name in ("a", "b", "rows"):
        new[name][..., ::2] += 1e-6
    new["dense"] += (np.arange(160) % 3 + 1).reshape(10, 16).astype(np.float32) * np.float32(2**-20)
    new["scalar"] += 1
    cuts = delta.Slicing((delta.Cut(("a", "dense"), 1, 3), delta.Cut(("b",), 2, 2), delta.Cut(("rows",), 0, 2)))
    with chunks_of(1 << 23), pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_DENSE_LANES", 1 << 30)
        packed = {packing: delta.encode(base, new, packing=packing, slicing=cuts) for packing in PACKINGS}
    return base, new, packed


def of_tensor(forged, tensor):
    """The places in the columns of the blocks that belong to a tensor."""
    return [at for at, owner in enumerate(forged.owners) if owner == tensor]


def box(tensor, number, start=None, shape=None):
    """Another box in the place of one that is listed."""

    def lie(forged):
        old = forged.boxes[tensor][number]
        forged.boxes[tensor][number] = [old[0] if start is None else start, old[1] if shape is None else shape]

    return lie


def in_box(tensor, number):
    """The first block of a tensor belongs to another box."""

    def lie(forged):
        forged.inside[of_tensor(forged, tensor)[0]] = number

    return lie


def more_boxes(tensor, *boxes):
    return lambda forged: forged.boxes[tensor].extend([list(start), list(shape)] for start, shape in boxes)


def of_first_block(tensor, column, value):
    def lie(forged):
        values = getattr(forged, column)
        values[of_tensor(forged, tensor)[0]] = value

    return lie


def both(*lies):
    def lie(forged):
        for one in lies:
            one(forged)

    return lie


OUTSIDE, UNLISTED, IMPOSSIBLE = "does not lie inside|is too large", "box that is not listed", "is impossible"
BOX_LIES = {  # and what the reader says
    "a box that starts outside": (box(0, 1, start=[0, 12]), OUTSIDE),
    "a box that ends outside": (box(0, 1, start=[0, 9]), OUTSIDE),
    "a box with a row too many": (box(0, 0, shape=[11, 4]), OUTSIDE),
    "a box that starts a row too low": (box(0, 0, start=[1, 0]), OUTSIDE),
    "a box of 64 bits": (box(0, 0, shape=[2**64 - 1, 4]), OUTSIDE),
    "a box whose end wraps round": (box(0, 0, start=[2**64 - 1, 0], shape=[1, 4]), OUTSIDE),
    "a box whose size wraps round": (box(0, 0, shape=[2**32, 2**32]), OUTSIDE),
    "a box without rows": (box(0, 0, shape=[0, 4]), OUTSIDE),
    "a box without columns": (box(0, 0, shape=[10, 0]), OUTSIDE),
    "an empty box at the end": (box(0, 2, start=[10, 12], shape=[0, 0]), OUTSIDE),
    "an empty box that no block is in": (more_boxes(0, ((0, 0), (0, 0))), OUTSIDE),
    "a box outside that no block is in": (more_boxes(0, ((0, 12), (10, 1))), OUTSIDE),
    "a box of a tensor without dimensions": (more_boxes(4, ((), ())), "without dimensions"),
    "the number of a tensor without dimensions": (in_box(4, 1), UNLISTED),
    "a box that is not listed": (in_box(0, 4), UNLISTED),
    "a box of another tensor": (in_box(1, 3), UNLISTED),
    "a dimension of 64 bits": (both(tensor(4, 2, [0, 2**63]), more_boxes(4, ((0, 0), (0, 1)))), "larger than any memory"),
    "a box number of 32 bits": (in_box(0, 2**32 - 1), UNLISTED),
    "a box of a tensor without boxes": (in_box(3, 1), UNLISTED),
    "a lane more than the box has": (of_first_block(0, "lanes", 41), IMPOSSIBLE),
    "a block of a box that starts too late": (of_first_block(0, "starts", 1), IMPOSSIBLE),
    "a block of a box that starts at its end": (of_first_block(0, "starts", 40), IMPOSSIBLE),
    "a block as large as the tensor": (of_first_block(0, "lanes", 120), IMPOSSIBLE),
    "lanes counted as elements": (of_first_block(1, "lanes", 97), IMPOSSIBLE),
    "a smaller box": (box(0, 0, shape=[10, 3]), IMPOSSIBLE),
    "a smaller box of elements of two lanes": (box(1, 1, start=[0, 0, 4], shape=[3, 4, 3]), IMPOSSIBLE),
    "two blocks of one box": (in_box(0, 2), "cannot be read: blocks of 'a' overlap"),
    "two numbers of one box": (box(0, 0, start=[0, 4]), "overlap"),
    "boxes that overlap": (box(0, 0, start=[0, 2]), "overlap"),
    "boxes that share a column": (box(0, 1, start=[0, 2]), "overlap"),
    "boxes of elements of two lanes that overlap": (box(1, 1, start=[0, 0, 2]), "overlap"),
    "a box and the whole tensor": (in_box(0, 0), "overlap"),
    "a box of rows that are taken": (both(more_boxes(3, ((2, 0), (4, 5))), in_box(3, 1)), "overlap"),
    "no boxes": (claim(**{"boxes of 0": 0}), "cannot be read"),
    "a box too few": (claim(**{"boxes of 0": 2}), "cannot be read"),
    "a box too many": (claim(**{"boxes of 0": 4}), "cannot be read"),
    "as many boxes as fit into 32 bits": (claim(**{"boxes of 0": 2**32 - 1}), "cannot be read"),
    "as many boxes in the last tensor": (claim(**{"boxes of 3": 2**32 - 1}), "cannot be read"),
    "boxes without dimensions that are not there": (claim(**{"boxes of 4": 2**32 - 1}), "without dimensions"),
    "a column of boxes that is too short": (lambda f: f.inside.pop(), "cannot be read"),
    "a column of boxes that is too long": (lambda f: f.inside.append(0), "cannot be read"),
}


@pytest.mark.parametrize("lie", [shifted_bounds, again])
def test_blocks_that_overlap_are_seen_in_the_table(lie, samples):
    forged = Forged.of(samples[2]["gaps"])
    lie(forged)
    with pytest.raises(DeltaCorrupt, match="blocks of 'a' overlap"):
        delta.inspect(forged.sealed())


@pytest.mark.parametrize("packing", PACKINGS)
def test_tampering_with_slices_without_a_change_gives_the_same_bytes(packing, sliced):
    base, new, packed = sliced
    forged = Forged.of(packed[packing])
    assert [len(forged.boxes[tensor]) for tensor in range(5)] == [3, 2, 3, 0, 0]
    assert forged.sealed() == packed[packing]
    assert delta_reader.read(forged.sealed(), bytes_of(base)) == bytes_of(new)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("lie", BOX_LIES)
def test_a_box_that_lies_is_refused(lie, packing, sliced):
    base, _, packed = sliced
    forged = Forged.of(packed[packing])
    change, problem = BOX_LIES[lie]
    change(forged)
    check_refused(forged.sealed(), base, DeltaCorrupt, match=problem)
    with pytest.raises((ValueError, IndexError, struct.error)):
        delta_reader.read(forged.sealed(), bytes_of(base))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("forms", ["sparse", "dense"])
def test_boxes_that_overlap_are_refused_by_a_rank_too(forms, packing, sliced):
    """A rank puts together the changes of its own parameters, and of nothing else."""
    base, new, _ = sliced
    cuts = delta.Slicing((delta.Cut(("dense",), 1, 4),))
    with chunks_of(1 << 23), pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_DENSE_LANES", 1 if forms == "dense" else 1 << 30)
        forged = Forged.of(delta.encode(base, new, packing=packing, slicing=cuts))
    box(2, 0, start=[0, 2])(forged)
    data = forged.sealed()
    check_refused(data, base, DeltaCorrupt, match="'dense' overlap")
    table = container.read_table(memoryview(data))
    assert {chunk.form for chunk in table.chunks if chunk.blocks[0].tensor == "dense"} == {forms}
    state = delta.ArrayState(base)
    runs = decode_chunks(memoryview(data), table, table.chunks, partial(block_lanes, state))
    held = [Held.slice_of(state.specs["dense"], Box((0, 0), (10, 8)))]
    with pytest.raises(DeltaCorrupt, match="'dense' overlap"):
        slice_runs(table.specs, runs, held)


@pytest.mark.parametrize("packing", PACKINGS)
def test_blocks_of_a_box_may_be_smaller_than_it(packing, sliced):
    """Writers may cut as they like: here a box has two blocks, in the wrong order, and another one that is not used."""
    base, new, packed = sliced
    forged = Forged.of(packed[packing])
    first, second, _ = of_tensor(forged, 0)
    forged.boxes[0] = [[[0, 0], [10, 8]], [[0, 8], [10, 4]], [[3, 3], [1, 1]]]  # was three of four columns
    forged.inside[first], forged.inside[second], forged.inside[of_tensor(forged, 0)[2]] = 1, 1, 2
    forged.starts[first], forged.starts[second] = 40, 0
    target = copied(base)
    delta.apply(target, forged.sealed())
    assert same(target, new)  # each half of the box changes like a third of the tensor
    assert delta_reader.read(forged.sealed(), bytes_of(base)) == bytes_of(new)


def test_boxes_that_have_more_lanes_than_their_tensor_are_refused_before_they_take_memory():
    spec, pieces = TensorSpec("w", DType.U8, (64, 64)), []
    writer = container.ContainerWriter(pieces.append, "gaps")
    for number in range(20):
        inside = Box((0, 0), (64, 64 - number))
        lanes = 64 * (64 - number)
        writer.add("dense", (container.Block("w", 0, lanes, 1, inside),), b"never looked at")
    writer.finish({"w": spec}, base_root="", new_root="")
    with pytest.raises(DeltaCorrupt, match="blocks of 'w' overlap"):
        container.read_table(memoryview(b"".join(pieces)))


def test_format_1_has_no_boxes(sliced):
    base, _, packed = sliced
    data = packed["gaps"]
    check_refused(data[:8] + struct.pack("<H", 1) + data[10:], base, DeltaCorrupt)  # the seal
    forged = Forged.of(data)
    check_refused(sealed(forged.table(), forged.frames, 0, number=1), base, DeltaCorrupt, match="cannot be read")


# -- frames that lie -----------------------------------------------------------------------------------------------


def frame_of_huge_size(stated=1 << 40):
    """A zstd frame whose head claims any size, with one block of two bytes in it."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", stated) + struct.pack("<I", 1 | (2 << 3))[:3] + b"ab"


def skippable(data):
    return struct.pack("<II", 0x184D2A50, len(data)) + data


def set_stream(name, value):
    def lie(streams):
        old = getattr(streams, name)
        setattr(streams, name, value(old) if callable(value) else value)

    return lie


def store(name, value):
    """Another stored form of a stream than its contents compressed."""

    def lie(streams):
        contents = getattr(streams, name)
        streams.stored[name] = value(contents) if callable(value) else value

    return lie


def first_group(entry):
    """Another entry for the first group that has changes; BF16 counts here are below 128, so it has two bytes."""

    def lie(streams):
        at = next(at for at, byte in enumerate(streams.groups) if byte)
        streams.groups = streams.groups[:at] + entry(*streams.groups[at : at + 2]) + streams.groups[at + 2 :]

    return lie


def large(symbol, bits):
    """Every step is large, and the first is this number."""

    def lie(streams):
        count = streams.changes
        halves = [15] * count + [0] * (count % 2)
        streams.steps = bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))
        streams.large_symbols = bytes([symbol] + [0] * (count - 1))
        streams.large_bits = bits

    return lie


def with_gap(symbol, bits):
    """The first gap is this number and has no shift to go with it; all others are 0."""

    def lie(streams):
        at, groups = 0, bytearray(streams.groups)
        while at < len(groups):
            at += 1 + bool(groups[at])
            if groups[at - 1] and at >= 2 and groups[at - 2]:
                groups[at - 1] = 0
        streams.groups = bytes(groups)
        streams.gap_symbols = bytes([symbol] + [0] * (streams.changes - 1))
        streams.gap_bits = bits

    return lie


NO_SIZE = zstandard.ZstdCompressor(write_content_size=False)

SPARSE_LIES = {
    "a change too many": set_stream("changes", lambda n: n + 1),
    "a change too few": set_stream("changes", lambda n: n - 1),
    "as many changes as fit into 32 bits": set_stream("changes", 2**32 - 1),
    "a group with a change too many": first_group(lambda count, shift: bytes([count + 1, shift])),
    "a group with a change too few": first_group(lambda count, shift: bytes([count - 1, shift])),
    "a shift of 25": first_group(lambda count, _: bytes([count, 25])),
    "a shift of 255": first_group(lambda count, _: bytes([count, 255])),
    "a larger shift": first_group(lambda count, shift: bytes([count, shift + 7])),
    "a count of 35 bits": first_group(lambda _, shift: b"\xff\xff\xff\xff\x7f" + bytes([shift])),
    "a count that does not end": first_group(lambda _, shift: b"\x80\x80\x80\x80\x80\x01" + bytes([shift])),
    "a group too many": set_stream("groups", lambda groups: groups + b"\0"),
    "a group too few": set_stream("groups", lambda groups: groups[:-1]),
    "a long group table": set_stream("groups", lambda groups: groups + bytes(5000)),
    "no groups": set_stream("groups", b""),
    "a symbol too many": set_stream("gap_symbols", lambda symbols: symbols + b"\0"),
    "a symbol too few": set_stream("gap_symbols", lambda symbols: symbols[:-1]),
    "no symbols": set_stream("gap_symbols", b""),
    "symbol 240": set_stream("gap_symbols", lambda symbols: b"\xf0" + symbols[1:]),
    "symbol 255": set_stream("gap_symbols", lambda symbols: symbols[:-1] + b"\xff"),
    "other symbols": set_stream("gap_symbols", lambda symbols: b"\x0f" * len(symbols)),
    "large symbols": set_stream("gap_symbols", lambda symbols: b"\xef" * len(symbols)),
    "a gap beyond the block": with_gap(0xEF, b"\xff\xff\xff\x0f"),
    "bits missing": set_stream("gap_bits", lambda bits: bits[:-1]),
    "no bits": set_stream("gap_bits", b""),
    "bits left over": set_stream("gap_bits", lambda bits: bits + b"\0"),
    "bits in the last byte that nobody asked for": with_gap(16, b"\2"),
    "a step too many": set_stream("steps", lambda steps: steps + b"\0"),
    "a step too few": set_stream("steps", lambda steps: steps[:-1]),
    "a large step that is not there": set_stream("steps", lambda steps: b"\xff" + steps[1:]),
    "no large step where one is": set_stream("steps", lambda steps: bytes(len(steps))),
    "a large symbol too many": set_stream("large_symbols", lambda symbols: symbols + b"\0"),
    "large symbol 240": set_stream("large_symbols", lambda symbols: b"\xf0" + symbols[1:]),
    "large bits missing": set_stream("large_bits", lambda bits: bits[:-1]),
    "large bits left over": set_stream("large_bits", lambda bits: bits + b"\0"),
    "a step that is too wide by one": large(16 + 8 * 11 + 7, struct.pack("<H", (65535 - 15) & 0xFFF)),
    "a step of 32 bits": large(0xEF, b"\xff\xff\xff\x0f"),
    "a step that wraps round to a small one": large(0xEF, b"\xf5\xff\xff\x0f"),
    **{
        f"{name}: {what}": store(name, value)
        for name in ("groups", "gap_symbols", "steps", "large_symbols")
        for what, value in {
            "no frame": b"",
            "not a frame": b"nonsense",
            "a frame without a size": NO_SIZE.compress,
            "a frame of a huge size": frame_of_huge_size(),
            "a frame of a size of 64 bits": frame_of_huge_size(2**64 - 1),
            "a frame that states -1 bytes": frame_of_huge_size(2**64 - 2),
            "a frame that states what is expected and has less": lambda data: frame_of_huge_size(len(data)),
            "a frame that is cut short": lambda data: zipped(data)[:-1],
            "a frame with a byte after it": lambda data: zipped(data) + b"\0",
            "two frames": lambda data: zipped(data) * 2,
            "a frame to skip": skippable(b"hello"),
            "a frame to skip before": lambda data: skippable(b"hello") + zipped(data),
            "an empty frame with something behind it": zipped(b"") + b"something",
            "an empty frame that is cut short": zipped(b"")[:6],
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("lie", SPARSE_LIES)
def test_a_sparse_frame_that_lies_is_refused(lie, packing, samples):
    base, _, packed = samples
    forged = Forged.of(packed[packing])
    streams = Streams.of(forged.frames[0])
    SPARSE_LIES[lie](streams)
    forged.frames[0] = streams.frame()
    assert forged.sealed() != packed[packing]
    check_refused(forged.sealed(), base, DeltaCorrupt)
    target = copied(base)
    for backend in ("compiled", "numpy"):
        with pytest.raises(DeltaCorrupt):
            delta.decode(forged.sealed(), target, backend=backend)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("stream", range(6))
@pytest.mark.parametrize("by", [-1, 1, 2**31])
def test_stream_sizes_that_do_not_fill_the_frame_are_refused(by, stream, packing, samples):
    base, _, packed = samples
    forged = Forged.of(packed[packing])
    sizes = list(struct.unpack_from("<7I", forged.frames[0]))
    sizes[1 + stream] = (sizes[1 + stream] + by) % 2**32
    forged.frames[0] = struct.pack("<7I", *sizes) + forged.frames[0][28:]
    check_refused(forged.sealed(), base, DeltaCorrupt)


def test_large_steps_of_32_bit_lanes_do_not_wrap_round():
    """The widest is 2^32 − 2, beyond 32 bits there is nothing; a sum that wraps would pass for a small step."""
    base, new = {"w": np.zeros(4, np.uint32)}, {"w": np.array([0, 1 << 31, 0, 0], np.uint32)}
    packed = delta.encode(base, new, packing="gaps")
    streams = Streams.of(Forged.of(packed).frames[0])
    assert streams.large_symbols == b"\xef"  # zigzag is 2^32 − 1: the widest
    for low in range((2**32 - 1 - 15) & 0xFFFFFFF, 2**28):
        forged = Forged.of(packed)
        streams.large_bits = struct.pack("<I", low)
        forged.frames[0] = streams.frame()
        check_refused(forged.sealed(), base, DeltaCorrupt, match="does not fit")


@pytest.fixture
def three():
    """Three changes by one, in one group: no low bits, no large steps, and half a byte to spare."""
    base, new = {"w": np.zeros(40, np.uint16)}, {"w": np.zeros(40, np.uint16)}
    new["w"][[2, 3, 9]] = 1
    packed = delta.encode(base, new, packing="gaps")
    streams = Streams.of(Forged.of(packed).frames[0])
    assert (streams.groups, streams.gap_symbols, streams.gap_bits) == (b"\3\0", b"\2\0\5", b"")
    assert (streams.steps, streams.large_symbols, streams.large_bits) == (b"\x11\x01", b"", b"")
    return base, packed, streams


def with_frame(packed, streams):
    forged = Forged.of(packed)
    forged.frames[0] = streams.frame()
    return forged.sealed()


@pytest.mark.parametrize(
    "stored",
    [b"", zipped(b"") + b"\0", zipped(b"") * 2, zipped(b"")[:-1], zipped(b"")[:6], skippable(b"hello"), zipped(b"\0")],
    ids=["nothing", "a byte more", "two", "a byte less", "cut short", "one to skip", "not empty"],
)
def test_an_empty_stream_is_exactly_one_empty_frame(stored, three):
    base, packed, streams = three
    streams.stored["large_symbols"] = stored
    check_refused(with_frame(packed, streams), base, DeltaCorrupt)


def test_the_spare_half_of_the_last_byte_is_empty(three):
    base, packed, streams = three
    streams.steps = b"\x11\x11"
    check_refused(with_frame(packed, streams), base, DeltaCorrupt, match="half byte")


@pytest.mark.parametrize(
    ("shift", "symbol", "width"),
    [(25, 0, 25), (32, 0, 32), (64, 0, 64), (24, 0xEF, 52), (24, 0x38, 30), (1, 0xEF, 29)],
)
def test_numbers_that_are_too_wide_are_refused_though_all_their_bits_are_there(shift, symbol, width, three):
    base, packed, streams = three
    streams.groups, streams.gap_symbols = bytes([3, shift]), bytes([symbol] * 3)
    for low in (0, 1):
        streams.gap_bits = (low << (3 * width - 1)).to_bytes((3 * width + 7) // 8, "little")
        check_refused(with_frame(packed, streams), base, DeltaCorrupt)


def test_nothing_lies_between_the_last_frame_and_the_table(samples):
    base, _, packed = samples
    forged = Forged.of(packed["gaps"])
    check_refused(sealed(forged.table(), [*forged.frames, b"junk"], 0), base, DeltaCorrupt, match="frames end")
    nothing = delta.encode(base, base, packing="gaps")
    check_refused(sealed(Forged.of(nothing).table(), [b"junk"], 0), base, DeltaCorrupt, match="frames end")


def test_the_last_lane_of_a_block_is_the_last_that_can_change(samples):
    base, _, packed = samples
    count, lanes = Forged.of(packed["gaps"]).changes[0], base["a"].size
    for gap, inside in [(lanes - count, True), (lanes - count + 1, False), (2**32 - 1, False)]:
        forged = Forged.of(packed["gaps"])
        streams = Streams.of(forged.frames[0])
        symbols, low = kernels().put_numbers(np.array([gap], np.uint32), np.array([1]), np.zeros(1, np.uint8))
        with_gap(int(symbols[0]), low.tobytes())(streams)
        forged.frames[0] = streams.frame()
        if inside:
            assert int(delta.decode(forged.sealed()).tensors["a"].indices[-1]) == lanes - 1
            check_refused_when_applied(forged.sealed(), base)
        else:
            check_refused(forged.sealed(), base, DeltaCorrupt, match="outside")


def test_a_class_walk_that_ends_early_is_refused():
    """The gaps of a class lead beyond the lanes that it has."""
    lanes = np.array([0x3F80, 0x3F80, 0x4000, 0x3F80] * 8, np.uint16)
    new = lanes.copy()
    new[[1, 2, 9]] += 1
    base = {"w": lanes.view(DType.BF16.numpy)}
    forged = Forged.of(delta.encode(base, {"w": new.view(DType.BF16.numpy)}))
    streams = Streams.of(forged.frames[0])
    assert streams.gap_symbols == bytes([1, 5, 0])  # class 127 has 24 lanes, class 128 has 8
    for symbols, changed in [((1, 15, 0), True), ((14, 9, 0), False), ((1, 5, 8), False), ((1, 5, 7), True)]:
        streams.gap_symbols = bytes(symbols)
        forged.frames[0] = streams.frame()
        if changed:
            sparse = delta.decode(forged.sealed(), base)
            assert sparse.changes == 3
            check_refused_when_applied(forged.sealed(), base)
        else:
            check_refused(forged.sealed(), base, DeltaCorrupt, match="changes")


def check_refused_when_applied(data, base):
    """A delta that could be one, but does not lead where it says."""
    target, snapshot = copied(base), copied(base)
    with pytest.raises(DeltaCorrupt, match="undone"):
        delta.apply(target, data)
    assert same(target, snapshot)


def dense_frame(sizes, *planes):
    return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(planes)


def dense_lies(frame):
    sizes = struct.unpack_from("<4I", frame)
    planes, at = [], 16
    for size in sizes:
        planes.append(frame[at : at + size])
        at += size
    ones, zeros = zipped(b"\1" * 300), zipped(bytes(300))
    return {
        "no planes": dense_frame([0] * 4),
        "a plane too few": dense_frame(sizes[:3], *planes[:3]),
        "sizes that are too large": dense_frame([sizes[0] + 1, *sizes[1:]], *planes),
        "sizes that wrap round": dense_frame([2**32 - 1, *sizes[1:]], *planes),
        "something behind": frame + b"\0",
        "a plane too long": dense_frame([len(zipped(bytes(301))), *sizes[1:]], zipped(bytes(301)), *planes[1:]),
        "a plane too short": dense_frame([len(zipped(bytes(299))), *sizes[1:]], zipped(bytes(299)), *planes[1:]),
        "a plane without a size": dense_frame([len(NO_SIZE.compress(bytes(300)))] + [len(zeros)] * 3,
                                              NO_SIZE.compress(bytes(300)), *[zeros] * 3),
        "a plane of a huge size": dense_frame([len(frame_of_huge_size()), *sizes[1:]], frame_of_huge_size(), *planes[1:]),
        "no change at all": dense_frame([len(zeros)] * 4, *[zeros] * 4),
        "one that does not change": dense_frame([len(zipped(bytes(1) + b"\1" * 299))] + [len(zeros)] * 3,
                                                zipped(bytes(1) + b"\1" * 299), *[zeros] * 3),
        "another direction": dense_frame([len(ones)] + [len(zeros)] * 3, ones, *[zeros] * 3),
    }  # fmt: skip


def test_a_dense_frame_that_lies_is_refused(samples):
    base, _, packed = samples
    lies = dense_lies(Forged.of(packed["gaps"]).frames[1])
    for name, frame in lies.items():
        forged = Forged.of(packed["gaps"])
        forged.frames[1] = frame
        if name == "another direction":  # a delta like any other, but the new root tells
            check_refused_when_applied(forged.sealed(), base)
        else:
            check_refused(forged.sealed(), base, DeltaCorrupt)


def test_a_raw_frame_that_lies_is_refused(samples):
    base, _, packed = samples
    frame = Forged.of(packed["gaps"]).frames[2]
    assert len(frame) == 64
    at = next(at for at, byte in enumerate(frame) if byte)
    for lie in (b"", frame[:-1], frame + b"\1", bytes(64), frame[:at] + b"\0" + frame[at + 1 :]):
        forged = Forged.of(packed["gaps"])
        forged.frames[2] = lie
        check_refused(forged.sealed(), base, DeltaCorrupt)


@pytest.mark.parametrize(("lanes", "problem"), [(1 << 24, "digest"), ((1 << 24) + 1, "more than 16777216 lanes")])
def test_a_chunk_has_a_largest_size(lanes, problem):
    with pytest.raises(DeltaCorrupt, match=problem):
        delta.decode(sealed(table_of(1, lanes=lanes), [], 0))


# -- memory --------------------------------------------------------------------------------------------------------


def many(value, code, count):
    return struct.pack(f"<{code}", value) * count


def table_of(count, *, blocks_each=1, change=1, lanes=1, form=0, size=0):
    """The table of a state with one large tensor, and as many chunks and blocks as are asked for, all alike."""
    blocks = count * blocks_each
    head = text("") + text("") + struct.pack("<I", 1) + text("w") + text("U8") + struct.pack("<BQ", 1, 1 << 40) + text("")
    head += struct.pack("<I", 0)  # boxes
    columns = [
        many(blocks_each, "I", count), many(form, "B", count), many(size, "Q", count), many(0, "I", blocks),
        many(0, "I", blocks), many(0, "Q", blocks), many(lanes, "I", blocks), many(change, "I", blocks), bytes(16 * count),
    ]  # fmt: skip
    return head + struct.pack("<I", count) + b"".join(columns)


def tiny_lies():
    """Deltas of a few KB that claim to be large."""
    one = table_of(0)
    yield "a table that states 1 GiB", sealed(one, [], 0, stored=frame_of_huge_size(1 << 30) + bytes(900), decoded=1 << 30)
    yield "a table that states 4 GiB", sealed(one, [], 0, stored=frame_of_huge_size(2**32 - 1), decoded=2**32 - 1)
    yield "many chunks", sealed(table_of(600_000), [], 0)
    yield "many chunks without blocks", sealed(table_of(600_000, blocks_each=0), [], 0)
    yield "many blocks", sealed(table_of(1, blocks_each=1_000_000), [], 0)
    yield "many blocks without changes", sealed(table_of(1, blocks_each=1_000_000, change=0), [], 0)
    dims = struct.pack("<B", 255) + struct.pack("<Q", 2**64 - 1) * 255
    large = text("") * 2 + struct.pack("<I", 5000) + b"".join(text(f"t{n}") + text("U8") + dims for n in range(5000))
    yield "tensors of many dimensions", sealed(large, [], 0)
    most = 1 << 24
    varint = bytes([0x80, 0x80, 0x80, 0x08, 0])  # 2^24 changes, shift 0
    for fill in (b"", bytes(600)):
        claim = frame_of_huge_size(most) + fill
        claims = dict.fromkeys(("gap_symbols", "steps"), claim)
        streams = Streams(most, varint, b"", b"", b"", b"", b"", stored=claims)
        frame = streams.frame()
        table = table_of(1, change=most, lanes=most, size=len(frame))[:-16] + xxhash.xxh3_128(frame).digest()
        yield f"many changes ({len(fill)})", sealed(table, [frame], 0)
        frame = dense_frame([len(claim)], claim)
        table = table_of(1, change=1, lanes=most, form=1, size=len(frame))[:-16] + xxhash.xxh3_128(frame).digest()
        yield f"a dense block ({len(fill)})", sealed(table, [frame], 0)
        frame = bytes(len(fill))
        table = table_of(1, change=1, lanes=most, form=2, size=len(frame))[:-16] + xxhash.xxh3_128(frame).digest()
        yield f"a raw block ({len(fill)})", sealed(table, [frame], 0)


@pytest.mark.parametrize("name", [name for name, _ in tiny_lies()])
def test_a_small_delta_that_claims_to_be_large_reserves_little(name):
    data = dict(tiny_lies())[name]
    assert len(data) < 30_000
    tracemalloc.start()
    try:
        with pytest.raises(DeltaCorrupt):
            delta.decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20


def zipped_zeros(data, nbytes):
    """So many bytes that begin with these, all others 0, made without the memory for them."""
    job = zstandard.ZstdCompressor(level=1).compressobj(size=nbytes)
    zeros, rest = bytes(1 << 20), nbytes - len(data)
    parts = [job.compress(data)]
    parts += [job.compress(zeros[: min(len(zeros), rest - start)]) for start in range(0, rest, len(zeros))]
    return b"".join([*parts, job.flush()])


def chunk_for_each_lane(form, frame, lanes=1 << 16):
    tensors, ones = [["w", "U8", [lanes]]], [1] * lanes
    columns = [ones, [form] * lanes, [0] * lanes, list(range(lanes)), ones, ones, [frame] * lanes]
    return Forged(0, ["", ""], tensors, *columns).sealed()


def huge_table():
    return sealed(table_of(0), [], 0, stored=zipped_zeros(table_of(0), 1 << 30), decoded=1 << 30)


WORDY = {  # deltas that keep the promises of the format and say little at great length
    "a table of 1 GiB": huge_table,
    "a raw chunk for each lane": lambda: chunk_for_each_lane(2, b"\x01"),
    "a sparse chunk for each lane": lambda: chunk_for_each_lane(
        0, Streams(1, bytes([1, 0]), b"\0", b"", b"\0", b"", b"").frame()
    ),
    "tensors that the version does not have": lambda: Forged(
        0, ["", ""], [[f"t{number}", "U8", [0]] for number in range(20_000)], [], [], [], [], [], [], []
    ).sealed(),
    "boxes that no block is in": lambda: Forged(
        0, ["", ""], [["w", "U8", [1 << 16]]], [], [], [], [], [], [], [], boxes={0: [[[0], [1]]] * 100_000}
    ).sealed(),
}


@pytest.mark.parametrize("name", WORDY)
def test_unpacking_takes_no_more_than_the_tensors_of_the_version_allow(name, monkeypatch):
    data, base = WORDY[name](), {"w": np.zeros(1 << 16, np.uint8)}
    made = []
    monkeypatch.setattr(container, "Block", lambda *fields: made.append(fields))
    tracemalloc.start()
    try:
        for read in (
            lambda: delta.decode(data, base),
            lambda: delta.apply(copied(base), data),
            lambda: container.check_table(memoryview(data), delta.ArrayState(base).specs),
        ):
            with pytest.raises(DeltaCorrupt, match=r"table of \d+ bytes"):
                read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not made
    assert peak < len(data) + (4 << 20)


def test_a_delta_of_19_mb_with_a_chunk_for_each_lane_is_refused_at_once():
    """Unpacked, it took 44 s and more."""
    lanes = 275_000
    data = chunk_for_each_lane(0, Streams(1, bytes([1, 0]), b"\0", b"", b"\0", b"", b"").frame(), lanes)
    assert 18_000_000 < len(data) < 20_000_000
    base = {"w": np.zeros(lanes, np.uint8)}
    for read in (lambda: delta.decode(data, base), lambda: delta.apply(base, data)):
        began = time.monotonic()
        with pytest.raises(DeltaCorrupt, match=r"table of \d+ bytes"):
            read()
        assert time.monotonic() - began < 1


def test_without_a_base_a_delta_must_be_about_the_tensors_that_are_expected(samples):
    base, _, packed = samples
    specs = delta.ArrayState(base).specs
    assert delta.decode(packed["gaps"], specs=specs).tensors.keys() == delta.decode(packed["gaps"]).tensors.keys()
    for others in ({**specs, "more": specs["a"]}, {name: spec for name, spec in specs.items() if name != "same"}):
        with pytest.raises(DeltaDoesNotFit):
            delta.decode(packed["gaps"], specs=others)


def test_a_table_that_shrank_beyond_belief_is_refused_without_a_base_too():
    data = huge_table()
    assert len(data) < 40_000
    tracemalloc.start()
    try:
        for read in (delta.decode, delta.inspect):
            with pytest.raises(DeltaCorrupt, match=r"table of \d+ bytes"):
                read(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# -- anything else -------------------------------------------------------------------------------------------------

COLUMNS = ["counts", "forms", "owners", "inside", "starts", "lanes", "changes", "sizes"]
WIDTHS = {"counts": 32, "forms": 8, "owners": 32, "inside": 32, "starts": 64, "lanes": 32, "changes": 32, "sizes": 64}
INTERESTING = st.sampled_from(
    [0, 1, 2, 3, 5, 63, 64, 1999, 2000, 2001, 2**16, 2**24, 2**24 + 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]
)


def check_harmless(data, base):
    """Either refused, or decoded to a delta that is applied or found out; no other error, and no other state."""
    target, snapshot = copied(base), copied(base)
    try:
        delta.apply(target, data, threads=1)
    except REFUSALS:
        assert same(target, snapshot)
    for backend in ("compiled", "numpy"):
        with suppress(REFUSALS):
            delta.decode(data, base, backend=backend, threads=1)
        assert same(base, snapshot)


def near_or_odd(data, value, width):
    """Another number in the place of this one."""
    near = max(0, value + data.draw(st.integers(-2, 2)))
    return data.draw(st.just(near) | INTERESTING) % (1 << width)


@pytest.mark.untraced
@settings(max_examples=150)
@given(data=st.data(), packing=st.sampled_from(PACKINGS), cut=st.booleans())
def test_no_table_breaks_the_reader(data, packing, cut, samples, sliced):
    base, _, packed = sliced if cut else samples
    forged = Forged.of(packed[packing])
    forged.sizes = [len(frame) for frame in forged.frames]
    for _ in range(data.draw(st.integers(1, 3))):
        column = data.draw(st.sampled_from(COLUMNS))
        at = data.draw(st.integers(0, len(getattr(forged, column)) - 1))
        getattr(forged, column)[at] = near_or_odd(data, getattr(forged, column)[at], WIDTHS[column])
    check_harmless(forged.sealed(), base)


@pytest.mark.untraced
@settings(max_examples=100)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_no_box_breaks_the_reader(data, packing, sliced):
    base, _, packed = sliced
    forged = Forged.of(packed[packing])
    for _ in range(data.draw(st.integers(1, 3))):
        numbers = data.draw(st.sampled_from([part for one in range(3) for box in forged.boxes[one] for part in box]))
        at = data.draw(st.integers(0, len(numbers) - 1))
        numbers[at] = near_or_odd(data, numbers[at], 64)
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(forged.inside) - 1))
        forged.inside[at] = data.draw(st.integers(0, 3))
    check_harmless(forged.sealed(), base)


@pytest.mark.untraced
@settings(max_examples=150)
@given(data=st.data(), packing=st.sampled_from(PACKINGS), cut=st.booleans())
def test_no_bytes_of_a_table_break_the_reader(data, packing, cut, samples, sliced):
    base, _, packed = sliced if cut else samples
    forged = Forged.of(packed[packing])
    table = bytearray(forged.table())
    for _ in range(data.draw(st.integers(1, 4))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    check_harmless(sealed(bytes(table), forged.frames, forged.packing), base)


@pytest.mark.untraced
@settings(max_examples=200)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_no_contents_of_streams_break_the_reader(data, packing, samples):
    base, _, packed = samples
    forged = Forged.of(packed[packing])
    streams = Streams.of(forged.frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(Streams.NAMES))
        contents = bytearray(getattr(streams, name))
        if contents:
            contents[data.draw(st.integers(0, len(contents) - 1))] = data.draw(st.integers(0, 255))
        setattr(streams, name, bytes(contents))
    forged.frames[0] = streams.frame()
    check_harmless(forged.sealed(), base)


@pytest.mark.untraced
@settings(max_examples=100)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_no_bytes_of_frames_break_the_reader(data, packing, samples):
    base, _, packed = samples
    forged = Forged.of(packed[packing])
    number = data.draw(st.integers(0, 2))
    frame = bytearray(forged.frames[number])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    forged.frames[number] = bytes(frame)
    check_harmless(forged.sealed(), base)


@settings(max_examples=100)
@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_delta_are_refused(data):
    with pytest.raises(REFUSALS):
        delta.inspect(data)
    with pytest.raises(REFUSALS):
        delta.apply({}, data)
