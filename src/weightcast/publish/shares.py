"""What a trainer rank gives to be published: whole tensors, or the boxes of them that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from weightcast.errors import InvalidInput
from weightcast.store.writer import PublishAs
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import bridge_for, local_box, spec_of
from weightcast.tensors.spec import TensorSpec


@dataclass(frozen=True)
class Shard:
    """A tensor that is one box of a larger one: `shape` is that of the whole, `start` is where the box begins in it."""

    tensor: object
    shape: Sequence[int]
    start: Sequence[int]


@dataclass(frozen=True)
class Given:
    """A tensor of a version as one rank has it: what the whole is, which box of it is here, and the tensor with that box."""

    spec: TensorSpec
    box: Box
    tensor: object

    @cached_property
    def held(self) -> TensorSpec:
        """The box as a tensor of its own."""
        return TensorSpec(name=self.spec.name, dtype=self.spec.dtype, shape=self.box.shape)


def given(
    tensors: Mapping[str, object], *, ranks: int, form: PublishAs | None = None
) -> tuple[dict[str, Given], dict[str, str]]:
    """What a mapping holds: the tensors that have bytes of their own, and the names that are tied to them.

    Names that are the same box of tensors of the same shape, in the same memory, are the same tensor. Without other
    `ranks` every tensor must be whole. Raises `InvalidInput` with every box that cannot be.
    """
    own: dict[str, Given] = {}
    tied: dict[str, str] = {}
    holders: dict[tuple[object, ...], str] = {}
    problems = []
    for name, tensor in tensors.items():
        one = _given(name, tensor)
        if form is not None and form.dtype is not None:
            one = replace(one, tensor=form.tensor(name, one.tensor))
            one = replace(one, spec=replace(one.spec, dtype=spec_of(name, one.tensor).dtype))
        if not one.box.fits(one.spec.shape):
            problems.append(
                f"{name!r} cannot have a box of shape {one.box.shape} at {one.box.start} of {one.spec.describe()}"
            )
        elif ranks == 1 and one.box != Box.whole(one.spec.shape):
            problems.append(f"{name!r} is only a box of shape {one.box.shape} of {one.spec.describe()}, and ranks is 1")
        key = (*bridge_for(one.tensor).memory_key(one.tensor), one.spec.shape, one.box)
        holder = holders.setdefault(key, name) if prod(one.box.shape) else name
        if holder == name:
            own[name] = one
        else:
            tied[name] = holder
    if problems:
        raise InvalidInput(f"these tensors cannot be published: {'; '.join(problems)}.")
    return own, tied


def _given(name: str, tensor: object) -> Given:
    if isinstance(tensor, Shard):
        shape, start = tuple(map(int, tensor.shape)), tuple(map(int, tensor.start))
        held = spec_of(name, tensor.tensor)
        if not len(shape) == len(start) == len(held.shape) or min((*shape, *start), default=0) < 0:
            raise InvalidInput(
                f"tensor {name!r}: a box of shape {list(held.shape)} cannot start at {list(start)} of a tensor of shape "
                f"{list(shape)}."
            )
        return Given(TensorSpec(name=name, dtype=held.dtype, shape=shape), Box(start, held.shape), tensor.tensor)
    distributed = local_box(name, tensor)
    if distributed is not None:
        shape, box, local = distributed
        return Given(TensorSpec(name=name, dtype=spec_of(name, local).dtype, shape=shape), box, local)
    spec = spec_of(name, tensor)
    return Given(spec, Box.whole(spec.shape), tensor)
