"""The bench of updates without its replica: what its ratios are made of, and which of them are asserted."""

import json
import math
import os
import subprocess
import sys
import textwrap
import time

import pytest

from weightcast.bench import update_bench
from weightcast.bench.ipc_children import children_of
from weightcast.bench.report import Report, this_machine
from weightcast.bench.served import Token, TokenStream
from weightcast.bench.timing import cpu_s
from weightcast.bench.update_bench import (
    CLEARED,
    PHASES,
    SWAPPED,
    Gaps,
    Round,
    Sample,
    UpdateSettings,
    What,
    run_update_bench,
)
from weightcast.cli.main import main
from weightcast.errors import InvalidInput

MIB = 1 << 20
SIZES = (128 * MIB, 512 * MIB, 2048 * MIB)
FULL, DELTAS, BEHIND = "full", [f"position {number}" for number in (1, 5, 10, 20)], "15 behind"


def sample(*, staged=1.0, cpu=1.0, depot=0.0, gaps=None, pause=0.01):
    seconds = dict.fromkeys(PHASES, 0.0) | {"stage_s": staged * 0.9, "vote_s": staged * 0.1, "pause_s": pause}
    cpu_of = {"front end": cpu * 0.2, "rank 0": cpu * 0.4, "rank 1": cpu * 0.4, "depot": depot, "trainer 0": 9.0}
    return Sample("delta", seconds, 1000, cpu_of, gaps)


def one_round(*, delta=0.5, last=0.5, behind=3.0, cpu=0.5, depot=1.5, gap=0.05, gap_2gib=0.05, busy=85.0, publish=1.5):
    """Every figure at its limit."""
    taken = Round()
    for source in ("file", "http"):
        taken.add(What(source, SIZES[1], FULL), sample(depot=depot))
        for way in DELTAS:
            staged = last if way == DELTAS[-1] else delta
            taken.add(What(source, SIZES[1], way), sample(staged=staged, cpu=cpu, depot=depot))
        taken.add(What(source, SIZES[1], BEHIND), sample(staged=behind, depot=depot))
    for size in SIZES:
        taken.steps_s[size] = 9.0
        for way in (FULL, DELTAS[0], BEHIND, SWAPPED):
            seen = Gaps(0.01, gap_2gib if size == SIZES[2] else gap, 0.02, 0.03)
            taken.add(What("file", size, way, loaded=True), sample(gaps=seen))
        taken.add(What("file", size, CLEARED, loaded=True), sample(gaps=Gaps(0.0, 9.0, 0.02, 0.03)))
    taken.sending_cpu_s = {FULL: 1.0, DELTAS[0]: 1.0, BEHIND: 1.0}
    taken.trainers_cpu_s = {1: 1.0, 2: 1.1, 4: 1.2}
    taken.publishing = {"full": 1.0, "delta": publish, "delta_memory": 1.3, "find": 1.0}
    taken.speeds = [(busy, 100.0)]
    return taken


def report_of(settings=UpdateSettings(), **figures):  # noqa: B008 - frozen
    rounds = [one_round(**figures), one_round(), one_round(**figures)]
    rows = list(update_bench._rows(rounds, settings))
    return Report("update", this_machine(), {"streams": 8}, rows, update_bench._targets(rounds, settings))


def test_figures_at_their_limits_are_met():
    report = report_of()
    assert report.missed == []
    assert report.targets["file, position 5: staging over a full version's"].value == pytest.approx(0.5)
    assert {name for name, target in report.targets.items() if not target.asserted} == {
        "file, full: exponent of the longest gap over the size",
        "file, 15 behind: exponent of the longest gap over the size",
        *(f"file, {CLEARED}, {size // MIB} MiB: longest gap over usual gap + pause + step" for size in SIZES),
    }


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"delta": 0.51, "last": 0.5}, ["position 1:", "position 5:", "position 10:"]),
        ({"delta": 0.3, "last": 0.41}, ["staging over that of position 1"]),
        ({"behind": 3.1}, ["15 behind: staging over a full"]),
        ({"cpu": 0.51}, ["CPU of the receivers"]),
        ({"depot": 1.6}, ["CPU of the depot"]),
        ({"gap": 0.0, "gap_2gib": 0.06}, ["2048 MiB: longest gap over", "position 1: exponent", f"{SWAPPED}: exponent"]),
        ({"busy": 84.0}, ["tokens/s with a delta"]),
        ({"publish": 1.6}, ["publishing a delta over a full"]),
    ],
)
def test_each_limit_can_be_missed_by_most_rounds(figures, missed):
    figures = {name: value or 1e-6 for name, value in figures.items()}
    found = report_of(**figures).missed
    assert found
    assert all(any(part in name for part in missed) for name in found)
    assert all(any(part in name for name in found) for part in missed)


def test_a_figure_that_was_not_measured_is_missed_and_not_taken_as_met():
    rounds = [one_round()]
    del rounds[0].updates[What("http", SIZES[1], BEHIND)]
    target = update_bench._targets(rounds, UpdateSettings())["http, 15 behind: staging over a full version's"]
    assert math.isnan(target.value)
    assert not target.ok


def test_nothing_is_asserted_of_a_quick_run():
    report = report_of(UpdateSettings(quick=True), delta=9.0, behind=99.0, busy=1.0)
    assert report.missed == []
    assert {target.why for target in report.targets.values()} >= {"a quick run"}


def test_gaps_that_grow_with_the_size_have_its_exponent():
    taken = Round()
    for size in SIZES:
        taken.add(What("file", size, FULL, loaded=True), sample(gaps=Gaps(size**0.5, 0.0, 0.01, 0.02)))
    assert update_bench._exponent(taken, FULL, SIZES) == pytest.approx(0.5)


def test_the_phases_of_an_update_add_up_to_the_way_from_publish_to_the_first_token():
    times = {"lookup_s": 1, "stage_s": 2, "verify_s": 3, "wait_s": 4, "commit_s": 5, "proof_s": 6, "settle_s": 7}
    results = [{"mode": "delta", "bytes": 10, "pause_s": pause, **times, "total_s": 28} for pause in (0.5, 1.5)]
    one = update_bench._sample(results, {}, publish_s=100.0, first_s=30.0)
    assert tuple(sorted(one.seconds)) == tuple(sorted(PHASES))
    assert sum(one.seconds.values()) == pytest.approx(130.0)
    assert (one.staged_s, one.seconds["pause_s"], one.seconds["order_s"], one.nbytes) == (10, 1.5, 3.5, 20)


def test_a_source_without_deltas_has_a_row_that_says_so(monkeypatch, capsys):
    monkeypatch.setattr(update_bench, "run_update_bench", lambda *_: report_of(busy=10.0))
    assert main(["bench", "update"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert main(["bench", "update", "--json", "-"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["source"] for row in rows if row.get("missing") == "no deltas"] == ["ipc", "shares"]


def test_sizes_are_read_from_the_command_line(monkeypatch):
    asked = []
    monkeypatch.setattr(update_bench, "run_update_bench", lambda settings, _: asked.append(settings) or report_of())
    for words in (["--sizes", "128MiB, 1GiB"], ["--sizes", ""], []):
        assert main(["bench", "update", *words]) == 0
    assert [settings.sizes for settings in asked] == [(128 * MIB, 1024 * MIB), (), (128 * MIB, 2048 * MIB)]
    assert main(["bench", "update", "--sizes", "128MiB,large"]) == 2


def test_a_size_that_cannot_be_divided_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be divided over 2 ranks"):
        run_update_bench(UpdateSettings(sizes=(1000,), directory=str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_the_cpu_seconds_of_a_process_include_threads_that_have_ended():
    code = """
        import sys, threading, time
        def burn():
            until = time.thread_time() + 0.2
            while time.thread_time() < until:
                pass
        for _ in sys.stdin:
            thread = threading.Thread(target=burn)
            thread.start()
            thread.join()
            print(flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.pid in children_of(os.getpid())
        time.sleep(0.2)
        before = cpu_s(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert 0.2 <= cpu_s(child.pid) - before < 1.0
        child.stdin.close()
    assert child.pid not in children_of(os.getpid())


def test_gaps_between_requests_are_left_out_where_only_those_within_are_asked_for():
    stream = TokenStream.__new__(TokenStream)
    stream.tokens = [
        Token(at, "v", first) for at, first in ((1.0, True), (1.5, False), (4.0, True), (4.25, False), (9.0, False))
    ]
    assert stream.gaps(0, 5) == [0.5, 2.5, 0.25, 4.75]
    assert stream.gaps(0, 5, within_requests=True) == [0.5, 0.25, 4.75]
    assert stream.gaps(4.1, 4.2, within_requests=True) == [0.25]
