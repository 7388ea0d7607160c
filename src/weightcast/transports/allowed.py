"""The sources that a caller may name in a request, and the options that only the operator may set.

A source is compared as it will be opened: parsed, with `..`, percent-encoding and symlinks resolved. Nothing is opened and
no host is asked before that.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from weightcast import config
from weightcast.errors import InvalidInput, SourceNotAllowed
from weightcast.wire.decoding import is_count

# They name files of this host, whom to trust, whether a token travels over TLS, or a device on which a port is opened.
# Requests must not set them.
OPERATOR_OPTIONS = frozenset({"token_file", "ca_file", "shared_dir", "tls", "uid", "nic"})
# The most that a request may ask for: they are threads, connections and memory of this process.
REQUEST_LIMITS = {"connections": 64, "prefetch": 64, "bucket_nbytes": 1 << 30}

LOCAL_SCHEMES = ("file", "checkpoint", "ipc", "legacy-ipc", "snapshot")
DEFAULT_PORTS = {"http": "80", "https": "443", "shares+http": "80", "shares+https": "443", "nixl": "", "shares+nixl": ""}

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@\\\s]+)(?::(\d{1,5}|\*))?")
_ANY = "*"
_SERVE_CURE = "start the server with it as --source, or with --allow-source PATTERN"


@dataclass(frozen=True)
class _Place:
    """A directory of this host, or one depot. As a rule: with `below`, everything below `path`; `port` may be any."""

    scheme: str
    path: str
    host: str = ""
    port: str = ""
    below: bool = False

    def covers(self, other: _Place) -> bool:
        """Whether this rule allows the other place."""
        if (self.scheme, self.host) != (other.scheme, other.host) or self.port not in (_ANY, other.port):
            return False
        if self.scheme not in LOCAL_SCHEMES:
            return self._contains(self.path, other.path)
        if not self._contains(self.path, os.path.normpath(other.path)):
            return False  # before the file system is asked about a path that a stranger chose
        return self._contains(os.path.realpath(self.path), os.path.realpath(other.path))

    def _contains(self, path: str, other: str) -> bool:
        return other == path if not self.below else other != path and other.startswith(f"{path.rstrip('/')}/")


class AllowedSources:
    """Rules made of sources and patterns: `file:///mnt/weights/*` is all below a directory, `http://host:*` all ports.

    Scheme, host and port must be the same, and so must the path. Options of a rule go with every source that it allows, so
    a caller names a depot and the operator gives its token. `cure` tells a refused caller how the operator allows more.
    """

    def __init__(self, rules: Iterable[str] = (), *, cure: str = _SERVE_CURE) -> None:
        self._rules: list[tuple[_Place, Mapping[str, str]]] = []
        self._cure = cure
        for rule in rules:
            try:
                places, options = _parse(rule, rule=True)
            except ValueError as error:
                raise InvalidInput(f"{rule!r} is not a source that callers can be allowed to name: {error}.") from error
            self._rules += [(place, options) for place in places]

    @classmethod
    def of_environment(cls) -> AllowedSources:
        """The rules of a plugin inside another engine: WEIGHTCAST_ALLOW_SOURCE, with spaces between them."""
        cure = f"start the server with {config.ALLOW_SOURCE}='PATTERN …' in its environment"
        return cls((config.setting(config.ALLOW_SOURCE) or "").split(), cure=cure)

    def resolve(self, named: str) -> str:
        """The source to open where a caller named this one. Raises `SourceNotAllowed`."""
        try:
            places, options = _parse(named)
        except ValueError as error:
            raise SourceNotAllowed(named, f"it cannot be read: {error}", self._cure) from error
        if forbidden := sorted(OPERATOR_OPTIONS & options.keys()):
            raise SourceNotAllowed(
                named.partition("?")[0],
                f"a request must not set {', '.join(forbidden)}: the operator does, in the URL that is allowed",
                self._cure,
            )
        for name in sorted(REQUEST_LIMITS.keys() & options.keys()):
            if not (is_count(options[name]) and int(options[name]) <= REQUEST_LIMITS[name]):
                raise SourceNotAllowed(
                    named[:200], f"a request may set {name} up to {REQUEST_LIMITS[name]}: more is the operator's", self._cure
                )
        for _, configured in self._rules:
            same = [rule for rule, its_options in self._rules if its_options == configured]
            if all(any(rule.covers(place) for rule in same) for place in places):
                return _compose(places, {**configured, **options})
        raise SourceNotAllowed(named, "it is none that callers may name", self._cure)


def _parse(source: str, *, rule: bool = False) -> tuple[list[_Place], dict[str, str]]:
    """The places that a source names, and its options. Raises `ValueError`."""
    if "\0" in source:
        raise ValueError("it has a null byte")
    if any("\ud800" <= character <= "\udfff" for character in source):
        raise ValueError("it has half a character")
    if "://" not in source:
        return [_directory("file", f"{Path.cwd()}/{source}" if not source.startswith("/") else source, rule=rule)], {}
    if any(character.isspace() or not character.isprintable() for character in source):
        raise ValueError("a URL has no spaces")
    parts = urlsplit(source)
    if parts.fragment:
        raise ValueError("it has a fragment")
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if parts.scheme in LOCAL_SCHEMES:
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"it must name a directory of this host: {parts.scheme}:///path")
        return [_directory(parts.scheme, unquote(parts.path), rule=rule)], options
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"no transport is called {parts.scheme!r}")
    return [_depot(parts.scheme, host, parts.path, rule=rule) for host in parts.netloc.split(",")], options


def _directory(scheme: str, path: str, *, rule: bool) -> _Place:
    below = rule and path.endswith(f"/{_ANY}")
    path = path.removesuffix(_ANY) if below else path
    if "\0" in path:
        raise ValueError("it has a null byte")
    return _Place(scheme, path=path if not rule else os.path.normpath(path), below=below)


def _depot(scheme: str, host: str, path: str, *, rule: bool) -> _Place:
    found = _HOST.fullmatch(host)
    if found is None or (found[2] == _ANY and not rule):
        raise ValueError(f"it must name depots as {scheme}://host:port, without a name or password")
    name = found[1].lower().rstrip(".")
    if name.startswith("["):
        name = f"[{ipaddress.ip_address(name[1:-1])}]"
    below = rule and path.endswith(f"/{_ANY}")
    path = unquote(path.removesuffix(_ANY) if below else path).rstrip("/")
    if {".", ".."} & set(path.split("/")) or "%" in path or "\\" in path or "//" in path:
        raise ValueError("its path has steps up, empty steps or is encoded twice")
    return _Place(scheme, path=path, host=name, port=found[2] or DEFAULT_PORTS[scheme], below=below)


def _compose(places: list[_Place], options: Mapping[str, str]) -> str:
    """The URL of places that were compared: what is opened is what was decided on."""
    first = places[0]
    hosts = ",".join(f"{place.host}:{place.port}" if place.port else place.host for place in places)
    path = os.path.realpath(first.path) if first.scheme in LOCAL_SCHEMES else first.path
    query = urlencode(options, quote_via=quote, safe=":/,")
    return f"{first.scheme}://{hosts}{quote(path)}" + (f"?{query}" if query else "")
