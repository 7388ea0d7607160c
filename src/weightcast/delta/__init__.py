"""Lossless deltas between two states: sparse differences in units in the last place, packed below 1.5 bytes per change.

    packed = delta.encode(base, new)        # bytes; packing="gaps" if receivers hold only slices
    edit = delta.apply(target, packed)      # in place, whole and proved, or not at all
    sparse = delta.decode(packed, base)     # indices and steps, for `fold`, `invert`, `slice` and `pack`

docs/delta-format.md describes the bytes.
"""

from weightcast.delta.apply import apply, move
from weightcast.delta.container import Packing
from weightcast.delta.decoder import decode, decode_chain
from weightcast.delta.edit import Edit, prepare
from weightcast.delta.encoder import Encoder, encode, pack
from weightcast.delta.placement import slice_delta as slice  # noqa: A004 - named for what it does; use as delta.slice
from weightcast.delta.report import DeltaReport, TensorReport, inspect
from weightcast.delta.sparse import Delta, TensorDelta, fold, invert
from weightcast.delta.states import ArrayState, MovedState, State
from weightcast.tensors.kernels import warm_up

__all__ = [
    "ArrayState",
    "Delta",
    "DeltaReport",
    "Edit",
    "Encoder",
    "MovedState",
    "Packing",
    "State",
    "TensorDelta",
    "TensorReport",
    "apply",
    "decode",
    "decode_chain",
    "encode",
    "fold",
    "inspect",
    "invert",
    "move",
    "pack",
    "prepare",
    "slice",
    "warm_up",
]
