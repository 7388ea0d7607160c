"""What a server is started with, and the secrets that its callers show."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from weightcast import config, logs
from weightcast.depot.access import check_token
from weightcast.engines.base import UPDATE_TIMEOUT_S, UpdateRequest
from weightcast.errors import InvalidInput
from weightcast.transports.allowed import AllowedSources
from weightcast.transports.http.access import read_token
from weightcast.worker.result import CommitMode

log = logs.get(__name__)


class Token:
    """A secret that callers show. Compares in constant time, and never prints what it holds."""

    def __init__(self, text: str) -> None:
        self._text = check_token(text).encode()

    @classmethod
    def read(cls, path: Path | None, variable: str) -> Token | None:
        """The token in a file, else the one in the environment, else None. Warns of a file that everybody can read."""
        if path is None:
            text = config.setting(variable)
            return None if text is None else cls(text)
        token = cls(read_token(path))
        if path.stat().st_mode & stat.S_IROTH:
            log.warning("token file open to others", path=path, cure=f"chmod 600 {path}")
        return token

    def is_shown(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries it as `Authorization: Bearer TOKEN`."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        shown = given.strip().encode("latin-1")  # the bytes as they came
        return scheme.lower() == "bearer" and secrets.compare_digest(shown, self._text)

    def __repr__(self) -> str:
        return "Token(…)"


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are taken, whatever the engine.

    `port` 0 takes a free one; `port_file` is where its number is written. `request_timeout_s` bounds every request, which
    may ask for less. `drain_timeout_s` is how long running requests may go on after a SIGTERM. With `follow`, each new
    version of the engine's default source is taken by itself; the source is asked every `follow_poll_s`. `update` is what an
    update does where the call that asks for it does not say.

    Callers of inference show `api_key`, those of control `control_token`; without that, control is for loopback. `sources`
    are the ones that callers may name. `allow_hosts` are names that may stand in the Host
    header of control calls. `legacy_get` lets the GETs of the old protocol change things.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    port_file: Path | None = None
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    max_body_nbytes: int = 16 << 20
    max_control_body_nbytes: int = 1 << 20
    max_choices: int = 128
    follow: bool = False
    follow_poll_s: float = 1.0
    follow_timeout_s: float = UPDATE_TIMEOUT_S
    follow_commit: CommitMode | Literal["auto"] = "auto"
    update: UpdateRequest = UpdateRequest()
    api_key: Token | None = None
    control_token: Token | None = None
    sources: AllowedSources = AllowedSources()
    allow_hosts: tuple[str, ...] = ()
    legacy_get: bool = False

    def __post_init__(self) -> None:
        more_than_0 = {
            "request_timeout_s": self.request_timeout_s,
            "body_timeout_s": self.body_timeout_s,
            "max_body_nbytes": self.max_body_nbytes,
            "max_control_body_nbytes": self.max_control_body_nbytes,
            "max_choices": self.max_choices,
            "follow_poll_s": self.follow_poll_s,
            "follow_timeout_s": self.follow_timeout_s,
            "update.timeout_s": self.update.timeout_s,
        }
        wrong = [f"{name}={value}" for name, value in more_than_0.items() if not value > 0]
        if not self.drain_timeout_s >= 0:
            wrong.append(f"drain_timeout_s={self.drain_timeout_s}")
        if not 0 <= self.port < 1 << 16:
            wrong.append(f"port={self.port}")
        if not self.model_name:
            wrong.append("model_name is empty")
        if wrong:
            raise InvalidInput(f"settings of the server that cannot work: {', '.join(wrong)}.")
