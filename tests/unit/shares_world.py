"""Trainer ranks in one process: what each of them holds of a model, and publishers that serve it."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np

from weightcast import DepotPublisher, Shard
from weightcast.clock import Deadline
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.flat import flat_bytes
from weightcast.transports.boxes import MemoryTaker, fetch_boxes
from weightcast.transports.http.shares import SharesReceiver


def soon():
    return Deadline.after(30)


def model(seed=1, *, rows=64):
    """Tensors of several kinds: large, narrow, uneven, with three dimensions, with none, without elements."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 1 << 16, (rows, 48), dtype=np.uint16)
    return {
        "embed": bits.view(ml_dtypes.bfloat16),  # NaNs and all
        "up": random.standard_normal((37, 21)).astype(np.float32),
        "experts": random.standard_normal((3, 10, 8)).astype(np.float32),
        "norm": random.standard_normal(48).astype(np.float32),
        "scale": np.array(0.5, dtype=np.float64),
        "nothing": np.empty((0, 5), dtype=np.float32),
    }


def rows_of(array, rank, ranks):
    """The rows of one rank as torch cuts them: all alike but the last ones."""
    each = -(-len(array) // ranks)
    start = min(rank * each, len(array))
    return Box((start, *(0,) * (array.ndim - 1)), (min(each, len(array) - start), *array.shape[1:]))


def columns_of(array, rank, ranks):
    edges = [round(array.shape[1] * one / ranks) for one in range(ranks + 1)]
    return Box((0, edges[rank]), (array.shape[0], edges[rank + 1] - edges[rank]))


def share_of(arrays, rank, ranks):
    """Rows of the embedding and the experts, columns of `up`, and all of the rest."""
    boxes = {
        "embed": rows_of(arrays["embed"], rank, ranks),
        "up": columns_of(arrays["up"], rank, ranks),
        "experts": rows_of(arrays["experts"], rank, ranks),
    }
    shards = {name: Shard(box_of(arrays[name], box), arrays[name].shape, box.start) for name, box in boxes.items()}
    return arrays | shards


@contextmanager
def trainers(ranks, **options):
    publishers = []
    try:
        for rank in range(ranks):
            publishers.append(DepotPublisher("127.0.0.1:0", rank=rank, ranks=ranks, **options))
        yield publishers
    finally:
        for one in publishers:
            one.close()


def publish(publishers, version, arrays, **options):
    for rank, one in enumerate(publishers):
        one.publish(version, share_of(arrays, rank, len(publishers)), **options)


@contextmanager
def receiving(publishers, **options):
    receiver = SharesReceiver([one.url for one in publishers], **options)
    try:
        yield receiver
    finally:
        receiver.close()


def fetched(receiver, manifest, boxes):
    """Boxes as arrays."""
    entries = manifest.by_name()
    arrays = [np.empty(box.shape, dtype=entries[name].dtype.numpy) for name, box in boxes]
    takers = [MemoryTaker(entries[name], box, flat_bytes(array)) for (name, box), array in zip(boxes, arrays, strict=True)]
    assert sorted(fetch_boxes(receiver, manifest, takers, proved=True, deadline=soon())) == list(range(len(boxes)))
    return arrays


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
