"""Run by the tests: kills a process at every file operation of a scenario, and looks at what each kill left.

    python -m process.kill_matrix SCENARIO DIRECTORY [--sampled] [--fault NAME]

Prints one JSON object. weightcast is imported once; every point of the matrix is a fork of this process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from weightcast import Store, delta
from weightcast.store import delta_writer, files, writer
from weightcast.store.publishing import Request, StorePublisher

from .operations import WRITING, Operation, killing, listing, points, sampled, watched
from .sample import find_problems, find_recovery_problems, find_strays, publish

CHILD_LIMIT_S = 90
WORKERS = 2


class Scenario(ABC):
    """What is there before, what is done, and what may be there after a kill at any moment of it."""

    place = "store"
    calls: tuple[str, ...] = ()  # kill at these only; by default at all
    deltas = False  # whether it makes any

    @abstractmethod
    def prepare(self, store: Path) -> None:
        """Make what is there before."""

    @abstractmethod
    def act(self, store: Path) -> None:
        """Do what is cut off."""

    @abstractmethod
    def judge(self, store: Path) -> tuple[str, list[str]]:
        """In a word, where the kill left the store; and everything that is wrong with it."""


class Publish(Scenario):
    """A third version comes to a store that holds two."""

    old: tuple[str, ...] = ("step_1", "step_2")
    new, later = "step_3", "step_4"

    def prepare(self, store: Path) -> None:
        for version in self.old:
            publish(store, version)

    def act(self, store: Path) -> None:
        publish(store, self.new)

    def judge(self, store: Path) -> tuple[str, list[str]]:
        newest = [self.old[-1], self.new] if self.old else []
        versions, problems = find_problems(store, [[*self.old], [*self.old, self.new]], newest)
        problems += find_recovery_problems(store, versions, self.new, self.later)
        return "new" if self.new in versions else "old", problems


class FirstPublish(Publish):
    """The first version makes the store and the directories above it."""

    old = ()
    place = "new/place/store"


class PublishOverLeftovers(Publish):
    """A publish of the same version died before, so its leftovers are removed first. The rest is as in `Publish`."""

    calls = ("unlink", "rmdir", "mkdir")

    def prepare(self, store: Path) -> None:
        super().prepare(store)
        assert die(lambda: publish(store, "step_3"), store, 30, "before")
        assert len(list((store / "versions/step_3").iterdir())) > 2


class PublishDelta(Publish):
    """A delta comes to a store that holds a full version and a delta on it."""

    deltas = True
    old = ("near_1", "near_2")
    new, later = "near_3", "near_4"

    def prepare(self, store: Path) -> None:
        super().prepare(store)
        assert [Store(store).manifest(version).kind for version in self.old] == ["full", "delta"]

    def judge(self, store: Path) -> tuple[str, list[str]]:
        outcome, problems = super().judge(store)
        kinds = [Store(store).manifest(version).kind for version in Store(store).versions()]
        return outcome, problems + ([] if set(kinds[1:]) == {"delta"} else [f"published {kinds}"])


class PublishTooLarge(Publish):
    """A payload grows too large, so that a full version takes its place. The rest is as in `Publish`."""

    old = ("near_1", "near_2")
    new, later = "far_3", "far_4"
    calls = ("unlink", "rename")
    deltas = True

    def judge(self, store: Path) -> tuple[str, list[str]]:
        outcome, problems = super().judge(store)
        return outcome, problems + ([] if Store(store).manifest(Store(store).newest()).kind == "full" else ["no full one"])


class Fold(Scenario):
    """The third of four versions, deltas on one another, is made to lead from the full one."""

    versions = ("near_1", "near_2", "near_3", "near_4")
    deltas = True

    def prepare(self, store: Path) -> None:
        for version in self.versions:
            publish(store, version)

    def act(self, store: Path) -> None:
        Store(store, lock_timeout=5).fold("near_3")

    def judge(self, store: Path) -> tuple[str, list[str]]:
        _, problems = find_problems(store, [[*self.versions]], ["near_4"])
        base = Store(store).manifest("near_3").base.version
        problems += find_recovery_problems(store, [*self.versions], "near_4", "near_5")
        self.act(store)
        if (found := Store(store).manifest("near_3").base.version) != "near_1":
            problems.append(f"folded again, it is on {found}")
        Store(store, lock_timeout=5).gc(keep_last=1)
        _, after = find_problems(store, [["near_1", "near_3", "near_4", "near_5"]], ["near_5"])
        return {"near_2": "old", "near_1": "new"}.get(base, base), [*problems, *after, *find_strays(store)]


class Gc(Scenario):
    """Two of four versions go, and the leftovers of writers that died."""

    def prepare(self, store: Path) -> None:
        for number in range(1, 5):
            publish(store, f"step_{number}")
        assert die(lambda: publish(store, "step_5"), store, 30, "before")
        (store / ".version.yaml.tmp").write_text("of a writer that died")

    def act(self, store: Path) -> None:
        Store(store, lock_timeout=5).gc(keep_last=2)

    def judge(self, store: Path) -> tuple[str, list[str]]:
        kept = ["step_3", "step_4"]
        stages = [["step_1", "step_2", *kept], ["step_2", *kept], kept]
        versions, problems = find_problems(store, stages, ["step_4"])
        self.act(store)
        _, after = find_problems(store, [kept], ["step_4"])
        return f"{len(versions)} versions", [*problems, *after, *find_strays(store)]


class Announce(Scenario):
    """An older version becomes the newest."""

    def prepare(self, store: Path) -> None:
        publish(store, "step_1")
        publish(store, "step_2")

    def act(self, store: Path) -> None:
        Store(store, lock_timeout=5).announce("step_1")

    def judge(self, store: Path) -> tuple[str, list[str]]:
        _, problems = find_problems(store, [["step_1", "step_2"]], ["step_1", "step_2"])
        return Store(store).newest(), problems


class Migrate(Announce):
    """The version file of a legacy store is converted."""

    def prepare(self, store: Path) -> None:
        super().prepare(store)
        (store / "version.yaml").unlink()
        (store / "version.txt").write_text("2\n")

    def act(self, store: Path) -> None:
        Store(store, lock_timeout=5).migrate()

    def judge(self, store: Path) -> tuple[str, list[str]]:
        outcome = "txt" if (store / "version.txt").exists() else "yaml"
        _, problems = find_problems(store, [["step_1", "step_2"]], ["step_2"])
        self.act(store)
        _, after = find_problems(store, [["step_1", "step_2"]], ["step_2"])
        return outcome, [*problems, *after]


SCENARIOS: dict[str, Scenario] = {
    "publish": Publish(),
    "first_publish": FirstPublish(),
    "publish_over_leftovers": PublishOverLeftovers(),
    "publish_delta": PublishDelta(),
    "publish_too_large": PublishTooLarge(),
    "fold": Fold(),
    "gc": Gc(),
    "announce": Announce(),
    "migrate": Migrate(),
}


def _top(store: Path) -> Path:
    """The directory in which everything of a run happens: the store may lie deeper in it."""
    return next(parent for parent in store.parents if parent.name == "run")


def in_child(work: Callable[[], None]) -> int:
    """Start a fork and return its process id. One that hangs is ended by its alarm."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(CHILD_LIMIT_S)
        work()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def die(act: Callable[[], None], store: Path, at: int, moment: str) -> bool:
    """Whether a fork that acts is killed at this point."""

    def work() -> None:
        with watched(_top(store), killing(at, moment)):
            act()

    _, status = os.waitpid(in_child(work), 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def count(act: Callable[[Path], None], store: Path, report: Path) -> None:
    """Act without a kill; note all operations and, from the interpreter's audit events, every change of files."""
    seen: list[Operation] = []
    audited: list[str] = []
    names = {"os.rename": "rename", "os.remove": "unlink", "os.mkdir": "mkdir", "os.rmdir": "rmdir"}
    top = _top(store)

    def audit(event: str, facts: tuple[Any, ...]) -> None:
        if not facts or not isinstance(facts[0], str | os.PathLike) or not Path(facts[0]).is_relative_to(top):
            return
        if event == "open":
            if facts[2] & (WRITING | os.O_DIRECTORY):
                audited.append(f"open {os.path.relpath(facts[0], top)}")
        elif event.startswith(("os.", "shutil.", "tempfile.")) and event not in ("os.listdir", "os.scandir"):
            audited.append(f"{names.get(event, event)} {os.path.relpath(facts[0], top)}")

    sys.addaudithook(audit)
    with watched(top, listing(seen)):
        act(store)
    alias = {"replace": "rename", "remove": "unlink"}
    changes = ("open", "rename", "replace", "mkdir", "unlink", "remove", "rmdir")
    watched_changes = [f"{alias.get(item.call, item.call)} {item.path}" for item in seen if item.call in changes]
    plain = [[item.call, item.path, item.to] for item in seen]
    report.write_text(json.dumps({"operations": plain, "audited": audited, "watched": watched_changes}))


def manifest_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """A broken publisher: the manifest is there before the parts have their names."""

    def publish(self: StorePublisher, request: Request) -> Any:
        later: list[tuple[Path, Path]] = []
        with (
            mock.patch.object(writer, "rename", lambda old, new: later.append((old, new))),
            mock.patch.object(delta_writer, "rename", lambda old, new: later.append((old, new))),
        ):
            manifest = original(self, request)
        assert later
        for old, new in later:
            files.rename(old, new)
        return manifest

    return publish


def version_file_in_place(path: Path, data: bytes) -> None:
    """A broken publisher: files are overwritten where readers look."""
    with files.FileWriter(path, overwrite=True) as file:
        file.write(data)
        file.sync()


def fold_in_place(path: Path, data: bytes) -> None:
    """A broken fold: the payload that the manifest names is overwritten."""
    files.FileWriter(path.with_name("delta-00001.bin"), overwrite=True).write(data)


def parts_first(directory: Path, **_: object) -> int:
    """A broken gc: the manifest is the last file to go."""
    for file in sorted(directory.iterdir(), key=lambda file: file.name == "manifest.json"):
        file.unlink()
    directory.rmdir()
    return 0


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[], Any]]] = {  # by name: the calls to kill it at, and how to break it
    "manifest_first": (
        ("rename",), lambda: mock.patch.object(StorePublisher, "publish", manifest_first(StorePublisher.publish)),
    ),
    "payload_in_place": (("write",), lambda: mock.patch("weightcast.store.folding.write_synced", fold_in_place)),
    "version_file_in_place": (
        ("open",), lambda: mock.patch("weightcast.store.version_file.replace_synced", version_file_in_place),
    ),
    "parts_first": (("unlink",), lambda: mock.patch("weightcast.store.pruning.remove_version", parts_first)),
}  # fmt: skip


class Matrix:
    """The points of a scenario, shared out among a few workers, each with a directory of its own."""

    def __init__(self, scenario: Scenario, act: Callable[[Path], None], directory: Path) -> None:
        self._scenario, self._act, self._directory = scenario, act, directory
        self._before = directory / "before/run"
        self._before.mkdir(parents=True)
        scenario.prepare(self._before / scenario.place)
        noted = directory / "noted.json"
        store = self._begin(directory)
        if os.waitpid(in_child(lambda: count(act, store, noted)), 0)[1]:
            raise SystemExit("the scenario fails without any kill")
        self.counted = json.loads(noted.read_text())
        self.log = [Operation(call, path, to) for call, path, to in self.counted["operations"]]

    def _begin(self, directory: Path) -> Path:
        shutil.rmtree(directory / "run", ignore_errors=True)
        shutil.copytree(self._before, directory / "run")
        return directory / "run" / self._scenario.place

    def run(self, calls: tuple[str, ...], *, sample: bool = False) -> dict[str, Any]:
        """Kill at every point, or at those of some calls, or a sample; returns how many ended where, and the problems."""
        whole = [(number, moment) for number, moment in points(self.log) if not calls or self.log[number].call in calls]
        tried = sampled(self.log, whole) if sample else whole
        shares = {self._directory / f"result-{worker}.json": tried[worker::WORKERS] for worker in range(WORKERS)}
        children = [in_child(lambda to=result, points=share: self._work(points, to)) for result, share in shares.items()]
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit("a worker failed")
        parts = [json.loads(result.read_text()) for result in shares]
        outcomes = sum((Counter(part["outcomes"]) for part in parts), Counter())
        problems = {where: found for part in parts for where, found in part["problems"].items()}
        return {**self.counted, "points": len(tried), "of": len(whole), "outcomes": outcomes, "problems": problems}

    def _work(self, share: list[tuple[int, str]], result: Path) -> None:
        directory = result.with_suffix("")
        outcomes: Counter[str] = Counter()
        problems: dict[str, list[str]] = {}
        for number, moment in share:
            outcome, found = self._try(self._begin(directory), number, moment)
            outcomes[outcome] += 1
            if found:
                problems[f"{moment} #{number} {self.log[number]}"] = found
        result.write_text(json.dumps({"outcomes": outcomes, "problems": problems}))

    def _try(self, store: Path, number: int, moment: str) -> tuple[str, list[str]]:
        if not die(lambda: self._act(store), store, number, moment):
            return "error", ["this point was not reached"]
        try:
            return self._scenario.judge(store)
        except Exception as error:
            return "error", [f"{type(error).__name__}: {error}"]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--fault", choices=FAULTS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # it tells of every leftover
    scenario = SCENARIOS[arguments.scenario]
    if scenario.deltas:
        delta.warm_up()  # once, before the forks
    calls, broken = FAULTS[arguments.fault] if arguments.fault else (scenario.calls, nullcontext)

    def act(store: Path) -> None:
        with broken():
            scenario.act(store)

    print(json.dumps(Matrix(scenario, act, arguments.directory).run(calls, sample=arguments.sampled)))


if __name__ == "__main__":
    main()
