"""Shared host memory: what it promises to its owner, to its readers and about those who mean harm."""

import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from weightcast.errors import InvalidInput, SourceFailed, StorageFailed, UnsupportedTensor, WrongState
from weightcast.transports.ipc import host_memory
from weightcast.transports.ipc.device import Handle
from weightcast.transports.ipc.devices import device_called, device_for
from weightcast.transports.ipc.host_memory import HostDevice

DEVICE = HostDevice()


@pytest.fixture
def allocated():
    made = []

    def allocate(nbytes):
        made.append(DEVICE.allocate(nbytes))
        return made[-1]

    yield allocate
    for memory in made:
        memory.close()


def opened(memory, **changes):
    handle = DEVICE.export(memory)
    return DEVICE.open(
        Handle(kind=handle.kind, id=handle.id, nbytes=changes.get("nbytes", handle.nbytes)), lambda _: memory.duplicate()
    )


def put(name, tensor, memory, offset=0):
    for block in DEVICE.blocks(name, tensor):
        DEVICE.copy(block, memory, offset)
        offset += block.nbytes
    DEVICE.synchronise()
    return offset


def own_descriptors():
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


# -- copying and reading -----------------------------------------------------------------------------------------------


def tensors():
    random = np.random.default_rng(3)
    wide = random.integers(0, 256, (3 << 20) + 5, dtype=np.uint8)
    matrix = torch.from_numpy(random.standard_normal((700, 900))).to(torch.bfloat16)
    return {
        "more than a block": wide,
        "transposed": matrix.T,
        "strided": torch.from_numpy(wide)[::3],
        "a view of a cube": torch.arange(4 * 5 * 6, dtype=torch.int32).reshape(4, 5, 6).permute(2, 0, 1),
        "8-bit floats": matrix[:3].float().to(torch.float8_e4m3fn),
        "one number": np.float32(7.5),
        "nothing": np.empty((0, 3), dtype=np.float32),
        "read-only": np.frombuffer(bytes(range(100)), dtype=np.uint8),
    }


@pytest.mark.parametrize("name", tensors())
def test_a_reader_sees_the_bytes_of_a_tensor_in_their_order(allocated, name):
    tensor = tensors()[name]
    if isinstance(tensor, torch.Tensor):
        expected = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    else:
        expected = np.ascontiguousarray(tensor).tobytes()
    memory = allocated(len(expected) + 64)
    assert put(name, tensor, memory, offset=64) == 64 + len(expected)
    reader = opened(memory)
    assert bytes(DEVICE.read(reader, 64, 64 + len(expected))) == expected
    assert bytes(DEVICE.read(reader, 0, 64)) == bytes(64)
    reader.close()


def test_what_is_written_after_the_mapping_is_seen_without_a_copy(allocated):
    memory = allocated(4096)
    reader = opened(memory)
    view = DEVICE.read(reader, 10, 20)
    put("x", np.full(10, 9, dtype=np.uint8), memory, offset=10)
    assert bytes(view) == bytes([9] * 10)
    reader.close()


def test_a_part_of_a_block_can_be_copied_alone(allocated):
    memory = allocated(10)
    (block,) = DEVICE.blocks("x", np.arange(100, dtype=np.uint8))
    DEVICE.copy(block.part(20, 30).part(2, 5), memory, 7)
    assert bytes(DEVICE.read(memory, 0, 10)) == bytes([0, 0, 0, 0, 0, 0, 0, 22, 23, 24])


def test_tensors_without_storage_are_refused_by_name():
    with pytest.raises(UnsupportedTensor, match="lost"):
        next(DEVICE.blocks("lost", torch.empty(3, device="meta")))


def test_bytes_outside_of_a_memory_are_refused(allocated):
    memory = allocated(100)
    (block,) = DEVICE.blocks("x", np.arange(50, dtype=np.uint8))
    for offset in (51, -1, 1 << 62):
        with pytest.raises(InvalidInput, match="100 bytes"):
            DEVICE.copy(block, memory, offset)
    for start, stop in ((0, 101), (-1, 3), (5, 4)):
        with pytest.raises(InvalidInput, match="are not in"):
            DEVICE.read(memory, start, stop)
        with pytest.raises(InvalidInput, match="are not in"):
            block.part(start, stop)
    assert not memory.bytes.any()


def test_threads_may_fill_one_memory_together(allocated):
    count, size = 8, 1 << 18
    memory = allocated(count * size)
    threads = [
        threading.Thread(target=put, args=(str(i), np.full(size, i, dtype=np.uint8), memory, i * size)) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(
        memory.bytes.reshape(count, size), np.repeat(np.arange(count, dtype=np.uint8)[:, None], size, axis=1)
    )


def test_memory_of_no_bytes_works(allocated):
    memory = allocated(0)
    reader = opened(memory)
    assert (memory.nbytes, reader.nbytes, len(reader.bytes), bytes(DEVICE.read(reader, 0, 0))) == (0, 0, 0, b"")
    reader.close()


def test_memory_of_several_stretches_has_every_page(allocated):
    nbytes = 2 * host_memory._TOUCH_NBYTES + 12345
    memory = allocated(nbytes)
    assert os.fstat(memory.descriptor).st_blocks * 512 >= nbytes
    assert not memory.bytes[:: mmap.PAGESIZE].any()


def test_ids_are_unique_and_exporting_twice_gives_the_same_handle(allocated):
    memories = [allocated(10) for _ in range(20)]
    handles = [DEVICE.export(memory) for memory in memories]
    assert len({handle.id for handle in handles}) == 20
    assert handles == [DEVICE.export(memory) for memory in memories]


# -- the end of a memory -----------------------------------------------------------------------------------------------


def test_closing_leaves_views_alone_and_can_be_done_twice(allocated):
    memory = allocated(1 << 20)
    put("x", np.full(1 << 20, 3, dtype=np.uint8), memory)
    reader = opened(memory)
    view, array = DEVICE.read(reader, 0, 1 << 20), reader.bytes[5:]
    for one in (reader, memory, reader, memory):
        one.close()
    assert view[77] == 3
    assert (array == 3).all()


def test_memory_that_is_closed_says_so(allocated):
    memory = allocated(10)
    (block,) = DEVICE.blocks("x", np.arange(5, dtype=np.uint8))
    memory.close()
    for use in (
        lambda: DEVICE.read(memory, 0, 1),
        lambda: DEVICE.copy(block, memory, 0),
        lambda: DEVICE.export(memory),
        memory.duplicate,
    ):
        with pytest.raises(WrongState, match="closed"):
            use()


def test_memory_that_was_opened_cannot_be_exported_again(allocated):
    reader = opened(allocated(10))
    with pytest.raises(WrongState, match="opened"):
        DEVICE.export(reader)
    reader.close()


def test_nothing_stays_open_or_mapped():
    def mappings():
        return Path("/proc/self/maps").read_text().count("memfd:weightcast")

    mapped = mappings()
    before = own_descriptors()
    for _ in range(50):
        memory = DEVICE.allocate(100_000)
        reader = opened(memory)
        reader.close()
        memory.close()
    assert own_descriptors() == before
    assert mappings() == mapped


def test_descriptors_do_not_leak_into_programs_that_are_started(allocated):
    memory = allocated(10)
    copy = memory.duplicate()
    look = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
    found = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=30, close_fds=False, check=True
    )
    os.close(copy)
    assert "pipe" in found.stdout
    assert "memfd" not in found.stdout


# -- lack of memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 80])
def test_more_memory_than_there_is_is_an_error_and_not_a_killed_process(nbytes):
    before = own_descriptors()
    with pytest.raises(StorageFailed, match=f"{nbytes} bytes of shared memory"):
        DEVICE.allocate(nbytes)
    assert own_descriptors() == before


def test_memory_that_is_not_available_is_never_asked_for(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:    9000000 kB\nMemFree:     9000000 kB\nMemAvailable:    100 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    DEVICE.allocate(100 * 1024).close()
    with pytest.raises(StorageFailed, match="only 100 kB of memory are available"):
        DEVICE.allocate(100 * 1024 + 1)


def test_a_kernel_that_runs_out_while_pages_are_reserved_is_an_error(monkeypatch):
    calls = []

    def refuse(descriptor, start, nbytes):
        calls.append((start, nbytes))
        if start:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = own_descriptors()
    with pytest.raises(StorageFailed, match="No space left"):
        DEVICE.allocate(3 * host_memory._TOUCH_NBYTES)
    assert own_descriptors() == before
    assert len(calls) >= 2


def test_a_negative_size_is_refused():
    with pytest.raises(InvalidInput, match="-1 bytes"):
        DEVICE.allocate(-1)


# -- those who mean harm -----------------------------------------------------------------------------------------------


def test_a_reader_cannot_write_by_any_way(allocated):
    memory = allocated(8192)
    reader = opened(memory)
    with pytest.raises(ValueError, match="read-only"):
        reader.bytes[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        reader.bytes.flags.writeable = True
    with pytest.raises(TypeError, match="read-only"):
        DEVICE.read(reader, 0, 10)[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        DEVICE.read(memory, 0, 10)[0] = 1
    copy = memory.duplicate()
    try:
        for attempt in (
            lambda: mmap.mmap(copy, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
            lambda: os.pwrite(copy, b"x", 0),
            lambda: os.ftruncate(copy, 10),
            lambda: os.ftruncate(copy, 1 << 20),
            lambda: fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()
    finally:
        os.close(copy)
    assert not memory.bytes.any()
    memory.bytes[0] = 1  # its owner still can
    assert reader.bytes[0] == 1
    reader.close()


def memfd(nbytes, seals=0):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def shm_file():
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(8192)
        return os.dup(file.fileno())


def end_of_a_socket():
    left, right = socket.socketpair()
    right.close()
    return left.detach()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: memfd(8192), "not a memfd whose size is sealed", id="not sealed"),
        pytest.param(lambda: memfd(8192, fcntl.F_SEAL_GROW), "not a memfd whose size is sealed", id="may shrink"),
        pytest.param(shm_file, "not a memfd whose size is sealed", id="a file"),
        pytest.param(end_of_a_socket, "not a memfd whose size is sealed", id="a socket"),
        pytest.param(lambda: os.open("/dev/zero", os.O_RDONLY), "not a memfd whose size is sealed", id="a device"),
        pytest.param(lambda: os.open("/", os.O_RDONLY), "not a memfd whose size is sealed", id="a directory"),
        pytest.param(lambda: memfd(4095, fcntl.F_SEAL_SHRINK), "should have 4096 bytes, but has 4095", id="too short"),
        pytest.param(lambda: memfd(0, fcntl.F_SEAL_SHRINK), "should have 4096 bytes, but has 0", id="empty"),
    ],
)
def test_a_descriptor_that_could_crash_its_reader_is_refused_and_closed(make, message):
    before = own_descriptors()
    with pytest.raises(SourceFailed, match=message):
        DEVICE.open(Handle(kind="memfd", id=5, nbytes=4096), lambda _: make())
    assert own_descriptors() == before


@pytest.mark.parametrize("nbytes", [-1, 4097, 1 << 63, 1 << 70])
def test_a_handle_that_lies_about_its_size_is_refused(allocated, nbytes):
    with pytest.raises(SourceFailed, match="should have"):
        opened(allocated(4096), nbytes=nbytes)


def test_an_empty_handle_of_an_empty_file_is_refused():
    with pytest.raises(SourceFailed, match="has 0"):
        DEVICE.open(Handle(kind="memfd", id=5, nbytes=0), lambda _: memfd(0, fcntl.F_SEAL_SHRINK))


def test_an_error_of_whoever_passes_descriptors_comes_through():
    def gone(handle):
        raise SourceFailed(f"memory {handle.id} is gone")

    with pytest.raises(SourceFailed, match="memory 5 is gone"):
        DEVICE.open(Handle(kind="memfd", id=5, nbytes=1), gone)


def test_a_handle_of_a_gpu_is_not_mapped_into_host_memory():
    with pytest.raises(SourceFailed, match="'cuda'"):
        DEVICE.open(Handle(kind="cuda", id=1, nbytes=1), lambda _: memfd(1, fcntl.F_SEAL_SHRINK))


# -- which device ------------------------------------------------------------------------------------------------------


def test_the_device_of_a_publisher_is_named():
    assert device_called("host").kind == "memfd"
    for name in ("", "cpu", "cuda", "cuda:-1", "cuda:01", "cuda:0 ", "CUDA:0", "cuda:99999"):
        with pytest.raises(InvalidInput, match="use 'host' or 'cuda:0'"):
            device_called(name)


def test_the_device_of_a_handle_is_told_by_the_handle(allocated):
    memory = allocated(3)
    reader = device_for(DEVICE.export(memory)).open(DEVICE.export(memory), lambda _: memory.duplicate())
    assert reader.nbytes == 3
    reader.close()
