"""The life of a server: take the port, start the engine, answer, drain, and leave nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import uvicorn
from starlette.types import ASGIApp

from weightcast import logs
from weightcast.control.app import build_app
from weightcast.control.engine import Engine
from weightcast.control.follow import Follower
from weightcast.control.listening import listen, port_told, url_of
from weightcast.control.service import Service
from weightcast.control.settings import ServerSettings
from weightcast.control.tokenizer import Tokenizer
from weightcast.errors import DeadlineExceeded

log = logs.get(__name__)

_KEEP_ALIVE_S = 75
_LAST_BYTES_S = 5  # for replies that are being written when the engine has closed
_CLOSE_S = 60.0  # for the engine, beyond the time to drain
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Announce = Callable[[str], None]


def serve(make_engine: Callable[[], Engine], tokenizer: Tokenizer, settings: ServerSettings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT, which drain; a second one aborts. `announce` gets the URL when requests are taken.

    `make_engine` is called within the event loop. Raises what the engine's first start raises; later failures are the
    engine's to recover from. To be called in the main thread.
    """

    async def run(listening: socket.socket) -> None:
        server = Server(make_engine(), tokenizer, settings)
        with _signals(server.stop):
            await server.run(listening, announce)

    with listen(settings.host, settings.port) as listening, port_told(settings.port_file, listening):
        log.info(
            "server listening",
            url=url_of(listening),
            model=settings.model_name,
            drain_timeout_s=settings.drain_timeout_s,
            follow=settings.follow,
        )
        if settings.control_token is None:
            log.info("control limited to loopback", why="there is no --control-token-file")
        asyncio.run(run(listening))


class Server:
    """One engine behind one port, in one event loop, which must run already."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        service = Service(engine, tokenizer, settings)
        engine.on_update_ended = service.metrics.update_ended
        self._http = _Http(build_app(service))
        self._stop = asyncio.Event()
        self._hurrying: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Drain, then end. The second time: end now."""
        if not self._stop.is_set():
            log.info("server draining", timeout_s=self._settings.drain_timeout_s)
            self._stop.set()
        elif self._hurrying is None:
            log.warning("server aborting", why="it was asked to stop a second time")
            self._http.hurry()
            self._hurrying = asyncio.create_task(self._engine.close(drain_s=0))

    async def run(self, listening: socket.socket, announce: Announce) -> None:
        """Returns after a drain; raises if the engine cannot start."""
        answering = asyncio.create_task(self._http.serve([listening]), name="http")
        starting = asyncio.create_task(self._engine.start(), name="engine-start")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait((starting, stopping, answering), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not stopping.done():
                await starting
                log.info("server ready", url=url_of(listening), version=self._engine.status.version)
                announce(url_of(listening))
                async with self._following():
                    await asyncio.wait((stopping, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await self._close()
            await asyncio.wait((starting, stopping, answering, *filter(None, [self._hurrying])), timeout=_CLOSE_S)
            if starting.done() and not starting.cancelled():
                starting.exception()  # either raised above, or the start was given up
        await answering

    @asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        """While inside, new versions are taken as they come, if that was asked for."""
        settings = self._settings
        if not settings.follow:
            yield
            return
        request = msgspec.structs.replace(
            settings.update, timeout_s=settings.follow_timeout_s, commit=settings.follow_commit
        )
        follower = Follower(self._engine, request, poll_s=settings.follow_poll_s)
        task = asyncio.create_task(follower.run(), name="follow")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=_CLOSE_S)

    async def _close(self) -> None:
        """End the engine, then the replies that are still being written."""
        drain_s = self._settings.drain_timeout_s if self._stop.is_set() else 0.0
        try:
            async with asyncio.timeout(drain_s + _CLOSE_S):
                await self._engine.close(drain_s=drain_s)
        except TimeoutError:
            raise DeadlineExceeded("ending the engine", drain_s + _CLOSE_S) from None
        finally:
            self._http.should_exit = True


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: signals are ours, since the engine must drain first."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_BYTES_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield

    def hurry(self) -> None:
        """Do not wait for clients that read slowly."""
        self.config.timeout_graceful_shutdown = 1


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT call `stop`."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
