"""The layouts of a model's parameters in the words of the update pipeline: what a rank holds of a version."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.engines.embedded.messages import version_name
from weightcast.engines.embedded.model.build import Model
from weightcast.engines.embedded.model.weights import WeightPiece, declared_weights
from weightcast.tensors.boxes import Held, Placement
from weightcast.tensors.bridges import torch_bridge
from weightcast.tensors.spec import TensorSpec
from weightcast.worker.shards import Shards

_ALWAYS_IGNORED = ("*.rotary_emb.inv_freq",)  # older checkpoints carry it; it follows from the config


def shards_of(model: Model, *, names: Sequence[str] = (), ignore: Sequence[str] = ()) -> Shards:
    """What this rank takes of a version to fill `model`.

    With patterns `names` the model's tensors are those of the version that match one of them: under the model's own names,
    or behind the letters that a pattern starts with (``draft.*`` holds ``draft.model.norm.weight``). All others belong to
    somebody else. `ignore` are patterns of further tensors that may be there.
    """
    weights = list(declared_weights(model))
    sources = {name: shape for weight in weights for name, shape in weight.layout.sources.items()}
    called = {name: version_name(name, names) for name in sources}
    held = tuple(
        Held(
            # The layout's shape: a parameter whose memory was freed has none.
            TensorSpec(weight.name, torch_bridge.spec(weight.name, weight.parameter).dtype, weight.layout.shape),
            tuple(_placement(piece, called[piece.source]) for piece in weight.layout.pieces),
        )
        for weight in weights
    )
    wanted = {called[name]: shape for name, shape in sources.items()}
    return Shards(held=held, sources=wanted, ignore=(*_ALWAYS_IGNORED, *model.ignored, *ignore))


def _placement(piece: WeightPiece, name: str) -> Placement:
    return Placement(name, piece.box, piece.target.start, piece.transposed)
