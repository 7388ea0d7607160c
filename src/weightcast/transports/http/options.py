"""What the URL of an `http://` or `https://` source says: several depots, and how to ask them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args
from urllib.parse import SplitResult

from weightcast.errors import InvalidInput
from weightcast.transports.http.access import Access
from weightcast.transports.http.depots import Order

_Number = TypeVar("_Number", int, float)


class HttpOptions(NamedTuple):
    """The depots of a source, and the settings of a receiver that its URL gives."""

    urls: tuple[str, ...]
    access: Access
    settings: Mapping[str, Any]


def _at_least(least: _Number, kind: Callable[[str], _Number]) -> Callable[[str], _Number]:
    def read(text: str) -> _Number:
        number = kind(text)
        if not number >= least:
            raise ValueError(f"must be {least} or more")
        return number

    return read


def _order(text: str) -> str:
    if text not in get_args(Order):
        raise ValueError(f"must be {' or '.join(get_args(Order))}")
    return text


_SETTINGS: dict[str, Callable[[str], Any]] = {
    "connections": _at_least(1, int),
    "prefetch": _at_least(1, int),
    "bucket_nbytes": _at_least(1 << 16, int),
    "spread": _at_least(0, int),
    "order": _order,
    "stall_s": _at_least(0.001, float),
}
KNOWN = frozenset({"token_file", "ca_file", *_SETTINGS})


def parse_options(location: SplitResult, options: Mapping[str, str]) -> HttpOptions:
    """Read `http://host:port[,host:port…][?options]`. Raises `InvalidInput` listing what cannot be read."""
    hosts = location.netloc.split(",")
    if "@" in location.netloc:
        raise InvalidInput("the URL of a depot must not hold a name or password: give a token by ?token_file=PATH.")
    if not all(hosts):
        raise InvalidInput(f"{location.geturl()!r} must name the host of each depot: http://host:port[,host:port].")
    settings, wrong = {}, []
    for name in _SETTINGS.keys() & options.keys():
        try:
            settings[name] = _SETTINGS[name](options[name])
        except ValueError as error:
            wrong.append(f"{name}={options[name]} ({error})")
    if wrong:
        raise InvalidInput(f"options of {location.scheme}:// that cannot be used: {', '.join(sorted(wrong))}.")
    files = {name: Path(options[name]) for name in ("token_file", "ca_file") if name in options}
    urls = tuple(f"{location.scheme}://{host}{location.path.rstrip('/')}" for host in hosts)
    return HttpOptions(urls, Access.read(**files), settings)
