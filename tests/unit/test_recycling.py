"""Memory comes back by itself when nobody sees it any more, is used again, and never before that."""

import gc
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from mapped_sources import Slab
from shard_models import cut_version, parameters, random_tensors, shards_of, soon
from test_live_delta import MemorySource

from weightcast import LiveModel, State
from weightcast.errors import ClearIncomplete, CommitFailed
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.file import FileReceiver
from weightcast.worker import shard_version
from weightcast.worker.buffers import Buffers
from weightcast.worker.shards import Shards


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def spec_of(shape, dtype=DType.BF16, name="w"):
    return TensorSpec(name, dtype, shape)


class Recorded(Buffers):
    """Buffers that know all places that they ever handed out."""

    def __init__(self):
        super().__init__()
        self.places = set()

    def take(self, spec, **more):
        array = super().take(spec, **more)
        self.places.add(array.ctypes.data)
        return array


# -- buffers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (1000, 33), (0, 4)])
@pytest.mark.parametrize("dtype", [DType.F8_E4M3, DType.BF16, DType.F32, DType.F64])
def test_buffers_are_aligned_and_all_of_their_memory(shape, dtype):
    array = Buffers().take(spec_of(shape, dtype))
    assert (array.shape, array.dtype) == (shape, dtype.numpy)
    assert array.nbytes == 0 or array.ctypes.data % 64 == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable
    tensor = torch.from_numpy(array.view(f"i{dtype.itemsize}"))
    assert tensor.untyped_storage().nbytes() == array.nbytes


def test_memory_is_used_again_for_the_same_size_and_padding_is_cleaned():
    buffers = Buffers()
    array = buffers.take(spec_of((4, 8)))
    array.view(np.uint16)[...] = 7
    address = array.ctypes.data
    assert buffers.nbytes == 0
    del array
    assert buffers.nbytes == 64
    again = buffers.take(spec_of((16,), DType.F32, "other"), zeroed=True)
    assert again.ctypes.data == address
    assert not again.any()
    assert buffers.nbytes == 0
    assert buffers.take(spec_of((4, 8))).ctypes.data != address


def in_a_cycle(array):
    found = [array]
    found.append(found)
    return found


VIEWS = {
    "a slice": lambda array: array[3:4],
    "its bytes": lambda array: memoryview(array.view(np.uint8)),
    "a tensor": lambda array: torch.from_numpy(array.view("i4")),
    "a view of a tensor": lambda array: torch.from_numpy(array.view("i4"))[1:2].view(torch.float32),
    "an array of a tensor": lambda array: torch.from_numpy(array.view("i4")).t().numpy(),
    "a storage": lambda array: torch.from_numpy(array.view("i4")).untyped_storage(),
    "a capsule": lambda array: torch.from_numpy(array.view("i4")).__dlpack__(),
    "a cycle": in_a_cycle,
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_that_anything_still_sees_does_not_come_back(view):
    buffers = Buffers()
    array = buffers.take(spec_of((64, 2), DType.F32))
    seen = VIEWS[view](array)
    del array
    assert buffers.nbytes == 0
    del seen
    if view == "a cycle":
        assert buffers.nbytes == 0
        gc.collect()
    assert buffers.nbytes == 512


def test_an_autograd_graph_keeps_the_memory_that_it_will_read():
    buffers = Buffers()
    array = buffers.take(spec_of((8,), DType.F32), zeroed=True)
    array[...] = 3
    weight = torch.from_numpy(array)
    x = torch.ones(8, requires_grad=True)
    loss = (x * weight).sum()
    del array, weight
    assert buffers.nbytes == 0
    loss.backward()
    assert x.grad.tolist() == [3] * 8
    del loss
    assert buffers.nbytes == 32


def test_what_comes_back_beyond_the_limit_is_freed():
    buffers = Buffers(limit_nbytes=100)
    arrays = [buffers.take(spec_of((size,))) for size in (32, 32, 18)]
    while arrays:
        arrays.pop(0)
        assert buffers.nbytes <= 100
    assert buffers.nbytes == 64 + 36


def test_what_was_in_use_when_the_buffers_were_cleared_is_freed_and_not_kept():
    buffers = Buffers()
    waiting, used = (buffers.take(spec_of((size,))) for size in (32, 64))
    del waiting
    buffers.clear()
    assert buffers.nbytes == 0
    new = buffers.take(spec_of((64,)))
    del used
    assert buffers.nbytes == 0
    del new
    assert buffers.nbytes == 128


def test_arrays_outlive_the_buffers_they_came_from():
    array = Buffers().take(spec_of((100,), DType.F64), zeroed=True)
    gc.collect()
    array += 1
    assert array.sum() == 100


def test_many_threads_never_get_the_same_memory():
    buffers, wrong = Buffers(), []

    def use(number):
        rng = np.random.default_rng(number)
        held = []
        for turn in range(400):
            array = buffers.take(spec_of((int(rng.integers(1, 4)) * 100,), DType.I64))
            array[...] = number * 1000 + turn
            cycle = [array]
            cycle.append(cycle)  # this one comes back in the middle of whatever the collector interrupts
            held.append((array, number * 1000 + turn))
            if len(held) > 3:
                old, mark = held.pop(int(rng.integers(0, 4)))
                if (old != mark).any():
                    wrong.append(mark)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    before = gc.get_threshold()
    gc.set_threshold(50)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        gc.set_threshold(*before)
    assert not wrong


# -- a live model --------------------------------------------------------------------------------------------------


SIZES = (1000, 1000, 300)


def tensors_of(number):
    return {f"t{at}": np.full(size, number * 10 + at, np.float32) for at, size in enumerate(SIZES)}


def numpy_model():
    return tensors_of(99)


def torch_model():
    module = torch.nn.Module()
    for name, array in tensors_of(99).items():
        module.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array), requires_grad=False))
    return module


def arrays_in(model):
    if isinstance(model, dict):
        return dict(model)
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def addresses(model):
    return {array.ctypes.data for array in arrays_in(model).values()}


def check(model, number):
    for name, array in tensors_of(number).items():
        assert arrays_in(model)[name].tobytes() == array.tobytes()


@pytest.fixture
def slab():
    return Slab(**{f"v{number}": tensors_of(number) for number in range(20)})


@pytest.mark.parametrize("make", [numpy_model, torch_model])
@pytest.mark.parametrize(("keep_previous", "sets"), [(True, 3), (False, 2)])
def test_swaps_go_round_in_the_same_memory(make, keep_previous, sets, slab):
    model, buffers = make(), Buffers()
    live = LiveModel(model, source=slab, keep_previous=keep_previous, buffers=buffers)
    seen = []
    for number in range(20):
        live.update(f"v{number}", commit="swap")
        check(model, number)
        seen.append(addresses(model))
        assert buffers.nbytes <= sum(SIZES) * 4
    assert len(set().union(*seen)) == sets * len(SIZES)
    assert buffers.nbytes == sum(SIZES) * 4  # one set waits, as large as the staged one will be
    if keep_previous:
        assert live.rollback() == "v18"
        check(model, 18)


@pytest.mark.parametrize("make", [numpy_model, torch_model])
def test_copies_keep_what_they_overwrite_in_the_same_memory(make, slab):
    model, buffers = make(), Recorded()
    live = LiveModel(model, source=slab, buffers=buffers)
    before = addresses(model)
    for number in range(8):
        live.update(f"v{number}", commit="copy")
        check(model, number)
        assert addresses(model) == before
    assert len(buffers.places) == 3 * len(SIZES)  # what is staged, what is overwritten, and the way back that was there
    live.rollback()
    check(model, 6)


@pytest.mark.parametrize("make", [numpy_model, torch_model])
def test_a_tensor_that_a_user_still_holds_is_never_overwritten(make, slab):
    model = make()
    live = LiveModel(model, source=slab)
    held = {}
    for number in range(12):
        live.update(f"v{number}", commit="swap")
        if number % 3 == 0:
            held[number] = arrays_in(model)["t1"][10:20]
    for number, view in held.items():
        assert view.tolist() == [number * 10 + 1] * 10


def test_modes_may_change_and_the_memory_stays_bounded(slab):
    model, buffers = torch_model(), Buffers()
    live = LiveModel(model, source=slab, buffers=buffers)
    for number, mode in enumerate(["swap", "copy", "swap", "swap", "copy", "copy", "swap", "delta"] * 2):
        live.update(f"v{number}", commit=mode)
        check(model, number)
        assert buffers.nbytes <= 2 * sum(SIZES) * 4
    live.update("v0", commit="inplace")
    assert buffers.nbytes == 0
    check(model, 0)


def test_a_failed_commit_gives_back_what_was_staged(slab):
    model, buffers = numpy_model(), Buffers()
    fails = []

    def post_load():
        if fails:
            raise fails.pop()

    live = LiveModel(model, source=slab, buffers=buffers, post_load=post_load)
    for number in range(4):
        live.update(f"v{number}", commit="swap")
    for _ in range(3):
        fails.append(OSError("no"))
        with pytest.raises(CommitFailed):
            live.update("v4", commit="swap")
        check(model, 3)
        gc.collect()
        assert buffers.nbytes <= 2 * sum(SIZES) * 4  # what was staged, and the version before, which lapsed
    live.update("v5", commit="swap")
    check(model, 5)


@pytest.mark.parametrize("make", [numpy_model, torch_model])
def test_clearing_frees_everything_and_still_tells_who_holds_on(make, slab):
    model, buffers = make(), Buffers()
    live = LiveModel(model, source=slab, buffers=buffers)
    for number in range(4):
        live.update(f"v{number}", commit="swap")
    live.clear()
    assert (buffers.nbytes, live.state) == (0, State.CLEARED)
    live.update("v4", commit="swap")
    check(model, 4)
    user = arrays_in(model)["t2"]
    with pytest.raises(ClearIncomplete, match="t2"):
        live.clear()
    del user
    assert buffers.nbytes == 0


def test_buffers_of_other_sizes_do_not_pile_up():
    """A version may carry tensors that the model ignores, of any size."""
    buffers, source = Buffers(), MemorySource()
    live = LiveModel(numpy_model(), source=source, buffers=buffers, ignore=("extra",))
    for number in range(6):
        tensors = tensors_of(number // 2) | {"extra": np.full(100 + number // 2, number)}
        tensors["t0"][0] += number % 2
        source.add(f"v{number}", tensors, base=f"v{number - 1}" if number % 2 else None)
        live.update(f"v{number}", commit="swap")
        assert buffers.nbytes <= 2 * sum(SIZES) * 4


# -- slices --------------------------------------------------------------------------------------------------------


def test_slices_are_cut_into_the_same_memory_without_a_word(store, rng):
    receiver, shards, buffers = FileReceiver(store), shards_of(0, 2), Buffers()
    store.publish("v", random_tensors(rng))
    for turn in range(4):
        version = cut_version(receiver, "v", shards, buffers=buffers)
        if turn == 0:
            waiting = buffers.nbytes + sum(array.nbytes for array in parameters(version).values())
        version.close()
        assert buffers.nbytes == waiting


def test_a_stream_of_slices_needs_memory_for_a_few_at_a_time(store, rng, monkeypatch):
    monkeypatch.setattr(shard_version, "STREAMED_NBYTES", 1)
    names = [f"w{number}" for number in range(6)]
    store.publish("v", {name: rng.standard_normal((10, 30)) for name in names})
    held = tuple(
        Held(TensorSpec(name, DType.F64, (31, 10)), (Placement(name, Box.whole((10, 30)), (0, 0), transposed=True),))
        for name in names
    )
    shards = Shards(held, dict.fromkeys(names, (10, 30)))
    version = cut_version(FileReceiver(store), "v", shards, mode="inplace")
    places = set()
    with closing(version.pieces(version.shard, deadline=soon())) as pieces:
        for piece in pieces:
            places.add(np.frombuffer(piece.data, np.uint8).ctypes.data)
            del piece
    assert len(places) == 1
