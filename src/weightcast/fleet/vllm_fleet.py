"""`VllmFleet`: many vLLM servers that take new weights as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.vllm.probe import Fingerprint, fingerprint_of
from weightcast.errors import FleetUpdateFailed, InvalidInput, WeightcastError
from weightcast.fleet.fan_out import on_all
from weightcast.fleet.rollout import Order, Rollout, ServerUpdate
from weightcast.fleet.vllm_server import PauseMode, RankStatus, VllmServer
from weightcast.store.store import Store
from weightcast.transports.registry import open_receiver
from weightcast.wire.manifest import check_version_id

if TYPE_CHECKING:
    import ssl

log = logs.get(__name__)

TIMEOUT_S = 180.0


class FleetUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A version that every server of a fleet has committed, and how long it took."""

    version: str
    source: str
    seconds: float
    probed: bool
    servers: tuple[ServerUpdate, ...]


class VllmFleet:
    """Servers that were started with `VLLM_SERVER_DEV_MODE=1` and weightcast as their weight transfer.

        fleet = VllmFleet(["http://gen-0:8000", "http://gen-1:8000"])
        fleet.update("step_7", "file:///mnt/weights")

    It is also a client for vLLM's own trainers (`WeightTransferTrainerFactory`), with the four methods that they call: each
    goes to all servers at the same time. `timeout` limits those. `token` is the servers' `--api-key`.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        self.servers = tuple(VllmServer(url, token, tls=tls) for url in given)
        known = [server.url for server in self.servers]
        if not known or len(set(known)) < len(known):
            raise InvalidInput(f"a fleet needs servers, each of them once, not {', '.join(known) or 'none'}.")
        self._timeout_s = Deadline.after(timeout).seconds

    # -- what vLLM's trainers call ------------------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Set up the weight transfer of all servers."""
        self._each("setting up the weight transfer", lambda server, deadline: server.init(init_info, deadline=deadline))

    def shutdown_weight_transfer_engine(self) -> None:
        """Let all servers release what they hold for it."""
        self._each("ending the weight transfer", lambda server, deadline: server.shutdown(deadline=deadline))

    def start_weight_update(self) -> None:
        """Begin an update on all servers."""
        self._each("starting an update", lambda server, deadline: server.start(deadline=deadline))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Stage on all servers, and wait for all."""
        self._each("staging", lambda server, deadline: server.update(update_info, deadline=deadline))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit on all servers."""
        self._each("the commit", lambda server, deadline: server.finish(weight_version, deadline=deadline))

    def _each(self, what: str, call: Callable[[VllmServer, Deadline], None]) -> None:
        deadline = Deadline.after(self._timeout_s)
        ended = on_all(self.servers, lambda server: call(server, deadline))
        failures = {
            server.url: one for server, one in zip(self.servers, ended, strict=True) if isinstance(one, WeightcastError)
        }
        if failures:
            done = ", ".join(server.url for server in self.servers if server.url not in failures) or "no server"
            raise FleetUpdateFailed(f"{what} was done by {done}, and failed on {len(failures)} other(s)", failures)

    # -- ours ---------------------------------------------------------------------------------------------------------

    @logs.updating("fleet")
    def update(
        self,
        version: str | None,
        source: str | PathLike[str] | Store,
        *,
        pause: PauseMode | None = None,
        verify_checksum: bool = True,
        timeout: float = TIMEOUT_S,
        probe: Fingerprint | bool | None = None,
    ) -> FleetUpdate:
        """Put a version of a source (default: its newest) on all servers.

        First it is staged on all of them, while they serve as before. If that fails anywhere, all drop it, nothing has
        changed, and `FleetUpdateFailed` lists every server and rank that failed. Then it is committed on all at the same
        time. A server that fails in that moment is named in `FleetUpdateFailed`, beside those that serve the version.

        `source` is opened by the servers: a URL, or a directory that they see under the same path. A `pause` is not needed
        for a right result; it is made around the commit alone. With a `probe`, every server is asked afterwards whether it
        computes what the version must (True: by the fingerprint in the version's metadata), and `ProbeMismatch` is raised
        if one does not: the version is served then nevertheless. `timeout` is for all of it, but for what must be cleaned
        up.
        """
        began = time.monotonic()
        if pause is not None and pause not in get_args(PauseMode):
            raise InvalidInput(f"a pause is one of {', '.join(get_args(PauseMode))}, not {pause!r}.")
        wanted, told, expected = self._looked_up(version, told_to_servers(source), probe, timeout)
        order = Order(wanted, told, pause, verify_checksum, timeout)
        rollout = Rollout(self.servers, order)
        rollout.stage()
        rollout.commit()
        if expected is not None:
            rollout.probe(expected)
        update = FleetUpdate(
            version=wanted,
            source=told,
            seconds=time.monotonic() - began,
            probed=expected is not None,
            servers=rollout.report(),
        )
        log.info(
            "servers updated",
            version=wanted,
            servers=len(update.servers),
            source=told,
            ms=logs.ms(update.seconds),
            stage_ms=logs.ms(max(one.stage_s for one in update.servers)),
            commit_ms=logs.ms(max(one.commit_s for one in update.servers)),
            pause=pause or None,
            probed=update.probed,
        )
        return update

    def _looked_up(
        self, version: str | None, source: str, probe: Fingerprint | bool | None, timeout: float
    ) -> tuple[str, str, Fingerprint | None]:
        """The version, so that all servers take the same one, and what to expect of it. Asks the source only if needed."""
        if version is not None and probe is not True:
            return check_version_id(version), source, probe or None
        with closing(open_receiver(source, rank=0)) as receiver:
            wanted = check_version_id(version) if version is not None else receiver.newest()
            if probe is not True:
                return wanted, source, probe or None
            metadata = receiver.manifest(wanted, deadline=Deadline.after(timeout)).metadata
            return wanted, source, fingerprint_of(wanted, metadata)

    def status(self, *, timeout: float = 30.0) -> Mapping[str, Sequence[RankStatus] | WeightcastError]:
        """What every worker of every server says of itself, or the error of asking, by URL."""
        deadline = Deadline.after(timeout)
        told = on_all(self.servers, lambda server: server.status(deadline=deadline))
        return dict(zip([server.url for server in self.servers], told, strict=True))


def told_to_servers(source: str | PathLike[str] | Store) -> str:
    """A source as processes with another working directory must be told of it."""
    if isinstance(source, Store):
        source = source.path
    if isinstance(source, str) and "://" in source:
        return source
    return Path(source).absolute().as_uri()
