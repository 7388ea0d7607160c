"""A power cut after every file operation: what was published stays whole, what was not never looks as if it were."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from weightcast import Store
from weightcast.errors import StorageFailed
from weightcast.store import draft, files, folding, pruning

from .operations import Operation, watched
from .power_cut import Medium, Tree, read_tree, write_tree
from .sample import find_problems, find_recovery_problems, publish

pytestmark = pytest.mark.untraced


@dataclass(frozen=True)
class Promise:
    """What a store must be like: one of these lists of versions, with one of these as the newest."""

    allowed: list[list[str]]
    newest: list[str]


Cut = tuple[str, Tree, Promise]  # where it was, what it left, what was promised there


def publishing(old: list[str], new: str) -> tuple[Promise, Promise]:
    """The promise while a version is published, and the one from the moment that publish returned."""
    whole = [*old, new]
    return Promise([old, whole], [old[-1], new] if old else []), Promise([whole], [new])


class Recording:
    """What was done under a directory, and what was promised at each moment of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.medium = Medium(root)
        self.log: list[tuple[Operation, Promise]] = []

    def do(self, act: Callable[[], object], during: Promise, after: Promise, *, refuse: str = "") -> None:
        """Act and note every operation. The promise `after` holds once the last of them has been done.

        The first operation whose description starts with `refuse` fails, and is not part of the log.
        """
        noted: list[Operation] = []
        refused = not refuse

        def around(operation, proceed):
            nonlocal refused
            if not refused and str(operation).startswith(refuse):
                refused = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            noted.append(replace(operation, data=bytes(operation.data) if operation.data is not None else None))
            return proceed()

        with watched(self.root, around):
            act()
        assert refused
        self.log += [(operation, during) for operation in noted[:-1]] + [(noted[-1], after)]

    def cuts(self) -> list[Cut]:
        """Every different tree that a power cut may leave, with where that was and what was promised there."""
        different: dict[tuple, Cut] = {}
        for number, (operation, promise) in enumerate(self.log):
            self.medium.follow(operation)
            for text, tree in self.medium.cuts():
                key = (tuple(tree.items()), str(promise))
                different.setdefault(key, (f"cut after #{number} {operation}: {text}", tree, promise))
        assert self.medium.now() == read_tree(self.root), "the log does not explain the directory"
        return list(different.values())


def sampled(cuts: list[Cut]) -> list[Cut]:
    """A part of them, at least an eighth: the first and the last of each promise, each kind of call with each kind of
    loss, and every eighth of the rest.
    """
    kinds: dict[object, list[int]] = defaultdict(list)
    promises: dict[str, list[int]] = defaultdict(list)
    for number, (where, _, promise) in enumerate(cuts):
        call = where.split()[3]
        kinds[call, re.sub(r"\d+", "", where.partition(": ")[2])].append(number)
        promises[str(promise)].append(number)
    chosen = {*range(0, len(cuts), 8), *(numbers[len(numbers) // 2] for numbers in kinds.values())}
    chosen |= {number for numbers in promises.values() for number in (numbers[0], numbers[-1])}
    assert len(chosen) >= len(cuts) / 8
    return [cuts[number] for number in sorted(chosen)]


def find_cut_problems(cuts: Iterable[Cut], scratch: Path) -> Iterator[str]:
    """What is wrong with any of the directories that a cut may leave."""
    for where, tree, promise in cuts:
        write_tree(tree, scratch)
        _, found = find_problems(scratch / "store", promise.allowed, promise.newest)
        shutil.rmtree(scratch)
        yield from (f"{where}: {problem}" for problem in found)


def check(recording: Recording, scratch: Path, record_property, form: str = "full") -> None:
    whole = recording.cuts()
    cuts = sampled(whole) if form == "sampled" else whole
    summary = f"{len(recording.log)} operations, {len(cuts)} of {len(whole)} different directories"
    record_property("power_cut", summary)
    print(summary)
    problems = list(find_cut_problems(cuts, scratch))
    assert not problems, f"{len(problems)} problems in {summary}:\n" + "\n".join(problems[:20])


@pytest.fixture
def root(memory_dir):
    (memory_dir / "run").mkdir()
    return memory_dir / "run"


@pytest.fixture
def filled(root):
    """A store that holds step_1, all of it safe."""
    publish(root / "store", "step_1")
    return root


def record_publish(root: Path) -> Recording:
    recording = Recording(root)
    recording.do(lambda: publish(root / "store", "step_2"), *publishing(["step_1"], "step_2"))
    return recording


def record_delta(root: Path) -> Recording:
    publish(root / "store", "near_2")
    recording = Recording(root)
    recording.do(lambda: publish(root / "store", "near_3"), *publishing(["step_1", "near_2"], "near_3"))
    assert Store(root / "store").manifest("near_3").kind == "delta"
    return recording


def record_fold(root: Path) -> Recording:
    """A fold, and a gc that removes the version and the payload which are not needed any more."""
    versions = ["step_1", "near_2", "near_3", "near_4"]
    for version in versions[1:]:
        publish(root / "store", version)
    recording = Recording(root)
    same = Promise([versions], ["near_4"])
    recording.do(lambda: Store(root / "store").fold(), same, same)
    left = ["near_2", "near_4"]
    stages = [versions, versions[1:], left]
    recording.do(lambda: Store(root / "store").gc(keep_last=1), Promise(stages, ["near_4"]), Promise([left], ["near_4"]))
    return recording


def record_gc_after_a_fold_that_died(root: Path) -> Recording:
    """The fold is killed when its manifest is in place and not yet safe; then comes a gc."""
    versions = ["step_1", "near_2", "near_3", "near_4"]
    for version in versions[1:]:
        publish(root / "store", version)
    recording = Recording(root)
    same = Promise([versions], ["near_4"])

    def killed():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(files, "sync_dir", lambda _: None)  # only the sync after the manifest's rename is called there
            Store(root / "store").fold()

    recording.do(killed, same, same)
    left = ["near_2", "near_4"]
    stages = [versions, versions[1:], left]
    recording.do(lambda: Store(root / "store").gc(keep_last=1), Promise(stages, ["near_4"]), Promise([left], ["near_4"]))
    return recording


def record_gc(root: Path) -> Recording:
    publish(root / "store", "step_2")
    recording = Recording(root)
    done = Promise([["step_2"]], ["step_2"])
    recording.do(
        lambda: Store(root / "store").gc(keep_last=1), Promise([["step_1", "step_2"], ["step_2"]], ["step_2"]), done
    )
    return recording


def test_a_power_cut_during_the_first_publishes_of_a_store_loses_nothing_that_was_published(
    root, form, memory_dir, record_property
):
    recording = Recording(root)
    recording.do(lambda: publish(root / "store", "step_1"), *publishing([], "step_1"))
    recording.do(lambda: publish(root / "store", "step_2"), *publishing(["step_1"], "step_2"))

    check(recording, memory_dir / "cut", record_property, form)


def test_a_power_cut_during_a_publish_leaves_the_old_versions_or_the_new_one_too(filled, form, memory_dir, record_property):
    check(record_publish(filled), memory_dir / "cut", record_property, form)


@pytest.mark.parametrize("record", [record_delta, record_fold, record_gc_after_a_fold_that_died])
def test_a_power_cut_while_deltas_are_written_or_folded_leaves_whole_versions(
    record, filled, form, memory_dir, record_property
):
    check(record(filled), memory_dir / "cut", record_property, form)


@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_store_goes_on_after_a_power_cut_during_a_publish(share, filled, memory_dir):
    problems = []
    for where, tree, promise in record_publish(filled).cuts()[::share]:
        path = memory_dir / "cut/store"
        write_tree(tree, path.parent)
        versions, _ = find_problems(path, promise.allowed, promise.newest)
        problems += [f"{where}: {problem}" for problem in find_recovery_problems(path, versions, "step_2", "step_3")]
        shutil.rmtree(path.parent)

    assert not problems, "\n".join(problems)


def test_a_power_cut_during_gc_leaves_whole_versions(filled, memory_dir, record_property):
    check(record_gc(filled), memory_dir / "cut", record_property)


def test_a_power_cut_after_a_publish_that_failed_when_it_was_sealed_leaves_whole_versions(
    filled, form, memory_dir, record_property
):
    def fail():
        with pytest.raises(StorageFailed):
            publish(filled / "store", "step_2")

    either = Promise([["step_1"], ["step_1", "step_2"]], ["step_1"])
    recording = Recording(filled)
    recording.do(fail, either, either, refuse="open store/.version.yaml.tmp")

    check(recording, memory_dir / "cut", record_property, form)


def test_a_power_cut_after_publishing_into_a_directory_that_a_killed_publisher_had_made_keeps_the_version(
    root, form, memory_dir, record_property
):
    nothing = Promise([[]], [])
    recording = Recording(root)
    recording.do((root / "store").mkdir, nothing, nothing)  # the first thing a publisher does; it was never synced
    recording.do(lambda: publish(root / "store", "step_1"), *publishing([], "step_1"))

    check(recording, memory_dir / "cut", record_property, form)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_power_cut_never_loses_the_name_of_the_newest_version(legacy, filled, memory_dir, record_property):
    old, path = ["step_1", "step_2"], filled / "store"
    publish(path, "step_2")
    if legacy:
        (path / "version.yaml").unlink()
        (path / "version.txt").write_text("2")
        recording = Recording(filled)
        recording.do(Store(path).migrate, Promise([old], ["step_2"]), Promise([old], ["step_2"]))
    else:
        recording = Recording(filled)
        recording.do(lambda: Store(path).announce("step_1"), Promise([old], old), Promise([old], ["step_1"]))

    check(recording, memory_dir / "cut", record_property)


@pytest.mark.parametrize(
    ("place", "name", "record"),
    [
        (files.FileWriter, "sync", record_publish),  # bytes of the parts and of the manifest
        (files, "sync_dir", record_publish),  # the names of the manifest and of version.yaml
        (draft, "sync_dir", record_publish),  # the names of the parts, before the manifest gets its own
        (draft, "sync_dir", record_delta),  # the name of the payload
        (folding, "sync_dir", record_fold),  # the name of the folded payload
        (pruning, "sync_dir", record_gc),  # the manifest's removal, before the parts go
        (pruning, "sync_dir", record_gc_after_a_fold_that_died),  # the folded manifest, before its old base goes
    ],
    ids=["file", "manifest", "parts", "payload", "fold", "gc", "gc after fold"],
)
def test_the_check_notices_each_sync_that_is_left_out(place, name, record, filled, memory_dir, monkeypatch):
    monkeypatch.setattr(place, name, lambda _: None)

    latest_first = reversed(sampled(record(filled).cuts()))

    assert next(find_cut_problems(latest_first, memory_dir / "cut"), None)
