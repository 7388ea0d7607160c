"""Two trainer ranks under FSDP2 that do what their input says. Run as: fsdp_publishers DIRECTORY RANK RANKS

Each line of standard input is a JSON list: the name of a function below and its arguments. Its answer, or the kind and text
of the error that it ended in, is one line of standard output. Before, they say that they are there, and wait for a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what FSDP loads when it is first used
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from weightcast import DepotPublisher, LiveModel, Publisher, Store
from weightcast.tensors.bridges import host_array
from weightcast.tensors.digest import array_digest

GROUP_S = 10.0  # how long a rank waits for another


class Model(nn.Module):
    """What trainers shard: rows, columns, fewer rows than ranks, uneven numbers of them, a tied head, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.gate = nn.Linear(8, 1)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(tokens)) * self.gate(self.embed(tokens))))


def whole(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(seed: int) -> Model:
    model = whole(seed)
    columns = model.down.weight
    fully_shard(model.up)
    return fully_shard(model, shard_placement_fn=lambda one: Shard(int(one is columns)))


def digests(tensors: Any) -> dict[str, str]:
    return {name: array_digest(host_array(name, tensor)) for name, tensor in tensors.items()}


class Rank:
    """What a test can ask of a rank."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.rank, self.ranks = directory, dist.get_rank(), dist.get_world_size()
        self.model = sharded(seed=1)
        self.kept: list[Any] = []
        self.live: LiveModel
        self.publisher: Publisher

    def store_publish(self, version: str, seed: int, *, name: str = "store", **options: Any) -> list[str]:
        manifest = Store(self.directory / name).publish(version, sharded(seed), **options)
        return [manifest.version, manifest.kind, manifest.root_digest]

    def store_publish_hybrid(self, version: str, seed: int) -> list[Any]:
        """Replicas of shards, a tensor-parallel layer under FSDP, and one that only the inner dimension shards."""
        mesh = init_device_mesh("cpu", (2, self.ranks // 2), mesh_dim_names=("outer", "inner"))
        model = whole(seed)
        parallelize_module(model, mesh["inner"], {"down": ColwiseParallel()})
        fully_shard(model.down, mesh=mesh["outer"])
        fully_shard(model.up, mesh=mesh)
        fully_shard(model.gate, mesh=mesh["inner"])
        manifest = Store(self.directory / "hybrid").publish(version, model)
        meshes = {one.device_mesh.ndim for one in model.state_dict().values() if isinstance(one, DTensor)}
        return [manifest.root_digest, sorted(meshes)]

    def store_publish_mapping(self, version: str, names: list[str]) -> str:
        state = sharded(1).state_dict()
        return Store(self.directory / "store").publish(version, {name: state[name] for name in names}).root_digest

    def store_publish_partial(self) -> str:
        mesh = init_device_mesh("cpu", (self.ranks,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        return Store(self.directory / "store").publish("partial", {"w": tensor}).root_digest

    def ipc_open(self, name: str, ranks: int) -> None:
        self.publisher = Publisher(self.directory / name, rank=self.rank, ranks=ranks)

    def ipc_publish(self, version: str, seed: int, timeout: float = 60) -> int:
        state = sharded(seed).state_dict()
        return len(self.publisher.publish(version, state, dtype="BF16", timeout=timeout).manifest.tensors)

    def ipc_stream(self) -> None:
        with Publisher(self.directory / f"stream{self.rank}") as publisher:
            publisher.stream("v", sharded(1).state_dict(), timeout=1)

    def depot_publish(self, version: str, seed: int, *, ranks: int | None = None) -> str:
        rank = self.rank if ranks is None else 0
        publisher = DepotPublisher("127.0.0.1:0", rank=rank, ranks=ranks or self.ranks)
        self.kept.append(publisher)
        publisher.publish(version, sharded(seed).state_dict(), dtype="BF16", keep_dtype=["gate.*"])
        return publisher.url

    def update(self, source: str, version: str, seed: int, commit: str = "copy", *, changed: bool = False) -> list[Any]:
        """Update the sharded model, and compare what it computes, and holds, with the whole one."""
        self.live = self.live if changed else LiveModel(self.model, source=source)
        live = self.live
        tokens = torch.arange(13)
        self.model(tokens)  # leaves the outer parameters gathered
        result = live.update(version, commit=commit)
        again = live.update(version, commit=commit)
        expected = whole(seed)
        with torch.no_grad():
            if changed:
                expected.up.weight[3, 2] += 1
                expected.embed.weight[12, 7] -= 1
            close = torch.allclose(self.model(tokens), expected(tokens), atol=1e-6)
        state = self.model.state_dict()
        gathered = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
        return [result.mode, close, digests(gathered) == digests(expected.state_dict()), again.mode, result.bytes]

    def clear(self) -> None:
        LiveModel(self.model).clear()

    def die(self) -> None:
        os._exit(3)


def main() -> None:
    directory, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    print(json.dumps("imported"), flush=True)
    sys.stdin.readline()  # all have imported torch, which takes long on a busy machine: now they meet
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GROUP_S),
    )
    asked = Rank(directory)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        call: Callable[..., Any] = getattr(asked, name)
        try:
            answer = call(*arguments, **options)
        except Exception as error:
            answer = {"error": type(error).__name__, "module": type(error).__module__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # torch's threads may still wait for a rank that a test has ended


if __name__ == "__main__":
    main()
