"""The bench of the choice on small tensors: it measures every way with real depots, and leaves nothing behind."""

import json

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from weightcast.bench import choice_bench
from weightcast.bench.choice_bench import DTYPES, SHARES, SOURCES, changed_pair
from weightcast.bench.report import Target
from weightcast.cli.main import cli

from .leftovers import bench_dirs, left_since


@pytest.mark.slow
def test_every_way_is_measured_from_publish_to_a_model_that_serves_it(monkeypatch):
    monkeypatch.setattr(choice_bench, "SHARES", (0.0, 0.01))
    children, files = set(psutil.Process().children()), bench_dirs()
    done = CliRunner().invoke(cli, ["bench", "choice", "--quick", "--size", "2MiB", "--json", "-"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert [(row["dtype"], row["share"], row["source"]) for row in report["rows"]] == [
        (str(dtype), share, source) for dtype in DTYPES for share in (0.0, 0.01) for source in SOURCES
    ]
    for row in report["rows"]:
        assert row["chosen"] == "delta"
        assert row["faster_s"] == min(row["full_s"], row["delta_s"])
        for way in ("full", "delta", "auto"):
            assert row[f"{way}_s"] == pytest.approx(row[f"{way}_publish_s"] + row[f"{way}_update_s"])
    assert not any(target["asserted"] for target in report["targets"].values())
    assert not left_since(files)
    assert set(psutil.Process().children()) <= children


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_states_differ_in_the_share_that_is_measured(dtype, share):
    old, new = changed_pair(dtype, 8 << 20, share, seed=3)
    bits = f"u{dtype.itemsize}"
    changed = sum(np.count_nonzero(old[name].view(bits) != new[name].view(bits)) for name in old)
    assert changed / sum(array.size for array in old.values()) == pytest.approx(share, rel=0.1)


def test_a_choice_that_is_too_slow_is_missed():
    row = {"dtype": "BF16", "share": 0.1, "source": "file", "faster_s": 1.0, "auto_s": 1.23}
    (missed,) = choice_bench._targets([row], asserted=True).values()
    (kept,) = choice_bench._targets([row | {"auto_s": 1.21}], asserted=True).values()
    assert (missed.ok, kept.ok) == (False, True)
    assert missed == Target(1.23, pytest.approx(1.22), "most")
