"""A small model whose parameters are slices, fused, stacked, transposed and padded; cut by hand, to compare with."""

import numpy as np
from delta_samples import moved_on
from msgspec.structs import replace

from weightcast.clock import Deadline
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType, from_numpy
from weightcast.tensors.flat import Piece, from_bytes
from weightcast.tensors.spec import TensorSpec
from weightcast.tensors.sums import array_sum, root_of_sums
from weightcast.worker.shards import HeldVersion, Shards, cut

VOCABULARY, WIDTH, INNER, EXPERTS = 10, 40, 36, 5
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "q": (INNER, WIDTH),
    "k": (6, WIDTH),
    "v": (6, WIDTH),
    "o": (WIDTH, INNER),
    "gate": (INNER, WIDTH),
    "up": (INNER, WIDTH),
    "left": (INNER, WIDTH),
    "right": (INNER, WIDTH),
    "bias": (INNER,),
    "norm": (WIDTH,),
    "scale": (),
    "none": (0, 3),
    **{f"experts.{number}": (INNER, WIDTH) for number in range(EXPERTS)},
    **{f"stacked.{number}": (WIDTH, INNER) for number in range(3)},
}


def random_tensors(rng, dtype=DType.BF16):
    """All tensors of the model, and one of integers."""
    tensors = {name: rng.normal(0, 0.02, shape).astype(dtype.numpy) for name, shape in SHAPES.items()}
    return tensors | {"table": rng.integers(0, 1 << 40, (6, 2))}


def next_tensors(rng, tensors, density=0.05, keep=()):
    """A version after this one: some elements of each tensor changed, but for those to `keep`."""
    return {
        name: array if name in keep else moved_on(rng, array, from_numpy(array.dtype), density=density, far=False)
        for name, array in tensors.items()
    }


def shards_of(rank, ranks, dtype=DType.BF16, **more):
    """What a rank holds. Experts are divided among ranks; each holds at least none."""
    held = []

    def add(name, shape, *placements, of=dtype):
        held.append(Held(TensorSpec(name, of, shape), placements))

    def rows(source, at, transposed=False):
        box = Box.shard(SHAPES[source], dim=0, rank=rank, ranks=ranks)
        return Placement(source, box, at, transposed)

    per = -(-VOCABULARY // ranks)
    mine = max(0, min(per, VOCABULARY - rank * per))
    add("emb", (per, WIDTH), Placement("embed", Box((rank * per, 0), (mine, WIDTH)), (0, 0)))
    q, k = INNER // ranks, 6 // ranks
    add("qkv", (q + 2 * k, WIDTH), rows("q", (0, 0)), rows("k", (q, 0)), rows("v", (q + k, 0)))
    add("gate_up", (WIDTH, 2 * q), rows("gate", (0, 0), True), rows("up", (0, q), True))
    add("beside", (q, 2 * WIDTH + 1), rows("left", (0, 0)), rows("right", (0, WIDTH)))
    add("out", (WIDTH, q), Placement("o", Box.shard(SHAPES["o"], dim=1, rank=rank, ranks=ranks), (0, 0)))
    add("b", (q + 1,), rows("bias", (0,)))
    add("norm", (WIDTH,), Placement("norm", Box.whole((WIDTH,)), (0,)))
    add("scale", (), Placement("scale", Box.whole(()), ()))
    add("none", (0, 3), Placement("none", Box.whole((0, 3)), (0, 0)))
    add("blank", (3,))
    experts = [number for number in range(EXPERTS) if number % ranks == rank]
    whole = Box.whole((INNER, WIDTH))
    stack = [Placement(f"experts.{number}", whole, (at, 0, 0), True) for at, number in enumerate(experts)]
    add("experts", (len(experts) + 1, WIDTH, INNER), *stack)
    column = Box.shard((WIDTH, INNER), dim=1, rank=rank, ranks=ranks)
    add("stack", (3, WIDTH, q), *(Placement(f"stacked.{number}", column, (number, 0, 0)) for number in range(3)))
    add("table", (6, 2), Placement("table", Box.whole((6, 2)), (0, 0)), of=DType.I64)
    return Shards(tuple(held), SHAPES | {"table": (6, 2)}, **more)


def by_hand(tensors, rank, ranks):
    """The parameters of a rank, sliced without any of the code that is tested."""

    def rows(name):
        return np.split(tensors[name], ranks)[rank]

    def filled(array, shape):
        whole = np.zeros(shape, array.dtype)
        whole[tuple(slice(0, size) for size in array.shape)] = array
        return whole

    per = -(-VOCABULARY // ranks)
    q = INNER // ranks
    experts = [tensors[f"experts.{number}"].T for number in range(EXPERTS) if number % ranks == rank]
    dtype = tensors["q"].dtype
    return {
        "emb": filled(tensors["embed"][rank * per : (rank + 1) * per], (per, WIDTH)),
        "qkv": np.concatenate([rows("q"), rows("k"), rows("v")]),
        "gate_up": np.concatenate([rows("gate").T, rows("up").T], axis=1),
        "beside": filled(np.concatenate([rows("left"), rows("right")], axis=1), (q, 2 * WIDTH + 1)),
        "out": np.split(tensors["o"], ranks, axis=1)[rank],
        "b": filled(rows("bias"), (q + 1,)),
        "norm": tensors["norm"],
        "scale": tensors["scale"],
        "none": tensors["none"],
        "blank": np.zeros(3, dtype),
        "experts": filled(np.stack(experts), (len(experts) + 1, WIDTH, INNER)),
        "stack": np.stack([np.split(tensors[f"stacked.{number}"], ranks, axis=1)[rank] for number in range(3)]),
        "table": tensors["table"],
    }


def soon():
    """Time enough for every test."""
    return Deadline.after(60)


def cut_version(receiver, version, shards, *, held=None, mode="copy", checksum=True, told=None, deadline=None, **more):
    """`cut`, with what most tests want."""
    manifest = receiver.manifest(version, deadline=soon())
    progress = told.append if told is not None else (lambda _: None)
    return cut(
        receiver, manifest, shards, held=held, mode=mode, checksum=checksum, deadline=deadline or soon(),
        progress=lambda done, total: progress((done, total)), **more,
    )  # fmt: skip


def parameters(version):
    """The arrays of a version that was cut whole."""
    return version.arrays(version.manifest(version.newest(), deadline=soon()))


def streamed(version, manifest, names=None):
    """What a version streams, one whole parameter per piece."""
    found = {}
    specs = {entry.name: entry.spec for entry in manifest.tensors}
    for piece in version.pieces(manifest, deadline=soon(), names=names):
        assert piece.tensor not in found
        assert (piece.offset, len(piece.data)) == (0, specs[piece.tensor].nbytes)
        found[piece.tensor] = from_bytes(bytes(piece.data), specs[piece.tensor])
    return found | {name: np.empty(spec.shape, spec.dtype.numpy) for name, spec in specs.items() if spec.nbytes == 0}


def check_manifest(version, arrays):
    """The manifest of a shard version is one of these very arrays. It has their sums if they are streamed once more; those
    of changes, and of parameters that are in memory, are worked out when they are staged.
    """
    shard = version.manifest(version.newest(), deadline=soon())
    proved = sealed(shard, arrays)
    unsealed = replace(proved, root_digest="", tensors=tuple(replace(entry, sum="") for entry in proved.tensors))
    assert shard == (proved if is_streamed(version) else unsealed)
    assert not any(entry.digest for entry in shard.tensors)
    assert (shard.version, shard.sequence, shard.step) == (version.full.version, version.full.sequence, version.full.step)
    assert not shard.payloads
    return shard


def sealed(shard, arrays):
    """The manifest of a shard version, with the sums of these arrays: what staging makes of the one of a delta."""
    assert {entry.name for entry in shard.tensors} == arrays.keys()
    tensors = tuple(replace(entry, sum=str(array_sum(entry.spec, arrays[entry.name]))) for entry in shard.tensors)
    return replace(shard, tensors=tensors, root_digest=root_of_sums((entry.spec, entry.sum) for entry in tensors))


def is_streamed(version):
    """Whether a version was cut to be streamed: neither its parameters nor its changes are in memory."""
    return not version.by_delta and version._arrays is None


def held_now(version, arrays=None):
    """What a rank serves once it has committed a version. `arrays` are its parameters then, where they are not in memory."""
    shard = version.manifest(version.newest(), deadline=soon())
    if arrays is None and not shard.sealed:
        arrays = parameters(version)
    return HeldVersion(version.full, shard if arrays is None else sealed(shard, arrays), version.url)


class MixedReceiver:
    """A source that sends the bytes of a version in small pieces, in any order, tensors mixed; and counts what it sends."""

    url = "mixed://"

    def __init__(self, manifest, tensors, rng, size=40):
        self._manifest, self._tensors, self._rng, self._size = manifest, tensors, rng, size
        self.asked = []

    def newest(self):
        return self._manifest.version

    def manifest(self, version, *, deadline):
        deadline.check("reading")
        return self._manifest

    def pieces(self, manifest, *, deadline, names=None):
        self.asked.append(set(self._tensors) if names is None else set(names))
        pieces = []
        for name, array in self._tensors.items():
            data = np.ascontiguousarray(array).tobytes()
            if names is None or name in names:
                pieces += [Piece(name, at, memoryview(data)[at : at + self._size]) for at in range(0, len(data), self._size)]
        for index in self._rng.permutation(len(pieces)):
            yield pieces[index]

    def close(self):
        pass
