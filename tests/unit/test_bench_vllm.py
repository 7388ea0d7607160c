"""The report of `weightcast bench vllm`: rows and targets, from figures that are given."""

import pytest

from weightcast.bench.update_bench import Gaps
from weightcast.bench.vllm_bench import KINDS, PHASES, Round, Sample, rows_of, targets_of


def sample(stage, pause, gap=0.0):
    seconds = dict(zip(PHASES, (1.0, stage, pause, 0.5), strict=True))
    return Sample(seconds, 100, {"front end": 0.1, "engine 0": 2.0}, Gaps(gap / 2, gap, 0.1, 0.2))


def a_round(*, delta, full, reload=1.0):
    taken = {"delta": [sample(delta, 0.1, 2.0)] * 3, "full": [sample(full, 0.1, 3.0)], "reload": [sample(0.0, reload, 1.0)]}
    return Round(taken, taken)


def test_phases_add_up_and_gaps_are_those_of_streams():
    rounds = [a_round(delta=0.5, full=0.7)] * 2
    idle, loaded = rows_of("delta", rounds)
    assert (idle["loaded"], loaded["loaded"], idle["samples"]) == (False, True, 6)
    for row in (idle, loaded):
        assert sum(row[phase] for phase in PHASES) == pytest.approx(row["total_s"]) == 2.1
        assert row["s"] == pytest.approx(row["stage_s"] + row["pause_s"])
        assert row["bytes"] == 100
    assert idle["cpu_s"] == {"front end": 0.1, "engine 0": 2.0}
    assert (loaded["longest_gap_ms"], loaded["staging_gap_ms"], loaded["commit_gap_ms"]) == (2000, 1000, 2000)


def test_targets_are_medians_of_ratios_within_a_round():
    rounds = [a_round(delta=0.9, full=1.9), a_round(delta=1.9, full=3.9, reload=2.0), a_round(delta=8.9, full=9.9)]
    targets = targets_of(rounds, large=True)
    assert targets["delta.over_reload"].value == pytest.approx(1.0)
    assert targets["full.over_reload"].value == pytest.approx(2.0)
    assert targets["delta.pause_over_reload"].value == pytest.approx(0.1)
    assert targets["delta.gap_over_reload"].value == pytest.approx(2.0)
    assert [name for name, target in targets.items() if not target.asserted] == [
        "delta.gap_over_reload",
        "full.gap_over_reload",
    ]


@pytest.mark.parametrize(("delta", "full", "missed"), [(1.39, 2.39, []), (1.41, 2.41, ["delta", "full"])])
def test_limits(delta, full, missed):
    targets = targets_of([a_round(delta=delta, full=full)], large=True)
    assert [kind for kind in KINDS if kind != "reload" and not targets[f"{kind}.over_reload"].ok] == sorted(
        missed, reverse=True
    )
    small = targets_of([a_round(delta=delta, full=full)], large=False)
    assert not small["delta.over_reload"].asserted
