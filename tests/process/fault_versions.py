"""What the fault trials publish: stores with the same version names, and every byte that a receiver must end up with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightcast import Store
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType, from_numpy
from weightcast.tensors.spec import TensorSpec
from weightcast.worker.shards import Shards

from .children import TESTS

sys.path.insert(0, str(TESTS / "unit"))

from delta_samples import moved_on

# Each letter begins anew, so that the way from one family to another is a full version; within a family deltas lead
# everywhere.
CHAIN = {"a0": "full", "a1": "delta", "a2": "delta", "b3": "full", "b4": "delta", "b5": "delta", "c6": "full", "c7": "delta"}
NEWEST = "c7"
RANKS = 2
PART_NBYTES = 1 << 20

LAYERS, WIDTH, INNER, VOCABULARY = 4, 256, 384, 1000
_SHAPES: dict[str, tuple[DType, tuple[int, ...]]] = {
    "embed": (DType.F32, (VOCABULARY, WIDTH)),
    **{
        f"{layer}.{name}": (dtype, shape)
        for layer in range(LAYERS)
        for name, dtype, shape in (
            ("q", DType.BF16, (WIDTH, WIDTH)),
            ("k", DType.BF16, (WIDTH // 4, WIDTH)),
            ("v", DType.BF16, (WIDTH // 4, WIDTH)),
            ("o", DType.F16, (WIDTH, WIDTH)),
            ("gate", DType.BF16, (INNER, WIDTH)),
            ("up", DType.BF16, (INNER, WIDTH)),
            ("down", DType.F8_E4M3, (WIDTH, INNER)),
            ("norm", DType.F32, (WIDTH,)),
        )
    },
    "mask": (DType.U8, (3, 1111)),
    "table": (DType.I64, (6, 2)),
    "scale": (DType.F32, ()),
    "nothing": (DType.F32, (0, 3)),
}

_ON_EVERY_RANK = [*(f"{layer}.norm" for layer in range(LAYERS)), "mask", "table", "scale", "nothing"]

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Published:
    """A store, and what its versions are."""

    path: Path
    states: dict[str, State]
    roots: dict[str, str]

    @classmethod
    def at(cls, path: Path, seed: int) -> Published:
        """What was published with this seed."""
        manifests = {version: path / "versions" / version / "manifest.json" for version in CHAIN}
        roots = {version: json.loads(file.read_bytes())["root_digest"] for version, file in manifests.items()}
        return cls(path, states(seed), roots)


def states(seed: int) -> dict[str, State]:
    """The tensors of every version of the chain, as they follow from a seed."""
    rng = np.random.default_rng(seed)
    made: dict[str, State] = {}
    state: State = {}
    for version, kind in CHAIN.items():
        state = made[version] = _fresh(rng) if kind == "full" else _next(rng, state)
    return made


def publish(path: Path, seed: int) -> None:
    """All versions of the chain."""
    store = Store(path)
    for version, state in states(seed).items():
        assert store.publish(version, state, CHAIN[version], part_nbytes=PART_NBYTES).kind == CHAIN[version]


def _fresh(rng: np.random.Generator) -> State:
    return {
        name: np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype.numpy).reshape(shape).copy()
        for name, (dtype, shape) in _SHAPES.items()
    }


def _next(rng: np.random.Generator, state: State) -> State:
    return {
        name: array
        if name == "mask" or not array.size
        else moved_on(rng, array, from_numpy(array.dtype), density=0.02, far=False)
        for name, array in state.items()
    }


def blank() -> State:
    """A model that has never been loaded."""
    return {name: np.zeros(shape, dtype.numpy) for name, (dtype, shape) in _SHAPES.items()}


# -- ranks ------------------------------------------------------------------------------------------------------------


def shards_of(rank: int) -> Shards:
    """What a rank holds: rows and columns of tensors, fused, transposed and padded."""
    held = []

    def add(name: str, dtype: DType, shape: tuple[int, ...], *placements: Placement) -> None:
        held.append(Held(TensorSpec(name, dtype, shape), placements))

    def cut(source: str, at: tuple[int, ...], dim: int = 0, transposed: bool = False) -> Placement:
        return Placement(source, Box.shard(_SHAPES[source][1], dim=dim, rank=rank, ranks=RANKS), at, transposed)

    add("embed", DType.F32, (VOCABULARY // RANKS + 3, WIDTH), cut("embed", (0, 0)))
    q, k, inner = WIDTH // RANKS, WIDTH // 4 // RANKS, INNER // RANKS
    for n in range(LAYERS):
        add(
            f"{n}.qkv", DType.BF16, (q + 2 * k, WIDTH),
            cut(f"{n}.q", (0, 0)), cut(f"{n}.k", (q, 0)), cut(f"{n}.v", (q + k, 0)),
        )  # fmt: skip
        add(f"{n}.o", DType.F16, (WIDTH, q), cut(f"{n}.o", (0, 0), dim=1))
        add(f"{n}.gate_up", DType.BF16, (WIDTH, 2 * inner), *_fused(cut, n, inner))
        add(f"{n}.down", DType.F8_E4M3, (WIDTH, inner), cut(f"{n}.down", (0, 0), dim=1))
    for name in _ON_EVERY_RANK:
        dtype, shape = _SHAPES[name]
        add(name, dtype, shape, Placement(name, Box.whole(shape), (0,) * len(shape)))
    return Shards(tuple(held), {name: shape for name, (_, shape) in _SHAPES.items()})


def _fused(cut, number: int, inner: int) -> Iterator[Placement]:
    yield cut(f"{number}.gate", (0, 0), transposed=True)
    yield cut(f"{number}.up", (0, inner), transposed=True)


def shard_by_hand(state: State, rank: int) -> State:
    """The parameters of a rank, without any of the code that is tested."""

    def rows(name: str) -> np.ndarray:
        return np.split(state[name], RANKS)[rank]

    def columns(name: str) -> np.ndarray:
        return np.split(state[name], RANKS, axis=1)[rank]

    found: State = {"embed": np.concatenate([rows("embed"), np.zeros((3, WIDTH), np.float32)])}
    for n in range(LAYERS):
        found[f"{n}.qkv"] = np.concatenate([rows(f"{n}.{name}") for name in "qkv"])
        found[f"{n}.o"] = columns(f"{n}.o")
        found[f"{n}.gate_up"] = np.concatenate([rows(f"{n}.gate").T, rows(f"{n}.up").T], axis=1)
        found[f"{n}.down"] = columns(f"{n}.down")
    return found | {
        name: state[name] for name in [*(f"{n}.norm" for n in range(LAYERS)), "mask", "table", "scale", "nothing"]
    }


def blank_shard(rank: int) -> State:
    """A rank's model that has never been loaded."""
    return {one.spec.name: np.zeros(one.spec.shape, one.spec.dtype.numpy) for one in shards_of(rank).held}


def differing(found: State, wanted: State) -> list[str]:
    """The tensors that are not the same, bit for bit."""
    assert found.keys() == wanted.keys()
    return [name for name, array in wanted.items() if not np.array_equal(_bits(found[name]), _bits(array))]


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
