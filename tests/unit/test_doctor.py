"""What the doctor says about a machine, given what the machine has."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.doctor import choices, hardware, machine, packages
from weightcast.doctor.children import ABSENT, Loaded
from weightcast.doctor.hardware import Hardware
from weightcast.doctor.packages import Engine
from weightcast.doctor.source import source_finding

LOADED = Loaded(state="loaded", version="1.0")
BROKEN = Loaded(state="broken", problem="ImportError: no")
RDMA = Hardware(active_ports=("mlx5_0:1",))


@pytest.fixture
def kernel(tmp_path):
    """Files as the kernel shows them: two RDMA devices, of which one is down, NVIDIA's driver and its peer module."""
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC"
    )
    (tmp_path / "module" / "nvidia_peermem").mkdir(parents=True)
    return tmp_path


def test_rdma_ports_the_driver_and_the_peer_module_are_read_from_the_kernel(kernel):
    found = hardware.look(kernel / "infiniband", kernel / "version", kernel / "module")

    assert found == Hardware(("mlx5_0:1",), ("mlx5_1:1",), "580.65.06", "nvidia_peermem")


def test_a_machine_without_any_of_it_has_notes_and_no_problem(tmp_path):
    found = hardware.look(tmp_path / "none", tmp_path / "none", tmp_path / "none")

    assert found == Hardware()
    assert [one.level for one in hardware.hardware_findings(found, ABSENT)] == ["note", "note"]


def test_a_limit_on_locked_memory_and_a_missing_peer_module_come_with_their_cure():
    assert hardware.locked_memory(resource.RLIM_INFINITY).level == "ok"
    assert "ulimit -l unlimited" in hardware.locked_memory(65536).cure
    assert hardware.gpu_direct(Hardware(nvidia_driver="580")).cure == "modprobe nvidia_peermem"
    assert hardware.gpu_direct(Hardware(nvidia_driver="580", peer_module="nvidia_peermem")).level == "ok"
    assert "not active: mlx5_1:1" in hardware.rdma(Hardware(idle_ports=("mlx5_1:1",))).found


@pytest.mark.parametrize(
    ("torch", "level", "meaning"),
    [
        (Loaded(state="loaded", cuda="12.8", devices=("H100",)), "ok", "torch can use"),
        (Loaded(state="loaded", cuda="12.8"), "note", "torch sees no GPU"),
        (Loaded(state="loaded"), "note", "torch is built for the CPU"),
        (ABSENT, "ok", ""),
    ],
)
def test_a_driver_that_torch_does_not_use_is_noted(torch, level, meaning):
    finding = hardware.cuda(Hardware(nvidia_driver="580.65.06"), torch)

    assert finding.level == level
    assert meaning in finding.meaning


@pytest.mark.parametrize(
    ("nixl", "found", "used", "why"),
    [
        (LOADED, RDMA, "nixl:// over RDMA", "mlx5_0:1"),
        (LOADED, Hardware(("mlx5_0:1",), peer_module="nvidia_peermem"), "nixl:// over RDMA", "mode=gdr"),
        (LOADED, Hardware(), "http://", "over TCP"),
        (ABSENT, RDMA, "http://", "pip install 'weightcast[nixl]'"),
        (BROKEN, RDMA, "http://", "pip install 'weightcast[nixl]'"),
        (ABSENT, Hardware(), "http://", "no RDMA"),
    ],
)
def test_between_hosts_rdma_is_used_where_both_nixl_and_a_port_are_there(nixl, found, used, why):
    choice = choices.between_hosts(nixl, found)

    assert choice.used == used
    assert why in choice.why


def test_on_one_host_memory_is_shared_where_it_can_be():
    assert choices.same_host(LOADED, can_share=True).used == "ipc://"
    assert "memfd" in choices.same_host(LOADED, can_share=False).why
    assert "pip install 'weightcast[ipc]'" in choices.same_host(BROKEN, can_share=True).why


def test_engines_and_kernels_follow_what_is_loaded():
    everything = dict.fromkeys(("torch", "numba", "zmq", "nixl", "serve"), LOADED)
    vllm = Engine("vLLM", "0.32.0", plugin=True)
    hidden = Engine("SGLang", "0.5", plugin=False)
    gpu = Loaded(state="loaded", devices=("H100", "H100"))

    made = choices.choices(everything | {"torch": gpu}, RDMA, [vllm, hidden], can_share=True)
    assert [choice.used for choice in made] == [
        "ipc://", "nixl:// over RDMA", "compiled", "CPU, and 2 GPU(s)", "vLLM 0.32.0, embedded (--device cuda)",
    ]  # fmt: skip
    made = choices.choices(
        dict.fromkeys(everything, ABSENT), Hardware(), [Engine("vLLM", None, plugin=True)], can_share=True
    )
    assert [choice.used for choice in made] == ["file://", "http://", "NumPy", "NumPy arrays", "none"]


def test_an_engine_that_cannot_find_our_plugin_is_a_problem():
    found = {
        one.name: one for one in packages.engine_findings([Engine("vLLM", "0.32.0", plugin=False), Engine("Paddle", "3.1")])
    }

    assert (found["vLLM"].level, found["vLLM"].cure) == ("problem", "pip install weightcast")
    assert found["Paddle"].level == "ok"


def test_packages_that_are_broken_or_silent_or_lack_a_plugin_are_problems_and_absent_ones_are_notes():
    silent = Loaded(state="silent", problem="not loaded within 3 s")
    no_ucx = Loaded(state="loaded", version="1.5", plugins=("POSIX",))
    told = {"torch": ABSENT, "numba": BROKEN, "zmq": silent, "nixl": no_ucx, "serve": LOADED}
    found = packages.package_findings(told)

    assert [one.level for one in found] == ["note", "problem", "problem", "problem", "ok"]
    assert found[0].cure == "pip install 'weightcast[torch]'"
    assert found[1].found == "ImportError: no"
    assert all(one.cure for one in found[:4])


def test_shared_directories_are_judged_by_whether_they_can_be_used(tmp_path):
    assert machine.shared_directory(tmp_path).level == "ok"
    assert machine.shared_directory(tmp_path / "none").level == "note"


def test_the_quota_of_a_container_is_read(tmp_path):
    for text, quota in (("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine._quota(tmp_path / "cpu.max") == quota
    assert machine._quota(tmp_path / "none") is None


def test_few_descriptors_are_noted_and_very_few_are_a_problem():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    levels = {}
    try:
        for soft in (1024, 512, 100):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            levels[soft] = machine.open_files().level
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    assert levels == {1024: "ok", 512: "note", 100: "problem"}


def test_a_source_tells_its_newest_version_or_why_it_does_not(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_7", {"a": np.arange(4.0)})

    found = source_finding(str(tmp_path / "store"), Deadline.after(10))
    assert found.level == "ok"
    assert "newest step_7, full, 1 tensors" in found.found
    for source, code in ((str(tmp_path / "none"), "store_not_found"), ("gopher://x", "unknown_source")):
        found = source_finding(source, Deadline.after(10))
        assert found.level == "problem"
        assert code in found.meaning
