"""From a published version through a rank's slices into a live model: full, delta, swapped, in place, and back."""

import numpy as np
import pytest
import torch
from delta_samples import same
from shard_models import (
    by_hand,
    cut_version,
    held_now,
    is_streamed,
    next_tensors,
    parameters,
    random_tensors,
    shards_of,
    soon,
)

from weightcast import LiveModel
from weightcast.errors import CommitFailed
from weightcast.tensors.dtypes import DType
from weightcast.transports.file import FileReceiver
from weightcast.worker.buffers import Buffers
from weightcast.worker.states import State


@pytest.fixture
def receiver(store):
    return FileReceiver(store)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (2, 3)])
def test_a_live_model_follows_its_slices_in_every_mode(rank, ranks, store, receiver, rng):
    shards, buffers = shards_of(rank, ranks), Buffers()
    model = {held.spec.name: np.ones(held.spec.shape, held.spec.dtype.numpy) for held in shards.held}
    live, held, tensors = LiveModel(model), None, None
    done = []
    for number, (kind, mode) in enumerate(
        [
            ("full", "copy"),
            ("delta", "delta"),
            ("delta", "swap"),
            ("full", "inplace"),
            ("delta", "copy"),
            ("full", "swap"),
            ("delta", "inplace"),
            ("delta", "swap"),
            ("delta", "swap"),
        ]
    ):
        tensors = random_tensors(rng) if tensors is None else next_tensors(rng, tensors)
        store.publish(f"v{number}", tensors, mode=kind)
        version = cut_version(receiver, f"v{number}", shards, held=held, mode=mode, buffers=buffers)
        result = live.update(source=version, commit=mode)
        done.append(result.mode)
        assert same(model, by_hand(tensors, rank, ranks))
        assert live.version == f"v{number}"
        held = held_now(version, model)
        assert live.root_digest() == held.shard.root_digest
        assert version.shard.root_digest == (held.shard.root_digest if is_streamed(version) else "")  # summed when staged
    assert done == ["copy", "delta", "swap", "inplace", "delta", "swap", "inplace", "swap", "swap"]


def test_a_stream_that_breaks_off_is_undone_from_the_source(store, receiver, rng):
    shards = shards_of(0, 2)
    first, second = random_tensors(rng), random_tensors(rng)
    store.publish("v0", first)
    model = {name: array.copy() for name, array in by_hand(first, 0, 2).items()}
    live = LiveModel(model)
    start = cut_version(receiver, "v0", shards)
    live.update(source=start)
    manifest = store.publish("v1", second)
    version = cut_version(receiver, "v1", shards, held=held_now(start), mode="inplace")
    entry = manifest.by_name()["stacked.2"]
    path = store.path / "versions" / "v1" / manifest.parts[entry.part].file
    path.write_bytes(path.read_bytes()[: entry.offset + 1])  # between the first and the second reading
    with pytest.raises(CommitFailed):
        live.update(source=version, commit="inplace")
    assert live.state is State.READY
    assert live.version == "v0"
    assert same(model, by_hand(first, 0, 2))


def test_the_first_load_adopts_the_buffers(store, receiver, rng):
    tensors = random_tensors(rng)
    store.publish("v0", tensors)
    shards, buffers = shards_of(1, 2), Buffers()
    module = torch.nn.Module()
    for held in shards.held:
        if held.spec.dtype is DType.BF16:
            empty = torch.empty(held.spec.shape, dtype=torch.bfloat16, device="meta")
            module.register_parameter(held.spec.name, torch.nn.Parameter(empty, requires_grad=False))
        else:
            module.register_buffer(held.spec.name, torch.empty(held.spec.shape, dtype=torch.int64, device="meta"))
    live = LiveModel(module)
    version = cut_version(receiver, "v0", shards, buffers=buffers)
    addresses = {name: array.ctypes.data for name, array in parameters(version).items()}
    live.update(source=version)
    for name, parameter in module.state_dict().items():
        assert parameter.numel() == 0 or parameter.data_ptr() == addresses[name]
        assert bytes(parameter.reshape(-1).view(torch.uint8).numpy()) == by_hand(tensors, 1, 2)[name].tobytes()
    again = LiveModel(module)  # what was adopted is memory of its own, so it can be swapped later
    store.publish("v1", next_tensors(rng, tensors))
    assert again.update(source=cut_version(receiver, "v1", shards), commit="swap").mode == "swap"


def test_reused_buffers_do_not_leak_into_padding(store, receiver, rng):
    shards, buffers = shards_of(2, 3), Buffers()
    for number in range(3):
        tensors = random_tensors(rng)
        store.publish(f"v{number}", tensors)
        version = cut_version(receiver, f"v{number}", shards, buffers=buffers)
        assert same(dict(parameters(version)), by_hand(tensors, 2, 3))
        for array in parameters(version).values():
            array.view(f"u{array.itemsize}")[...] = 1
        del array
        version.close()
        assert buffers.nbytes > 0
    assert version.manifest("v2", deadline=soon()) == version.shard
