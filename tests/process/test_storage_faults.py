"""File systems that refuse: full, failing, read-only. And publishers that stand in each other's way."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from weightcast import Store
from weightcast.errors import StorageFailed, StoreBusy
from weightcast.store.draft import Draft

from .children import report_of
from .operations import Operation, listing, points, refusing, sampled, watched
from .sample import find_problems, find_strays, publish

OLD = ["step_1", "step_2"]


NEAR = ["near_1", "near_2"]  # the second is a delta, and so is what comes after


@pytest.fixture
def before(memory_dir):
    """A directory with a store that holds two versions."""
    return fill(memory_dir / "before", OLD)


@pytest.fixture
def before_deltas(memory_dir):
    """The same where the second version is a delta on the first."""
    return fill(memory_dir / "before", NEAR)


def fill(directory: Path, versions: list[str]) -> Path:
    for version in versions:
        publish(directory / "store", version)
    return directory


def begin(before: Path) -> Path:
    """A fresh copy of what was there before, to do something to."""
    run = before.with_name("run")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(before, run)
    return run / "store"


def operations_of_a_publish(before: Path, version: str = "step_3") -> list[Operation]:
    log: list[Operation] = []
    store = begin(before)
    with watched(store.parent, listing(log)):
        publish(store, version)
    assert str(log[-1]) == "close store/.lock"  # nothing was written to it, so its close cannot fail, and all is done
    return log[:-1]


def find_fault_problems(
    before: Path, at: int, error: int, moment: str = "before", *, ever_after: bool = False, old: list[str] = OLD
) -> list[str]:
    """What is wrong after a publish in which one operation failed; `ever_after`, its cleanup failed too."""
    store = begin(before)
    new, later = (f"{old[0][:-1]}{number}" for number in (3, 4))
    descriptors = os.listdir("/proc/self/fd")
    problems = []
    try:
        with watched(store.parent, refusing(at, error, moment, ever_after=ever_after)):
            publish(store, new)
    except StorageFailed as failure:
        if failure.errno != error or failure.path not in str(failure) or not Path(failure.path).is_relative_to(store):
            problems.append(f"the error does not tell what failed where: {failure}")
    except Exception as failure:
        problems.append(f"raised {type(failure).__name__}: {failure}")
    else:
        problems.append("did not raise")
    if os.listdir("/proc/self/fd") != descriptors:
        problems.append("left files open")
    allowed = [old, [*old, new]] if ever_after else [old]
    versions, found = find_problems(store, allowed, [old[-1], new] if ever_after else [old[-1]])
    problems += found if ever_after else [*found, *find_strays(store)]
    following = later if new in versions else new
    publish(store, following)
    if Store(store).versions() != [*versions, following] or not Store(store).verify().ok:
        problems.append("the next publish did not work")
    return problems


def check(problems: dict[str, list[str]], count: int, record_property) -> None:
    record_property("fault_matrix", f"{count} points")
    print(f"{count} points")
    listed = "".join(f"\n  {where}: {'; '.join(found)}" for where, found in problems.items() if found)
    assert not listed, f"of {count} points:{listed}"


def points_of(log: list[Operation], form: str) -> list[tuple[int, str]]:
    """Where a call can fail, in the sampled or the full form."""
    whole = [(number, moment) for number, moment in points(log) if moment != "after"]
    assert len(whole) > 50
    return sampled(log, whole) if form == "sampled" else whole


def starts_of(log: list[Operation], form: str) -> list[int]:
    """From where on all calls can fail, in the sampled or the full form."""
    whole = [(number, "before") for number in range(len(log))]
    return [number for number, _ in (sampled(log, whole) if form == "sampled" else whole)]


@pytest.mark.untraced
def test_a_disk_that_is_full_at_any_operation_of_a_publish_leaves_the_store_as_it_was(before, form, record_property):
    log = operations_of_a_publish(before)
    tried = points_of(log, form)
    problems = {
        f"{moment} #{number} {log[number]}": find_fault_problems(before, number, errno.ENOSPC, moment)
        for number, moment in tried
    }

    check(problems, len(tried), record_property)


@pytest.mark.untraced
def test_a_disk_that_is_full_at_any_operation_of_a_delta_leaves_the_store_as_it_was(before_deltas, form, record_property):
    log = operations_of_a_publish(before_deltas, "near_3")
    tried = points_of(log, form)
    problems = {
        f"{moment} #{number} {log[number]}": find_fault_problems(before_deltas, number, errno.ENOSPC, moment, old=NEAR)
        for number, moment in tried
    }

    check(problems, len(tried), record_property)


@pytest.mark.untraced
def test_a_disk_that_turns_read_only_at_any_operation_of_a_fold_leaves_the_same_states(before_deltas, form, record_property):
    versions = [*NEAR, "near_3"]
    publish(before_deltas / "store", "near_3")
    log: list[Operation] = []
    store = Store(begin(before_deltas))
    with watched(store.path.parent, listing(log)):
        store.fold()
    problems = {}
    for number in starts_of(log[:-1], form):
        begin(before_deltas)
        found = []
        try:
            with watched(store.path.parent, refusing(number, errno.EROFS, ever_after=True)):
                store.fold()
        except StorageFailed:
            pass
        except Exception as failure:
            found.append(f"raised {type(failure).__name__}: {failure}")
        else:
            found.append("did not raise")
        found += find_problems(store.path, [versions], ["near_3"])[1]
        if store.fold().base.version != "near_1":
            found.append("the next fold did not work")
        store.gc(keep_last=3)
        found += [*find_problems(store.path, [versions], ["near_3"])[1], *find_strays(store.path)]
        problems[f"from #{number} {log[number]}"] = found

    check(problems, len(problems), record_property)


def test_a_sync_that_fails_leaves_the_store_as_it_was(before, record_property):
    syncs = [(number, item) for number, item in enumerate(operations_of_a_publish(before)) if item.call == "fsync"]
    problems = {f"#{number} {item}": find_fault_problems(before, number, errno.EIO) for number, item in syncs}

    check(problems, len(syncs), record_property)
    assert len(syncs) > 10


def test_a_disk_that_turns_read_only_at_any_operation_of_a_publish_leaves_whole_versions(before, form, record_property):
    log = operations_of_a_publish(before)
    problems = {
        f"from #{number} {log[number]}": find_fault_problems(before, number, errno.EROFS, ever_after=True)
        for number in starts_of(log, form)
    }

    check(problems, len(problems), record_property)


@pytest.mark.parametrize(
    ("act", "legacy", "during", "after", "newest"),
    [
        (lambda store: store.gc(keep_last=1), False, [OLD, ["step_2"]], ["step_2"], "step_2"),
        (lambda store: store.announce("step_1"), False, [OLD], OLD, "step_1"),
        (lambda store: store.migrate(), True, [OLD], OLD, "step_2"),
    ],
    ids=["gc", "announce", "migrate"],
)
def test_a_disk_that_turns_read_only_at_any_other_write_is_reported_and_the_next_attempt_works(
    act, legacy, during, after, newest, before, record_property
):
    (before / "store/.version.yaml.tmp").write_text("of a writer that died")
    if legacy:
        (before / "store/version.yaml").unlink()
        (before / "store/version.txt").write_text("2\n")
    log: list[Operation] = []
    store = Store(begin(before))
    with watched(store.path.parent, listing(log)):
        act(store)
    problems = {}
    for number, item in enumerate(log[:-1]):
        begin(before)
        found = []
        try:
            with watched(store.path.parent, refusing(number, errno.EROFS, ever_after=True)):
                act(store)
        except StorageFailed:
            pass
        except Exception as failure:
            found.append(f"raised {type(failure).__name__}: {failure}")
        found += find_problems(store.path, during, ["step_2", newest])[1]
        act(store)
        found += [*find_problems(store.path, [after], [newest])[1], *find_strays(store.path)]
        problems[f"from #{number} {item}"] = found

    check(problems, len(problems), record_property)


def test_the_check_notices_a_publisher_that_does_not_clean_up(before, monkeypatch):
    monkeypatch.setattr(Draft, "abandon", lambda _: None)

    problems = find_fault_problems(before, at=20, error=errno.ENOSPC)

    assert any("garbage" in problem for problem in problems), problems


@pytest.fixture
def mounts(tmp_path):
    """The command that gives a child its own mounts."""
    attempt = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, text=True, timeout=20, check=False
    )
    if attempt.returncode:
        pytest.skip(f"mounting is not permitted here: {attempt.stderr.strip()}")
    return "unshare", "-m"


@pytest.mark.parametrize("limit", ["size", "nr_inodes"])
def test_publishing_until_a_real_disk_is_full_leaves_whole_versions_and_gc_makes_room(
    limit, form, mounts, tmp_path, record_property
):
    every = 3 if form == "sampled" else 1
    report = report_of("small_disk", "full", tmp_path, "--limit", limit, "--every", every, under=mounts)

    record_property("full_disk", report["summary"])
    print(report["summary"])
    assert not report["problems"], "\n".join(report["problems"])
    assert report["went_on"] > 5 / every


def test_a_read_only_mount_refuses_every_writer_and_serves_every_reader(mounts, tmp_path):
    report = report_of("small_disk", "read_only", tmp_path, under=mounts)

    assert not report["problems"], "\n".join(report["problems"])


def wait_for_line(child: subprocess.Popen[str], expected: str) -> None:
    line = child.stdout.readline().strip()
    assert line == expected, f"{line!r} instead of {expected!r}; {child.stderr.read()}"


def finish(child: subprocess.Popen[str]) -> str:
    output, errors = child.communicate("go on\n", timeout=30)
    assert child.returncode == 0, errors
    return output


def test_a_second_publisher_gives_up_after_its_lock_timeout_and_changes_nothing(start, tmp_path):
    first = start("publisher", tmp_path / "store", "step_1", "--pause")
    wait_for_line(first, "begins")
    wait_for_line(first, "holds the lock")
    impatient = Store(tmp_path / "store", lock_timeout=0.2)

    for attempt in (lambda: impatient.publish("step_2", {"a": b""}), impatient.gc):
        started = time.monotonic()
        with pytest.raises(StoreBusy, match=r"waited 0\.2 s"):
            attempt()
        assert 0.2 <= time.monotonic() - started < 5

    assert "published" in finish(first)
    assert Store(tmp_path / "store").versions() == ["step_1"]
    assert not find_strays(tmp_path / "store")


def test_a_second_publisher_waits_for_the_first(start, tmp_path):
    first = start("publisher", tmp_path / "store", "step_1", "--pause")
    wait_for_line(first, "begins")
    wait_for_line(first, "holds the lock")
    second = start("publisher", tmp_path / "store", "step_2")
    wait_for_line(second, "begins")
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.3)

    assert "published" in finish(first)
    assert "published" in finish(second)
    assert not find_problems(tmp_path / "store", [["step_1", "step_2"]], ["step_2"])[1]


def test_many_publishers_at_once_all_succeed_one_after_another(start, tmp_path):
    names = [f"step_{number}" for number in range(1, 6)]
    publishers = [start("publisher", tmp_path / "store", name) for name in names]
    for publisher in publishers:
        finish(publisher)

    store = Store(tmp_path / "store")
    versions = store.versions()
    assert sorted(versions) == names
    assert [store.manifest(version).sequence for version in versions] == [1, 2, 3, 4, 5]
    assert not find_problems(store.path, [versions], versions[-1:])[1]
    assert not find_strays(store.path)


def test_a_publisher_killed_while_it_holds_the_lock_does_not_block_the_next(start, tmp_path):
    first = start("publisher", tmp_path / "store", "step_1", "--pause")
    wait_for_line(first, "begins")
    wait_for_line(first, "holds the lock")
    first.kill()
    first.wait(10)

    publish(tmp_path / "store", "step_1")

    assert not find_problems(tmp_path / "store", [["step_1"]], ["step_1"])[1]
    assert not find_strays(tmp_path / "store")
