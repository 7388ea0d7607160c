"""What a tensor is, without its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightcast.errors import InvalidInput, UnsupportedTensor
from weightcast.tensors.dtypes import DType

_SHOWN = 5  # of many names, in a message
MAX_DIMS = 64  # as many as an array of NumPy can have
RESERVED_NAME = "__metadata__"  # a key of the safetensors header


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


# What torch.compile, activation checkpointing and FSDP1 put into the names of what they wrap, at any place.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_OUTERMOST = "module."  # DistributedDataParallel puts it in front of all names; elsewhere it may be the name of a module


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without what wrappers of modules put into it. `module.` is removed once, and only if all names have it.

    Two names may become the same: `check_distinct` refuses that.
    """
    bare = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) or name for name in names}
    if bare and all(name.startswith(_OUTERMOST) for name in bare.values()):
        bare = {name: short.removeprefix(_OUTERMOST) for name, short in bare.items()}
    return bare


def barest_names(names: Iterable[str]) -> dict[str, str]:
    """As `bare_names`, and with every `module.` removed that all names begin with: the form in which names are compared."""
    bare = bare_names(names)
    while (barer := bare_names(bare.values())) != {name: name for name in barer}:
        bare = {name: barer[short] for name, short in bare.items()}
    return bare


def check_distinct(bare: Mapping[str, str], what: str) -> None:
    """Refuse names that would become the same, listing the first of them."""
    holders: dict[str, list[str]] = {}
    for name, short in bare.items():
        holders.setdefault(short, []).append(name)
    same = [f"{' and '.join(names)} become {short}" for short, names in holders.items() if len(names) > 1]
    if same:
        more = f"; and {len(same) - _SHOWN} more" if len(same) > _SHOWN else ""
        raise InvalidInput(
            f"the names of {what} cannot be stripped of their wrappers: {'; '.join(same[:_SHOWN])}{more}. Rename them."
        )


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and shape. The bytes are little-endian and contiguous in C order."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        is_text = isinstance(self.name, str)
        if not is_text or not self.name or self.name == RESERVED_NAME or "\0" in self.name or _has_surrogates(self.name):
            raise UnsupportedTensor(f"{self.name!r} cannot be the name of a tensor.")
        if len(self.shape) > MAX_DIMS:  # to multiply a million sizes takes hours
            raise UnsupportedTensor(
                f"a tensor has {MAX_DIMS} dimensions at most, and {self.name[:200]!r} {len(self.shape)}."
            )

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
