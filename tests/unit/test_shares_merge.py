"""Shares of several publishers that make one manifest, and everything that keeps them from it."""

import numpy as np
import pytest
from msgspec.structs import replace

from weightcast.errors import ManifestCorrupt, UnsupportedFormat
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.dtypes import from_numpy
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import Sum, array_sum, box_sum, root_of_sums
from weightcast.wire.manifest import decode_manifest, encode_manifest, find_problems
from weightcast.wire.shares import Share, ShareEntry, decode_share, encode_share, merged, share_root


def spec_of(name, array):
    return TensorSpec(name, from_numpy(array.dtype), array.shape)


def entry(name, array, box):
    spec, held = spec_of(name, array), box_of(array, box)
    total = str(box_sum(spec, box, held))
    return ShareEntry(name=name, dtype=spec.dtype, shape=spec.shape, box=box, offset=64, sum=total)


def share(rank, entries, *, ranks=2, **fields):
    return Share(
        version="step_1", sequence=1, step=1, created_s=float(rank), rank=rank, ranks=ranks, algorithm="xxh3-128",
        root_digest=share_root(entries, "xxh3-128"), entries=tuple(entries),
        nbytes=1000, pieces=bytes(16), piece_nbytes=1 << 20, **fields,
    )  # fmt: skip


def tying(name, holder, array, box):
    """What a share says of a name whose bytes another one holds."""
    return {"tied": {name: holder}, "tied_sums": {name: entry(name, array, box).sum}}


@pytest.fixture
def arrays():
    random = np.random.default_rng(7)
    return {
        "w": random.standard_normal((5, 4)).astype(np.float32),
        "norm": random.standard_normal(3).astype(np.float32),
        "none": np.empty((0, 4), dtype=np.float32),
        "scale": np.array(2.5, dtype=np.float32),
    }


def halves(arrays):
    """Rank 0 has three rows of `w`, rank 1 the other two; both have all of the rest."""
    return [
        [
            entry("w", arrays["w"], box),
            *(entry(name, arrays[name], Box.whole(arrays[name].shape)) for name in ("norm", "none", "scale")),
        ]
        for box in (Box((0, 0), (3, 4)), Box((3, 0), (2, 4)))
    ]


def test_shares_make_a_manifest_that_whole_arrays_prove_and_that_any_order_of_shares_gives(arrays):
    shares = [share(rank, entries) for rank, entries in enumerate(halves(arrays))]

    manifest = merged(shares)

    assert merged(shares[::-1]) == manifest
    assert list(find_problems(manifest)) == []
    assert decode_manifest(encode_manifest(manifest), "here") == manifest
    assert [box.ranks for box in manifest.boxes["w"]] == [(0,), (1,)]
    assert [box.ranks for box in manifest.boxes["norm"]] == [(0, 1)]
    assert manifest.boxes["none"] == ()
    sums = {name: str(array_sum(spec_of(name, array), array)) for name, array in arrays.items()}
    assert {tensor.name: (tensor.digest, tensor.sum) for tensor in manifest.tensors} == {
        name: ("", sums[name]) for name in arrays
    }
    assert sums["none"] == str(Sum())
    assert manifest.root_digest == root_of_sums((spec_of(name, array), sums[name]) for name, array in arrays.items())


def test_an_empty_shard_says_only_that_there_is_such_a_tensor(arrays):
    entries = halves(arrays)
    third = [entry("w", arrays["w"], Box((5, 0), (0, 4)))]

    manifest = merged([share(rank, one, ranks=3) for rank, one in enumerate([*entries, third])])

    assert [box.ranks for box in manifest.boxes["w"]] == [(0,), (1,)]


def problems_of(shares):
    with pytest.raises(ManifestCorrupt) as caught:
        merged(shares)
    return "\n".join(caught.value.problems)


def test_everything_that_does_not_go_together_is_told_at_once(arrays):
    first, second = halves(arrays)
    other = np.array([1, 2, 3], dtype=np.float32)
    second = [
        second[0],
        entry("norm", other, Box.whole((3,))),
        entry("scale", np.array(1.5, dtype=np.float64), Box.whole(())),
    ]

    told = problems_of(
        [
            share(0, first, ranks=4, metadata={"run": "a"}),
            replace(share(1, second, ranks=4, metadata={"run": "b"}), step=2, version="step_2"),
        ]
    )

    assert "rank(s) 2, 3 of 4 are missing" in told
    assert "version is step_1 at rank 0, step_2 at rank 1" in told
    assert "step is 1 at rank 0, 2 at rank 1" in told
    assert "metadata 'run' is 'a' at rank 0, 'b' at rank 1" in told
    assert "the box of tensor 'norm' at [0] of shape [3] is sum:" in told
    assert "tensor 'scale' is F32[] at rank 0, F64[] at rank 1" in told


def test_holes_and_overlaps_are_told(arrays):
    first, second = halves(arrays)

    hole = problems_of([share(0, first), share(1, second[1:])])
    overlap = problems_of([share(0, first), share(1, [entry("w", arrays["w"], Box((2, 0), (3, 4))), *second[1:]])])

    assert "tensor 'w': nobody holds [3:5, 0:4]" in hole
    assert "tensor 'w': [2:3, 0:4] lies in [0:3, 0:4] and in [2:5, 0:4]" in overlap


def test_the_same_rank_twice_and_a_rank_that_cannot_be_are_told(arrays):
    first, second = halves(arrays)

    assert "rank 0 is there 2 times" in problems_of([share(0, first), share(0, first), share(1, second)])
    assert "rank 7 of 2 cannot be" in problems_of([share(0, first), share(7, second)])


def test_tied_names_stay_tied_where_all_that_have_bytes_say_so(arrays):
    first, second = halves(arrays)
    empty = entry("head", arrays["w"], Box((5, 0), (0, 4)))

    manifest = merged(
        [
            share(0, first, ranks=3, **tying("head", "w", arrays["w"], first[0].box)),
            share(1, second, ranks=3, **tying("head", "w", arrays["w"], second[0].box)),
            share(2, [empty], ranks=3),
        ]
    )

    assert manifest.tied == {"head": "w"}
    assert "head" not in manifest.boxes
    tensor = manifest.by_name()["w"]
    assert (tensor.summed_as, tensor.sum) == ("head", str(array_sum(spec_of("head", arrays["w"]), arrays["w"])))
    assert all(box.sum == entry("head", arrays["w"], Box(box.start, box.shape)).sum for box in manifest.boxes["w"])


def test_names_that_are_tied_at_one_rank_only_are_tensors_of_their_own(arrays):
    first, second = halves(arrays)
    head = entry("head", arrays["w"], Box((3, 0), (2, 4)))

    manifest = merged([share(0, first, **tying("head", "w", arrays["w"], first[0].box)), share(1, [*second, head])])

    assert manifest.tied == {}
    boxes = [[replace(box, sum="") for box in manifest.boxes[name]] for name in ("head", "w")]
    assert boxes[0] == boxes[1]
    sums = {tensor.name: (tensor.summed_as, tensor.sum) for tensor in manifest.tensors}
    for name in ("head", "w"):
        assert sums[name] == ("", str(array_sum(spec_of(name, arrays["w"]), arrays["w"])))


def test_a_share_is_read_back_and_a_changed_one_is_refused(arrays):
    first, _ = halves(arrays)
    sent = share(0, first, metadata={"run": "a"}, **tying("head", "w", arrays["w"], first[0].box))
    data = encode_share(sent)

    assert decode_share(data, "here") == sent
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(ManifestCorrupt):
            decode_share(bytes(changed), "here")
    with pytest.raises(ManifestCorrupt, match="does not follow"):
        decode_share(encode_share(replace(sent, root_digest="xxh3-128:" + "0" * 32)), "here")
    other = [replace(first[0], sum=first[1].sum), *first[1:]]
    with pytest.raises(ManifestCorrupt, match="does not follow"):
        decode_share(encode_share(replace(sent, entries=tuple(other))), "here")
    for total in ("", "sum:" + "0" * 31, "xxh3-128:" + "0" * 32):
        without = share(0, [replace(first[0], sum=total), *first[1:]])
        with pytest.raises(ManifestCorrupt, match="boxes without sums"):
            decode_share(encode_share(without), "here")
    with pytest.raises(ManifestCorrupt, match="boxes without sums"):
        decode_share(encode_share(replace(sent, tied_sums={"head": ""})), "here")
    with pytest.raises(ManifestCorrupt, match="tied names without sums"):
        decode_share(encode_share(replace(sent, tied_sums={})), "here")


def test_a_share_of_an_older_release_is_refused_by_its_format(arrays):
    first, _ = halves(arrays)
    with pytest.raises(UnsupportedFormat, match="has format 1; this release needs 2 or later"):
        decode_share(encode_share(replace(share(0, first), format=1)), "here")


def test_a_manifest_whose_boxes_lie_is_not_believed(arrays):
    manifest = merged([share(rank, entries) for rank, entries in enumerate(halves(arrays))])
    boxes = manifest.boxes["w"]

    def told(**fields):
        return "\n".join(find_problems(replace(manifest, **fields)))

    assert "does not follow from its boxes" in told(
        boxes={**manifest.boxes, "w": (replace(boxes[0], sum=boxes[1].sum), boxes[1])}
    )
    other = tuple(replace(one, sum=boxes[0].sum) if one.name == "w" else one for one in manifest.tensors)
    assert "the sum of tensor 'w' does not follow from its boxes" in told(tensors=other)
    assert "the root digest does not follow" in told(tensors=other)
    assert "nobody holds [3:5, 0:4]" in told(boxes={**manifest.boxes, "w": boxes[:1]})
    assert "of ranks []" in told(boxes={**manifest.boxes, "w": (replace(boxes[0], ranks=()), boxes[1])})
    for wrong in ({"sum": ""}, {"sum": "xxh3-128:" + "0" * 32}, {"ranks": (2,)}, {"offsets": (-1,)}, {"offsets": (960,)}):
        assert "tensor 'w' has a box with" in told(boxes={**manifest.boxes, "w": (replace(boxes[0], **wrong), boxes[1])})
    assert "which is not a tensor of it" in told(boxes={**manifest.boxes, "x": boxes})
    assert "cannot start at" in told(boxes={**manifest.boxes, "w": (replace(boxes[0], start=(-1, 0)), boxes[1])})


def test_what_several_ranks_hold_counts_from_the_payload_of_the_first(arrays):
    shares = [share(rank, entries) for rank, entries in enumerate(halves(arrays))]
    manifest = merged(shares)
    whole = {name: Box.whole(arrays[name].shape) for name in ("norm", "scale")}
    assert manifest.counted_elsewhere() == {(1, name): (box,) for name, box in whole.items()}
