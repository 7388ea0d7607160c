"""From what a user calls a model to slots. Reading a model's shape allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from weightcast.errors import InvalidInput, UnsupportedTensor
from weightcast.tensors.boxes import Box
from weightcast.tensors.bridges import framework_of
from weightcast.tensors.spec import TensorSpec, barest_names, check_distinct
from weightcast.worker.targets.base import Slot
from weightcast.worker.targets.numpy_target import Holder, capture_arrays


@dataclass(frozen=True)
class ModelPart:
    """One of the models that a version feeds: the main model, or a draft model beside it.

    `names` are patterns (``mtp.*``) of the version's tensors that this part takes; every match must have a place in it.
    Without patterns it takes the tensors that are called like its own parameters. `rename` turns a version's name into
    this part's (default: the same).
    """

    model: object
    names: Sequence[str] | None = None
    rename: Callable[[str], str] | None = None


@dataclass(frozen=True)
class CapturedPart:
    """A part and its slots. `boxes` says of the slots of distributed tensors what they are boxes of, and which."""

    part: ModelPart
    slots: tuple[Slot, ...]
    boxes: Mapping[str, tuple[tuple[int, ...], Box]] = field(default_factory=dict)

    def whole(self, slot: Slot) -> TensorSpec:
        """The tensor that a version must have for a slot."""
        shape, _ = self.boxes.get(slot.spec.name, (slot.spec.shape, None))
        return replace(slot.spec, shape=shape)

    def box(self, slot: Slot) -> Box:
        """Which box of it the slot is."""
        return self.boxes[slot.spec.name][1] if slot.spec.name in self.boxes else Box.whole(slot.spec.shape)

    def reshard(self) -> None:
        """Let what was gathered from the slots be gathered again."""
        if self.boxes and framework_of(self.part.model) == "torch":
            from weightcast.worker.targets.torch_target import reshard  # noqa: PLC0415 - torch is an extra

            reshard(cast("Any", self.part.model))


def capture_parts(model: object, device: str, *, strip_wrappers: bool = False) -> tuple[CapturedPart, ...]:
    """The slots of a module, a mapping, a `ModelPart`, or a sequence of these."""
    models = model if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    if not models:
        raise InvalidInput("an empty list of models has nothing to update.")
    parts = [item if isinstance(item, ModelPart) else ModelPart(item) for item in models]
    return tuple(_capture(part, device, strip_wrappers=strip_wrappers) for part in parts)


def _capture(part: ModelPart, device: str, *, strip_wrappers: bool) -> CapturedPart:
    kind = type(part.model).__qualname__
    held = _held_tensors(part.model)
    if strip_wrappers:
        bare = barest_names(held)
        check_distinct(bare, f"the {kind}")
        held = {bare[name]: holder for name, holder in held.items()}
    if not held:
        raise InvalidInput(f"the {kind} has no parameters: there is nothing to update.")
    frameworks = {name: framework_of(mapping[key]) for name, (mapping, key) in held.items()}
    foreign = [name for name, framework in frameworks.items() if framework not in ("numpy", "torch")]
    if foreign:
        raise UnsupportedTensor(f"not NumPy arrays or torch tensors in the mapping: {', '.join(foreign)}.")
    slots: list[Slot] = list(capture_arrays((name, held[name]) for name in held if frameworks[name] == "numpy"))
    boxes: Mapping[str, tuple[tuple[int, ...], Box]] = {}
    if "torch" in frameworks.values():
        import torch  # noqa: PLC0415 - an extra, and the model shows that it is there

        from weightcast.worker.targets.torch_target import capture_tensors  # noqa: PLC0415

        ours = ((name, held[name]) for name in held if frameworks[name] == "torch")
        captured, boxes = capture_tensors(ours, torch.device(device))
        slots += captured
    return CapturedPart(part, tuple(slots), boxes)


def _held_tensors(model: object) -> dict[str, Holder]:
    """Where each tensor of a model is held, by name."""
    if isinstance(model, MutableMapping):
        return {key: (model, key) for key in model}
    if framework_of(model) == "torch":
        import torch  # noqa: PLC0415 - an extra, and the model shows that it is there

        from weightcast.worker.targets.torch_target import named_holders  # noqa: PLC0415

        if isinstance(model, torch.nn.Module):
            return dict(named_holders(model))
    raise InvalidInput(
        f"a {type(model).__qualname__} is not a model: give a torch module, a mutable mapping of NumPy arrays or torch "
        "tensors, a ModelPart, or a list of these."
    )
