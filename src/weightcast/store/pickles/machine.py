"""A pickle reader that runs nothing: an interpreter for the few opcodes that files of tensors are made of.

It replaces the `pickle` module because that one cannot be made safe enough by choosing what `find_class` returns: it
allocates what the file claims to need, and reads all tensors into memory. Here every global is one of a fixed table of our
own functions, bytes are left in the file and only their place is noted, and the number of steps is limited.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weightcast.errors import PartCorrupt, PickleRefused
from weightcast.store.byte_file import ByteFile

MAX_STEPS = 8_000_000  # a state dict needs about 25 for a tensor; each may cost some hundred bytes of memory
MAX_TEXT_NBYTES = 4096  # longer texts are array data of protocol 2
_BUFFER_NBYTES = 1 << 16
_OPCODE_NAMES = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}


@dataclass(frozen=True)
class Blob:
    """Bytes that stay in the file. With `utf8` they were bytes written as latin-1 text, as protocol 2 does."""

    offset: int
    stored_nbytes: int
    utf8: bool = False


class Text(str):
    """A short text and its place in the file, for the case that it is array data."""

    __slots__ = ("blob",)
    blob: Blob


@dataclass(frozen=True)
class Global:
    """One of our own functions, under the name by which a pickle asks for it. `call` None: it is data, not callable."""

    name: str
    call: Callable[[tuple[object, ...]], object] | None = None


class Buildable:
    """An object that BUILD may complete."""

    def build(self, state: object) -> None:
        """Take the state, or raise `PartCorrupt`."""
        raise NotImplementedError


class OrderedDict(dict[object, object], Buildable):
    """Stands for collections.OrderedDict. Its attributes (torch keeps module versions there) are of no use here."""

    def build(self, state: object) -> None:
        """Drop the attributes."""


class Window:
    """A stretch of an open file, read front to back through a small buffer."""

    def __init__(self, file: ByteFile, start: int, end: int) -> None:
        self.path = file.path
        self._file, self._end = file, end
        self._buffer, self._at, self._buffer_start = b"", 0, start

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self._buffer_start + self._at

    @property
    def rest_nbytes(self) -> int:
        """Bytes between here and the end."""
        return self._end - self.position

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        end = self._at + nbytes
        if end > len(self._buffer):
            self._need(nbytes)
            self._buffer_start, self._at, end = self.position, 0, nbytes
            self._buffer = self.read_at(self._buffer_start, min(max(nbytes, _BUFFER_NBYTES), self.rest_nbytes))
        data = self._buffer[self._at : end]
        self._at = end
        return data

    def skip(self, nbytes: int) -> int:
        """Pass over bytes without reading them; returns where they begin."""
        self._need(nbytes)
        start = self.position
        self._at += nbytes
        if self._at > len(self._buffer):
            self._buffer, self._buffer_start, self._at = b"", start + nbytes, 0
        return start

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes from anywhere in the file."""
        return self._file.read(nbytes, offset)

    def _need(self, nbytes: int) -> None:
        if nbytes > self.rest_nbytes:
            raise PartCorrupt(self.path, f"it ends in the middle of its data: {nbytes} bytes wanted at byte {self.position}")


_MARK = object()


class Machine:
    """Runs one pickle. `globals_` is everything it may ask for; `load_persistent` None refuses persistent ids."""

    def __init__(
        self,
        window: Window,
        globals_: Mapping[str, Global],
        load_persistent: Callable[[object], object] | None = None,
    ) -> None:
        self._window, self._path, self._globals, self._load_persistent = window, window.path, globals_, load_persistent
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        """The object that the pickle describes. Raises `PickleRefused` or `PartCorrupt`, nothing else."""
        if self._window.take(1) != b"\x80" or self._window.take(1)[0] not in range(2, 6):
            raise PartCorrupt(self._path, "it is not a pickle of protocol 2 to 5")
        for _ in range(MAX_STEPS):
            opcode = self._window.take(1)
            if opcode == b".":
                return self._pop()
            step = _STEPS.get(opcode)
            if step is None:
                raise self._refusal(opcode)
            step(self)
        raise PartCorrupt(self._path, f"its pickle has more than {MAX_STEPS} steps")

    def _refusal(self, opcode: bytes) -> PickleRefused | PartCorrupt:
        name = _OPCODE_NAMES.get(opcode)
        if name is None:
            return PartCorrupt(self._path, f"its pickle has an unknown opcode {opcode[0]:#04x}")
        if name == "INST":
            return PickleRefused(self._path, f"{self._line()}.{self._line()}")
        if name == "PERSID":
            return PickleRefused(self._path, "a persistent id")
        return PickleRefused(self._path, f"the pickle opcode {name}")

    def _wrong(self, problem: str) -> PartCorrupt:
        return PartCorrupt(self._path, f"its pickle is malformed before byte {self._window.position}: {problem}")

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise self._wrong("a value is missing")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[object]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise self._wrong("a mark is missing")

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _count(self, width: int) -> int:
        return int.from_bytes(self._window.take(width), "little")

    def _line(self) -> str:
        line = bytearray()
        while (byte := self._window.take(1)) != b"\n":
            line += byte
            if len(line) > MAX_TEXT_NBYTES:
                raise self._wrong("the name of a global is too long")
        return self._decode(bytes(line))

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"a text is not UTF-8: {error}") from error

    def _bytes(self, width: int) -> None:
        nbytes = self._count(width)
        self._push(Blob(self._window.skip(nbytes), nbytes))

    def _text(self, width: int) -> None:
        nbytes = self._count(width)
        blob = Blob(self._window.position, nbytes, utf8=True)
        if nbytes > MAX_TEXT_NBYTES:
            self._window.skip(nbytes)
            self._push(blob)
        else:
            text = Text(self._decode(self._window.take(nbytes)))
            text.blob = blob
            self._push(text)

    def _long(self) -> None:
        self._push(int.from_bytes(self._window.take(self._count(1)), "little", signed=True))

    def _tuple(self, length: int | None = None) -> None:
        values = self._pop_to_mark() if length is None else [self._pop() for _ in range(length)][::-1]
        self._push(tuple(values))

    def _append(self, values: list[object]) -> None:
        target = self._pop()
        if type(target) is not list:
            raise self._wrong("an element is appended to something that is not a list")
        target.extend(values)
        self._push(target)

    def _set_items(self, values: list[object]) -> None:
        target = self._pop()
        if not isinstance(target, dict) or len(values) % 2:
            raise self._wrong("items are set on something that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int):
                raise self._wrong(f"a dict has a key of type {type(key).__name__}")
            if key in target:
                raise self._wrong(f"a dict has the key {key!r} twice")
            target[key] = value
        self._push(target)

    def _set_item(self) -> None:
        value = self._pop()
        self._set_items([self._pop(), value])

    def _global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._wrong("the name of a global is not a text")
        wanted = f"{module}.{name}"
        found = self._globals.get(wanted)
        if found is None:
            raise PickleRefused(self._path, "".join(c if c.isprintable() else "?" for c in wanted))
        self._push(found)

    def _stack_global(self) -> None:
        name = self._pop()
        self._global(self._pop(), name)

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Global) or function.call is None or type(args) is not tuple:
            raise PickleRefused(self._path, f"a call of {getattr(function, 'name', type(function).__name__)}")
        self._push(function.call(args))

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        if not isinstance(target, Buildable):
            raise PickleRefused(self._path, f"a change of the state of {getattr(target, 'name', type(target).__name__)}")
        target.build(state)
        self._push(target)

    def _persistent(self) -> None:
        if self._load_persistent is None:
            raise PickleRefused(self._path, "a persistent id")
        self._push(self._load_persistent(self._pop()))

    def _put(self, index: int) -> None:
        value = self._pop()
        self._memo[index] = value
        self._push(value)

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._wrong(f"value {index} is used before it is stored")
        self._push(self._memo[index])


_STEPS: dict[bytes, Callable[[Machine], object]] = {
    b"\x95": lambda m: m._count(8),  # FRAME: a hint for readers with buffers of their own
    b"(": lambda m: m._push(_MARK),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"K": lambda m: m._push(m._count(1)),
    b"M": lambda m: m._push(m._count(2)),
    b"J": lambda m: m._push(int.from_bytes(m._window.take(4), "little", signed=True)),
    b"G": lambda m: m._push(struct.unpack(">d", m._window.take(8))[0]),
    b"\x8a": Machine._long,
    b"C": lambda m: m._bytes(1),
    b"B": lambda m: m._bytes(4),
    b"\x8e": lambda m: m._bytes(8),
    b"\x96": lambda m: m._bytes(8),
    b"\x8c": lambda m: m._text(1),
    b"X": lambda m: m._text(4),
    b"\x8d": lambda m: m._text(8),
    b"}": lambda m: m._push({}),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"t": Machine._tuple,
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"a": lambda m: m._append([m._pop()]),
    b"e": lambda m: m._append(m._pop_to_mark()),
    b"s": Machine._set_item,
    b"u": lambda m: m._set_items(m._pop_to_mark()),
    b"c": lambda m: m._global(m._line(), m._line()),
    b"\x93": Machine._stack_global,
    b"R": Machine._reduce,
    b"b": Machine._build,
    b"Q": Machine._persistent,
    b"q": lambda m: m._put(m._count(1)),
    b"r": lambda m: m._put(m._count(4)),
    b"h": lambda m: m._get(m._count(1)),
    b"j": lambda m: m._get(m._count(4)),
    b"\x94": lambda m: m._put(len(m._memo)),
}
