"""Ranks that hold slices read them by NIXL."""

from contextlib import closing

import numpy as np
import pytest

from weightcast import DeltaPolicy, LiveModel, Store
from weightcast.depot.nixl_export import NixlExport
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.tensors.boxes import Box, Held, box_of
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import array_sum, root_of_sums
from weightcast.transports.base import RangeReceiver, StateReceiver
from weightcast.transports.boxes import MemoryTaker, fetch_boxes
from weightcast.transports.registry import open_receiver
from weightcast.worker.shards import HeldVersion, Shards, cut

from .nixl_stand import needs_nixl, soon

pytestmark = needs_nixl

SHAPES = {"rows": (96, 12_000), "columns": (24, 32_768), "narrow": (512, 64), "norm": (40,)}


def state(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def depot(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("nixl") / "store", delta=DeltaPolicy(max_share=1))
    store.publish("v0", state(1))
    moved = {name: array.copy() for name, array in state(1).items()}
    for number in (1, 2):
        for array in moved.values():
            array.reshape(-1)[number::5000] += 1
        store.publish(f"v{number}", moved)
    with StoredShelf(store.path) as shelf:
        export = NixlExport(shelf)
        with closing(export), Depot(shelf, routes=export.routes()) as depot:
            yield f"nixl{depot.url.removeprefix('http')}", moved


@pytest.fixture(scope="module")
def receiver(depot):
    with closing(open_receiver(f"{depot[0]}?bucket_nbytes=100000", rank=0)) as receiver:
        assert isinstance(receiver, RangeReceiver)
        assert isinstance(receiver, StateReceiver)
        yield receiver


def shards(rank, ranks):
    dims = {"rows": 0, "columns": 1, "narrow": 1}
    boxes = {
        name: Box.shard(shape, dim=dims[name], rank=rank, ranks=ranks) if name in dims else Box.whole(shape)
        for name, shape in SHAPES.items()
    }
    held = [Held.slice_of(TensorSpec(name, DType.F32, SHAPES[name]), box) for name, box in boxes.items()]
    return Shards(tuple(held), SHAPES), boxes


def test_boxes_are_read_where_they_lie(receiver):
    manifest, tensors = receiver.manifest("v0", deadline=soon()), state(1)
    wanted = [
        ("rows", Box((7, 0), (31, 12_000))),
        ("rows", Box((0, 5000), (50, 6000))),
        ("columns", Box((3, 100), (20, 16_384))),
        ("narrow", Box((0, 3), (512, 9))),
        ("norm", Box((0,), (40,))),
        ("rows", Box((0, 0), (96, 12_000))),
        ("rows", Box((9, 9), (0, 4))),
    ]
    cuts = [tensors[name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] for name, box in wanted]
    memories, entries = [np.zeros(cut.nbytes, np.uint8) for cut in cuts], manifest.by_name()
    takers = [MemoryTaker(entries[name], box, memory) for (name, box), memory in zip(wanted, memories, strict=True)]
    for proved in (False, True):
        told = list(fetch_boxes(receiver, manifest, takers, proved=proved, deadline=soon()))
        assert sorted(told) == list(range(len(wanted)))
    assert all(memory.tobytes() == cut.tobytes() for memory, cut in zip(memories, cuts, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_slices_and_then_one_delta(receiver, depot, rank):
    layout, boxes = shards(rank, 2)
    first = receiver.manifest("v0", deadline=soon())
    version = cut(
        receiver, first, layout, held=None, mode="copy", checksum=True, deadline=soon(), progress=lambda *_: None
    )  # fmt: skip
    own = sum(np.prod(box.shape) * 4 for box in boxes.values())
    assert version.nbytes == own
    live = LiveModel({name: array.copy() for name, array in version.arrays(version.shard).items()})
    live.update("v0", source=version)
    held = HeldVersion(first, live.served_manifest, version.url)
    later = cut(
        receiver, receiver.manifest("v2", deadline=soon()), layout,
        held=held, mode="copy", checksum=True, deadline=soon(), progress=lambda *_: None,
    )  # fmt: skip
    assert later.by_delta
    assert later.nbytes < own / 50
    live.update("v2", source=later, commit="delta")
    new = {name: box_of(depot[1][name], box) for name, box in boxes.items()}
    expected = ((TensorSpec(name, DType.F32, array.shape), array) for name, array in new.items())
    assert live.root_digest() == root_of_sums((spec, str(array_sum(spec, array))) for spec, array in expected)


def test_a_whole_model_catches_up(depot):
    url, tensors = depot
    model = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    with LiveModel(model, source=url) as live:
        live.update("v0")
        assert live.update("v2").mode == "delta"
    assert all(np.array_equal(model[name], tensors[name]) for name in SHAPES)
