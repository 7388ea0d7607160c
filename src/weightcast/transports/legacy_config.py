"""The transfer configuration of the legacy system (`rsync_config`), read into settings of ours.

`KEYS` is the whole table: what a key may be, what it becomes here, and what replaces it where it has no meaning.
docs/legacy-config.md shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlunsplit

from weightcast.errors import InvalidInput
from weightcast.wire.decoding import split_url

Mode = Literal["rdma", "gdr"]
Check = Callable[[object], str]  # what a value must be and is not; empty if it is

MODES: tuple[Mode, ...] = ("rdma", "gdr")
MTP_CHUNK = 16
LONGEST_S = 7 * 24 * 3600.0

_NETWORK = ("http", "https", "shares+http", "shares+https", "nixl")
_HTTP_OPTIONS = ("bucket_nbytes", "prefetch", "stall_s")
_SCHEMES: dict[str, tuple[str, ...]] = {"gpu_direct": ("nixl",), "ipc": ("ipc", "legacy-ipc")}  # by legacy backend


# -- what values may be --------------------------------------------------------------------------------------------------


def _whole(least: int, most: int) -> Check:
    def check(value: object) -> str:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return "" if fits else f"must be a whole number from {least} to {most}"

    return check


def _seconds(value: object) -> str:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_S
    return "" if fits else f"must be seconds, more than 0 and at most {LONGEST_S:.0f}"


def _flag(value: object) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _text(value: object) -> str:
    return "" if isinstance(value, str) and value.strip() == value != "" else "must be text without spaces around it"


def _names(value: object) -> str:
    fits = isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    return "" if fits else "must be a list of names, or one text with commas"


def _anything(value: object) -> str:
    return "" if isinstance(value, str | int) else "must be text or a number"


def _one_of(*allowed: str, refused: Mapping[str, str] | None = None) -> Check:
    def check(value: object) -> str:
        if isinstance(value, str) and value in allowed:
            return ""
        why = (refused or {}).get(value, "") if isinstance(value, str) else ""
        return f"must be {' or '.join(allowed)}{f': {why}' if why else ''}"

    return check


@dataclass(frozen=True)
class Key:
    """One key of the legacy configuration.

    `becomes` is the field of `TransferSettings` that it fills; a key without one is accepted, and `instead` says what
    does its work here. `nullable` keys may be null or empty, which is the same as leaving them out.
    """

    name: str
    check: Check
    becomes: str = ""
    instead: str = ""
    nullable: bool = False


_BACKENDS = _one_of(
    "gpu_direct", "ipc", refused={"mooncake": "Mooncake is not a transport here, take a source nixl://host:port"}
)
_RANKS = "a replica counts its ranks itself: weightcast serve --ranks"
_SOURCE = "the source says where the depot is: --source nixl://host:port; nothing has to be looked up"
_DIGESTS = "every tensor is verified in every update; POST /v1/weights/digest tells digests of what a rank holds"
_LOGS = "weightcast -v and -vv log to standard error; GET /v1/updates/ID and GET /metrics tell what an update took"

KEYS: tuple[Key, ...] = (
    Key("bucket_size_mb", _whole(1, 1 << 16), "bucket_nbytes"),
    Key("num_buffers", _whole(1, 1024), "prefetch"),
    Key("qsize", _whole(1, 1024), "prefetch"),
    Key("gdr_prefetch_queue_size", _whole(1, 1024), "prefetch"),
    Key("recv_bucket_timeout_s", _seconds, "stall_s"),
    Key("session_total_timeout_s", _seconds, "timeout_s"),
    Key("device", _text, "nic", nullable=True),
    Key("device_name", _text, "nic", nullable=True),
    Key("transfer_mode", _one_of(*MODES), "mode", nullable=True),
    Key("gpu_direct", _flag, "mode"),
    Key("phase1_backend", _BACKENDS, "backend"),
    Key("backend", _BACKENDS, "backend"),
    Key("gdr_release_cache", _flag, "release_cache"),
    Key("gdr_mtp_chunk_size", _whole(1, 1 << 20), "mtp_chunk",
        "a draft model is staged and committed with the main one, by declared names (--draft-names), not in chunks"),
    Key("discover_timeout_s", _seconds, instead="reaching the depot counts as part of the update, within its timeout"),
    Key("output_framework", _one_of("paddle", "torch", "numpy"), instead="bytes are written to whatever the engine runs on"),
    Key("materialize_tensors", _flag, instead="what is staged never shares memory with a buffer that is used again"),
    Key("phase2_backend", _one_of("none", refused=dict.fromkeys(
        ("gpu_direct", "mooncake", "ipc"), "to pass versions on, run depots that mirror one another"
    )), instead="to pass versions on, run depots that mirror one another: weightcast depot --mirror", nullable=True),
    Key("phase2_fan_out", _whole(1, 1 << 16), instead="how many a depot serves is decided by who names it as a source"),
    Key("role", _one_of("inference", refused={"trainer": "this is the configuration of a receiver"}),
        instead="whoever serves receives"),
    Key("index", _whole(0, 1 << 31), instead=_RANKS),
    Key("group_size", _whole(1, 1 << 31), instead=_RANKS),
    Key("global_rank", _whole(0, 1 << 31), instead=_RANKS),
    Key("local_rank", _whole(0, 1 << 31), instead=_RANKS),
    Key("gpu_id", _whole(-1, 1 << 16), instead="weightcast serve --device, and CUDA_VISIBLE_DEVICES"),
    Key("gdr_debug_tensor_digest", _flag, instead=_DIGESTS),
    Key("gdr_debug_tensor_names", _names, instead=_DIGESTS),
    Key("gdr_debug_compare_direct", _flag, instead=_DIGESTS),
    Key("redis_host", _text, instead=_SOURCE),
    Key("redis_port", _whole(1, 65535), instead=_SOURCE),
    Key("redis_ttl_s", _seconds, instead=_SOURCE),
    Key("etcd_server", _text, instead=_SOURCE),
    Key("log_level", _anything, instead=_LOGS, nullable=True),
    Key("log_file", _text, instead=_LOGS, nullable=True),
    Key("perf_log_file", _text, instead=_LOGS, nullable=True),
)  # fmt: skip

_BY_NAME = {key.name: key for key in KEYS}
_DEPTHS = ("gdr_prefetch_queue_size", "num_buffers", "qsize")  # the first one that is given is our one queue


# -- what they become ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferSettings:
    """How versions are received. None, or empty, leaves it to the transport or the update.

    `mode` is how a nixl:// source is read; `asked_mode` is the same if anybody asked for one, and empty if it is only the
    default. `notes` say of every key that has no meaning here what does its work.
    """

    bucket_nbytes: int | None = None
    prefetch: int | None = None
    stall_s: float | None = None
    timeout_s: float | None = None
    nic: str = ""
    mode: Mode = "rdma"
    asked_mode: Mode | Literal[""] = ""
    backend: Literal["", "gpu_direct", "ipc"] = ""
    release_cache: bool | None = None
    mtp_chunk: int = MTP_CHUNK
    notes: tuple[str, ...] = ()

    def as_options(self) -> dict[str, str]:
        """These settings as options of a nixl:// URL; `applied_to` knows which of them http:// has."""
        values = {
            "bucket_nbytes": self.bucket_nbytes, "prefetch": self.prefetch, "stall_s": self.stall_s, "nic": self.nic or None,
        }  # fmt: skip
        return {"mode": self.mode} | {name: f"{value}" for name, value in values.items() if value is not None}

    def applied_to(self, source: str) -> str:
        """A source with these settings. What its URL says itself stays; a source that is not on a network has no such
        options, and stays as it is.

        Raises `InvalidInput` if the bytes of this source do not come the way that was asked for.
        """
        scheme = split_url(source).scheme if "://" in source else "file"
        asked: list[tuple[str, tuple[str, ...]]] = []
        asked += [(f"transfer_mode {self.asked_mode!r}", ("nixl",))] if self.asked_mode else []
        asked += [(f"backend {self.backend!r}", _SCHEMES[self.backend])] if self.backend else []
        for what, schemes in asked:
            if scheme not in schemes:
                wanted = " or ".join(f"{name}://" for name in schemes)
                raise InvalidInput(f"{what} of the legacy configuration goes with a source {wanted}…, not with {source!r}.")
        if scheme not in _NETWORK:
            return source
        options = self.as_options()
        if scheme != "nixl":
            options = {name: value for name, value in options.items() if name in _HTTP_OPTIONS}
        return with_options(source, options)


def with_options(source: str, options: Mapping[str, str], *, win: bool = False) -> str:
    """A URL with these options. Where it has one of them already, that stays as it is, unless these are to `win`."""
    parts = split_url(source)
    has = dict(parse_qsl(parts.query, keep_blank_values=True))
    merged = {**has, **options} if win else {**options, **has}
    if merged == has:
        return source
    return urlunsplit(parts._replace(query=urlencode(merged, quote_via=quote, safe=":/,")))


# -- reading -------------------------------------------------------------------------------------------------------------


@dataclass
class LegacyConfig:
    """A legacy configuration while it is read: values that are right, and everything that is wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, config: str | bytes | Mapping[str, Any], *, transfer_mode: str | None = None) -> TransferSettings:
        """The settings that a configuration asks for: a JSON object, or a mapping, which is left as it is.

        `transfer_mode` is that of a request, and wins over the configuration's. Raises `InvalidInput` that lists every key
        that is unknown, has a wrong value, or asks for what is not offered here.
        """
        reading = cls()
        given = _decoded(config) if isinstance(config, str | bytes) else config
        if not isinstance(given, Mapping):
            raise InvalidInput(f"the legacy configuration must be a JSON object, and is {type(given).__name__}.")
        for name, value in given.items():
            reading._take(name, value)
        settings = reading._settings(transfer_mode)
        if reading.problems:
            raise InvalidInput(
                f"the legacy configuration cannot be used: {'; '.join(reading.problems)}. "
                "`weightcast docs legacy-config` explains its settings."
            )
        return settings

    def _take(self, name: object, value: object) -> None:
        key = _BY_NAME.get(name) if isinstance(name, str) else None
        if key is None:
            self.problems.append(f"{name!r} is not a key that is known")
        elif value in (None, "") and key.nullable:
            return
        elif wrong := key.check(value):
            self.problems.append(f"{key.name} {wrong}, and is {value!r}")
        else:
            self.values[key.name] = value

    def _settings(self, transfer_mode: str | None) -> TransferSettings:
        values = self.values
        megabytes, depth = values.get("bucket_size_mb"), next((values[key] for key in _DEPTHS if key in values), None)
        asked = self._mode(transfer_mode)
        return TransferSettings(
            bucket_nbytes=None if megabytes is None else megabytes << 20,
            prefetch=depth,
            stall_s=_as_float(values.get("recv_bucket_timeout_s")),
            timeout_s=_as_float(values.get("session_total_timeout_s")),
            nic=self._same("device", "device_name"),
            mode=asked or "rdma",
            asked_mode=asked,
            backend=self._same("phase1_backend", "backend"),
            release_cache=values.get("gdr_release_cache"),
            mtp_chunk=values.get("gdr_mtp_chunk_size", MTP_CHUNK),
            notes=self._notes(),
        )

    def _mode(self, requested: str | None) -> Mode | Literal[""]:
        """That of the request, else that of the configuration, else gdr if it says gpu_direct, else nobody's."""
        if requested and requested not in MODES:
            self.problems.append(f"transfer_mode of the request must be {' or '.join(MODES)}, and is {requested!r}")
        asked = requested or self.values.get("transfer_mode") or ("gdr" if self.values.get("gpu_direct") else "")
        return next((mode for mode in MODES if mode == asked), "")

    def _same(self, one: str, other: str) -> Any:
        """The value of two keys that mean the same."""
        values = [self.values[name] for name in (one, other) if name in self.values]
        if len(set(values)) > 1:
            self.problems.append(f"{one} is {values[0]!r} and {other} is {values[1]!r}, and both mean the same: give one")
        return values[0] if values else ""

    def _notes(self) -> tuple[str, ...]:
        depths = [name for name in _DEPTHS if name in self.values]
        unused = [f"{name} has no effect beside {depths[0]}: there is one queue" for name in depths[1:]]
        replaced = [f"{name} has no effect: {_BY_NAME[name].instead}" for name in self.values if _BY_NAME[name].instead]
        return tuple(unused + replaced)


def _as_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _decoded(text: str | bytes) -> object:
    """JSON, in which every key stands once and every number is one."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise InvalidInput(f"the legacy configuration has keys that stand there twice: {', '.join(twice)}.")
        return dict(pairs)

    def refuse(number: str) -> object:
        raise InvalidInput(f"the legacy configuration has {number}, which is no JSON.")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the legacy configuration is not JSON that can be read: {error}.") from error
