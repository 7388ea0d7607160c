"""The bench of pauses without its replica: what is published, what a shard is, what is asserted, and copying beside it."""

import asyncio
import json
import mmap
import os
import signal

import ml_dtypes
import numpy as np
import psutil
import pytest

from weightcast.bench import pause_bench
from weightcast.bench.model_versions import flip_some, make_versions, model_config
from weightcast.bench.pause_bench import PauseSettings, run_pause_bench
from weightcast.bench.pause_copies import Copiers
from weightcast.bench.pause_replica import ROUND, Measured, Sample, _Memory, shard_sizes
from weightcast.bench.report import Report, this_machine
from weightcast.cli.main import main
from weightcast.engines.embedded.presets import preset_config, tensor_shapes
from weightcast.errors import InvalidInput, ReplicaFailed
from weightcast.store.store import Store

MIB = 1 << 20
DELTAS = ("b1", "b2", "b3", "b4", "b5")


@pytest.mark.parametrize(("size", "ranks"), [(4 * MIB, 1), (8 * MIB, 2), (64 * MIB, 2), (512 * MIB, 2), (512 * MIB, 4)])
def test_a_model_is_about_as_large_as_asked_for(size, ranks):
    config = preset_config("moe", tied=True, dtype="bfloat16") | model_config(size, ranks)
    assert 2 * sum(int(np.prod(shape)) for _, shape in tensor_shapes(config)) == pytest.approx(size, rel=0.25)
    assert config["num_experts"] % ranks == 0


def test_a_size_that_cannot_be_divided_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be divided over 2 ranks: take 1179648 or more"):
        run_pause_bench(PauseSettings(nbytes=1000, directory=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("shape", "changes"), [((300, 100), 300), ((250,), 2), ((99,), 1), ((3,), 1)])
def test_a_delta_moves_one_element_in_a_hundred_by_one_unit_in_the_last_place(shape, changes):
    random = np.random.default_rng(1)
    old = random.standard_normal(shape).astype(ml_dtypes.bfloat16)
    new = old.copy()
    assert flip_some(new.view(np.uint16), random) == changes
    steps = new.view(np.int16).astype(int) - old.view(np.int16).astype(int)
    assert np.count_nonzero(steps) == changes
    assert set(np.unique(steps)) <= {-1, 0, 1}


def test_versions_are_two_full_ones_and_deltas_of_one_percent_each_on_the_one_before(tmp_path):
    made = make_versions(tmp_path, nbytes=2 * MIB, ranks=2, seed=0, progress=lambda _: None)
    store = Store(made.store_dir)
    kinds = {version: store.manifest(version) for version in store.versions()}
    on_b = dict(zip(DELTAS, ("b", *DELTAS), strict=False))
    assert {name: manifest.base.version for name, manifest in kinds.items() if manifest.base} == on_b | {
        "a1": "a", "a2": "a1", "a3": "a2",
    }  # fmt: skip
    assert set(made.publish_s) == set(kinds)
    a, b, b1, b2 = (store.load(version) for version in ("a3", "b", "b1", "b2"))
    assert all((a[name].view(np.uint16) != b[name].view(np.uint16)).all() for name in a)
    for old, new in ((b, b1), (b1, b2)):
        changed = sum(np.count_nonzero(old[name].view(np.uint16) != new[name].view(np.uint16)) for name in old)
        assert changed == pytest.approx(made.nbytes / 2 / 100, rel=0.05)
    assert all(np.isfinite(array.astype(np.float32)).all() for array in b2.values())
    sizes = shard_sizes(made.model_dir, 2)
    assert len(sizes[0]) == len(sizes[1])
    assert sum(map(sum, sizes)) == pytest.approx(made.nbytes, rel=0.2)  # some parameters are on both ranks


def test_the_steps_of_a_round_never_update_to_what_is_served_and_follow_the_deltas():
    served = [step.version for step in ROUND]
    assert all(one != other for one, other in zip(served, [*served[1:], served[0]], strict=True))
    assert served[-len(DELTAS) - 1 :] == ["b", *DELTAS]
    assert served[0] != "a"  # what the replica starts with


def measured(*, copy=0.012, swap=0.004, delta=0.005, delta_swap=0.004, risen=0.1):
    times = {"copy": copy, "swap": swap, "first_delta_swap": 1.0, "delta_swap": delta_swap, "delta": delta}
    samples = [
        Sample(step.kind, times[step.kind] * slower, 1.0, int(risen * 1000), (0.01 * slower,))
        for slower in (1, 3)
        for step in ROUND
    ]
    return Measured(samples, 1000, 30)


def report_of(settings=PauseSettings(), **figures):  # noqa: B008 - frozen
    rows = pause_bench._rows(measured(**figures))
    return Report("pause", this_machine(), {}, rows, pause_bench._targets(rows, settings))


def test_limits_that_are_kept_by_the_fastest_round_are_met():
    report = report_of()
    assert report.missed == []
    assert all(target.asserted and not target.why for target in report.targets.values())
    assert report.targets["copy.over_memcpy"].value == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"swap": 0.0101}, "swap.pause_ms"),
        ({"delta_swap": 0.0101}, "delta_swap.pause_ms"),
        ({"risen": 0.6}, "delta_swap.risen_shards"),
        ({"copy": 0.0121}, "copy.over_memcpy"),
        ({"delta": 0.0061}, "delta.over_copy"),
    ],
)
def test_each_limit_can_be_missed(figures, missed):
    assert report_of(**figures).missed == [missed]


def test_nothing_is_asserted_of_a_small_model():
    report = report_of(PauseSettings(nbytes=64 * MIB), swap=1.0, copy=1.0, delta=9.0, delta_swap=1.0, risen=1)
    assert report.missed == []
    assert all("smaller than 256 MiB" in target.why for target in report.targets.values())


def test_a_missed_limit_is_exit_status_1_and_the_report_is_shown_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr(pause_bench, "run_pause_bench", lambda *_: report_of(swap=0.02))
    assert main(["bench", "pause"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert main(["bench", "pause", "--json", "-"]) == 1
    assert not json.loads(capsys.readouterr().out)["targets"]["swap.pause_ms"]["ok"]


def test_processes_copy_at_once_and_end_with_the_bench():
    async def run():
        before = set(psutil.Process().children())
        async with Copiers([[1000, 2000], [3000]]) as copiers:
            assert len(set(psutil.Process().children()) - before) == 2
            seconds = await copiers.measure(3)
        assert set(psutil.Process().children()) <= before
        return seconds

    seconds = asyncio.run(run())
    assert len(seconds) == 3
    assert all(0 < one < 10 for one in seconds)


def test_a_copying_process_that_dies_is_an_error_not_a_hang():
    async def run():
        before = set(psutil.Process().children())
        async with Copiers([[1000]]) as copiers:
            (child,) = set(psutil.Process().children()) - before
            os.kill(child.pid, signal.SIGKILL)
            await copiers.measure(1)

    with pytest.raises(ReplicaFailed, match="copies memory"):
        asyncio.run(run())


def test_buffers_that_are_freed_and_made_anew_are_seen_as_memory_that_rose():
    nbytes, text = 64 * MIB, b"1" * (64 * MIB)
    with mmap.mmap(-1, nbytes) as held:  # given back to the system at once, unlike what an allocator frees
        held.write(text)
        memory = _Memory([os.getpid()])
        memory.look()
        assert memory.risen < 16 * MIB
    memory.look()
    with mmap.mmap(-1, nbytes) as held:
        held.write(text)
        memory.look()
    assert nbytes * 0.9 < memory.risen < nbytes * 1.5
