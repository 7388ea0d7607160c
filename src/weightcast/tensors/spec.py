"""What a tensor is, without its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightcast.errors import UnsupportedTensor
from weightcast.tensors.dtypes import DType

RESERVED_NAME = "__metadata__"  # a key of the safetensors header


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and shape. The bytes are little-endian and contiguous in C order."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or self.name == RESERVED_NAME or "\0" in self.name or _has_surrogates(self.name):
            raise UnsupportedTensor(f"{self.name!r} cannot be the name of a tensor.")

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize

    def describe(self) -> str:
        """Dtype and shape as people write them: ``BF16[4096, 11008]``."""
        return f"{self.dtype}[{', '.join(str(size) for size in self.shape)}]"
