"""One version on its way to all servers of a fleet: staged on all of them before it is committed on any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.vllm.probe import Fingerprint, compare
from weightcast.errors import (
    FleetUpdateFailed,
    ProbeMismatch,
    ReplicaFailed,
    UpdateFailed,
    WeightcastError,
    WrongState,
    rebuilt,
)
from weightcast.fleet.fan_out import on_all
from weightcast.fleet.vllm_server import NoSuchMethod, NoSuchRoute, PauseMode, RankStatus, VllmServer

log = logs.get(__name__)

ANSWER_S = 30.0  # for what is answered between two steps of an engine; one that takes longer hangs
CLEAN_UP_S = 15.0  # for what must be done after a failure, when the deadline may be over
_NOT_CONFIGURED = "Weight transfer not configured"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.5
_LATER = 1.25  # times as long until the next look: at most a fifth of a staging is lost


@dataclass(frozen=True)
class Order:
    """What is to be done."""

    version: str
    source: str
    pause: PauseMode | None
    verify_checksum: bool
    timeout_s: float


class ServerUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """How one server took a version.

    `stage_s` passed while it served as before; `commit_s` is the commit alone, `pause_s` how long it generated nothing
    because it was told so (None: it was not). `aside` is false for one that could only stage inside the update.
    """

    url: str
    version: str
    stage_s: float
    commit_s: float
    pause_s: float | None
    aside: bool


class _Turn:
    """What is known of one server meanwhile."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.aside = True  # it can stage beside what it serves
        self.session = True  # it has vLLM's own updates, which are begun and finished
        self.committed = False
        self.stage_s = self.commit_s = 0.0
        self.pause_s: float | None = None


class Rollout:
    """Brings one version to all servers. Call `stage`, `commit` and perhaps `probe`, in this order, once."""

    def __init__(self, servers: Sequence[VllmServer], order: Order) -> None:
        self._order = order
        self._turns = [_Turn(server) for server in servers]
        self._stop = threading.Event()
        self._deadline = Deadline.after(order.timeout_s, cancelled=self._stop)

    # -- everything that changes nothing ------------------------------------------------------------------------------

    def stage(self) -> None:
        """Have the version staged on all servers, and an update begun that only has to be finished.

        If one fails, all of them drop it, and `FleetUpdateFailed` tells who and why.
        """
        try:
            self._all(self._stage)
            self._all(self._begin)
            self._deadline.check(f"staging {self._order.version}")
        except BaseException:
            on_all(self._turns, self._abandon)
            raise

    def _all(self, step: Callable[[_Turn], None]) -> None:
        failures = self._failures(step)
        if failures:
            who = f"{len(failures)} of {len(self._turns)}"
            raise FleetUpdateFailed(f"no server was changed: {who} could not take version {self._order.version}", failures)

    def _failures(self, step: Callable[[_Turn], None]) -> dict[str, WeightcastError]:
        ended = on_all(self._turns, step, interrupted=self._stop)
        return {
            turn.server.url: one for turn, one in zip(self._turns, ended, strict=True) if isinstance(one, WeightcastError)
        }

    def _stage(self, turn: _Turn) -> None:
        order, server, began = self._order, turn.server, time.monotonic()
        try:
            server.stage(
                order.version, order.source,
                verify_checksum=order.verify_checksum, timeout=order.timeout_s, deadline=self._soon(),
            )  # fmt: skip
        except NoSuchMethod as error:
            if server.world_size(deadline=self._soon()) > 1:
                raise  # vLLM has read the answer of one worker only, and takes the others' for those to our next calls
            turn.aside = False
            log.warning("server cannot stage", version=order.version, server=server.url, error=error)
            return
        self._await_staged(server)
        turn.stage_s = time.monotonic() - began

    def _await_staged(self, server: VllmServer) -> None:
        version, wait_s = self._order.version, _FIRST_LOOK_S
        while True:
            ranks = server.status(deadline=self._soon())
            waiting = [rank for rank in ranks if rank.state == "STAGING"]
            ended = [rank for rank in ranks if rank.state != "STAGING"]
            failed = [rank for rank in ended if rank.state != "STAGED" or rank.staged != version]
            if not waiting and not failed:
                return
            if not waiting:
                raise _why_not_staged(version, failed)
            time.sleep(min(wait_s, self._deadline.remaining()))
            if failed and self._deadline.remaining() == 0:
                raise _why_not_staged(version, failed)
            self._deadline.check(f"staging {version} at {server.url} ({len(waiting)} of {len(ranks)} ranks still do)")
            wait_s = min(wait_s * _LATER, _LAST_LOOK_S)

    def _begin(self, turn: _Turn) -> None:
        order, server, began = self._order, turn.server, time.monotonic()
        if not self._begun(turn):
            return
        # The very same as was asked for in `_stage`: workers recognise by all of it that they have it already.
        info = {
            "version": order.version,
            "source": order.source,
            "verify_checksum": order.verify_checksum,
            "timeout": order.timeout_s,
        }
        try:
            server.update(info, deadline=self._deadline)
        except ReplicaFailed as error:
            raise self._in_full(server, error) from error
        turn.stage_s += time.monotonic() - began

    def _begun(self, turn: _Turn) -> bool:
        """Begin an update of vLLM's, if the server has such: one that has our workers as an extension only has none."""
        try:
            turn.server.start(deadline=self._soon())
        except (NoSuchRoute, ReplicaFailed) as error:
            lone = isinstance(error, NoSuchRoute) or (  # else the workers were called: see `_stage`
                _NOT_CONFIGURED in str(error) and turn.server.world_size(deadline=self._soon()) == 1
            )
            if not turn.aside or not lone:
                raise
            turn.session = False
            log.info("no session", version=self._order.version, server=turn.server.url, error=error)
        return turn.session

    def _soon(self) -> Deadline:
        return Deadline.after(min(ANSWER_S, self._deadline.remaining()))

    def _abandon(self, turn: _Turn) -> None:
        try:
            turn.server.abandon(deadline=Deadline.after(CLEAN_UP_S))
        except WeightcastError as error:
            # It may be the one that is gone: what it staged goes with it, or at its next update.
            log.warning("abandon failed", version=self._order.version, server=turn.server.url, error=error)

    # -- the change ---------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit on all servers at the same time. Whatever happens, none stays paused by this.

        What is begun is given time to end: if the deadline came between two servers, they would serve different versions.
        `FleetUpdateFailed` tells who failed, what those serve now, and who serves the new version.
        """
        self._deadline = Deadline.after(max(self._deadline.remaining(), CLEAN_UP_S))
        failures = self._failures(self._commit)
        if not failures:
            return
        lost = [turn for turn in self._turns if turn.server.url in failures and not turn.committed]
        serving = dict(zip([turn.server.url for turn in lost], on_all(lost, self._served), strict=True))
        on_all(lost, self._abandon)
        committed = [turn.server.url for turn in self._turns if turn.committed]
        raise FleetUpdateFailed(
            f"version {self._order.version} is committed by {len(committed)} of {len(self._turns)} servers "
            f"({', '.join(committed) or 'none that is known'}). Update again, or take those out that failed",
            failures,
            committed=committed,
            serving={url: one if isinstance(one, str) else None for url, one in serving.items()},
        )

    def _commit(self, turn: _Turn) -> None:
        server, order = turn.server, self._order
        if order.pause is None:
            self._finish(turn)
            return
        began = time.monotonic()
        try:
            server.pause(order.pause, deadline=self._deadline)
            self._finish(turn)
        finally:
            self._resume(server)
            turn.pause_s = time.monotonic() - began

    def _finish(self, turn: _Turn) -> None:
        began = time.monotonic()
        try:
            if turn.session:
                turn.server.finish(self._order.version, deadline=self._deadline)
            else:
                turn.server.commit(deadline=self._deadline)
        except ReplicaFailed as error:
            raise self._in_full(turn.server, error) from error
        turn.committed, turn.commit_s = True, time.monotonic() - began

    def _resume(self, server: VllmServer) -> None:
        """Resume, and not give up at the first failure: an engine that stays paused answers nobody."""
        deadline, wait_s = Deadline.after(CLEAN_UP_S), _FIRST_LOOK_S
        while True:
            try:
                server.resume(deadline=deadline)
                return
            except WeightcastError as error:
                if deadline.remaining() <= wait_s:
                    raise ReplicaFailed(f"{server.url} could not be resumed, and may stay paused: {error}") from error
                time.sleep(wait_s)
                wait_s *= 2

    def _served(self, turn: _Turn) -> str:
        return turn.server.weight_version(deadline=Deadline.after(CLEAN_UP_S))

    def _in_full(self, server: VllmServer, error: ReplicaFailed) -> WeightcastError:
        """The errors of the ranks themselves, if they can be asked: vLLM tells one, and cuts it."""
        try:
            ranks = [rank for rank in server.status(deadline=Deadline.after(CLEAN_UP_S)) if rank.error is not None]
        except WeightcastError:
            return error
        return _failed_ranks(ranks) if ranks else error

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def probe(self, expected: Fingerprint) -> None:
        """Ask every server what it makes of the fingerprint's prompt. `ProbeMismatch` tells all differences."""

        deadline = Deadline.after(max(self._deadline.remaining(), CLEAN_UP_S))

        def differences(turn: _Turn) -> list[str]:
            observed = turn.server.completion(expected.prompt, top=2 * len(expected.top), deadline=deadline)
            return [str(one) for one in compare(expected, observed)]

        asked = dict(zip([turn.server.url for turn in self._turns], on_all(self._turns, differences), strict=True))
        wrong = {url: found for url, found in asked.items() if isinstance(found, list) and found}
        silent = {url: error for url, error in asked.items() if isinstance(error, WeightcastError)}
        if wrong:
            told = wrong | {url: [f"it could not be asked: {error}"] for url, error in silent.items()}
            raise ProbeMismatch(self._order.version, expected.tolerance, told)
        if silent:
            what = f"version {self._order.version} is committed everywhere, but {len(silent)} server(s) could not be probed"
            raise FleetUpdateFailed(what, silent, committed=list(asked))

    def report(self) -> tuple[ServerUpdate, ...]:
        """How each server took it."""
        return tuple(
            ServerUpdate(
                url=turn.server.url,
                version=self._order.version,
                stage_s=turn.stage_s,
                commit_s=turn.commit_s,
                pause_s=turn.pause_s,
                aside=turn.aside,
            )
            for turn in self._turns
        )


def _why_not_staged(version: str, ranks: Sequence[RankStatus]) -> WeightcastError:
    failed = [rank for rank in ranks if rank.error is not None]
    if failed:
        return _failed_ranks(failed)
    states = ", ".join(f"rank {rank.rank} is {rank.state} with {rank.staged or 'nothing'} staged" for rank in ranks)
    return WrongState(
        f"stage {version}: somebody else drives the server, or a worker was restarted ({states})", "LOST", ["STAGED"]
    )


def _failed_ranks(ranks: Sequence[RankStatus]) -> WeightcastError:
    """One error for a server: of the kind that all its ranks tell, if it is one."""
    codes = {rank.error.code for rank in ranks if rank.error}
    told = "; ".join(f"rank {rank.rank}: {rank.error.message}" for rank in ranks if rank.error)
    return rebuilt(codes.pop(), told) if len(codes) == 1 else UpdateFailed(told)
