"""What a power cut may leave of a directory, computed from a log of the operations on it.

The medium keeps what was synced: the bytes of a file as of its last fsync, the names in a directory as of the fsync of
that directory. Whatever came later may be there or not, in any order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .operations import Operation

Lost = Literal["since the last sync", "but not its size"]  # unsynced data of a file that is there: cut off, or zeros
Tree = dict[str, bytes | None]  # by relative path: the contents of a file, None for a directory


@dataclass(eq=False)
class File:
    """Bytes now, and those that are safe."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def after(self, lost: Lost) -> bytes:
        """The contents after the cut."""
        if lost == "since the last sync" or bytes(self.data) == self.synced:
            return self.synced
        return bytes(len(self.data))


@dataclass(eq=False)
class Directory:
    """Names now, those that are safe, and the steps between: each maps names to what they got, None where removed."""

    names: dict[str, File | Directory] = field(default_factory=dict)
    synced: dict[str, File | Directory] = field(default_factory=dict)
    steps: list[dict[str, File | Directory | None]] = field(default_factory=list)

    def change(self, step: dict[str, File | Directory | None]) -> None:
        """Take one step, which reaches the medium whole or not at all."""
        _apply(self.names, step)
        self.steps.append(step)

    def sync(self) -> None:
        """Make all steps safe."""
        self.synced, self.steps = dict(self.names), []

    def after(self, kept: list[int]) -> dict[str, File | Directory]:
        """The names after the cut if these of the unsynced steps reached the medium."""
        names = dict(self.synced)
        for number in kept:
            _apply(names, self.steps[number])
        return names


def _apply(names: dict[str, File | Directory], step: dict[str, File | Directory | None]) -> None:
    for name, node in step.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


class Medium:
    """A directory tree that follows a log, from what is there and safe when it starts."""

    def __init__(self, root: Path) -> None:
        self.root = _read(root)
        self._open: dict[str, File | Directory] = {}

    def follow(self, operation: Operation) -> None:
        """Do one operation of the log. Descriptors are known by path: the code under test opens no file twice at once."""
        path, name = operation.path, os.path.basename(operation.path)
        if operation.call == "open":
            self._follow_open(operation)
        elif operation.call in ("write", "pwrite"):
            self._follow_write(operation)
        elif operation.call == "fsync":
            node = self._open[path]
            if isinstance(node, File):
                node.synced = bytes(node.data)
            else:
                node.sync()
        elif operation.call in ("rename", "replace"):
            assert os.path.dirname(path) == os.path.dirname(operation.to)
            above = self._above(path)
            above.change({name: None, os.path.basename(operation.to): above.names[name]})
        elif operation.call == "mkdir":
            self._above(path).change({name: Directory()})
        elif operation.call in ("unlink", "remove", "rmdir"):
            if name in self._above(path).names:
                self._above(path).change({name: None})
        else:
            assert operation.call in ("close", "flock")

    def _above(self, path: str) -> Directory:
        node = self.root
        for name in path.split(os.sep)[:-1]:
            below = node.names[name]
            assert isinstance(below, Directory)
            node = below
        return node

    def _follow_open(self, operation: Operation) -> None:
        above, name = self._above(operation.path), os.path.basename(operation.path)
        if operation.path == ".":
            self._open[operation.path] = self.root
            return
        if name not in above.names:
            assert operation.flags & os.O_CREAT
            above.change({name: File()})
        node = above.names[name]
        if operation.flags & os.O_TRUNC:
            assert isinstance(node, File)
            node.data.clear()
        self._open[operation.path] = node

    def _follow_write(self, operation: Operation) -> None:
        node = self._open[operation.path]
        assert isinstance(node, File)
        assert operation.data is not None
        start = len(node.data) if operation.offset is None else operation.offset
        node.data[start : start + len(operation.data)] = operation.data

    def now(self) -> Tree:
        """The tree as processes see it."""
        return dict(_walk(self.root, lambda directory: directory.names, lambda file: bytes(file.data)))

    def cuts(self) -> Iterator[tuple[str, Tree]]:
        """The trees that a power cut may leave at this moment, each with a description."""
        unsynced = [(directory, number) for directory in _directories(self.root) for number in range(len(directory.steps))]
        choices = {"no unsynced name": set(), "every name": set(unsynced)}
        for number, step in enumerate(unsynced):
            choices[f"only unsynced name {number}"] = {step}
            choices[f"every name but {number}"] = set(unsynced) - {step}
        for text, kept in choices.items():
            for lost in ("since the last sync", "but not its size"):
                yield f"{text} got through, data was lost {lost}", self._after(kept, lost)

    def _after(self, kept: set[tuple[Directory, int]], lost: Lost) -> Tree:
        def names(directory: Directory) -> dict[str, File | Directory]:
            return directory.after([number for number in range(len(directory.steps)) if (directory, number) in kept])

        return dict(_walk(self.root, names, lambda file: file.after(lost)))


def _walk(directory, names, contents, above: str = "") -> Iterator[tuple[str, bytes | None]]:
    for name, node in sorted(names(directory).items()):
        path = f"{above}{name}"
        if isinstance(node, File):
            yield path, contents(node)
        else:
            yield path, None
            yield from _walk(node, names, contents, f"{path}/")


def _directories(directory: Directory) -> Iterator[Directory]:
    yield directory
    for node in {id(node): node for names in (directory.names, directory.synced) for node in names.values()}.values():
        if isinstance(node, Directory):
            yield from _directories(node)


def _read(path: Path) -> Directory:
    names: dict[str, File | Directory] = {}
    for entry in path.iterdir():
        if entry.is_dir():
            names[entry.name] = _read(entry)
        else:
            data = entry.read_bytes()
            names[entry.name] = File(bytearray(data), data)
    return Directory(names=names, synced=dict(names))


def read_tree(root: Path) -> Tree:
    """A real directory as a tree."""
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))}


def write_tree(tree: Tree, root: Path) -> None:
    """A tree as a real directory."""
    root.mkdir(parents=True)
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
