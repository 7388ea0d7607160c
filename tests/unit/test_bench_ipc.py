"""The bench of same-host updates without its updates: what is moved, its processes, what is refused, what is asserted."""

import json
import os
import time

import numpy as np
import psutil
import pytest

from weightcast.bench import ipc_bench, ipc_rivals, ipc_updates
from weightcast.bench.ipc_bench import IpcSettings, run_ipc_bench
from weightcast.bench.ipc_children import Child, session_members
from weightcast.bench.ipc_copies import Memcpys
from weightcast.bench.ipc_rivals import RIVALS, Rival
from weightcast.bench.ipc_tensors import Model, blank_tensors, digest_of, tensor_shapes
from weightcast.bench.ipc_updates import WAYS, Round, Timed
from weightcast.bench.report import Report, this_machine
from weightcast.cli.main import main
from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, InvalidInput, ReplicaFailed, UpdateFailed

MIB = 1 << 20


@pytest.mark.parametrize("size", [MIB, 7 * MIB, 32 * MIB, 1 << 30, 20 << 30])
def test_the_tensors_are_as_large_as_asked_for_and_of_all_sizes(size):
    sizes = sorted(2 * int(np.prod(shape)) for shape in tensor_shapes(size).values())
    assert sum(sizes) == pytest.approx(size, rel=0.01)
    assert len(sizes) == 93
    assert sizes[-1] > size / 25
    assert sizes[0] < size / 1000


def test_a_size_that_is_no_model_is_refused():
    with pytest.raises(InvalidInput, match="take 1048576 or more"):
        run_ipc_bench(IpcSettings(nbytes=1000))


def test_every_element_of_a_version_differs_from_those_of_the_five_before():
    model, former = Model(MIB, 3), []
    assert model.digest() == Model(MIB, 3).digest() != Model(MIB, 4).digest()
    for number in range(8):
        model.change(number)
        now = {name: array.view(np.uint16).copy() for name, array in model.tensors.items()}
        assert all((now[name] != old[name]).all() for old in former[-5:] for name in now)
        assert all(np.isfinite(array.astype(np.float32)).all() for array in model.tensors.values())
        former.append(now)
    assert digest_of(model.tensors) == model.digest() != digest_of(blank_tensors(MIB))


def test_too_little_memory_is_refused_before_anything_is_made(monkeypatch, tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       99999999 kB\nMemAvailable:     900000 kB\n")
    monkeypatch.setattr(ipc_bench, "_MEMINFO", told)
    with pytest.raises(InvalidInput, match="921600000 are available: take a smaller --size or --no-rivals"):
        run_ipc_bench(IpcSettings(nbytes=40 * MIB))
    with pytest.raises(InvalidInput, match="921600000 are available: take a smaller --size\\."):
        run_ipc_bench(IpcSettings(nbytes=50 * MIB, rivals=False))


def test_memory_is_copied_twice_by_one_thread_or_two():
    tensors = Model(MIB, 0).tensors
    with Memcpys(tensors) as memcpys:
        assert memcpys.two(1) > 0
        for target, _ in memcpys._pairs:
            target.fill(0)
        assert memcpys.two(2) > 0
        assert all((target == source).all() for target, source in memcpys._pairs)
        assert sum(len(target) for target, _ in memcpys._pairs) == sum(array.nbytes for array in tensors.values())


# -- processes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes the module `program`, which `python -m` finds."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "program.py").write_text(
            f"import os, sys, time\nfrom weightcast.bench.ipc_children import serve\n{text}"
        )
        return "program"

    return write


def test_what_a_process_prints_is_no_answer(program):
    text = (
        "def add(one, other):\n"
        "    print('noise')\n"
        "    os.write(1, b'more')\n"
        "    return {'sum': one + other, 'at': os.environ['X']}\n"
        "serve({'add': add})"
    )
    with Child(program(text), environment={"X": "here"}) as child:
        for one in range(3):
            assert child.ask("add", Deadline.after(20), one=one, other=2) == {"sum": one + 2, "at": "here"}


def test_a_process_that_fails_is_an_error_with_what_it_printed(program):
    module = program('serve({"divide": lambda: {"never": 1 / 0}})')
    with Child(module) as child, pytest.raises(ReplicaFailed, match=r"program.*status 1.*ZeroDivisionError"):
        child.ask("divide", Deadline.after(20))
    with Child(program("sys.exit('no')")) as child, pytest.raises(ReplicaFailed, match="It printed: no"):
        child.hear(Deadline.after(20))


def test_a_process_that_says_nothing_meets_the_deadline_and_ends_with_all_that_it_started(program):
    text = (
        "import subprocess\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0)\n"
        "serve({'tell': lambda: {'pid': other.pid}, 'hang': lambda: time.sleep(600)})"
    )
    with Child(program(text)) as child:
        other = child.ask("tell", Deadline.after(20))["pid"]
        session = os.getsid(other)
        assert session != os.getsid(0)
        assert other in session_members(session)
        with pytest.raises(DeadlineExceeded, match="waiting for program"):
            child.ask("hang", Deadline.after(0.1))
        child.end(at_once=True)
    assert not session_members(session)
    assert not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE


def test_a_process_ends_by_itself_when_it_is_not_needed_any_more(program, tmp_path):
    with Child(program("serve({'go': dict})\nopen('over', 'w').close()")) as child:
        assert child.ask("go", Deadline.after(20)) == {}
        began = time.monotonic()
    assert (tmp_path / "over").exists()
    assert time.monotonic() - began < 5


class Told:
    """A process that answers as it was told to."""

    def __init__(self, **answer):
        self.answer = answer

    def ask(self, do, deadline, **facts):
        return self.answer


def test_a_receiver_that_has_other_bytes_than_the_trainer_is_an_error():
    model = Model(MIB, 0)
    ipc_updates.check_same(WAYS[1], [Told(digest=model.digest())] * 2, model)
    with pytest.raises(UpdateFailed, match=r"not sums:[0-9a-f]+, the trainer's bytes"):
        ipc_updates.check_same(WAYS[1], [Told(digest=model.digest()), Told(digest="other")], model)
    ipc_rivals._check_same(RIVALS[0], Told(digest="a"), Told(digest="a"))
    ipc_rivals._check_same(RIVALS[1], Told(digest="a", taken="a"), None)
    with pytest.raises(UpdateFailed, match="holds b and not a"):
        ipc_rivals._check_same(RIVALS[0], Told(digest="a"), Told(digest="b"))
    with pytest.raises(UpdateFailed, match="holds b and not a"):
        ipc_rivals._check_same(RIVALS[1], Told(digest="a", taken="b"), None)


# -- the report ----------------------------------------------------------------------------------------------------------


def timed(total, memcpys=1.0):
    rounds = [Round(total * slower, 0.4 * slower, 0.5 * slower, 0.5, 0.01, 0.001) for slower in (1, 2)]
    return Timed(
        Round(9.0, 5.0, 5.1, 3, 0.5, 0.1),
        (Round(5.0, 2.0, 2.1, 2, 0.5, 0.1),),
        rounds,
        (memcpys, memcpys * 2),
        (0.6,),
        (0.5,),
    )


def report_of(settings=IpcSettings(), cores=2, **figures):  # noqa: B008 - frozen
    seconds = {"swap": 1.35, "swap, 2 receivers": 1.6, "copy": 3.0, "stream": 3.0} | figures
    rows = [ipc_bench._way_row(way, timed(seconds[way.kind]), 10**9) for way in WAYS]
    rows.append({"kind": "carrier pigeon", "receivers": 1, "missing": "pip install pigeon"})
    return Report("ipc", this_machine(), {}, rows, ipc_bench._targets(rows, settings, cores))


def test_limits_that_are_kept_by_the_fastest_round_are_met():
    report = report_of()
    assert report.missed == []
    assert {name: target.value for name, target in report.targets.items()} == {
        "1_receiver.over_memcpys": pytest.approx(1.35), "2_receivers.over_memcpys": pytest.approx(1.6),
    }  # fmt: skip
    row = report.rows[0]
    assert (row["cold_s"], row["s"], row["median_s"]) == (9.0, 1.35, pytest.approx(2.025))
    assert (row["over_two_threads"], row["median_over_memcpys"]) == (pytest.approx(2.25), pytest.approx(1.35))
    assert (row["publish_s"], row["rounds"], len(row["all_rounds"])) == (0.4, 2, 4)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [({"swap": 1.36}, "1_receiver.over_memcpys"), ({"swap, 2 receivers": 1.61}, "2_receivers.over_memcpys")],
)
def test_each_limit_can_be_missed(figures, missed):
    assert report_of(**figures).missed == [missed]


@pytest.mark.parametrize(
    ("settings", "cores", "why"), [(IpcSettings(nbytes=MIB), 2, "smaller than 256 MiB"), (IpcSettings(), 1, "one core")]
)
def test_nothing_is_asserted_of_a_small_model_or_of_one_core(settings, cores, why):
    report = report_of(settings, cores, swap=9.0)
    assert report.missed == []
    assert all(why in target.why for target in report.targets.values())


def test_a_rival_that_is_not_installed_says_how_to_get_it_and_one_that_fails_why(tmp_path):
    model = Model(MIB, 0)
    ours = ipc_updates.Updates(WAYS[0], model, tmp_path)  # never started
    with Memcpys(model.tensors) as memcpys:

        def row(rival):
            return ipc_bench._rival_row(rival, model, memcpys, IpcSettings(), ours, lambda _: None)

        lacking = row(Rival("pigeons", "weightcast.bench.nothing", ("no_such_package",)))
        failing = row(Rival("nobody", "weightcast.bench.nothing", ("numpy",)))
        ours.busy = True
        with pytest.raises(ReplicaFailed):  # a failure of our own is not laid to a rival
            row(Rival("nobody", "weightcast.bench.nothing", ("numpy",)))
    assert "pip install 'weightcast[bench]'" in lacking["missing"]
    assert "No module named weightcast.bench.nothing" in failing["failed"]


def test_a_missed_limit_is_exit_status_1_and_everything_is_shown_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr(ipc_bench, "run_ipc_bench", lambda *_: report_of(swap=1.5))
    assert main(["bench", "ipc"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert "carrier pigeon: pip install pigeon" in out
    assert main(["bench", "ipc", "--json", "-"]) == 1
    assert not json.loads(capsys.readouterr().out)["targets"]["1_receiver.over_memcpys"]["ok"]
