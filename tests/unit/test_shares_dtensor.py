"""DTensors accepted as they are: the box that each rank holds is the one whose values it has."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from weightcast import LiveModel  # noqa: E402
from weightcast.errors import UnsupportedTensor, VersionDoesNotFit  # noqa: E402
from weightcast.publish.shares import given  # noqa: E402
from weightcast.tensors.box_plan import tiling_problems  # noqa: E402
from weightcast.tensors.boxes import Box, box_of  # noqa: E402


@pytest.fixture
def as_rank():
    """Makes this process one rank of several, without the others: nothing may be sent or gathered."""

    def become(rank, world):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh_of(rank, shape):
    """Meshes of one rank only: torch takes what it keeps of equal meshes for the same, and knows one rank in a process."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{axis} of {rank}" for axis in range(len(shape))))


def check_holds(given_one, whole):
    assert given_one.spec.shape == tuple(whole.shape)
    held = given_one.tensor.detach().numpy()
    assert held.tobytes() == box_of(whole, given_one.box).tobytes()
    return given_one.box


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "replicas"),
    [
        ((4,), (Shard(0),), 1),
        ((4,), (Shard(1),), 1),
        ((4,), (Replicate(),), 4),
        ((2, 2), (Replicate(), Shard(0)), 2),
        ((2, 2), (Shard(0), Shard(1)), 1),
        ((2, 2), (Shard(1), Shard(1)), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (3, 4), (1, 2)], ids=str)
def test_a_rank_holds_the_box_of_its_values(as_rank, mesh_shape, placements, replicas, shape):
    whole = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    boxes = []
    for rank in range(4):
        as_rank(rank, 4)
        mesh = mesh_of(rank, mesh_shape)
        tensor = distribute_tensor(torch.from_numpy(whole), mesh, placements, src_data_rank=None)
        own, _ = given({"w": torch.nn.Parameter(tensor)}, ranks=4)
        boxes.append(check_holds(own["w"], whole))
    filled = [box for box in boxes if min(box.shape)]
    assert all(filled.count(box) == replicas for box in filled)
    assert tiling_problems(shape, list(dict.fromkeys(filled))) == []


def test_fsdp_of_tensor_parallel_layers_is_taken_as_it_is(as_rank):
    wholes = {
        "0.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
        "1.weight": np.arange(48, dtype=np.float32).reshape(6, 8),
    }
    boxes = {name: [] for name in wholes}
    for rank in range(4):
        as_rank(rank, 4)
        mesh = mesh_of(rank, (2, 2))
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 6, bias=False))
        layers.load_state_dict({name: torch.from_numpy(whole) for name, whole in wholes.items()})
        parallelize_module(
            layers, mesh[f"1 of {rank}"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None
        )
        fully_shard(layers, mesh=mesh[f"0 of {rank}"])
        own, tied = given(layers.state_dict(), ranks=4)
        assert not tied
        for name, whole in wholes.items():
            boxes[name].append(check_holds(own[name], whole))
    for name, whole in wholes.items():
        assert tiling_problems(whole.shape, boxes[name]) == []


def test_names_of_the_same_shard_are_tied(as_rank):
    as_rank(1, 4)
    tensor = distribute_tensor(torch.ones(8, 2), init_device_mesh("cpu", (4,)), (Shard(0),), src_data_rank=None)
    own, tied = given({"embed": tensor, "head": tensor, "other": tensor.clone()}, ranks=4)
    assert tied == {"head": "embed"}
    assert own["embed"].box == own["other"].box == Box((2, 0), (2, 2))


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "local", "shape"),
    [
        ((4,), (Partial(),), (8, 2), (8, 2)),
        ((4,), (_StridedShard(0, split_factor=2),), (2, 2), (8, 2)),  # two stretches of one row
        ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (2, 2), (7, 2)),  # uneven
        ((2, 2), (Shard(0), _StridedShard(0, split_factor=2)), (2, 2), (8, 2)),
        ((4,), (Shard(0),), (3, 2), (8, 2)),  # cut otherwise than torch would
    ],
    ids=str,
)
def test_what_may_not_be_one_box_is_refused(as_rank, mesh_shape, placements, local, shape):
    as_rank(1, 4)
    mesh = init_device_mesh("cpu", mesh_shape)
    tensor = DTensor.from_local(torch.ones(local), mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))
    with pytest.raises(UnsupportedTensor, match="tensor 'w': it is a DTensor") as caught:
        given({"w": tensor}, ranks=4)
    assert "redistribute" in str(caught.value)


@pytest.mark.parametrize("agrees", [False, True])
def test_a_distributed_model_with_tied_parameters_refuses_a_delta_that_may_untie_them(store, agrees, as_rank):
    as_rank(0, 1)
    mesh = mesh_of(0, (1,))
    array = np.arange(256, dtype=np.float32).reshape(64, 4)
    store.publish("v1", {"a.weight": array, "b.weight": array.copy()})
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 64, bias=False) for name in "ab"})
    model["a"].weight = torch.nn.Parameter(distribute_tensor(torch.zeros(64, 4), mesh, [Shard(0)]))
    model["b"].weight = model["a"].weight
    live = LiveModel(model, source=store, all_reduce=(lambda numbers: numbers) if agrees else None)
    live.update("v1")
    changed = array.copy()
    changed[3, 3] = 99
    store.publish("v2", {"a.weight": array, "b.weight": changed}, "delta")
    with pytest.raises(VersionDoesNotFit, match="the model ties them"):
        live.update("v2")
    assert live.version == "v1"
    assert (model["a"].weight.to_local().detach().numpy() == array).all()
