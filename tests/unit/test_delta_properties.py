"""What holds for all deltas: they add up, go back, cut into slices, and pack to the same bytes again."""

from itertools import pairwise

import numpy as np
import pytest
from delta_samples import chunks_of, copied, equal_deltas, moved_on, pair, same, state_chains
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast import delta
from weightcast.delta.container import PACKINGS
from weightcast.errors import BaseVersionMismatch, DeltaDoesNotFit, InvalidInput
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec

packings = st.sampled_from(PACKINGS)


def between(a, b, packing="classes"):
    """The sparse form of the delta between two states."""
    return delta.decode(delta.encode(a, b, packing=packing), a)


# -- fold and invert -----------------------------------------------------------------------------------------------


@pytest.mark.untraced
@settings(max_examples=80)
@given(chain=state_chains(length=3))
def test_folding_two_deltas_is_encoding_the_ends(chain):
    a, b, c = chain
    folded = delta.fold(between(a, b), between(b, c))
    assert equal_deltas(folded, between(a, c))
    assert delta.pack(folded) == delta.encode(a, c, packing="gaps")
    assert delta.pack(folded, packing="classes", base=a) == delta.encode(a, c)


@pytest.mark.untraced
@settings(max_examples=40)
@given(chain=state_chains(length=4, tensors=3, lanes=200))
def test_folding_does_not_care_where_it_begins(chain):
    one, two, three = (between(a, b) for a, b in pairwise(chain))
    assert equal_deltas(delta.fold(delta.fold(one, two), three), delta.fold(one, delta.fold(two, three)))


@pytest.mark.untraced
@settings(max_examples=60)
@given(chain=state_chains())
def test_the_inverse_restores_every_bit_and_cancels(chain):
    a, b = chain
    there = between(a, b)
    back = delta.invert(there)
    target = copied(b)
    delta.apply(target, back)
    assert same(target, a)
    assert (back.base_root, back.new_root) == (there.new_root, there.base_root)
    assert not delta.fold(there, back).tensors
    assert equal_deltas(delta.invert(back), there)
    assert equal_deltas(back, between(b, a))


@pytest.mark.untraced
@settings(max_examples=40)
@given(chain=state_chains(length=5, tensors=3), packing=packings, threads=st.integers(1, 3))
def test_a_chain_decodes_to_the_fold_of_its_links(chain, packing, threads):
    links = [delta.encode(a, b, packing=packing) for a, b in pairwise(chain)]
    folded = delta.decode_chain(links, chain[0], threads=threads)
    assert equal_deltas(folded, between(chain[0], chain[-1]))
    target = copied(chain[0])
    delta.apply(target, folded)
    assert same(target, chain[-1])


def test_a_chain_through_dense_states_and_several_chunks_decodes(rng):
    chain = [pair(rng, DType.F32, (4500,), density=0)[0]]
    for density in (1, 0.01, 0.5, 0):
        chain.append(moved_on(rng, chain[-1], DType.F32, density=density, far=False))
    versions = [{"w": array} for array in chain]
    with chunks_of(1000):
        links = [delta.encode(a, b) for a, b in pairwise(versions)]
        assert equal_deltas(delta.decode_chain(links, versions[0]), between(versions[0], versions[-1]))


def test_deltas_that_do_not_follow_one_another_are_not_folded(rng):
    a, b = pair(rng, DType.BF16, (300,), density=0.1)
    there = between({"w": a}, {"w": b})
    with pytest.raises(BaseVersionMismatch):
        delta.fold(there, there)
    other = between({"v": a}, {"v": b})
    with pytest.raises(DeltaDoesNotFit):
        delta.fold(there, other)
    with pytest.raises(InvalidInput, match="empty chain"):
        delta.decode_chain([], {"w": a})


# -- pack ----------------------------------------------------------------------------------------------------------


@pytest.mark.untraced
@settings(max_examples=80)
@given(chain=state_chains(tensors=6), packing=packings, chunk=st.sampled_from([64, 1000, 1 << 23]))
def test_packing_what_was_decoded_gives_the_same_bytes(chain, packing, chunk):
    base, new = chain
    with chunks_of(chunk):
        packed = delta.encode(base, new, packing=packing)
        sparse = delta.decode(packed, base)
        assert delta.pack(sparse, packing=packing, base=base) == packed
        assert delta.pack(sparse) == delta.encode(base, new, packing="gaps")


def test_unchanged_tensors_take_part_in_the_order_of_chunks(rng):
    """A tensor that stays as it is comes first of its kind; decoded, it is not there any more."""
    base = {"a": np.zeros(10, np.float32), "b": np.zeros(10, np.uint16), "c": np.zeros(10, np.float32)}
    new = copied(base)
    new["b"][3] = new["c"][3] = 1
    for packing in PACKINGS:
        packed = delta.encode(base, new, packing=packing)
        assert delta.pack(delta.decode(packed, base), packing=packing, base=base) == packed


def test_packing_by_classes_needs_the_base(rng):
    a, b = pair(rng, DType.BF16, (300,), density=0.1)
    sparse = between({"w": a}, {"w": b})
    with pytest.raises(InvalidInput, match="base"):
        delta.pack(sparse, packing="classes")
    with pytest.raises(DeltaDoesNotFit):
        delta.pack(sparse, packing="classes", base={"w": a[:5]})


# -- slices --------------------------------------------------------------------------------------------------------


def cut(array, box):
    return array[tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))]


@st.composite
def boxed_pairs(draw):
    """Two arrays of any dtype and 1 to 4 dimensions, and a box in them, which may be empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    box = Box(start, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))
    dtype = draw(st.sampled_from(list(DType)))
    return *pair(rng, dtype, shape, density=draw(st.sampled_from([0.02, 0.3, 1])), far=draw(st.booleans())), box


@pytest.mark.untraced
@settings(max_examples=150)
@given(sample=boxed_pairs())
def test_slicing_and_then_applying_is_applying_and_then_slicing(sample):
    old, new, box = sample
    sliced = delta.slice(between({"w": old}, {"w": new}), {"w": box})
    target = {"w": cut(old, box).copy()}
    delta.apply(target, sliced)
    assert same(target, {"w": cut(new, box)})
    direct = between({"w": cut(old, box).copy()}, {"w": cut(new, box).copy()})
    assert equal_deltas(sliced, direct)
    assert (sliced.base_root, sliced.new_root) == ("", "")


@settings(max_examples=30)
@given(sample=boxed_pairs())
def test_slices_fold_invert_and_pack_like_any_delta(sample):
    old, new, box = sample
    sliced = delta.slice(between({"w": old}, {"w": new}), {"w": box})
    assert equal_deltas(delta.decode(delta.pack(sliced)), sliced)
    assert not delta.fold(sliced, delta.invert(sliced)).tensors


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_along_any_dimension_make_up_the_whole(dim, rng):
    old, new = pair(rng, DType.BF16, (8, 12, 4), density=0.2)
    whole = between({"w": old}, {"w": new})
    parts = []
    for rank in range(4):
        box = Box.shard(old.shape, dim=dim, rank=rank, ranks=4)
        target = {"w": cut(old, box).copy()}
        delta.apply(target, delta.slice(whole, {"w": box}))
        parts.append(target["w"])
    assert same({"w": np.concatenate(parts, dim)}, {"w": new})


def fused_check(base, new, held, fuse):
    """Applying a slice to a fused tensor is fusing what the whole delta was applied to."""
    target = {held.spec.name: fuse(base)}
    delta.apply(target, delta.slice(between(base, new), [held]))
    assert same(target, {held.spec.name: fuse(new)})


def states_of(rng, shapes, dtype, density):
    pairs = {name: pair(rng, dtype, shape, density=density) for name, shape in shapes.items()}
    return ({name: both[side] for name, both in pairs.items()} for side in (0, 1))


@pytest.mark.parametrize("density", [0, 0.02, 1])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F64])
def test_q_k_and_v_fused_and_sharded(dtype, rank, density, rng):
    base, new = states_of(rng, {"q": (16, 10), "k": (4, 10), "v": (4, 10), "other": (3,)}, dtype, density)
    boxes = {name: Box.shard(base[name].shape, dim=0, rank=rank, ranks=2) for name in "qkv"}
    at = {"q": (0, 0), "k": (8, 0), "v": (10, 0)}
    held = Held(TensorSpec("qkv", dtype, (12, 10)), tuple(Placement(name, boxes[name], at[name]) for name in "qkv"))
    fused_check(base, new, held, lambda state: np.concatenate([cut(state[name], boxes[name]) for name in "qkv"]))


@pytest.mark.parametrize("density", [0.02, 1])
def test_gate_and_up_fused_along_the_second_dimension(density, rng):
    base, new = states_of(rng, {"gate": (7, 8), "up": (7, 8)}, DType.F8_E4M3, density)
    placements = (Placement("gate", Box((0, 2), (7, 4)), (0, 0)), Placement("up", Box((0, 2), (7, 4)), (0, 4)))
    held = Held(TensorSpec("gate_up", DType.F8_E4M3, (7, 8)), placements)
    fused_check(base, new, held, lambda state: np.hstack([state["gate"][:, 2:6], state["up"][:, 2:6]]))


@pytest.mark.parametrize("density", [0.02, 1])
def test_experts_stacked_along_a_dimension_of_their_own(density, rng):
    names = [f"expert{number}" for number in range(5)]
    base, new = states_of(rng, dict.fromkeys(names, (6, 8)), DType.BF16, density)
    box = Box((0, 4), (6, 4))
    mine = [names[4], names[1], names[2]]
    placements = tuple(Placement(name, box, (slot, 0, 0)) for slot, name in enumerate(mine))
    held = Held(TensorSpec("experts", DType.BF16, (3, 6, 4)), placements)
    fused_check(base, new, held, lambda state: np.stack([cut(state[name], box) for name in mine]))


@st.composite
def placed_pairs(draw):
    """Two versions of some matrices, and a parameter made of boxes of them: each perhaps transposed, in a slot of a stack,
    beside the others or below them, with elements left over.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([DType.F8_E4M3, DType.BF16, DType.F32, DType.F64, DType.C64]))
    density, far = draw(st.sampled_from([0, 0.03, 0.3, 1])), draw(st.booleans())
    old, new, placements, corner = {}, {}, [], (0, 0)
    beside, stacked = draw(st.booleans()), draw(st.booleans())
    for number in range(draw(st.integers(1, 4))):
        name = f"m{number}"
        shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        old[name], new[name] = pair(rng, dtype, shape, density=density, far=far)
        start = tuple(draw(st.integers(0, size - 1)) for size in shape)
        box = Box(start, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))
        at = (number, draw(st.integers(0, 3)), draw(st.integers(0, 3))) if stacked else corner
        placement = Placement(name, box, at, transposed=draw(st.booleans()))
        placements.append(placement)
        size = placement.target.shape
        corner = (0, corner[1] + size[1]) if beside else (corner[0] + size[0], 0)
    ends = [[s + n for s, n in zip(p.target.start, p.target.shape, strict=True)] for p in placements]
    shape = tuple(max(column) + draw(st.integers(0, 2)) for column in zip(*ends, strict=True))
    return old, new, Held(TensorSpec("p", dtype, shape), tuple(draw(st.permutations(placements))))


def put_together(state, held):
    """A parameter made by hand from a state."""
    whole = np.zeros(held.spec.shape, held.spec.dtype.numpy)
    for placement in held.placements:
        part = cut(state[placement.source], placement.box)
        cut(whole, placement.target)[...] = part.T if placement.transposed else part
    return whole


@pytest.mark.untraced
@settings(max_examples=150)
@given(sample=placed_pairs())
def test_slicing_commutes_with_applying_for_every_placement(sample):
    old, new, held = sample
    sliced = delta.slice(between(old, new), [held])
    target = {"p": put_together(old, held)}
    delta.apply(target, sliced)
    assert same(target, {"p": put_together(new, held)})
    assert equal_deltas(
        sliced, between({"p": put_together(old, held)}, target)
    )  # so indices are sorted, and the form normal


def test_slices_that_do_not_fit_are_all_listed(rng):
    old, new = pair(rng, DType.BF16, (6, 8), density=0.1)
    whole = between({"w": old, "v": old}, {"w": new, "v": new})
    with pytest.raises(DeltaDoesNotFit, match="no such tensor"):
        delta.slice(whole, {"u": Box((0,), (1,))})
    held = Held(
        TensorSpec("fused", DType.F16, (6, 8)),
        (Placement("w", Box.whole((6, 8)), (0, 0)), Placement("u", Box.whole((6, 8)), (0, 0))),
    )
    with pytest.raises(DeltaDoesNotFit) as caught:
        delta.slice(whole, [held, Held.slice_of(TensorSpec("v", DType.BF16, (6, 8)), Box((0, 4), (6, 5)))])
    assert [mismatch.kind for mismatch in caught.value.mismatches] == ["dtype", "missing", "shape"]
    outside = Held(TensorSpec("w", DType.BF16, (3, 8)), (Placement("w", Box((0, 0), (3, 8)), (1, 0)),))
    with pytest.raises(DeltaDoesNotFit, match="does not lie inside"):
        delta.slice(whole, [outside])


def test_a_scalar_is_sliced_as_it_is(rng):
    old, new = pair(rng, DType.F32, (), density=1)
    sliced = delta.slice(between({"w": old}, {"w": new}), {"w": Box.whole(())})
    target = {"w": old.copy()}
    delta.apply(target, sliced)
    assert same(target, {"w": new})
