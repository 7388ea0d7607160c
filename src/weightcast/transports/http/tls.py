"""The encrypted half of `https://`. Loaded only where it is used."""

from __future__ import annotations

import select
import socket
import ssl

from weightcast.errors import SourceFailed
from weightcast.transports.http.patience import Patience, wait_ready


def secured(sock: socket.socket, context: ssl.SSLContext | None, host: str, patience: Patience) -> ssl.SSLSocket:
    """The socket after the handshake, not blocking yet. Raises `SourceFailed` if the other end is not who it must be."""
    trust = context or ssl.create_default_context()
    wrapped = None
    try:
        wrapped = trust.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        _shake_hands(wrapped, patience)
        return wrapped
    except BaseException as error:
        if wrapped is not None:
            wrapped.close()  # `sock` has nothing left to close
        if isinstance(error, OSError | ValueError):  # a certificate that does not convince is one of them
            raise SourceFailed(f"no encrypted connection to {patience.url}: {error}.") from error
        raise


def _shake_hands(sock: ssl.SSLSocket, patience: Patience) -> None:
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            wait_ready(sock, select.POLLIN, patience)
        except ssl.SSLWantWriteError:
            wait_ready(sock, select.POLLOUT, patience)
