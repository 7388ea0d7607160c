"""Deltas that are cut where ranks divide tensors: they mean the same, and a rank needs nothing but its own part."""

from itertools import pairwise, product

import delta_reader
import numpy as np
import pytest
from delta_samples import chunks_of, copied, equal_deltas, pair, same
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast import delta
from weightcast.delta import Cut, Slicing, container, encoder, slicing
from weightcast.delta.container import PACKINGS, read_table
from weightcast.delta.decoder import decode_chunks, decode_payloads
from weightcast.delta.runs import slice_chains, slice_runs
from weightcast.delta.states import block_lanes
from weightcast.errors import InvalidInput
from weightcast.tensors.box_plan import intersection, moved, tiling_problems
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType
from weightcast.tensors.lanes import lanes_per_element
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, array_sum

BACKENDS = ("compiled", "numpy")


def bytes_of(state):
    return {name: array.tobytes() for name, array in state.items()}


def states_of(rng, shapes, dtype, *, density=0.1, far=False):
    """Two states with these tensors."""
    pairs = {name: pair(rng, dtype, shape, density=density, far=far) for name, shape in shapes.items()}
    return tuple({name: both[side] for name, both in pairs.items()} for side in (0, 1))


def table_of(packed):
    return read_table(memoryview(packed))


def blocks_of(packed):
    return [block for chunk in table_of(packed).chunks for block in chunk.blocks]


def box_of_block(block, spec):
    """What a block covers, which is whole rows of its tensor, or a whole box."""
    if block.box is None:
        return block.bounds(spec)
    assert (block.start, block.lanes) == (0, int(np.prod(block.box.shape)) * lanes_per_element(spec.dtype))
    return block.box


def parts_of(cuts, block, spec):
    """The parts of the places that a block was made of."""
    places = [place for place in cuts.places(spec) if place.box == block.box]
    return {place.part for place in places if block.box is not None or place.start == block.start}


def check_chunks(packed, cuts):
    """Each chunk has blocks of one part and of one kind, and blocks lie where the slicing says."""
    table = table_of(packed)
    for chunk in table.chunks:
        parts = [parts_of(cuts, block, table.specs[block.tensor]) for block in chunk.blocks]
        assert all(len(part) == 1 for part in parts)
        assert len(set.union(*parts)) == 1
        assert sum(block.lanes for block in chunk.blocks) <= slicing.CHUNK_LANES


def check_sliced(base, new, cuts, packing):
    """Cut or not, a delta means the same; the bytes depend on nothing but the states, the packing and the cuts."""
    packed = delta.encode(base, new, packing=packing, slicing=cuts, threads=1, backend="compiled")
    whole = delta.encode(base, new, packing=packing)
    for backend, threads in ((None, 3), ("numpy", 1), ("numpy", 2)):
        assert packed == delta.encode(base, new, packing=packing, slicing=cuts, threads=threads, backend=backend)
    sparse = delta.decode(packed, base, threads=1)
    assert equal_deltas(sparse, delta.decode(whole, base))
    for backend, threads in product(BACKENDS, (1, 3)):
        assert equal_deltas(sparse, delta.decode(packed, base, backend=backend, threads=threads))
    for other in PACKINGS:
        again = delta.pack(sparse, packing=other, slicing=cuts, base=base)
        assert again == (packed if other == packing else delta.encode(base, new, packing=other, slicing=cuts))
    assert (sparse.base_root, sparse.new_root) == (table_of(whole).base_root, table_of(whole).new_root)
    target = copied(base)
    delta.apply(target, packed)
    assert same(target, new)
    check_chunks(packed, cuts)
    return packed


# -- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.untraced
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", list(DType))
def test_slices_of_every_dtype_along_every_dimension_restore_every_bit(dtype, packing, rng):
    shapes = {"a1": (61,), "b1": (9, 14), "b0": (9, 14), "c0": (5, 6, 7), "c1": (5, 6, 7), "c2": (5, 6, 7), "s0": ()}
    base, new = states_of(rng, shapes, dtype, density=0.2, far=True)
    cuts = Slicing(tuple(Cut((f"*{dim}",), dim, 4) for dim in range(3)))  # a1 and s0 have no such dimension
    with chunks_of(100):
        packed = check_sliced(base, new, cuts, packing)
        assert delta_reader.read(packed, bytes_of(base)) == bytes_of(new)
    boxed = {block.tensor for block in blocks_of(packed) if block.box is not None}
    assert boxed == {"b1", "c1", "c2"}


@st.composite
def cuts_of(draw, shape):
    """A cut of tensors of this shape: into equal parts, with sections, or at edges."""
    dim = draw(st.integers(0, 2))
    size = shape[dim] if dim < len(shape) else 10
    parts, like = draw(st.sampled_from([1, 2, 3, 7, 64])), draw(st.sampled_from(["one", "two"]))
    inner = sorted(draw(st.sets(st.integers(1, size), max_size=3)))
    how = draw(st.sampled_from(["parts", "sections", "edges"]))
    if how == "parts":
        return dim, {"parts": parts, "like": like}
    if how == "edges":
        return dim, {"parts": parts, "like": like, "edges": tuple(inner)}
    sections = tuple(after - before for before, after in pairwise([0, *(edge for edge in inner if edge < size), size]))
    return dim, {"parts": min(parts, 64 // len(sections)), "like": like, "sections": sections}


@st.composite
def sliced_states(draw):
    """Two states of some tensors with up to three dimensions, and a cut for each of them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base, new, cuts = {}, {}, []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
        density, far = draw(st.sampled_from([0, 0.05, 0.3, 1])), draw(st.booleans())
        name = f"t{number}"
        base[name], new[name] = pair(rng, draw(st.sampled_from(list(DType))), shape, density=density, far=far)
        dim, how = draw(cuts_of(shape))
        cuts.append(Cut((name,), dim, **how))
    return base, new, Slicing(tuple(cuts))


@pytest.mark.untraced
@settings(max_examples=50)
@given(sample=sliced_states(), packing=st.sampled_from(PACKINGS), chunk=st.sampled_from([16, 100, 1 << 23]))
def test_any_slicing_means_the_same_delta(sample, packing, chunk):
    base, new, cuts = sample
    with chunks_of(chunk), pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_DENSE_LANES", 40)
        packed = check_sliced(base, new, cuts, packing)
    assert delta_reader.read(packed, bytes_of(base)) == bytes_of(new)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", ["sparse", "dense", "raw"])
def test_boxes_have_every_form(form, packing, rng):
    density, far = {"sparse": (0.05, False), "dense": (1, False), "raw": (1, True)}[form]
    base, new = states_of(rng, {"w": (100, 200), "v": (50, 4, 100)}, DType.F32, density=density, far=far)
    with chunks_of(10_000):
        packed = check_sliced(base, new, Slicing((Cut(("*",), 1, 2),)), packing)
    assert {chunk.form for chunk in table_of(packed).chunks} == {form}
    assert all(block.box is not None for block in blocks_of(packed))
    assert delta_reader.read(packed, bytes_of(base)) == bytes_of(new)


@pytest.mark.parametrize("packing", PACKINGS)
def test_tensors_larger_than_a_real_chunk_are_cut_into_boxes_of_some_rows(packing, rng):
    shape = (2100, 4100)  # 2046 rows are a chunk
    old = np.zeros(shape, np.uint16)
    old[:, ::64] = rng.integers(0, 1 << 16, old[:, ::64].shape, dtype=np.uint16)
    new = old.copy()
    new[np.arange(2100), rng.integers(0, 4100, 2100)] += 1
    base, state = ({"w": array.view(DType.BF16.numpy)} for array in (old, new))
    cuts = Slicing((Cut(("w",), 1, 3),))
    packed = delta.encode(base, state, packing=packing, slicing=cuts)
    boxes = [block.box for block in blocks_of(packed)]
    columns = [(0, 1366), (1366, 1367), (2733, 1367)]
    assert set(boxes) == {Box((at, first), (rows, size)) for at, rows in [(0, 2046), (2046, 54)] for first, size in columns}
    check_chunks(packed, cuts)
    assert equal_deltas(delta.decode(packed, base), delta.decode(delta.encode(base, state), base))
    assert delta.pack(delta.decode(packed, base), packing=packing, slicing=cuts, base=base) == packed
    delta.apply(base, packed)
    assert same(base, state)


@pytest.mark.parametrize("packing", PACKINGS)
def test_chunks_that_have_to_close_before_they_are_full_change_nothing_else(packing, rng, monkeypatch):
    """Many parts are open at the same time; what waits in all of them is bounded."""
    shapes = {f"t{number}": (20, 30) for number in range(12)}
    base, new = states_of(rng, shapes, DType.BF16, density=0.1)
    base |= {"same": np.ones((20, 30), DType.BF16.numpy)}
    new |= {"same": np.ones((20, 30), DType.BF16.numpy)}
    cuts = Slicing((Cut(("t?",), 1, 8), Cut(("*",), 0, 7, like="other")))
    with chunks_of(2000):
        open_chunks = len(table_of(check_sliced(base, new, cuts, packing)).chunks)
        monkeypatch.setattr(encoder, "_PENDING_LANES", 1500)
        assert len(table_of(check_sliced(base, new, cuts, packing)).chunks) > open_chunks


@pytest.mark.parametrize("threads", [1, 3])
def test_slices_of_tensors_that_are_only_lent_are_copied_and_summed(threads, rng):
    base, new = states_of(rng, {f"t{number}": (40, 50) for number in range(4)}, DType.F32, density=0.05)
    buffer, pieces = np.zeros(2000, np.uint32), []
    cuts = Slicing((Cut(("*",), 1, 4),))
    with (
        chunks_of(700),
        delta.Encoder(pieces.append, packing="classes", slicing=cuts, threads=threads, collect_nbytes=1 << 20) as encoding,
    ):
        for name, array in base.items():
            buffer[:] = new[name].view(np.uint32).reshape(-1)
            old = array.view(np.uint32).reshape(-1)
            spec = TensorSpec(name, DType.F32, (40, 50))
            encoding.add(spec, lambda a, b, old=old: old[a:b], lambda a, b: buffer[a:b], borrowed=True)
            buffer[:] = 0
        encoding.finish(base_root="", new_root="")
        collected = encoding.delta(base_root="", new_root="")
        whole = delta.encode(base, new, slicing=cuts)
    assert equal_deltas(collected, delta.decode(b"".join(pieces), base))
    assert equal_deltas(collected, delta.decode(whole, base))
    for name, array in base.items():
        spec = TensorSpec(name, DType.F32, (40, 50))
        assert encoding.sums[name] == array_sum(spec, new[name])
        assert encoding.sums[name] - encoding.grown[name] == array_sum(spec, array)


# -- what a rank needs ---------------------------------------------------------------------------------------------


def held_by(specs, cuts, rank, ranks):
    """Boxes of one of some ranks that share out the parts of a slicing, by tensor; all of what is not cut."""
    boxes = {}
    for name, spec in specs.items():
        cut = next((cut for cut in cuts.cuts if name in cut.names), None)
        boxes[name] = Box.whole(spec.shape) if cut is None else Box.shard(spec.shape, dim=cut.dim, rank=rank, ranks=ranks)
    return boxes


LAYERS = {"q": (32, 24), "o": (24, 32), "up": (48, 24), "down": (24, 48), "norm": (24,), "experts": (6, 16, 10)}
CUTS = Slicing((Cut(("q", "up"), 0, 8), Cut(("o", "down"), 1, 8), Cut(("experts",), 1, 8, like="experts")))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F64, DType.C64, DType.U8])
def test_a_rank_decodes_its_chunks_with_its_own_frames_and_its_own_base(dtype, packing, ranks, rng):
    base, new = states_of(rng, LAYERS, dtype, density=0.1)
    with chunks_of(500):
        packed = delta.encode(base, new, packing=packing, slicing=CUTS)
    table = table_of(packed)
    expected = delta.decode(packed, base)
    fetched = []
    for rank in range(ranks):
        boxes = held_by(table.specs, CUTS, rank, ranks)
        mine = [
            chunk
            for chunk in table.chunks
            if any(intersection(block.bounds(table.specs[block.tensor]), boxes[block.tensor]) for block in chunk.blocks)
        ]
        blocks = [block for chunk in mine for block in chunk.blocks]
        for block in blocks:  # none of them reaches beyond what the rank holds
            own = box_of_block(block, table.specs[block.tensor])
            assert intersection(own, boxes[block.tensor]) == own
        only_mine = bytearray(len(packed))  # the other frames were not fetched
        for chunk in mine:
            only_mine[chunk.offset : chunk.offset + chunk.nbytes] = packed[chunk.offset : chunk.offset + chunk.nbytes]
        here = {}  # other parts of the base are not known
        for name, array in base.items():
            here[name] = np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape).copy()
            where = tuple(slice(at, at + size) for at, size in zip(boxes[name].start, boxes[name].shape, strict=True))
            here[name][where] = array[where]
        state = delta.ArrayState(here)
        old = (lambda block, state=state: block_lanes(state, block)) if packing == "classes" else None
        runs = decode_chunks(memoryview(only_mine), table, mine, old)
        held = [Held.slice_of(table.specs[name], box) for name, box in boxes.items()]
        assert equal_deltas(slice_runs(table.specs, runs, held), delta.slice(expected, boxes))
        fetched.append(sum(chunk.nbytes for chunk in mine))
    whole = [chunk.nbytes for chunk in table.chunks if chunk.blocks[0].tensor == "norm"]
    assert sum(fetched) == sum(chunk.nbytes for chunk in table.chunks) + (ranks - 1) * sum(whole)


def part_of(array, box):
    return array[tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))]


@pytest.mark.parametrize("cuts", [Slicing(), CUTS], ids=["whole", "cut"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F64])
def test_what_ranks_of_a_trainer_pack_of_their_boxes_is_one_delta(dtype, packing, cuts, rng):
    """The ranks divide tensors in another way than the cuts do: by the other dimension, or by the same in other sizes."""
    base, new = states_of(rng, LAYERS, dtype, density=0.1)
    specs = delta.ArrayState(base).specs
    dims = {"q": 1, "o": 1, "up": 0, "down": 0, "experts": 2, "norm": 0}
    payloads, grown = [], dict.fromkeys(specs, Sum())
    with chunks_of(500):
        for rank in range(2):
            pieces = []
            with delta.Encoder(pieces.append, packing=packing, slicing=cuts) as encoding:
                for name, spec in specs.items():
                    box = Box.shard(spec.shape, dim=dims[name], rank=rank, ranks=2)
                    encoding.add_box(spec, box, part_of(base[name], box), part_of(new[name], box), summed=spec)
                encoding.finish(base_root="", new_root="")
                grown = {name: total + encoding.grown[name] for name, total in grown.items()}
            payloads.append(b"".join(pieces))
            assert all(sum(block.lanes for block in chunk.blocks) <= 500 for chunk in table_of(payloads[-1]).chunks)
    together = decode_payloads(payloads, delta.ArrayState(base), specs=specs)
    assert equal_deltas(together, delta.decode(delta.encode(base, new), base))
    for name, spec in specs.items():
        assert array_sum(spec, base[name]) + grown[name] == array_sum(spec, new[name])


@given(data=st.data(), dtype=st.sampled_from([DType.U8, DType.F64]))
def test_the_boxes_of_a_box_cover_it_once(data, dtype):
    shape = tuple(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    held = Box(start, tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))
    dim, how = data.draw(cuts_of(shape))
    spec, cuts = TensorSpec("w", dtype, shape), Slicing((Cut(("w",), dim, **how),))
    with chunks_of(data.draw(st.sampled_from([8, 100, 1 << 23]))):
        boxes = list(cuts.boxes(spec, held))
        ranges = cuts.cuts[0].ranges(shape[dim]) if dim < len(shape) else []
    assert tiling_problems(held.shape, [moved(box, held.start) for _, box in boxes]) == []
    for (_, _, part), box in boxes if ranges else ():
        assert any(first <= box.start[dim] and box.start[dim] + box.shape[dim] <= last for first, last in ranges[part])


@st.composite
def held_parts(draw, base):
    """A box of each tensor, which need not be along the cuts, and perhaps a matrix transposed into a stack."""
    held = []
    for name, array in base.items():
        start = tuple(draw(st.integers(0, size - 1)) for size in array.shape)
        shape = tuple(draw(st.integers(0, size - at)) for size, at in zip(array.shape, start, strict=True))
        spec = delta.ArrayState(base).specs[name]
        if len(shape) == 2 and draw(st.booleans()):
            placement = Placement(name, Box(start, shape), (1, 0, 0), transposed=True)
            held.append(Held(TensorSpec(name, spec.dtype, (2, shape[1], shape[0] + 1)), (placement,)))
        else:
            held.append(Held.slice_of(spec, Box(start, shape)))
    return held


@pytest.mark.untraced
@settings(max_examples=100)
@given(data=st.data(), sample=sliced_states(), packing=st.sampled_from(PACKINGS), chunk=st.sampled_from([16, 1 << 23]))
def test_a_slice_of_a_delta_does_not_depend_on_how_it_was_cut(data, sample, packing, chunk):
    base, new, cuts = sample
    held = data.draw(held_parts(base))
    expected = delta.slice(delta.decode(delta.encode(base, new), base), held)
    with chunks_of(chunk):
        packed = delta.encode(base, new, packing=packing, slicing=cuts)
    table = table_of(packed)
    assert equal_deltas(delta.slice(delta.decode(packed, base), held), expected)
    state = delta.ArrayState(base)
    runs = decode_chunks(memoryview(packed), table, table.chunks, lambda block: block_lanes(state, block))
    assert equal_deltas(slice_runs(table.specs, runs, held), expected)


@pytest.mark.parametrize("length", [2, 17, 40])  # chains are folded sixteen at a time
def test_a_chain_of_slices_is_the_slice_of_the_whole_way(rng, length):
    shapes = {"w": (30, 40), "v": (20, 10)}
    states = [states_of(rng, shapes, DType.BF16)[0]]
    for _ in range(length):
        after = copied(states[-1])
        for array in after.values():
            lanes = array.reshape(-1).view(np.uint16)
            lanes[rng.integers(0, lanes.size, 30)] ^= np.uint16(1)  # some of them go back to what they were
        states.append(after)
    held = [
        Held.slice_of(delta.ArrayState(states[0]).specs["w"], Box((5, 10), (20, 20))),
        Held(TensorSpec("t", DType.BF16, (10, 25)), (Placement("v", Box((0, 0), (20, 10)), (0, 5), transposed=True),)),
    ]
    cuts = Slicing((Cut(("*",), 1, 4),))
    packed = [delta.encode(before, after, packing="gaps", slicing=cuts) for before, after in pairwise(states)]
    tables = [table_of(one) for one in packed]
    chain = [decode_chunks(memoryview(one), table, table.chunks, None) for one, table in zip(packed, tables, strict=True)]
    expected = delta.slice(delta.decode(delta.encode(states[0], states[-1]), states[0]), held)
    assert equal_deltas(slice_chains(tables[0].specs, [chain], held), expected)
    each = [[[run for run in runs if run.tensor == name] for runs in chain] for name in tables[0].specs]
    assert equal_deltas(slice_chains(tables[0].specs, each, held), expected)


def test_deltas_with_slices_follow_one_another(rng):
    first, second = states_of(rng, {"w": (30, 40), "v": (20, 10)}, DType.BF16, density=0.2)
    third = {name: array.copy() for name, array in second.items()}
    third["w"].view(np.uint16)[:, 7:9] += 1
    cuts = Slicing((Cut(("w",), 1, 4), Cut(("v",), 0, 3)))
    with chunks_of(200):
        links = [delta.encode(a, b, slicing=cuts) for a, b in pairwise([first, second, third])]
        folded = delta.decode_chain(links, first)
        assert equal_deltas(folded, delta.decode(delta.encode(first, third), first))
        assert delta.pack(folded, packing="classes", slicing=cuts, base=first) == delta.encode(first, third, slicing=cuts)


def decoder_states(rng, layers, width):
    """Weights of a decoder before and after an optimizer step, in which small weights change more often."""
    matrices = {"q": (1, 1), "k": (0.25, 1), "v": (0.25, 1), "o": (1, 1), "gate": (2, 1), "up": (2, 1), "down": (1, 2)}
    base, new = {}, {}
    for layer, (matrix, (high, wide)) in product(range(layers), matrices.items()):
        old = rng.normal(0, 0.02, (int(high * width), int(wide * width))).astype(np.float32)
        changed = rng.random(old.shape, np.float32) * np.abs(old) < 2.5e-4
        name = f"layers.{layer}.{matrix}_proj.weight"
        base[name] = old.astype(DType.BF16.numpy)
        new[name] = base[name].copy()
        new[name].view(np.uint16)[changed] += rng.choice([-1, 1], np.count_nonzero(changed)).astype(np.int16).view(np.uint16)
    return base, new


@pytest.mark.untraced
@pytest.mark.parametrize("packing", PACKINGS)
def test_sixteen_slices_of_many_layers_cost_little(packing, rng):
    """Each chunk costs a few hundred bytes, however many changes it has: larger weights pay a smaller share."""
    base, new = decoder_states(rng, layers=8, width=384)  # 10 million lanes, of which every twentieth changes
    whole = delta.encode(base, new, packing=packing)
    sliced = delta.encode(base, new, packing=packing, slicing=Slicing.decoder(16))
    assert len(table_of(whole).chunks) == 2
    assert len(table_of(sliced).chunks) == 32  # 16 of key and value heads, 16 of all others
    assert len(sliced) <= 1.06 * len(whole)


# -- where tensors are cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "size", "ranges"),
    [
        (Cut(("*",), 0, 4), 8, [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]),
        (Cut(("*",), 0, 3), 8, [[(0, 2)], [(2, 5)], [(5, 8)]]),
        (Cut(("*",), 0, 5), 3, [[(0, 1)], [(1, 2)], [(2, 3)]]),
        (Cut(("*",), 0, 2, sections=(4, 2, 2)), 8, [[(0, 2), (4, 5), (6, 7)], [(2, 4), (5, 6), (7, 8)]]),
        (Cut(("*",), 0, 4, sections=(6, 2)), 8, [[(0, 3), (6, 7)], [(3, 6), (7, 8)]]),
        (Cut(("*",), 0, 2, sections=(4, 2)), 8, [[(0, 4)], [(4, 8)]]),
        (Cut(("*",), 0, edges=(3, 7)), 8, [[(0, 3)], [(3, 7)], [(7, 8)]]),
        (Cut(("*",), 0, edges=(0, 3, 8)), 8, [[(0, 3)], [(3, 8)]]),
        (Cut(("*",), 0, edges=(3, 9, 20)), 8, [[(0, 3)], [(3, 8)]]),
    ],
    ids=["even", "uneven", "more parts than rows", "sections", "a short section", "other sections", "edges", "all edges",
         "edges beyond"],
)  # fmt: skip
def test_a_dimension_is_cut_into_these_ranges(cut, size, ranges):
    assert cut.ranges(size) == ranges


@given(size=st.integers(1, 200), data=st.data())
def test_the_places_of_a_tensor_cover_it_once(size, data):
    shape = (size, *data.draw(st.lists(st.integers(1, 9), max_size=2)))
    dim, how = data.draw(cuts_of(shape))
    spec = TensorSpec("w", data.draw(st.sampled_from([DType.U8, DType.F64])), shape)
    with chunks_of(data.draw(st.sampled_from([8, 64, 1 << 23]))):
        places = list(Slicing((Cut(("w",), dim, **how),)).places(spec))
    lanes = lanes_per_element(spec.dtype)
    counts = np.zeros(spec.numel * lanes, dtype=int)
    for place in places:
        if place.box is None:
            counts[place.start : place.stop] += 1
        else:
            counts.reshape(*shape, lanes)[
                tuple(slice(a, a + n) for a, n in zip(place.box.start, place.box.shape, strict=True))
            ] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dim": -1}, {"dim": 0, "parts": 0}, {"dim": 0, "parts": -3}, {"dim": 0, "parts": container.MAX_SLICES + 1},
        {"dim": 0, "edges": tuple(range(1, container.MAX_SLICES + 3))}, {"dim": 0, "edges": (3, 3)},
        {"dim": 0, "edges": (5, 2)}, {"dim": 0, "sections": (4, 0)}, {"dim": 0, "sections": (4, -1)},
    ],
    ids=str,
)  # fmt: skip
def test_a_cut_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InvalidInput):
        Cut(("*",), **wrong)


def test_small_tensors_and_those_that_no_cut_fits_stay_whole(rng):
    whole = {"l.q_proj.bias": (100,), "l.norm.weight": (40_000,), "l.o_proj.weight": (40_000,)}
    shapes = {"l.q_proj.weight": (16, 8), **whole}
    base, new = states_of(rng, shapes, DType.BF16, density=0.5)
    assert base["l.q_proj.weight"].nbytes == container.SLICED_NBYTES
    packed = check_sliced(base, new, Slicing.decoder(4), "classes")
    lanes = {name: sorted(block.lanes for block in blocks_of(packed) if block.tensor == name) for name in shapes}
    assert lanes.pop("l.q_proj.weight") == [4 * 8] * 4
    assert lanes == {name: list(shape) for name, shape in whole.items()}
    base["l.q_proj.weight"], new["l.q_proj.weight"] = (state["l.q_proj.weight"][:, :-1].copy() for state in (base, new))
    packed = check_sliced(base, new, Slicing.decoder(4), "classes")
    assert [block.lanes for block in blocks_of(packed) if block.tensor == "l.q_proj.weight"] == [16 * 7]


def test_decoders_are_cut_as_engines_divide_them():
    def part_and_box(name, shape=(512, 512), parts=4):
        place = list(Slicing.decoder(parts).places(TensorSpec(name, DType.BF16, shape)))[1]
        return place.part, place.box

    box = Box((0, 128), (512, 128))
    layer = "model.layers.3."
    for name in ("self_attn.q_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "experts.1.w1.weight"):
        assert part_and_box(layer + name) == (("tensor parallel", 4, 1), None)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "experts.1.w2.weight"):
        assert part_and_box(layer + name) == (("tensor parallel", 4, 1), box)
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        assert part_and_box(layer + name) == (("key and value heads", 4, 1), None)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert part_and_box(name) == (("vocabulary", 4, 1), None)
    (whole,) = Slicing.decoder().places(TensorSpec(layer + "norm", DType.BF16, (512, 512)))
    assert whole == (("", 0, 0), 0, 512 * 512, None)


def test_the_first_cut_that_fits_is_taken():
    spec = TensorSpec("experts.w1", DType.U8, (512, 512))
    cuts = Slicing((Cut(("*.w1",), 1, 2, like="experts"), Cut(("*",), 0, 8)))
    assert [place.part for place in cuts.places(spec)] == [("experts", 2, 0), ("experts", 2, 1)]
    other = TensorSpec("experts.w2", DType.U8, (512, 512))
    assert {place.part[1] for place in cuts.places(other)} == {8}


@pytest.mark.parametrize("packing", PACKINGS)
def test_experts_that_stay_whole_are_parts_by_their_numbers(packing, rng):
    shapes = {
        f"layers.{layer}.experts.{expert}.{w}": (9, 8) for layer in (0, 1) for expert in range(3) for w in ("w1", "w2")
    }
    base, new = states_of(rng, {**shapes, "layers.0.experts.shared": (9, 8), "norm": (30,)}, DType.BF16, density=0.3)
    cuts = Slicing((Cut(("*.experts.*",), None, like="experts", number=r"experts\.(\d+)\."),))
    with chunks_of(1 << 23):
        packed = check_sliced(base, new, cuts, packing)
        places = {name: list(cuts.places(spec)) for name, spec in table_of(packed).specs.items()}
    assert {len(one) for one in places.values()} == {1}
    assert places["layers.1.experts.2.w1"][0].part == ("experts", 0, 2)
    assert places["layers.0.experts.shared"][0].part == places["norm"][0].part == ("", 0, 0)
    found = {frozenset(block.tensor for block in chunk.blocks) for chunk in table_of(packed).chunks}
    assert found == {
        frozenset({"layers.0.experts.shared", "norm"}),
        *(frozenset(name for name in shapes if f".{expert}.w" in name) for expert in range(3)),
    }
    assert delta_reader.read(packed, bytes_of(base)) == bytes_of(new)


def test_what_one_rank_needs_lies_together(rng):
    base, new = states_of(rng, LAYERS, DType.BF16, density=0.2)
    with chunks_of(1 << 23):
        table = table_of(delta.encode(base, new, slicing=CUTS))
        parts = [next(iter(parts_of(CUTS, chunk.blocks[0], table.specs[chunk.blocks[0].tensor]))) for chunk in table.chunks]
    numbers = [number for _, _, number in parts]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(8))
