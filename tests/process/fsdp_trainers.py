"""Four trainer ranks under FSDP2, each with a publisher of its own. Run as: fsdp_trainers DIRECTORY

They are forked from one process that has torch imported. When `urls.json` is there, all have published; they end when
standard input does. The whole weights, before they are sharded, are published to the store in DIRECTORY. What the
ranks hold is also written by themselves to the store `shares` there.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # what FSDP loads when it is first used: once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from weightcast import DeltaPolicy, DepotPublisher, ShareWriter, Store
from weightcast.delta import Cut, Slicing

RANKS = 4
CUTS = Slicing((Cut(("*.up.weight", "*embed.weight"), 0), Cut(("*.down.weight",), 1)))
WIDTH, INNER, VOCABULARY, LAYERS = 512, 1536, 4099, 2


class Block(nn.Module):
    """The kinds of tensors that a layer has: rows are cut by trainers, or columns, unevenly, or nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 3)  # fewer rows than trainer ranks


class Model(nn.Module):
    """Some MiB of weights, with a head that is tied to the embedding. `wide` is a tensor-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.wide = Block()


def sharded(model: Model) -> dict[str, torch.Tensor]:
    """The model under FSDP: `down` by columns, norms whole at every rank, all else by rows. `wide` is tensor-parallel over
    pairs of ranks, and under FSDP over the others: a mesh of two dimensions.
    """
    wide, model.wide = model.wide, None
    plane = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(wide, plane["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    beside = fully_shard(wide, mesh=plane["dp"]).state_dict()
    assert type(beside["up.weight"].placements[0]) is _StridedShard
    mesh = init_device_mesh("cpu", (RANKS,))
    norms = {parameter for block in model.blocks for parameter in block.norm.parameters()}
    for block in model.blocks:
        columns = block.down.weight
        fully_shard(
            block,
            mesh=mesh,
            ignored_params=norms,
            shard_placement_fn=lambda one, columns=columns: Shard(int(one is columns)),
        )
    whole = fully_shard(model, mesh=mesh, ignored_params=norms).state_dict()
    return whole | {f"wide.{name}": tensor for name, tensor in beside.items()}


def stepped(model: Model) -> Model:
    """The weights after one more step: every twentieth element differs in its lowest bit. The same at every rank."""
    later = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in later.parameters():  # what is tied comes once
            bits = parameter.view(torch.int16).view(-1)
            chosen = torch.randint(0, bits.numel(), (max(1, bits.numel() // 20),), generator=generator).unique()
            bits[chosen] ^= 1
    return later


def run(rank: int, directory: Path, told: multiprocessing.Queue[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    torch.manual_seed(5)
    model = Model().to(torch.bfloat16)
    later = stepped(model)
    if rank == 0:
        Store(directory / "store").publish("step_1", model.state_dict(), "full")
        Store(directory / "store").publish("step_2", later.state_dict(), "full")
    state, next_state = sharded(model), sharded(later)
    deltas = DeltaPolicy(slicing=CUTS)
    writer = ShareWriter(directory / "shares", rank=rank, ranks=RANKS, threads=1, deltas=deltas)
    assert writer.publish("step_1", state).kind == "full"
    assert writer.publish("step_2", next_state).kind == "delta"
    with DepotPublisher("127.0.0.1:0", rank=rank, ranks=RANKS, threads=1, deltas=deltas, nixl=True) as publisher:
        publisher.publish("step_1", state)
        publisher.publish("step_2", next_state)
        with torch.no_grad():
            for tensor in (*state.values(), *next_state.values()):  # the next step: what was published must not follow it
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(float(rank))
        dist.barrier()
        told.put(publisher.url)
        sys.stdin.read()
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    told: multiprocessing.Queue[str] = fork.Queue()
    ranks = [fork.Process(target=entered, args=(rank, directory, told)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    urls = [told.get(timeout=120) for _ in ranks]
    (directory / "urls.tmp").write_text(json.dumps(urls))
    (directory / "urls.tmp").rename(directory / "urls.json")
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


def entered(rank: int, directory: Path, told: multiprocessing.Queue[str]) -> None:
    sys.stdin = open(0)  # noqa: SIM115 - multiprocessing takes it away from children
    run(rank, directory, told)


if __name__ == "__main__":
    main()
