"""Ranks of a trainer that publish a sharded model together: its tensors are gathered one by one, when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weightcast.errors import GatherFailed, InvalidInput, WeightcastError, rebuilt
from weightcast.tensors.bridges import LazyTensor, dtensor_bridge, is_distributed, local_box, spec_of, torch_bridge
from weightcast.tensors.digest import bytes_digest
from weightcast.tensors.flat import Array

T = TypeVar("T")

_END = -1  # in the place of a tensor's number: nothing more is gathered
_AGREED_DIGITS = 15  # of a hexadecimal digest: what an int64 can hold


def gathering_of(version: str, tensors: Mapping[str, object]) -> Gathering | None:
    """What gathers the DTensors of a mapping; None if all tensors are here whole. Sends nothing."""
    sharded = {}
    for name, tensor in tensors.items():
        if is_distributed(tensor):
            local_box(name, tensor)  # refuses placements that cannot be carried
            if dtensor_bridge.is_sharded(tensor):
                sharded[name] = cast("DTensor", tensor)
    return Gathering(version, tensors, sharded) if sharded else None


class Gathered(LazyTensor):
    """A DTensor that is gathered from all ranks when it is read."""

    def __init__(self, name: str, tensor: object, gather: Callable[[str], torch.Tensor]) -> None:
        self.spec = spec_of(name, tensor)
        self._tensor, self._gather = tensor, gather

    def host(self) -> Array:
        """The whole tensor."""
        return torch_bridge.host(self._gather(self.spec.name))

    def memory_key(self) -> tuple[object, ...]:
        """That of the DTensor."""
        return dtensor_bridge.memory_key(self._tensor)


class Gathering:
    """The ranks of a device mesh that hold the DTensors of one version. Each of them must make the same calls.

    `rank` counts in the order of the mesh; rank 0 leads. The largest mesh of the tensors must hold the ranks of all others.
    Waits end after the timeout of the mesh's process groups, and then raise `GatherFailed`.
    """

    def __init__(self, version: str, tensors: Mapping[str, object], sharded: Mapping[str, DTensor]) -> None:
        self._version, self._tensors, self._sharded = version, tensors, sharded
        self._names = list(sharded)
        self._mesh = _largest_mesh(sharded)
        coordinate = self._mesh.get_coordinate()
        if coordinate is None:
            raise InvalidInput(
                f"{version} cannot be published by this process: it is not a rank of the device mesh of the tensors."
            )
        self._coordinate = tuple(coordinate)
        ranks = self._mesh.mesh.flatten().tolist()
        self.rank, self.ranks = ranks.index(dist.get_rank()), len(ranks)
        self._turn = threading.Lock()
        self._lost = False

    def run(self, lead: Callable[[Mapping[str, object]], bytes]) -> bytes:
        """Let rank 0 call `lead` with tensors that it can read whole; gives what that returned, or raises it, on all ranks.

        The others gather what rank 0 reads, in the order in which it does so.
        """
        self.agree_on_tensors()
        if self.rank > 0:
            return self._follow()
        try:
            told = lead(self.lazy(self._lead_gather))
        except BaseException as error:
            code = error.code if isinstance(error, WeightcastError) else GatherFailed.code
            with suppress(GatherFailed):
                if not self._lost:
                    self._tell_end(code, str(error) or type(error).__name__)
            raise
        self._tell_end("", told)
        return told

    def lazy(self, gather: Callable[[str], torch.Tensor] | None = None) -> dict[str, object]:
        """All tensors, those that are sharded in a form that is gathered when it is read: as by `tensor`, unless told."""
        return {
            name: Gathered(name, tensor, gather or self._gather) if name in self._sharded else tensor
            for name, tensor in self._tensors.items()
        }

    def tensor(self, name: str) -> object:
        """A tensor, whole. If it is sharded, all ranks must ask for it now."""
        return self._gather(name) if name in self._sharded else self._tensors[name]

    def agree_on_tensors(self) -> None:
        """Raise `InvalidInput` on all ranks if they do not publish the same version of the same tensors."""
        specs = [f"{name} {spec_of(name, tensor).describe()}" for name, tensor in self._tensors.items()]
        told = "\n".join([self._version, *specs])
        number = int(bytes_digest(told.encode()).rpartition(":")[2][:_AGREED_DIGITS], 16)
        largest, smallest = self._largest(number, -number)
        if largest != -smallest:
            raise InvalidInput(
                f"the {self.ranks} ranks that publish {self._version} do not give the same version, names, dtypes and "
                "shapes in the same order. Publish the same state_dict() on every rank."
            )

    def agree(self, failed: BaseException | None) -> None:
        """Raise on all ranks if anything failed on one: there that, elsewhere `GatherFailed`."""
        (any_failed,) = self._largest(int(failed is not None))
        if failed is not None:
            raise failed
        if any_failed:
            raise GatherFailed(f"{self._version} was not published: another rank failed, and says why.")

    def together(self, act: Callable[[], T]) -> T:
        """What `act` gives, if it fails on no rank; else this raises on all of them, as `agree` does."""
        try:
            result = act()
        except Exception as error:
            self.agree(error)
            raise
        self.agree(None)
        return result

    def _gather(self, name: str) -> torch.Tensor:
        tensor = cast("DTensor", self._sharded[name].detach())
        with self._exchange(f"gathering {name!r}"):
            if tensor.device.type != tensor.device_mesh.device_type:  # offloaded: its group cannot send from there
                tensor = cast("DTensor", tensor.to(tensor.device_mesh.device_type))
            return tensor.full_tensor()

    def share(self, data: bytes = b"") -> bytes:
        """The bytes of rank 0, on all ranks."""
        nbytes = int(self._from_first(torch.tensor([len(data)])).item())
        message = torch.zeros(nbytes, dtype=torch.uint8)
        if self.rank == 0 and nbytes:
            message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._from_first(message).numpy().tobytes() if nbytes else b""

    def _lead_gather(self, name: str) -> torch.Tensor:
        with self._turn:
            self._from_first(torch.tensor([self._names.index(name)]))
            return self._gather(name)

    def _follow(self) -> bytes:
        while (number := int(self._from_first(torch.tensor([_END])).item())) != _END:
            self._gather(self._names[number])
        code, told = self.share().decode(), self.share()
        if code:
            raise rebuilt(code, told.decode())
        return told

    def _tell_end(self, code: str, told: str | bytes) -> None:
        self._from_first(torch.tensor([_END]))
        self.share(code.encode())
        self.share(told.encode() if isinstance(told, str) else told)

    def _from_first(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of rank 0: along each dimension of the mesh from those that have them by then."""
        on_device = numbers.to(self._mesh.device_type)
        with self._exchange("waiting for rank 0"):
            for dim in range(self._mesh.ndim):
                where = tuple(0 if axis == dim else at for axis, at in enumerate(self._coordinate))
                dist.broadcast(on_device, src=int(self._mesh.mesh[where]), group=self._mesh.get_group(dim))
            return on_device.cpu()

    def _largest(self, *numbers: int) -> list[int]:
        """The largest of each over all ranks."""
        on_device = torch.tensor(numbers, device=self._mesh.device_type)
        with self._exchange("waiting for all ranks to publish"):
            for dim in range(self._mesh.ndim):
                dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=self._mesh.get_group(dim))
            return cast("list[int]", on_device.tolist())

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises: a peer died, or did not come in time
            self._lost = True
            raise GatherFailed(
                f"{self._version} was not published: {what} failed on rank {self.rank} of {self.ranks} ({error}). Sharded "
                "tensors are gathered: every rank must call publish, with the same version."
            ) from error


def _largest_mesh(sharded: Mapping[str, DTensor]) -> DeviceMesh:
    meshes = {tensor.device_mesh: name for name, tensor in sharded.items()}
    largest = max(meshes, key=lambda mesh: mesh.size())
    everyone = set(largest.mesh.flatten().tolist())
    outside = [name for mesh, name in meshes.items() if not set(mesh.mesh.flatten().tolist()) <= everyone]
    if outside:
        raise InvalidInput(
            f"{outside[0]!r} is on a device mesh with ranks that the largest mesh of these tensors does not have, so no "
            "group can gather them all. Publish what each rank holds with DepotPublisher(rank=..., ranks=...)."
        )
    return largest
