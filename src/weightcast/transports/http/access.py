"""What a client shows to depots, and what it wants to be shown: a token, and certificates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.errors import InvalidInput

if TYPE_CHECKING:
    import ssl

_MAX_TOKEN_NBYTES = 4096


@dataclass(frozen=True)
class Access:
    """A bearer token, and how servers are checked over `https://` (None: against the authorities of this host).

    Neither is ever part of a URL, a message or a log line.
    """

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
            raise InvalidInput("a token must be printable ASCII characters without spaces.")

    @classmethod
    def read(cls, *, token_file: Path | None = None, ca_file: Path | None = None) -> Access:
        """Access as files tell it: a token, and certificates of the authorities to believe instead of this host's."""
        return cls(
            token=None if token_file is None else read_token(token_file),
            tls=None if ca_file is None else _believing(ca_file),
        )


def read_token(path: Path) -> str:
    """The token that is all there is in a file. Raises `InvalidInput` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_TOKEN_NBYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the token cannot be read from {path}: {error}.") from error


def _believing(ca_file: Path) -> ssl.SSLContext:
    import ssl  # noqa: PLC0415 - plain http needs none of it

    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise InvalidInput(f"certificates of authorities cannot be read from {ca_file}: {error}.") from error
