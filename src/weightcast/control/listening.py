"""The socket that a server listens on, taken before anything slow is done, and the file that tells its port."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightcast.errors import InvalidInput, StorageFailed

_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one. Raises `InvalidInput` if the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidInput(f"cannot listen on {host} port {port}: {why}. Choose another --host or --port.") from error
    # for every connection that is accepted: a reply is written in several pieces, each of which would else wait for the
    # client's acknowledgement of the one before
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(listening: socket.socket) -> str:
    """Where clients on this machine reach it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def port_told(path: Path | None, listening: socket.socket) -> Iterator[None]:
    """While inside, `path` holds the number of the port; it appears whole and is removed at the end."""
    if path is None:
        yield
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with aside.open("x") as file:  # never through a link that another user planted
            file.write(f"{listening.getsockname()[1]}\n")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise StorageFailed("write the port to", path, error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
