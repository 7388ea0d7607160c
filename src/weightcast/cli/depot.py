"""`weightcast depot`: a store served to other hosts, and filled from other depots."""

from __future__ import annotations

import os
import select
import signal
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from weightcast import logs
from weightcast.cli.completion import directories
from weightcast.cli.help import Command
from weightcast.clock import Deadline
from weightcast.errors import StoreBusy, WeightcastError
from weightcast.store.store import Store

if TYPE_CHECKING:
    from weightcast.depot.holding import Shelf
    from weightcast.store.acks import Acks
    from weightcast.transports.http.access import Access

log = logs.get(__name__)

_COUNT = click.IntRange(min=1)
_FILE = click.Path(path_type=Path, dir_okay=False)
_LOOK_S = 0.2
_LOCK_S = 2.0


_SECTIONS = {
    "Store": ("--store", "--mirror", "--keep-last", "--keep-full-every"),
    "Network": ("--listen", "--port-file", "--nixl"),
    "Access": ("--token-file", "--tls-cert", "--tls-key", "--mirror-ca"),
}


@click.command(cls=Command, sections=_SECTIONS, short_help="Serve a store to other hosts over HTTP.")
@click.option(
    "--store",
    "path",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=directories,
    help="The store that is served.",
)
@click.option(
    "--listen",
    default="127.0.0.1:8300",
    show_default=True,
    metavar="HOST:PORT",
    help="0.0.0.0 is all addresses; port 0 a free one.",
)
@click.option(
    "--mirror",
    multiple=True,
    metavar="URL",
    help="Fill the store from this depot, or from trainer ranks (shares+http://a,b); several: the nearest first.",
)
@click.option("--token-file", type=_FILE, help="What clients must show, and what is shown to --mirror.")
@click.option("--tls-cert", type=_FILE, help="Serve over TLS with this certificate and its chain (PEM).")
@click.option("--tls-key", type=_FILE, help="The key of --tls-cert (PEM).")
@click.option("--mirror-ca", type=_FILE, help="Authorities to believe for --mirror https://… instead of this host's (PEM).")
@click.option("--port-file", type=_FILE, help="Write the port's number here while serving.")
@click.option(
    "--nixl",
    type=click.Choice(("off", "on")),
    default="off",
    show_default=True,
    help="Let receivers read the memory by nixl://. Opens a port of UCX at the address of --listen.",
)
@click.option("--keep-last", type=_COUNT, help="After each new version keep this many.  [default: all; with --mirror 3]")
@click.option("--keep-full-every", type=_COUNT, help="With --keep-last: also a full version at every so many publications.")
def depot(
    path: Path,
    listen: str,
    mirror: tuple[str, ...],
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    mirror_ca: Path | None,
    port_file: Path | None,
    nixl: str,
    keep_last: int | None,
    keep_full_every: int | None,
) -> None:
    """Serve the versions of a store to receivers on other hosts until SIGTERM or SIGINT.

    Any process may publish to the store: new versions are served at once, and receivers that wait for one get it. The store
    may come later: until then the depot answers that there is no version yet. With
    --mirror the store belongs to this depot, which fills it from others and passes on what has come, piece by piece.
    --keep-last never removes a version that a receiver serves, nor the base of one that is kept.

    Without --token-file everyone who reaches the port can read all weights.

    Exit status:
      0  ended by a signal
      1  the storage failed
      2  the call itself is wrong: a directory, an option, a port in use

    Examples:
      weightcast depot --store /mnt/weights --listen 0.0.0.0:8300 --token-file token.txt --keep-last 5
      weightcast depot --store /dev/shm/mirror --listen 0.0.0.0:8300 --mirror http://trainer:8300
      weightcast serve ./model --source http://trainer:8300 --follow       # a receiver
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key need each other.")
    if keep_full_every is not None and (keep_last is None or mirror):
        raise click.UsageError("--keep-full-every needs --keep-last, and a store of its own: not with --mirror.")
    if mirror_ca is not None and not mirror:
        raise click.UsageError("--mirror-ca needs --mirror: whom to believe.")
    if path.exists() and not path.is_dir():
        raise click.UsageError(f"--store {path} is not a directory.")
    from weightcast.control.listening import port_told  # noqa: PLC0415 - servers are slow to import
    from weightcast.depot.access import server_tls  # noqa: PLC0415
    from weightcast.depot.nixl_export import NixlExport  # noqa: PLC0415
    from weightcast.depot.server import Depot, listening_host  # noqa: PLC0415
    from weightcast.store.acks import Acks  # noqa: PLC0415
    from weightcast.transports.http.access import Access  # noqa: PLC0415

    access = Access.read(token_file=token_file, ca_file=mirror_ca)
    tls = server_tls(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    with ExitStack() as stack:
        stop = stack.enter_context(closing(_Stop()))
        acks = Acks(path)
        shelf = stack.enter_context(closing(_shelf(path, mirror, access, keep_last, acks)))
        if nixl == "on":
            export = stack.enter_context(closing(NixlExport(shelf, host=listening_host(listen))))
        routes = export.routes() if nixl == "on" else NixlExport.refusals()
        server = stack.enter_context(Depot(shelf, listen, token=access.token, tls=tls, acks=acks, routes=routes))
        stack.enter_context(port_told(port_file, server.listening))
        click.echo(f"serving {path} at {server.url}" + (f", mirroring {', '.join(mirror)}" if mirror else ""))
        if not (mirror or path.exists()):
            click.echo(f"waiting for a store at {path}: nothing has been published there yet")
        log.info("depot started", store=path, url=server.url, mirror=list(mirror), keep_last=keep_last)
        if keep_last is None or mirror:
            stop.wait()
        else:
            _keep(path, shelf, keep_last, keep_full_every, stop)


def _shelf(path: Path, mirror: tuple[str, ...], access: Access, keep_last: int | None, acks: Acks) -> Shelf:
    if not mirror:
        from weightcast.depot.stored import StoredShelf  # noqa: PLC0415

        return StoredShelf(path)
    from weightcast.depot.mirror import KEEP_LAST, Mirror  # noqa: PLC0415

    return Mirror(path, mirror, access=access, keep_last=keep_last or KEEP_LAST, protect=acks.protected)


def _keep(path: Path, shelf: Shelf, keep_last: int, keep_full_every: int | None, stop: _Stop) -> None:
    """Remove what is not to be kept, after each new version."""
    store, after = Store(path, lock_timeout=_LOCK_S), ""
    while not stop.wait(0):
        newest = shelf.wait_newer(after, deadline=Deadline.after(_LOOK_S))
        if newest is None:
            continue
        try:
            store.gc(keep_last=keep_last, keep_full_every=keep_full_every)
        except StoreBusy as error:  # whoever publishes there: it is tried again
            log.info("gc postponed", store=path, error=error)
            continue
        except WeightcastError as error:
            log.warning("gc failed", store=path, error=error)
        after = newest.version


class _Stop:
    """Told by SIGTERM and SIGINT, through a pipe: a handler may interrupt anything, so it must not take a lock."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.signal(number, self._told) for number in (signal.SIGTERM, signal.SIGINT)}

    def _told(self, _number: int, _frame: FrameType | None) -> None:
        with suppress(BlockingIOError):  # full: it was told often enough
            os.write(self._write, b"x")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is told in time."""
        return bool(select.select([self._read], [], [], timeout_s)[0])

    def close(self) -> None:
        """Let signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
