"""Changes that trainer ranks publish beside their shares: each rank compares, packs and serves its own boxes."""

import numpy as np
import pytest
from shares_world import columns_of, model, receiving, rows_of, same, share_of, soon, trainers

from weightcast import DeltaPolicy, DepotPublisher, LiveModel, Publisher, Shard, ShareWriter, Store
from weightcast.delta import Cut, Slicing, slicing
from weightcast.errors import InvalidInput
from weightcast.tensors.boxes import Box, Held, box_of
from weightcast.tensors.bridges import spec_of
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.worker.shards import Shards


def stepped(rng, arrays, changes=5):
    """The next weights: a few elements of each tensor differ in their lowest bit."""
    new = {name: array.copy() for name, array in arrays.items()}
    for array in new.values():
        flat = array.reshape(-1).view(f"u{array.itemsize}")
        if flat.size:
            flat[rng.choice(flat.size, min(changes, flat.size), replace=False)] ^= 1
    return new


def publish_all(publishers, version, arrays, tied=()):
    for rank, one in enumerate(publishers):
        share = share_of(arrays, rank, len(publishers))
        one.publish(version, share | {name: share[holder] for name, holder in dict(tied).items()})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["copy", "swap"])
def test_a_whole_model_follows_by_the_changes_of_all_ranks(rng, tmp_path, ranks, mode):
    arrays = model()
    store = Store(tmp_path / "store")
    live = {name: np.zeros_like(array) for name, array in arrays.items()}
    with trainers(ranks) as publishers, receiving(publishers) as shared:
        receiver = HttpReceiver([publishers[0].url]) if ranks == 1 else shared
        target = LiveModel(live, source=receiver)
        for number in range(4):
            if ranks == 1:
                publishers[0].publish(f"step_{number}", arrays)
            else:
                publish_all(publishers, f"step_{number}", arrays)
            result = target.update(commit=mode)
            manifest = receiver.manifest(f"step_{number}", deadline=soon())
            assert manifest.root_digest == store.publish(f"step_{number}", arrays, "full").root_digest
            if number:
                assert manifest.base.version == f"step_{number - 1}"
                assert manifest.base.root_digest == store.manifest(f"step_{number - 1}").root_digest
                assert [payload.part for payload in manifest.payloads] == list(range(ranks))
                assert result.bytes == manifest.payload_nbytes
            assert all(same(live[name], array) for name, array in arrays.items())
            arrays = stepped(rng, arrays)
        receiver.close()


@pytest.mark.parametrize("tied", [{"zero": "norm"}, {"a_head": "embed"}], ids=["replicated", "sharded"])
def test_tied_weights_follow_too(rng, tied):
    arrays = model()
    live = {name: np.zeros_like(array) for name, array in arrays.items()}
    live |= {name: live[holder] for name, holder in tied.items()}
    with trainers(3) as publishers, receiving(publishers) as receiver:
        target = LiveModel(live, source=receiver)
        for number in range(3):
            publish_all(publishers, f"step_{number}", arrays, tied)
            result = target.update(commit="copy")
            manifest = receiver.manifest(f"step_{number}", deadline=soon())
            assert bool(manifest.payloads) == (number > 0)
            assert number == 0 or result.bytes == manifest.payload_nbytes
            assert all(same(live[name], array) for name, array in arrays.items())
            arrays = stepped(rng, arrays)


def test_a_version_is_a_delta_only_if_every_rank_holds_the_base(rng):
    arrays = model()
    live = {name: np.zeros_like(array) for name, array in arrays.items()}
    with trainers(2) as publishers:
        publish_all(publishers, "step_0", arrays)
        with receiving(publishers) as receiver:
            target = LiveModel(live, source=receiver)
            target.update()
        with DepotPublisher("127.0.0.1:0", rank=1, ranks=2) as anew:  # started again: it holds nothing
            arrays = stepped(rng, arrays)
            publish_all([publishers[0], anew], "step_1", arrays)
            with receiving([publishers[0], anew]) as receiver:
                manifest = receiver.manifest("step_1", deadline=soon())
                assert (manifest.base, manifest.payloads) == (None, ())
                target.update(source=receiver)
                assert all(same(live[name], array) for name, array in arrays.items())


WIDE = {"rows": (96, 64), "columns": (64, 96), "norm": (64,), "odd": (31, 7)}


def wide(rng):
    """Tensors that trainers and engines divide differently."""
    return {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in WIDE.items()}


def boxes_of(arrays, rank, ranks, how):
    """What a trainer rank holds: FSDP's rows, columns, rows and columns, or everything."""
    boxes = {name: Box.whole(array.shape) for name, array in arrays.items()}
    if how == "rows":
        return {name: rows_of(array, rank, ranks) for name, array in arrays.items()}
    if how == "columns":
        return boxes | {name: columns_of(arrays[name], rank, ranks) for name in ("rows", "columns", "odd")}
    if how == "both":  # a mesh of two dimensions
        half, other = rank // 2, rank % 2
        for name in ("rows", "columns", "odd"):
            outer = rows_of(arrays[name], half, ranks // 2)
            inner = columns_of(arrays[name], other, 2)
            boxes[name] = Box((outer.start[0], inner.start[1]), (outer.shape[0], inner.shape[1]))
    return boxes


@pytest.mark.parametrize("how", ["rows", "columns", "both", "replicated"])
@pytest.mark.parametrize("packing", ["gaps", "classes"])
@pytest.mark.parametrize("engines", [2, 3])
def test_any_sharding_goes_to_any_sharding(rng, monkeypatch, how, packing, engines):
    monkeypatch.setattr(slicing, "SLICED_NBYTES", 0)
    cuts = Slicing((Cut(("rows",), 0, parts=6), Cut(("columns",), 1, parts=6)))
    arrays = wide(rng)
    policy = DeltaPolicy(packing=packing, slicing=cuts)

    def publish(version):
        for rank, one in enumerate(publishers):
            own = boxes_of(arrays, rank, 4, how)
            one.publish(
                version,
                {name: Shard(np.ascontiguousarray(box_of(array, own[name])), array.shape, own[name].start)
                 for name, array in arrays.items()},
            )  # fmt: skip

    def held(rank):
        places = {
            "rows": rows_of(arrays["rows"], rank, engines), "columns": columns_of(arrays["columns"], rank, engines),
            "norm": Box.whole((64,)), "odd": Box.whole((31, 7)),
        }  # fmt: skip
        return {name: Held.slice_of(spec_of(name, arrays[name]), box) for name, box in places.items()}

    with trainers(4, deltas=policy) as publishers, receiving(publishers) as receiver:
        publish("step_0")
        ranks = []
        for rank in range(engines):
            layout = Shards(tuple(held(rank).values()), {name: array.shape for name, array in arrays.items()})
            live = {name: np.zeros(one.spec.shape, np.float32) for name, one in held(rank).items()}
            target = LiveModel(live, source=receiver, layout=layout)
            target.update()
            ranks.append((live, target))
        for number in range(1, 4):
            arrays = stepped(rng, arrays, 40)
            publish(f"step_{number}")
            manifest = receiver.manifest(f"step_{number}", deadline=soon())
            assert len(manifest.payloads) == 4
            for rank, (live, target) in enumerate(ranks):
                result = target.update()
                for name, one in held(rank).items():
                    assert same(live[name], box_of(arrays[name], one.placements[0].box))
                assert result.mode == "delta"


def test_a_rank_whose_boxes_lie_on_slice_edges_fetches_its_share(rng):
    arrays = {
        f"layers.{number}.{name}": rng.normal(0, 1, shape).astype(np.float32)
        for number in range(4)
        for name, shape in (("q_proj.weight", (512, 256)), ("o_proj.weight", (256, 512)))
    }
    policy = DeltaPolicy(slicing=Slicing.decoder())
    layouts = []
    for rank in (0, 1):
        boxes = {n: (rows_of if "q_proj" in n else columns_of)(array, rank, 2) for n, array in arrays.items()}
        held = tuple(Held.slice_of(spec_of(name, arrays[name]), box) for name, box in boxes.items())
        layouts.append(Shards(held, {name: array.shape for name, array in arrays.items()}))
    with trainers(4, deltas=policy) as publishers, receiving(publishers) as receiver:
        targets = []
        for number in range(2):
            for rank, one in enumerate(publishers):
                own = {name: rows_of(array, rank, 4) for name, array in arrays.items()}
                one.publish(
                    f"step_{number}",
                    {name: Shard(box_of(array, own[name]), array.shape, own[name].start) for name, array in arrays.items()},
                )
            manifest = receiver.manifest(f"step_{number}", deadline=soon())
            for rank, layout in enumerate(layouts):
                if number == 0:
                    live = {one.spec.name: np.zeros(one.spec.shape, np.float32) for one in layout.held}
                    targets.append((live, LiveModel(live, source=receiver, layout=layout)))
                    targets[-1][1].update()
                    continue
                live, target = targets[rank]
                result = target.update()
                tables = sum(payload.nbytes - payload.table for payload in manifest.payloads)
                share = (manifest.payload_nbytes - tables) / 2
                assert result.bytes - tables <= 1.1 * share
                for one in layout.held:
                    assert same(live[one.spec.name], box_of(arrays[one.spec.name], one.placements[0].box))
            arrays = stepped(rng, arrays, 5000)


def test_a_rank_that_holds_nothing_does_not_keep_the_others_from_deltas(rng):
    arrays = {"w": rng.standard_normal((256, 1024)).astype(np.float32)}
    with trainers(2) as publishers, receiving(publishers) as receiver:
        for number in range(2):
            publishers[0].publish(f"step_{number}", arrays)
            publishers[1].publish(f"step_{number}", {"w": Shard(np.empty((0, 1024), np.float32), (256, 1024), (256, 0))})
            manifest = receiver.manifest(f"step_{number}", deadline=soon())
            assert len(manifest.payloads) == 2 * number
            arrays = stepped(rng, arrays)


@pytest.mark.parametrize("kind", ["depot", "shared memory"])
def test_changes_above_max_share_are_not_published(rng, tmp_path, kind):
    arrays = {"w": rng.standard_normal((256, 1024)).astype(np.float32)}
    new = stepped(rng, arrays, 2000)
    for share, count in ((0.5, 1), (0.001, 0)):
        policy = DeltaPolicy(max_share=share)
        with (
            DepotPublisher("127.0.0.1:0", deltas=policy)
            if kind == "depot"
            else Publisher(tmp_path / str(count), deltas=policy)
        ) as publisher:
            publisher.publish("step_0", arrays)
            assert len(publisher.publish("step_1", new).manifest.payloads) == count


@pytest.mark.parametrize(
    "make",
    [
        lambda _, policy: DepotPublisher("127.0.0.1:0", deltas=policy),
        lambda path, policy: Publisher(path / "shared", deltas=policy),
        lambda path, policy: ShareWriter(path, rank=0, ranks=2, deltas=policy),
    ],
    ids=["depot", "shared memory", "store"],
)
def test_publishers_that_pack_once_refuse_both_packings(tmp_path, make):
    with pytest.raises(InvalidInput, match="packing='both' is for Store alone"):
        make(tmp_path, DeltaPolicy(packing="both"))
