"""Who may ask a depot: a bearer token, and TLS."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.errors import AccessRefused, InvalidInput, StorageFailed

if TYPE_CHECKING:
    import ssl

_MAX_TOKEN = 4096


class Gate:
    """Lets requests pass that carry the token; without a token, all."""

    def __init__(self, token: str | None) -> None:
        if token is not None:
            check_token(token)
        self._token = None if token is None else token.encode()

    @property
    def is_open(self) -> bool:
        """Whether no token is asked for."""
        return self._token is None

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise `AccessRefused` unless the request carries the token. How long it takes tells nothing of the token."""
        if self._token is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise AccessRefused("this depot wants a token: send it as 'Authorization: Bearer TOKEN'.")
        if not secrets.compare_digest(given.strip().encode("latin-1"), self._token):  # latin-1: the bytes as they came
            raise AccessRefused("this depot wants another token than the one it was given.")


def check_token(token: str) -> str:
    """Refuse a token that could not be sent in a header."""
    if not token or len(token) > _MAX_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidInput(f"a token must be 1 to {_MAX_TOKEN} printable ASCII characters without spaces.")
    return token


def server_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """What a depot needs to serve over TLS: a certificate with its chain, and its key, both PEM."""
    import ssl  # noqa: PLC0415 - plain HTTP needs none of it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise InvalidInput(f"{cert} and {key} are not a certificate and its key in PEM: {error}.") from error
    except OSError as error:
        raise StorageFailed("read the certificate and key", f"{cert} and {key}", error) from error
    return context
