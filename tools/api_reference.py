"""Writes docs/api.md from signatures and docstrings. `make docs` runs it, a test compares.

What is public is told by `__all__` of `weightcast`, `weightcast.delta` and `weightcast.errors`; nothing else is.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import weightcast
from weightcast import delta, errors

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_WIDTH = 110
_TOP = """# The Python API

Every public name: those in `__all__` of `weightcast`, `weightcast.delta` and `weightcast.errors`. Whatever else can be
imported may change without notice. This page is made by `make docs` from the docstrings; change those, not the page. Where
to begin: [README](../README.md), then [concepts.md](concepts.md).

"""
_GROUPS = {
    "Publishing": ("Store", "DeltaPolicy", "Publisher", "DepotPublisher", "Publication", "Shard", "ShareWriter"),
    "Updating": ("LiveModel", "ModelPart", "UpdateResult", "State", "TRANSFORMER_GROUPS"),
    "Tensor-parallel layouts": ("Shards", "Held", "Placement", "Box", "TensorSpec", "DType"),
    "Describing": ("Manifest", "Mismatch", "WeightcastError"),
    "Other engines": ("VllmFleet",),
}


def render() -> str:
    """The page."""
    return _TOP + "\n".join(line for part in _sections() for line in (*part, "")).rstrip() + "\n"


def _sections() -> Iterator[list[str]]:
    listed = {name for names in _GROUPS.values() for name in names} | {"__version__"}
    if listed != set(weightcast.__all__):
        raise SystemExit(f"these names need a place in {Path(__file__).name}: {sorted(listed ^ set(weightcast.__all__))}")
    yield [
        f"- {title}: {', '.join(f'[`{name}`](#{_anchor(name)})' for name in names)}" for title, names in _GROUPS.items()
    ] + ["- [`weightcast.delta`](#weightcastdelta), [`weightcast.errors`](#weightcasterrors)"]
    for title, names in _GROUPS.items():
        yield [f"## {title}"]
        for name in names:
            yield from _described(name, getattr(weightcast, name), "###")
    yield ["## weightcast.delta"]
    yield [_text(delta.__doc__)]
    for name in delta.__all__:
        yield from _described(f"delta.{name}", getattr(delta, name), "###")
    yield ["## weightcast.errors"]
    yield ["Each is a `WeightcastError`; causes and cures are in [errors.md](errors.md). The tree:"]
    yield ["```text", _tree(errors.WeightcastError), "```"]


def _anchor(name: str) -> str:
    return name.lower()


def _described(name: str, found: Any, level: str) -> Iterator[list[str]]:
    yield [f"{level} {name}"]
    if isinstance(found, type):
        yield from _class(name, found, level)
    elif inspect.isfunction(found):
        yield ["```text", _signature(name, found), "```"]
        yield [_text(found.__doc__)]
    else:
        yield ["```text", _wrapped(f"{name} = ", found), "```"]


def _class(name: str, cls: type, level: str) -> Iterator[list[str]]:
    if issubclass(cls, enum.Enum):
        yield ["```text", "\n".join(f"{cls.__name__}.{one.name}" for one in cls), "```"]
        yield [_text(cls.__doc__)]
        return
    fields = getattr(cls, "__struct_fields__", ())
    if issubclass(cls, msgspec.Struct):
        kinds = [f"    {field}: {inspect.get_annotations(cls).get(field, '')}" for field in fields]
        yield ["```text", f"class {name}:", *kinds, "```"]
    else:
        constructed = "__init__" in vars(cls) or getattr(cls, "__match_args__", ())
        yield ["```text", _signature(f"class {name}", cls) if constructed else f"class {name}", "```"]
    yield [_text(cls.__doc__)]
    for member, value in vars(cls).items():
        yield from _member(name, member, value, level + "#")


def _member(owner: str, name: str, value: Any, level: str) -> Iterator[list[str]]:
    value = getattr(value, "__wrapped__", value) if isinstance(value, types.FunctionType) else value
    if name.startswith("_"):
        return
    if isinstance(value, property) and value.fget is not None and value.fget.__doc__:
        kind = inspect.get_annotations(value.fget).get("return", "")
        yield [f"{level} {owner}.{name}"]
        yield ["```text", f"{name}: {kind}", "```"]
        yield [_text(value.fget.__doc__)]
        return
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if inspect.isfunction(function) and function.__doc__:
        yield [f"{level} {owner}.{name}"]
        yield ["```text", _signature(name, function), "```"]
        yield [_text(function.__doc__)]


def _signature(name: str, found: Any) -> str:
    """As it is written; one line for each parameter where one does not hold them all."""
    signature = inspect.signature(found)
    kept = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    signature = signature.replace(parameters=kept)
    returned = (
        "" if isinstance(found, type) or signature.return_annotation is inspect.Signature.empty else _returned(signature)
    )
    parts = _parameters(kept)
    line = f"{name}({', '.join(parts)}){returned}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returned}"])


def _returned(signature: inspect.Signature) -> str:
    kind = signature.return_annotation
    return f" -> {kind if isinstance(kind, str) else inspect.formatannotation(kind)}"


def _parameters(parameters: list[inspect.Parameter]) -> list[str]:
    parts, starred = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        starred = starred or one.kind is one.VAR_POSITIONAL
        parts.append(_without_address(_parameter(one)))
    return parts


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else one.annotation
    kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = f"{stars}{one.name}" + (f": {kind}" if kind else "")
    if one.default is one.empty:
        return text
    default = one.default.__name__ if inspect.isfunction(one.default) else repr(one.default)
    return f"{text} = {default}" if kind else f"{text}={default}"


def _without_address(text: str) -> str:
    return re.sub(r"<(?:function |class ')?([\w.]+)[^>]*>", r"\1", text)


def _wrapped(head: str, value: object) -> str:
    whole = f"{head}{value!r}"
    if len(whole) <= _WIDTH or not isinstance(value, tuple | list):
        return whole
    return "\n".join([f"{head}(", *(f"    {one!r}," for one in value), ")"])


def _text(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "")


def _tree(cls: type, depth: int = 0) -> str:
    kept = [one for one in cls.__subclasses__() if one.__name__ in errors.__all__]
    return "\n".join([f"{'  ' * depth}{cls.__name__}", *(_tree(one, depth + 1) for one in kept)])


if __name__ == "__main__":
    PAGE.write_text(render())
