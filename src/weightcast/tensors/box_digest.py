"""The digest of a tensor that is known by the digests of its boxes, as several publishers share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from weightcast.tensors.digest import DEFAULT, Algorithm, Hasher, bytes_digest
from weightcast.tensors.flat import Array, byte_blocks


class Placed(Protocol):
    """A box, whatever else is known of it."""

    @property
    def start(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def boxes_digest(boxes: Iterable[tuple[Placed, str]], algorithm: Algorithm = DEFAULT) -> str:
    """The digest over boxes and their own digests, in the order of where they start.

    A single box is the whole tensor, and its digest is that of the tensor: what nobody divided has the same digest as if
    there were a single publisher. Boxes without elements are not boxes here.
    """
    listed = sorted((tuple(box.start), tuple(box.shape), digest) for box, digest in boxes)
    if len(listed) == 1:
        return listed[0][2]
    # Neither numbers nor digests have spaces or line ends in them, so no two lists are the same text.
    lines = [f"{','.join(map(str, start))} {','.join(map(str, shape))} {digest}\n" for start, shape, digest in listed]
    return bytes_digest("".join(lines).encode(), algorithm)


def array_boxes_digest(
    array: Array, boxes: Sequence[Placed], algorithm: Algorithm = DEFAULT, check: Callable[[], None] = lambda: None
) -> str:
    """The same from a whole array. `check` is called every few MiB, and may raise."""
    return boxes_digest(((box, _digest(box_of(array, box), algorithm, check)) for box in boxes), algorithm)


def box_of(array: Array, box: Placed) -> Array:
    """The elements of a box, where they lie."""
    where: tuple[Any, ...] = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
    return array[(*where, ...)]


def _digest(array: Array, algorithm: Algorithm, check: Callable[[], None]) -> str:
    hasher = Hasher(algorithm)
    for block in byte_blocks(array):
        hasher.update(block.data)
        check()
    return hasher.digest()
