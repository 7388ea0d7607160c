"""Lossless deltas between two states: sparse differences in units in the last place, packed below 1.5 bytes per change.

    packed = delta.encode(base, new)        # bytes; packing="gaps" is decoded without the base
    edit = delta.apply(target, packed)      # in place, whole and proved, or not at all
    sparse = delta.decode(packed, base)     # indices and steps, for `fold`, `invert`, `slice` and `pack`

docs/delta-format.md describes the bytes.
"""

from weightcast.delta.apply import apply, move
from weightcast.delta.decoder import decode, decode_chain, decode_payloads
from weightcast.delta.edit import Edit, prepare
from weightcast.delta.encoder import Encoder, encode, pack
from weightcast.delta.report import DeltaReport, TensorReport, inspect
from weightcast.delta.runs import slice_delta as slice  # noqa: A004 - named for what it does; use as delta.slice
from weightcast.delta.slicing import Cut, Slicing
from weightcast.delta.sparse import Delta, TensorDelta, fold, invert
from weightcast.delta.states import ArrayState, MovedState, State
from weightcast.tensors.kernels import warm_up
from weightcast.wire.manifest import Packing

__all__ = [
    "ArrayState",
    "Cut",
    "Delta",
    "DeltaReport",
    "Edit",
    "Encoder",
    "MovedState",
    "Packing",
    "Slicing",
    "State",
    "TensorDelta",
    "TensorReport",
    "apply",
    "decode",
    "decode_chain",
    "decode_payloads",
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
