"""torch's distributed tensors: the box of the whole tensor that this process holds, found without any communication."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import torch_bridge
from weightcast.tensors.flat import Array
from weightcast.tensors.spec import TensorSpec

_CURE = "Redistribute it first (tensor.redistribute), or pass Shard(tensor, shape=..., start=...) instead."


def spec(name: str, tensor: object) -> TensorSpec:
    """That of the whole tensor."""
    return torch_bridge.spec(name, tensor)


def has_storage(tensor: object) -> bool:
    """Whether the part of it that is here has."""
    return torch_bridge.has_storage(cast("DTensor", cast("DTensor", tensor).detach()).to_local())


def host(tensor: object) -> Array:
    """The elements, if all of them are here."""
    shape, box, local = local_box(tensor)
    if box != Box.whole(shape):
        raise UnsupportedTensor(
            f"it is a DTensor, and this process holds {list(box.shape)} of its {list(shape)}. Publish shards as they are "
            "with DepotPublisher(rank=..., ranks=...), gather them with Store.publish on every rank, or pass "
            "tensor.full_tensor()."
        )
    return torch_bridge.host(local)


def memory_key(tensor: object) -> tuple[object, ...]:
    """That of what is here, and which box of what it is."""
    shape, box, local = local_box(tensor)
    if not local.numel():
        return (id(tensor),)
    return (*torch_bridge.memory_key(local), shape, box)


def is_sharded(tensor: object) -> bool:
    """Whether processes hold different parts of it. The same on all of them."""
    whole = cast("DTensor", tensor)
    return any(
        not one.is_replicate() and size > 1 for one, size in zip(whole.placements, whole.device_mesh.shape, strict=True)
    )


def local_box(tensor: object) -> tuple[tuple[int, ...], Box, torch.Tensor]:
    """The shape of the whole tensor, the box of it that is here, and the memory of that box. Nothing is gathered.

    A process that is not in the tensor's mesh, or whose shard is empty, holds a box without elements.
    """
    whole = cast("DTensor", tensor)
    shape, mesh, placements = tuple(whole.shape), whole.device_mesh, whole.placements
    refused = [one for one in placements if type(one) not in (Shard, Replicate, _StridedShard)]
    if refused:
        raise UnsupportedTensor(
            f"it is a DTensor with placement(s) {_listed(refused)}, of which no rank holds the values: only Shard(dim) and "
            f"Replicate() are carried. {_CURE}"
        )
    local = cast("DTensor", whole.detach()).to_local()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return shape, Box((0,) * len(shape), (0,) * len(shape)), local.reshape((0,) * len(shape))
    held, start = map(tuple, compute_local_shape_and_global_offset(shape, mesh, placements))
    if any(type(one) is _StridedShard for one in placements):
        _check_one_stretch(shape, mesh.shape, coordinate, placements, start)
    if held != tuple(local.shape):
        raise UnsupportedTensor(
            f"it is a DTensor whose local part has shape {list(local.shape)}, but {_listed(placements)} of {list(shape)} "
            f"says {list(held)}: where it lies in the whole is not known. {_CURE}"
        )
    return shape, Box(start, held), local


def _check_one_stretch(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: Sequence[int],
    placements: tuple[Placement, ...],
    start: tuple[int, ...],
) -> None:
    """Refuse a strided shard unless it is what FSDP makes of a tensor-parallel one: evenly cut by the mesh dimensions behind
    it first, and then by its own. Then a rank holds one stretch of the dimension; in general it holds several.
    """
    for dim, size in enumerate(shape):
        axes = [axis for axis, one in enumerate(placements) if isinstance(one, Shard | _StridedShard) and one.dim == dim]
        strided = [axis for axis in axes if type(placements[axis]) is _StridedShard]
        if not strided:
            continue
        inner = [axis for axis in axes if axis > strided[0]]
        factor = cast("_StridedShard", placements[strided[0]]).split_factor
        at, length = 0, size
        for axis in (*inner, strided[0]):
            length //= mesh_shape[axis]
            at += coordinate[axis] * length
        even = size % prod(mesh_shape[axis] for axis in axes) == 0
        if axes[0] != strided[0] or len(strided) > 1 or factor != prod(mesh_shape[axis] for axis in inner):
            even = False
        if not even or at != start[dim]:
            raise UnsupportedTensor(
                f"it is a DTensor with placements {_listed(placements)} of {list(shape)} on a mesh of {list(mesh_shape)}: a "
                f"rank may hold several stretches of dimension {dim}, and not one box. {_CURE}"
            )


def _listed(placements: list[Placement] | tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))
