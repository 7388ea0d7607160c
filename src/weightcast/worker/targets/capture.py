"""From what a user calls a model to slots. Reading a model's shape allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightcast.errors import InvalidInput, UnsupportedTensor
from weightcast.tensors.bridges import Framework, framework_of
from weightcast.worker.targets.base import Slot
from weightcast.worker.targets.numpy_target import capture_arrays


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
    """A part and its slots."""

    part: ModelPart
    slots: tuple[Slot, ...]


def capture_parts(model: object, device: str) -> tuple[CapturedPart, ...]:
    """The slots of a module, a mapping, a `ModelPart`, or a sequence of these."""
    models = model if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    if not models:
        raise InvalidInput("an empty list of models has nothing to update.")
    parts = [item if isinstance(item, ModelPart) else ModelPart(item) for item in models]
    return tuple(CapturedPart(part, tuple(_capture(part.model, device))) for part in parts)


def _capture(model: object, device: str) -> Sequence[Slot]:
    if isinstance(model, MutableMapping):
        slots = _capture_mapping(model, device)
    elif framework_of(model) == "torch":
        slots = _capture_module(model, device)
    else:
        raise InvalidInput(
            f"a {type(model).__qualname__} is not a model: give a torch module, a mutable mapping of NumPy arrays or torch "
            "tensors, a ModelPart, or a list of these."
        )
    if not slots:
        raise InvalidInput(f"the {type(model).__qualname__} has no parameters: there is nothing to update.")
    return slots


def _capture_module(model: object, device: str) -> Sequence[Slot]:
    import torch  # noqa: PLC0415 - an extra, and the model shows that it is there

    from weightcast.worker.targets.torch_target import capture_module  # noqa: PLC0415

    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(f"a {type(model).__qualname__} is not a model: give a module or a mapping of tensors.")
    return capture_module(model, torch.device(device))


def _capture_mapping(mapping: MutableMapping[str, Any], device: str) -> Sequence[Slot]:
    keys: dict[Framework | None, list[str]] = {}
    for key, value in mapping.items():
        keys.setdefault(framework_of(value), []).append(key)
    foreign = [*keys.get("paddle", []), *keys.get(None, [])]
    if foreign:
        raise UnsupportedTensor(f"not NumPy arrays or torch tensors in the mapping: {', '.join(foreign)}.")
    slots: list[Slot] = list(capture_arrays((key, (mapping, key)) for key in keys.get("numpy", [])))
    if "torch" in keys:
        import torch  # noqa: PLC0415

        from weightcast.worker.targets.torch_target import capture_tensors  # noqa: PLC0415

        slots += capture_tensors(((key, (mapping, key)) for key in keys["torch"]), torch.device(device))
    return slots
