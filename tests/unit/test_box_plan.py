"""Plans that fetch boxes from whoever holds them: every wanted element once, and the work shared out."""

import time
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.tensors.box_plan import (
    MAX_PROBLEMS,
    SPLIT_NBYTES,
    Place,
    PlacedBox,
    Wanted,
    chunks,
    intersection,
    plan,
    tiling_problems,
)
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import add_up, array_sum, box_sum

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def held_at(box, files):
    return PlacedBox(box, tuple(Place(str(file), 0) for file in files))


def files_of(fetch):
    return tuple(int(place.file) for place in fetch.places)


def cuts(draw, size):
    return sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})


@st.composite
def tilings(draw, shape):
    """Boxes that cover a shape exactly once: cut along one dimension, each of these along the next, and so on."""

    def divided(start, dim):
        if dim == len(shape):
            return [Box(tuple(a for a, _ in start), tuple(b - a for a, b in start))]
        edges = cuts(draw, shape[dim])
        return [box for a, b in pairwise(edges) for box in divided((*start, (a, b)), dim + 1)]

    return draw(st.permutations(divided((), 0)))


@st.composite
def boxes_in(draw, shape):
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(starts, tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)))


@st.composite
def cases(draw):
    shape = draw(SHAPES)
    tiles = draw(tilings(shape))
    holders = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(tuple)
    held = [held_at(tile, draw(holders)) for tile in tiles]
    return shape, held, draw(st.lists(boxes_in(shape), min_size=1, max_size=4))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_wanted_element_is_fetched_once_from_somebody_who_holds_it(case):
    shape, held, boxes = case
    wanted = [Wanted("w", box, 2) for box in boxes]

    fetches, lost = plan(wanted, {"w": held})

    assert not lost
    for index, box in enumerate(boxes):
        count = np.zeros(shape, dtype=int)
        for fetch in fetches:
            if fetch.wanted == index:
                box_of(count, fetch.box)[...] += 1
        inside = np.zeros(shape, dtype=int)
        box_of(inside, box)[...] = 1
        assert (count == inside).all()
    for fetch in fetches:
        (holding,) = [one for one in held if intersection(one.box, fetch.box)]
        assert intersection(holding.box, fetch.box) == fetch.box
        assert set(fetch.places) == set(holding.places)
        assert fetch.held == holding.box
    assert (fetches, lost) == plan(wanted, {"w": held[::-1]})  # whatever order it is told in


@given(cases(), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_without_a_holder_the_others_are_asked_and_what_only_it_had_is_lost(case, gone):
    _, held, boxes = case
    wanted = [Wanted("w", box, 2) for box in boxes]

    fetches, lost = plan(wanted, {"w": held}, without=[str(gone)])

    assert all(gone not in files_of(fetch) for fetch in fetches)
    assert all(files_of(fetch) == (gone,) for fetch in lost)
    elements = sum(prod(fetch.box.shape) for fetch in (*fetches, *lost))
    assert elements == sum(prod(box.shape) for box in boxes)


def test_what_several_hold_is_shared_out_by_bytes_and_what_one_holds_counts():
    rows = 64
    held = {
        "large": [held_at(Box.whole((rows, SPLIT_NBYTES)), (0, 1, 2, 3))],
        "own": [held_at(Box.whole((8, SPLIT_NBYTES)), (2,))],
        **{f"norm{index}": [held_at(Box.whole((64,)), (0, 1, 2, 3))] for index in range(40)},
    }
    wanted = [Wanted(name, boxes[0].box, 1) for name, boxes in held.items()]

    fetches, _ = plan(wanted, held)

    load = dict.fromkeys(range(4), 0)
    for fetch in fetches:
        load[files_of(fetch)[0]] += prod(fetch.box.shape)
    assert max(load.values()) - min(load.values()) <= 16 * SPLIT_NBYTES
    assert min(load.values()) >= 16 * SPLIT_NBYTES
    norms = [fetch for fetch in fetches if wanted[fetch.wanted].tensor.startswith("norm")]
    assert len(norms) == 40  # too small to be divided


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_chunks_follow_one_another_in_the_bytes_of_a_box(data):
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape))
    nbytes = data.draw(st.integers(1, 60))
    array = np.arange(prod(shape), dtype=np.int16).reshape(shape)

    parts = list(chunks(box, 2, nbytes))

    joined = b"".join(box_of(array, part).tobytes() for part in parts)
    assert joined == box_of(array, box).tobytes()
    assert all(prod(part.shape) * 2 <= max(nbytes, 2) for part in parts)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_boxes_that_cover_a_tensor_once_have_no_problems_and_others_do(data):
    shape = data.draw(SHAPES)
    tiles = data.draw(tilings(shape))
    empty = data.draw(boxes_in(shape).filter(lambda box: not prod(box.shape)) if shape else st.none())
    assert tiling_problems(shape, [*tiles, *([empty] if empty else [])]) == []

    one = data.draw(st.integers(0, len(tiles) - 1))
    assert tiling_problems(shape, tiles[:one] + tiles[one + 1 :])
    assert tiling_problems(shape, [*tiles, tiles[one]])


def test_all_holes_and_overlaps_are_told():
    boxes = [Box((0, 0), (2, 4)), Box((1, 3), (3, 1)), Box((3, 0), (1, 3))]

    assert tiling_problems((5, 4), boxes) == [
        "[1:2, 3:4] lies in [0:2, 0:4] and in [1:4, 3:4]",
        "nobody holds [2:3, 0:3]",
        "nobody holds [4:5, 0:4]",
    ]
    assert tiling_problems((3,), [Box((2,), (2,))]) == ["[2:4] lies outside of a tensor of shape [3]"]
    assert tiling_problems((), []) == ["nobody holds []"]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_sums_of_boxes_add_up_to_that_of_the_array_and_change_with_every_byte(data):
    shape = data.draw(SHAPES)
    tiles = data.draw(tilings(shape))
    spec = TensorSpec("w", DType.U16, shape)
    array = np.random.default_rng(1).integers(0, 1 << 16, shape).astype(np.uint16)

    total = add_up(box_sum(spec, tile, box_of(array, tile)) for tile in tiles)

    assert total == array_sum(spec, array)
    changed = array.copy()
    changed.reshape(-1)[data.draw(st.integers(0, array.size - 1))] ^= 1
    assert add_up(box_sum(spec, tile, box_of(changed, tile)) for tile in tiles) != total


def test_the_same_bytes_in_other_boxes_have_the_same_sum_and_in_another_place_another():
    array = np.arange(4, dtype=np.uint8)
    spec = TensorSpec("w", DType.U8, (4,))
    halves, others = [Box((0,), (2,)), Box((2,), (2,))], [Box((0,), (1,)), Box((1,), (3,))]

    first, second = (add_up(box_sum(spec, box, box_of(array, box)) for box in boxes) for boxes in (halves, others))

    assert first == second
    assert box_sum(spec, halves[0], array[:2]) != box_sum(spec, halves[1], array[:2])


@pytest.mark.parametrize("box", [Box.whole((4, 2)), Box((0, 1), (4, 1)), Box((1, 0), (2, 2))])
def test_summing_a_box_asks_whether_to_go_on(box):
    def stop():
        raise RuntimeError("stop")

    spec, asked, array = TensorSpec("w", DType.F64, (4, 2)), [], box_of(np.ones((4, 2)), box)
    with pytest.raises(RuntimeError, match="stop"):
        box_sum(spec, box, array, stop)
    assert box_sum(spec, box, array, lambda: asked.append(box)) == box_sum(spec, box, array)
    assert asked


def test_boxes_that_cross_are_told_up_to_a_bound_and_soon():
    """Each of a thousand rows crosses each of a thousand columns: a million parts lie in two boxes."""
    count = 1000
    boxes = [Box((at, 0), (1, count)) for at in range(count)] + [Box((0, at), (count, 1)) for at in range(count)]
    began = time.monotonic()
    assert len(tiling_problems((count, count), boxes)) == MAX_PROBLEMS
    assert len(tiling_problems((1,), [Box((at,), (1,)) for at in range(1, count)])) == MAX_PROBLEMS
    assert time.monotonic() - began < 5


def layered(dims):
    """A tiling in which each layer along the last dimension is cut in two along another one."""
    shape, boxes = (2,) * (dims - 1) + (dims - 1,), []
    for layer in range(dims - 1):
        for half in (0, 1):
            start, size = [0] * dims, list(shape)
            start[layer], size[layer], start[-1], size[-1] = half, 1, layer, 1
            boxes.append(Box(tuple(start), tuple(size)))
    return shape, boxes


@pytest.mark.parametrize("dims", [3, 18, 60])
def test_a_tiling_of_many_dimensions_is_proved_soon_and_what_is_none_refused_soon(dims):
    shape, boxes = layered(dims)
    began = time.monotonic()
    assert tiling_problems(shape, boxes) == []
    assert tiling_problems(shape, boxes[:-1])
    assert tiling_problems(shape, [*boxes[:-1], boxes[-2]])  # of the right volume
    assert time.monotonic() - began < 10


def test_a_tiling_of_thousands_of_boxes_is_proved_soon():
    rows = [Box((at, 0), (1, 4000)) for at in range(4000)]
    columns = [Box((0, 4000 + at), (4000, 1)) for at in range(4000)]
    grid = [Box((at, 8000 + 50 * column), (50, 50)) for at in range(0, 4000, 50) for column in range(80)]
    began = time.monotonic()
    assert tiling_problems((4000, 12000), [*rows, *columns, *grid]) == []
    assert time.monotonic() - began < 3
    assert tiling_problems((4000, 12000), [*rows, *columns, *grid[1:], grid[7]])
    assert time.monotonic() - began < 10


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_boxes_have_problems_unless_each_element_lies_in_one(data):
    shape = data.draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        box_of(count, box)[...] += 1
    assert bool(tiling_problems(shape, boxes)) == (count != 1).any()
