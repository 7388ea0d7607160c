"""Log lines: one event with its fields, one line, and the ids of the request and the update that it belongs to.

    log = logs.get(__name__)
    with logs.bound(request_id="r-1"):
        log.info("update committed", version="step_4", pause_ms=3.1)

Only `configure` installs anything. Without it, as a library, lines go wherever the program sends those of the loggers below
"weightcast", with fields and ids as part of the message. No line holds the contents of a tensor: see `rendered`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike, fspath
from types import TracebackType
from typing import ParamSpec, TextIO, TypeVar

Scalar = str | int | float | bool | None
Value = Scalar | list[Scalar]

CORE = ("ts", "level", "logger", "event", "exception")  # the keys of every JSON line; a field of such a name gets a _
ROOT = "weightcast"
_LONGEST_LINE = 4096  # bytes: what a pipe takes whole, so that lines of several processes do not mix
_LONGEST = 4000  # characters of one value; less where the line would be too long
_SHORTER = (_LONGEST, 2800, 1800, 1000, 500, 200, 80, 20)
_LONGEST_LIST = 16
_LONGEST_ID = 256
_WAS_CUT = re.compile(r"… \((\d+) characters\)$")
_SHORT_NAMES = {"request_id": "request", "update_id": "update"}
_SHORT_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_ids: ContextVar[Mapping[str, str]] = ContextVar("weightcast_log_ids", default={})  # noqa: B039 - never changed in place


# -- ids -----------------------------------------------------------------------------------------------------------------


def usable_id(text: str) -> bool:
    """Whether it can go into headers and lines as it is: short, ASCII, and nothing that ends a line."""
    return 0 < len(text) <= _LONGEST_ID and text.isascii() and text.isprintable()


@contextmanager
def bound(**ids: str | None) -> Iterator[None]:
    """Every line that is logged inside carries these, beside those that are bound already. None and "" bind nothing.

    It holds for this thread or task, for tasks that begin inside, and for functions that are `carried` elsewhere.
    """
    given = {name: _as_id(value) for name, value in ids.items() if value}
    token = _ids.set({**_ids.get(), **given})
    try:
        yield
    finally:
        _ids.reset(token)


@contextmanager
def updating(kind: str = "update") -> Iterator[None]:
    """Every line that is logged inside carries an `update_id`: a new one, unless one is bound already."""
    with bound(update_id=_ids.get().get("update_id") or f"{kind}-{uuid.uuid4().hex}"):
        yield


def ids() -> dict[str, str]:
    """What is bound here."""
    return dict(_ids.get())


def carried(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, for another thread: its lines carry the ids that are bound where this is called."""
    here = _ids.get()

    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with bound(**here):
            return function(*args, **kwargs)

    return run


def _as_id(text: str) -> str:
    return text if usable_id(text) else text.encode("unicode_escape").decode("ascii")[:_LONGEST_ID]


# -- events --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """The message of a record. `fields` hold the ids first, then what the event says, all `rendered`."""

    name: str
    fields: Mapping[str, Value]

    def __str__(self) -> str:
        return _as_text(self.name, self.fields)


class Log:
    """A logger whose lines are events: `log.info("update committed", version=…)`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    @property
    def level(self) -> int:
        """Events below it are dropped."""
        return self._logger.getEffectiveLevel()

    def debug(self, event: str, /, **fields: object) -> None:
        """A detail: one request, one piece, one try."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Something an operator wants to read about: one line per version and change of state."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, *, trace: BaseException | None = None, **fields: object) -> None:
        """Something is wrong, and work goes on. `trace` adds the traceback of an error."""
        self._write(logging.WARNING, event, fields, trace)

    def error(self, event: str, /, *, trace: BaseException | None = None, **fields: object) -> None:
        """Something failed. `trace` adds the traceback of an error."""
        self._write(logging.ERROR, event, fields, trace)

    def exception(self, event: str, /, **fields: object) -> None:
        """The error that is being handled is none that was expected: with its traceback."""
        self._write(logging.ERROR, event, fields, sys.exception())

    def at(self, level: int, event: str, /, **fields: object) -> None:
        """An event whose level depends."""
        self._write(level, event, fields)

    def _write(self, level: int, event: str, fields: Mapping[str, object], trace: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            said = {name: rendered(value) for name, value in fields.items()}
            self._logger.log(level, Event(event, {**_ids.get(), **said}), exc_info=trace, stacklevel=3)


def get(name: str) -> Log:
    """The log of a module: `logs.get(__name__)`."""
    return Log(logging.getLogger(name))


def ms(seconds: float) -> float:
    """A duration as lines tell it: milliseconds, to a tenth."""
    return round(seconds * 1000, 1)


def summary(text: str) -> str:
    """The first line of a message, and how many follow: lists belong into answers, and at DEBUG into lines of their own."""
    first, *more = text.splitlines() or [""]
    return f"{first} (and {len(more)} more lines)" if more else text


def rendered(value: object) -> Value:
    """What a line says of a value: scalars, paths and short lists of them as they are, errors by their `summary`, anything
    else as its type and size, `<ndarray 4096>`, never its contents.
    """
    if isinstance(value, list | tuple | set | frozenset) and len(value) <= _LONGEST_LIST:
        return [_scalar(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    return _scalar(value)


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, BaseException):
        return _cut(summary(str(value)) or type(value).__name__, _LONGEST)
    if isinstance(value, str | PathLike):
        text = fspath(value) if isinstance(value, PathLike) else str(value)
        return _cut(text, _LONGEST) if isinstance(text, str) else _outside(text)
    return _outside(value)


def _outside(value: object) -> str:
    """A value that is not looked into: `<Tensor 4096>`."""
    try:
        numel = getattr(value, "numel", None)
        size = numel() if callable(numel) else getattr(value, "size", None)
        if not isinstance(size, int):
            size = len(value)  # type: ignore[arg-type]  # whatever has a length
    except Exception:  # noqa: BLE001 - a line must not fail for what some object does when asked for its size
        return f"<{type(value).__name__}>"
    return f"<{type(value).__name__} {size}>"


def _cut(text: str, most: int) -> str:
    """The beginning, and how long it was in all, also if it was cut before."""
    if len(text) <= most:
        return text
    before = _WAS_CUT.search(text)
    return f"{text[:most]}… ({before[1] if before else len(text)} characters)"


# -- the two forms ---------------------------------------------------------------------------------------------------------


def _taken_apart(record: logging.LogRecord) -> tuple[str, dict[str, Value]]:
    """The event and the fields of any record, ours or that of another library."""
    if isinstance(record.msg, Event):
        return record.msg.name, dict(record.msg.fields)
    return _cut(record.getMessage().strip(), _LONGEST), dict(_ids.get())


def _trace_of(record: logging.LogRecord) -> str:
    """The traceback; of a long one the end, which says most."""
    kind_error_trace = record.exc_info
    if not isinstance(kind_error_trace, tuple) or kind_error_trace[1] is None:
        return ""
    return "".join(traceback.format_exception(kind_error_trace[1])).rstrip()


def _fitting(render: Callable[[str, dict[str, Value]], str], event: str, fields: Mapping[str, Value]) -> str:
    """The line, with its long values cut as far as it takes for a pipe to take it whole; of a traceback the end is kept."""
    line = ""
    for most in _SHORTER:
        line = render(_cut(event, most), {name: _shortened(name, value, most) for name, value in fields.items()})
        if len(line.encode("utf-8", "backslashreplace")) < _LONGEST_LINE:
            return line
    names = list(fields)[: _LONGEST_LIST // 2]
    return render(_cut(event, _SHORTER[-1]), {name: _shortened(name, fields[name], _SHORTER[-1]) for name in names})


def _shortened(name: str, value: Value, most: int) -> Value:
    if isinstance(value, list):
        return [_cut(item, max(20, most // _LONGEST_LIST)) if isinstance(item, str) else item for item in value]
    if not isinstance(value, str) or len(value) <= most:
        return value
    return f"… {value[-most:]}" if name == "exception" else _cut(value, most)


class HumanFormatter(logging.Formatter):
    """`19:24:51.123 INFO  engines.embedded.replica.updates  update committed  update=… version=step_4 pause_ms=3.1`"""

    def __init__(self, always: Mapping[str, Value] | None = None) -> None:
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        event, fields = _taken_apart(record)
        trace = _trace_of(record)
        said = {**self._always, **fields} | ({"exception": trace} if trace else {})
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = _SHORT_LEVELS.get(record.levelname, record.levelname)
        head = f"{clock}.{int(record.msecs):03d} {level:<5} {_escaped(record.name.removeprefix(ROOT + '.'))}"
        return _fitting(lambda event, fields: f"{head}  {_as_text(event, fields)}", event, said)


class JsonFormatter(logging.Formatter):
    """One object per line: ts (ISO 8601, UTC), level, logger, event, the fields, and exception for a traceback."""

    def __init__(self, always: Mapping[str, Value] | None = None) -> None:
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        """One line, in ASCII."""
        event, fields = _taken_apart(record)
        head: dict[str, Value] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
        }
        said = {f"{name}_" if name in CORE else name: _finite(value) for name, value in {**self._always, **fields}.items()}
        trace = _trace_of(record)
        if trace:
            said["exception"] = trace
        return _fitting(lambda event, fields: json.dumps({**head, "event": event, **fields}, allow_nan=False), event, said)


def _finite(value: Value) -> Value:
    """JSON has no infinities: they become words."""
    if isinstance(value, list):
        return [_finite(item) for item in value]  # type: ignore[misc]  # a list of scalars
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _as_text(event: str, fields: Mapping[str, Value]) -> str:
    said = " ".join(f"{_SHORT_NAMES.get(name, name)}={_word(value)}" for name, value in fields.items())
    return f"{_escaped(event)}  {said}" if said else _escaped(event)


def _word(value: Value) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.1f}"
    if isinstance(value, int):
        return str(value)
    plain = value and value.isprintable() and not any(character in ' ="[],' for character in value)
    return value if plain else _escaped(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    """On one line, whatever is in it."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


# -- for programs ----------------------------------------------------------------------------------------------------------


class Handler(logging.Handler):
    """Writes each line at once and whole, so that those of several processes do not mix. Without a stream to whatever is
    standard error at that moment.
    """

    def __init__(self, *, as_json: bool, stream: TextIO | None, always: Mapping[str, Value]) -> None:
        super().__init__()
        self.as_json, self._stream = as_json, stream
        self.setFormatter((JsonFormatter if as_json else HumanFormatter)(always))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. Other libraries are heard from WARNING on."""
        if record.levelno < logging.WARNING and record.name.partition(".")[0] != ROOT:
            return
        try:
            stream = self._stream or sys.stderr
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:  # noqa: BLE001 - as every handler: a line that cannot be written ends nothing
            self.handleError(record)


def configure(
    level: int, *, as_json: bool = False, stream: TextIO | None = None, always: Mapping[str, Scalar] | None = None
) -> None:
    """Send the events of this process from `level` on to `stream`, standard error by default, as text or as JSON.

    For programs, not for libraries. `always` are fields of every line. Called again it replaces what it did before. Warnings
    of Python become lines too; in JSON form so do errors that nobody catches.
    """
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, Handler)]:
        root.removeHandler(handler)
    root.addHandler(Handler(as_json=as_json, stream=stream, always={k: rendered(v) for k, v in (always or {}).items()}))
    root.setLevel(level)
    logging.captureWarnings(True)
    if as_json:
        sys.excepthook, threading.excepthook = _uncaught, _uncaught_in_thread
    elif sys.excepthook is _uncaught:
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__


def as_json() -> bool:
    """Whether this process was told to log in JSON."""
    return any(isinstance(handler, Handler) and handler.as_json for handler in logging.getLogger().handlers)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        get(ROOT).error("program crashed", trace=error, error=f"{kind.__name__}: {error}")


def _uncaught_in_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not issubclass(told.exc_type, SystemExit):
        name = told.thread.name if told.thread else None
        error = f"{told.exc_type.__name__}: {told.exc_value}"
        get(ROOT).error("thread crashed", trace=told.exc_value, thread=name, error=error)
