"""What every bench shares: targets with a direction, one JSON form, and rounds in turn."""

import gc
import json
from importlib import metadata

import pytest

from weightcast.bench import timing
from weightcast.bench.report import Report, Target, this_machine
from weightcast.bench.timing import Timing, interleaved


@pytest.mark.parametrize(
    ("value", "at", "ok"),
    [(1.0, "most", True), (1.1, "most", False), (1.0, "least", True), (0.9, "least", False), (float("nan"), "most", False)],
)
def test_a_target_has_a_direction(value, at, ok):
    assert Target(value, 1.0, at).ok is ok


def test_a_report_is_one_document_and_only_asserted_targets_can_be_missed():
    targets = {"a": Target(2, 1, "most"), "b": Target(2, 1, "most", asserted=False), "c": Target(2, 1, "least")}
    report = Report("x", this_machine(), {"seed": 1}, [{"kind": "size", "nbytes": 3}], targets, ["so"])
    assert report.missed == ["a"]
    document = json.loads(report.to_json())
    assert list(document) == ["bench", "machine", "settings", "notes", "rows", "targets"]
    assert document["targets"]["b"] == {"value": 2, "limit": 1, "at": "most", "asserted": False, "ok": False}
    assert document["rows"] == [{"kind": "size", "nbytes": 3}]
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["cpu"]
    assert document["machine"]["memory_nbytes"] > 1 << 28


def test_a_package_that_is_not_there_has_no_version(monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    assert this_machine().torch is None


def test_tasks_run_in_turn_after_each_was_warmed_up(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) ** 2)
    ran = []
    timings = interleaved({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=3)
    assert ran == list("ab" * 4)
    assert timings == {"a": Timing((1, 9, 17)), "b": Timing((5, 13, 21))}
    assert (timings["a"].minimum, timings["a"].median, timings["a"].spread) == (1, 9, 8 / 9)
    assert Timing((2.0,)).spread == 0


def test_no_garbage_is_collected_on_the_clock_and_it_is_again_afterwards():
    seen = []
    with pytest.raises(ZeroDivisionError):
        interleaved({"a": lambda: seen.append(gc.isenabled()), "b": lambda: 1 // (2 - len(seen))}, rounds=1)
    assert seen == [True, False]
    assert gc.isenabled()
