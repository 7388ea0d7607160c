"""Random schedules of what operators, trainers and accidents do to a real server, against a model of what must be served."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from weightcast.store.snapshot import write_snapshot

from .follow_stand import POLL_S, FollowStand
from .server_process import START_S

OPERATIONS = 5  # of a schedule
KILLS = 0.35  # of all schedules lose a rank
FRONT_ENDS = 0.06  # lose the front end


@dataclass
class Model:
    """What must be served. Versions are places in the order of publication; `newest` is the one that the store names.

    `pin` is what an operator moved away from, and `previous` what a rollback leads to.
    """

    versions: list[str]
    newest: int
    served: int
    pin: int | None = None
    previous: int | None = None

    def follow(self) -> None:
        """Take the newest version, unless the pin forbids it."""
        if self.pin is None or (self.newest > self.pin and self.newest != self.served):
            self.move(self.newest, None)

    def move(self, served: int, pin: int | None) -> None:
        if served != self.served:
            self.served, self.previous = served, self.served
        self.pin = pin

    @property
    def version(self) -> str:
        return self.versions[self.served]

    @property
    def away_from(self) -> str | None:
        return None if self.pin is None else self.versions[self.pin]


@dataclass
class Watcher:
    """Looks at the server all the time; each version that it sees must be one of `allowed`."""

    stand: FollowStand
    allowed: set[str]
    wrong: list[str] = field(default_factory=list)
    looks: int = 0

    def run(self, stop: threading.Event) -> None:
        with httpx.Client(timeout=START_S) as http:
            while not stop.wait(POLL_S / 2):
                before = set(self.allowed)
                try:
                    now = http.get(f"{self.stand.server.url}/v1/weights").json()["result"]
                except (httpx.HTTPError, OSError, ValueError, KeyError):
                    continue  # the front end is being killed or starts
                self.looks += 1
                if now["version"] and now["version"] not in before | self.allowed:
                    self.wrong.append(f"{now['version']} was served, and allowed were {before | self.allowed}: {now}")
                held = {rank["version"] for rank in now["ranks"]} - {""}
                if now["state"] == "READY" and not held <= before | self.allowed:
                    self.wrong.append(f"ranks held {held}, and allowed were {before | self.allowed}: {now}")


class Schedules:
    """One server, and one schedule after another on it. Each begins where the last one ended."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root, self.stand = root, FollowStand(root, seed=seed)
        self.stand.start()
        self.stand.wait_serving("base")
        self.stand.publish("step_1")
        self.stand.wait_serving("step_1")
        self.model = Model(self.stand.published, newest=1, served=1, previous=0)
        self.watcher = Watcher(self.stand, {"step_1"})
        self.told: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.watcher.run, args=(self._stop,))
        self._thread.start()
        self._mixed = 0

    def close(self) -> None:
        self._stop.set()
        self._thread.join(START_S)
        self.stand.close()

    def run(self, number: int) -> None:
        """One schedule: random operations, each judged when the server has come to rest."""
        usual = [self.publish, self.rollback, self.explicit, self.explicit, self.newest, self.resume, self.announce]
        chosen: list[Callable[[], None]] = [self.random.choice([*usual, self.mix]) for _ in range(OPERATIONS)]
        if self.random.random() < KILLS:
            chosen[self.random.randrange(OPERATIONS)] = self.random.choice([self.kill_rank, self.kill_in_update])
        if self.random.random() < FRONT_ENDS:
            chosen[self.random.randrange(OPERATIONS)] = self.kill_front_end
        for operation in chosen:
            self.told.append(f"{number}: {operation.__name__}")
            operation()
            self.settle()

    # -- operations ------------------------------------------------------------------------------------------------------

    def expecting(self, act: Callable[[], object]) -> None:
        """Change the model by what an operation does to it; before and after are both allowed until the server rests."""
        before = self.model.version
        act()
        self.model.follow()
        self.told[-1] += f" -> {self.model.version}, away from {self.model.away_from}"
        self.watcher.allowed = {before, self.model.version}

    def allow(self, *versions: str) -> None:
        self.watcher.allowed = {self.model.version, *versions}

    def publish(self) -> None:
        version = f"step_{len(self.model.versions)}"
        self.allow(version)
        self.stand.publish(version)
        self.expecting(lambda: setattr(self.model, "newest", len(self.model.versions) - 1))

    def rollback(self) -> None:
        before = self.model.previous
        if before is not None:
            self.allow(self.model.versions[before])
        answer = self.stand.rollback()
        assert answer.status_code == (404 if before is None else 200), f"{answer.text} {self.model}"
        if before is not None:
            self.expecting(lambda: self.model.move(before, self.model.newest))
            self.model.previous = None

    def explicit(self) -> None:
        self.update(self.random.randrange(len(self.model.versions)))

    def newest(self) -> None:
        self.update(self.model.newest)

    def update(self, place: int) -> None:
        self.allow(self.model.versions[place])
        answer = self.stand.update(self.model.versions[place])
        assert answer.status_code == 200, answer.text
        self.expecting(lambda: self.model.move(place, None if place == self.model.newest else self.model.newest))

    def resume(self) -> None:
        self.allow(self.model.versions[self.model.newest])
        answer = self.stand.follow()
        assert answer.status_code == 200, answer.text
        self.expecting(lambda: setattr(self.model, "pin", None))

    def announce(self) -> None:
        """Another version becomes the newest, which may be an older one."""
        place = self.random.randrange(len(self.model.versions))
        self.allow(self.model.versions[place])
        self.stand.store.announce(self.model.versions[place])
        self.expecting(lambda: setattr(self.model, "newest", place))

    def mix(self) -> None:
        """Snapshots of two versions, one for each rank. Nothing may come of it."""
        self._mixed += 1
        directory = self.root / f"mixed-{self._mixed}"
        places = self.random.sample(range(len(self.model.versions)), 2)
        if places[0] == self.model.served:  # it is served already, so no rank would read anything
            places.reverse()
        for rank, place in enumerate(places):
            version = self.model.versions[place]
            named = version if self.random.random() < 0.5 else self.model.versions[places[0]]
            write_snapshot(
                directory, self.stand.store.load(version), rank=rank, ranks=2, device_id="0", version=named, part_nbytes=None
            )
        answer = self.stand.update(source=f"snapshot://{directory}?id=0", verify_checksum=False)
        assert answer.status_code == 502, answer.text
        assert "rank 1" in answer.text
        shutil.rmtree(directory)

    def kill_rank(self) -> None:
        self.stand.kill_rank(self.random.randrange(2))
        self.model.previous = None

    def kill_in_update(self) -> None:
        """A rank dies at some moment of an update: it ends at the old version or at the new one."""
        place = self.random.randrange(len(self.model.versions))
        version, before = self.model.versions[place], self.model.version
        self.allow(version)
        pid, restarts = self.stand.server.ranks()[self.random.randrange(2)], self.stand.server.health()["restarts"]
        accident = threading.Timer(self.random.random() * 0.15, os.kill, [pid, signal.SIGKILL])
        accident.start()
        self.stand.update(version)  # whatever it says
        accident.join(START_S)
        self.stand.server.wait_for(lambda: self.stand.server.health()["restarts"] > restarts, "a restart", START_S)
        now = self.stand.weights()
        assert now["version"] in (before, version), now
        away = None if place == self.model.newest else self.model.newest
        if now["version"] == version and (now["pin"] and now["pin"]["away_from"]) == (
            None if away is None else self.model.versions[away]
        ):
            self.expecting(lambda: self.model.move(place, away))
        self.model.previous = None

    def kill_front_end(self) -> None:
        self.stand.kill_front_end()
        self.stand.start()
        self.model.previous = None

    # -- what came of it -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The server comes to rest where the model says, stays there, and all ranks hold that version."""
        self.stand.wait_serving(self.model.version)
        self.watcher.allowed = {self.model.version}
        self.stand.dwell(self.model.version)
        self.stand.judge(self.model.version, self.model.away_from)
        assert not self.watcher.wrong, self.watcher.wrong[0]
        held = self.stand.weights()["previous"]
        assert held == (None if self.model.previous is None else self.model.versions[self.model.previous]), self.model


def run_schedules(root: Path, seed: int, count: int) -> None:
    schedules, began = Schedules(root, seed), time.monotonic()
    try:
        for number in range(count):
            schedules.run(number)
    except BaseException as error:
        error.add_note("\n".join(["the schedules so far:", *schedules.told[-40:], schedules.stand.server.said()]))
        raise
    finally:
        schedules.close()
    seconds = time.monotonic() - began
    print(f"\n{count} schedules, {len(schedules.told)} operations, {schedules.watcher.looks} looks, {seconds:.0f} s")


@pytest.mark.timeout(240)
def test_whatever_happens_the_version_that_must_be_served_is_served(tmp_path):
    run_schedules(tmp_path, seed=1, count=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 108))
def test_200_schedules(tmp_path, seed):
    run_schedules(tmp_path, seed=seed, count=25)
