"""The bench of the network without its rounds: what is moved, how ends meet, what is refused, what is asserted."""

import json
from contextlib import ExitStack
from dataclasses import replace

import psutil
import pytest

from weightcast.bench import ipc_bench, network_bench
from weightcast.bench.ipc_rivals import Moves, Rival
from weightcast.bench.ipc_tensors import Model, digest_of
from weightcast.bench.network_bench import NetworkSettings, run_network_bench
from weightcast.bench.network_meeting import OnePiece, find, leave
from weightcast.bench.network_ways import CHUNKS, HTTP, NIXL, READ, RIVALS, STORED, TCP, Rounds, TcpMover, missing
from weightcast.bench.report import Report, this_machine
from weightcast.cli.main import main
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, UpdateFailed

MIB = 1 << 20


def test_one_piece_of_memory_holds_the_tensors_of_the_model():
    model, sent, received = Model(MIB, 3), OnePiece(MIB, 3), OnePiece(MIB, None)
    assert digest_of(sent.tensors) == model.digest() != digest_of(received.tensors)
    for number in range(2):
        model.change(number)
        sent.change(number)
        received.change(number)
        received.memory[:] = sent.memory
        assert digest_of(sent.tensors) == model.digest() == digest_of(received.tensors)
    assert sent.memory.nbytes == model.nbytes


def test_what_a_process_leaves_is_found_whole_or_waited_for(tmp_path):
    with pytest.raises(DeadlineExceeded, match=r"waiting for .*port"):
        find(str(tmp_path), "port", Deadline.after(0.05))
    leave(str(tmp_path), "port", b"80")
    assert find(str(tmp_path), "port", Deadline.after(5)) == b"80"
    assert [path.name for path in tmp_path.iterdir()] == ["port"]


def test_too_little_memory_is_refused_before_anything_is_made(monkeypatch, tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       99999999 kB\nMemAvailable:     1500000 kB\n")
    monkeypatch.setattr(ipc_bench, "_MEMINFO", told)
    with pytest.raises(InvalidInput, match="1536000000 are available: take a smaller --size"):
        run_network_bench(NetworkSettings(nbytes=40 * MIB))
    with pytest.raises(InvalidInput, match="take 1048576 or more"):
        run_network_bench(NetworkSettings(nbytes=1000))


# -- processes -----------------------------------------------------------------------------------------------------------


def test_other_bytes_than_the_trainers_are_noticed(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(
        "import sys, time\n"
        "from weightcast.bench.ipc_children import serve\n"
        "empty = lambda **facts: {}\n"
        "moment = lambda: {'began_s': 0.0, 'ended_s': 2.0}\n"
        "serve({'begin': empty, 'change': empty, 'move': moment, 'digest': lambda: {'digest': sys.argv[1]}})\n"
    )
    monkeypatch.chdir(tmp_path)
    with Moves(Rival("liar", "program", ()), nbytes=MIB, seed=0, directory=tmp_path) as moves:
        assert moves.round() == 2.0
        with pytest.raises(UpdateFailed, match="liar: the receiver holds receiver and not trainer"):
            moves.check()


# -- the report ----------------------------------------------------------------------------------------------------------

TOLD = {"noticed_s": 9.01, "ended_s": 9.2, "stage_s": 0.18, "verify_s": 0.001}


def rounds_of(seconds):
    return Rounds(5.0, [seconds, 2 * seconds, 1.5 * seconds], [TOLD] * 3)


class Known:
    """One that was measured."""

    def __init__(self, way):
        self.way = way


def report_of(settings=NetworkSettings(), cores=2, **figures):  # noqa: B008 - frozen
    seconds = {"tcp": 0.1601, "read": 0.1701, "http": 0.2, "nixl": 0.2, "gloo": 0.3, "mooncake": 0.5, "ray": 1.0} | figures
    measuring = network_bench._Measuring(settings, 10**9, lambda _: None)
    limits = {TCP.kind: rounds_of(seconds["tcp"]), READ.kind: rounds_of(seconds["read"])}
    ours = {HTTP.kind: rounds_of(seconds["http"]), NIXL.kind: rounds_of(seconds["nixl"])}
    rows = [measuring._limit_row(Known(way), limits) for way in (TCP, READ)]
    rows += [measuring._our_row(way, limits | ours) for way in (HTTP, NIXL)]
    rows.append(measuring._our_row(STORED, limits | {STORED.kind: rounds_of(1.0)}))
    for rival, name in zip(RIVALS, ("gloo", "mooncake", "ray"), strict=True):
        taken = {rival.kind: rounds_of(seconds[name])} | ours
        rows.append(measuring._rival_row(rival, taken, [Known(HTTP), Known(NIXL)]))
    rows.append({"kind": "carrier pigeon", "missing": "pip install pigeon"})
    return Report("network", this_machine(), {}, rows, network_bench._targets(rows, settings, cores))


def test_limits_that_are_kept_by_the_fastest_round_are_met():
    report = report_of()
    assert report.missed == []
    assert {name: (round(target.value, 2), target.limit) for name, target in report.targets.items()} == {
        "http.over_tcp": (0.8, 0.8), "http.ahead_of_gloo": (1.5, 1.0), "http.ahead_of_mooncake": (2.5, 1.0),
        "http.ahead_of_ray": (5.0, 1.0), "nixl.over_tcp": (0.8, 0.8), "nixl.over_nixl_read": (0.85, 0.85),
        "nixl.ahead_of_gloo": (1.5, 1.0), "nixl.ahead_of_mooncake": (2.5, 1.0), "nixl.ahead_of_ray": (5.0, 1.0),
    }  # fmt: skip
    row = next(row for row in report.rows if row["kind"] == "http")
    assert (row["s"], row["median_s"], row["cold_s"], row["gb_per_s"]) == (0.2, pytest.approx(0.3), 5.0, pytest.approx(5))
    assert row["noticed_s"] == pytest.approx(0.2 - 0.19)
    assert "over_read" not in row


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"http": 0.202}, {"http.over_tcp"}),
        ({"nixl": 0.202}, {"nixl.over_tcp", "nixl.over_nixl_read"}),
        ({"read": 0.169}, {"nixl.over_nixl_read"}),
        ({"gloo": 0.19}, {"http.ahead_of_gloo", "nixl.ahead_of_gloo"}),
        ({"mooncake": 0.19}, {"http.ahead_of_mooncake", "nixl.ahead_of_mooncake"}),
        ({"ray": 0.19}, {"http.ahead_of_ray", "nixl.ahead_of_ray"}),
    ],
)
def test_each_limit_can_be_missed(figures, missed):
    assert set(report_of(**figures).missed) == missed


@pytest.mark.parametrize(
    ("settings", "cores", "why"),
    [(NetworkSettings(nbytes=MIB), 2, "smaller than 256 MiB"), (NetworkSettings(), 1, "one core")],
)
def test_nothing_is_asserted_of_a_small_model_or_of_one_core(settings, cores, why):
    report = report_of(settings, cores, http=9.0)
    assert report.missed == []
    assert all(why in target.why for target in report.targets.values())


def test_ratios_are_of_fastest_rounds_of_medians_and_round_by_round():
    ours, tcp = Rounds(1.0, [1.0, 2.0, 4.0]), Rounds(1.0, [0.9, 1.0, 4.0])
    found = network_bench._over("tcp", ours, tcp)
    assert (found["over_tcp"], found["median_over_tcp"]) == (0.9, 0.5)
    assert (found["best_round_over_tcp"], found["median_round_over_tcp"]) == (1.0, 0.9)


def test_a_rival_that_is_not_installed_says_how_to_get_it_and_one_that_fails_why(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    measuring = network_bench._Measuring(NetworkSettings(nbytes=MIB), MIB, lambda _: None)
    lacking = replace(RIVALS[1], packages=("mooncake", "no_such_package"))
    monkeypatch.setitem(network_bench.missing.__globals__["INSTALL"], "no_such_package", "pip install it")
    assert "pip install it" in missing(lacking)
    assert "pip install it" in measuring._beside_rival(lacking, [])["missing"]
    before = set(psutil.Process().children())
    failing = measuring._beside_rival(Rival("nobody", "weightcast.bench.nothing", ("numpy",)), [])
    assert "No module named weightcast.bench.nothing" in failing["failed"]
    assert set(psutil.Process().children()) <= before


def test_our_own_failure_is_not_laid_to_a_rival():
    measuring = network_bench._Measuring(NetworkSettings(nbytes=MIB, rounds=1), MIB, lambda _: None)

    class Broken(Known):
        cold_s, failed = 0.0, None

        def round(self):
            raise UpdateFailed("ours")

    with pytest.raises(UpdateFailed, match="ours"):
        measuring._beside_rival(TCP, [Broken(HTTP)])


def test_a_missed_limit_is_exit_status_1_and_everything_is_shown_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr(network_bench, "run_network_bench", lambda *_: report_of(http=0.3))
    assert main(["bench", "network"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert "carrier pigeon: pip install pigeon" in out
    assert all(row in out for row in ("raw NIXL READ", "http, from a store", "Mooncake TCP"))
    assert main(["bench", "network", "--json", "-"]) == 1
    assert not json.loads(capsys.readouterr().out)["targets"]["http.over_tcp"]["ok"]


def test_bare_tcp_is_tried_in_all_shapes_and_the_best_of_one_stream_and_of_two_count(tmp_path):
    with ExitStack() as opened:
        mover = opened.enter_context(TcpMover(nbytes=MIB, seed=0, directory=tmp_path))
        assert [shape.streams for shape in mover.shapes] == [1, 2]
        for shape in mover.shapes:
            same = [seconds for other, seconds in mover.tried.items() if other.streams == shape.streams]
            assert len(same) == len(CHUNKS)
            assert mover.tried[shape] == min(same)
        assert mover.round()[0] > 0
        mover.check()
    assert not [child for child in psutil.Process().children() if "network_tcp" in " ".join(child.cmdline())]
