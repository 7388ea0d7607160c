"""GPU memory against a double of libcuda, for there is no GPU here.

The double is called through ctypes with the C prototypes of cuda.h, so that a wrong argument type arrives as a wrong value.
Copies happen only when somebody waits for them: what was reused too early is seen as wrong bytes.
"""
# ruff: noqa: N802, N815 - the names are those of cuda.h

import ctypes
import itertools
import pickle
import threading
import uuid
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

import numpy as np
import pytest
import torch

from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, SourceFailed, StorageFailed, UnsupportedTensor, WrongState
from weightcast.transports.ipc import cuda_memory, devices
from weightcast.transports.ipc.cuda_driver import CudaDriver, load_driver
from weightcast.transports.ipc.cuda_memory import CudaDevice
from weightcast.transports.ipc.device import Handle
from weightcast.transports.ipc.devices import device_called, device_for
from weightcast.transports.ipc.legacy_receiver import LegacyIpcReceiver

OUT_OF_MEMORY, INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, MAP_FAILED = 2, 1, 201, 400, 205
NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT"}


class MemHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * 64),)


class DeviceUuid(ctypes.Structure):
    _fields_ = (("bytes", c_char * 16),)


DEVICEPTR = c_ulonglong
SIGNATURES = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(DeviceUuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(DEVICEPTR), c_size_t),
    "cuMemFree_v2": (DEVICEPTR,),
    "cuIpcGetMemHandle": (POINTER(MemHandle), DEVICEPTR),
    "cuIpcOpenMemHandle_v2": (POINTER(DEVICEPTR), MemHandle, c_uint),
    "cuIpcCloseMemHandle": (DEVICEPTR,),
    "cuMemcpyDtoDAsync_v2": (DEVICEPTR, DEVICEPTR, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (DEVICEPTR, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, DEVICEPTR, c_size_t, c_void_p),
}
WITHOUT_CONTEXT = {name for name in SIGNATURES if name.startswith(("cuGet", "cuInit", "cuDevice", "cuCtxP"))}


class Machine:
    """What the processes of a host have in common: GPUs and exported memory."""

    def __init__(self, gpus=2):
        self.uuids = [bytes(range(16 * n, 16 * n + 16)) for n in range(gpus)]
        self.exported = {}  # handle -> process, address


class Refused(Exception):
    """A result that is not 0."""


class Libcuda:
    """libcuda of one process. `calls` are the names in their order; `refuse` gives a function a result of its own."""

    def __init__(self, machine, visible=None):
        self.machine = machine
        self.visible = list(range(len(machine.uuids))) if visible is None else visible
        self.calls, self.refuse = [], {}
        self.retained, self.streams, self.allocated, self.opened, self.pending = [], set(), {}, [], []
        self._contexts, self._numbers = threading.local(), itertools.count(0x7000_1234_5678)
        self._lock = threading.RLock()
        for name, types in SIGNATURES.items():
            setattr(self, name, CFUNCTYPE(c_int, *types)(self._entry(name)))

    def _entry(self, name):
        def call(*args):
            with self._lock:
                self.calls.append(name)
                if name in self.refuse:
                    return self.refuse[name]
                if name not in WITHOUT_CONTEXT and not self.stack:
                    return INVALID_CONTEXT
                try:
                    getattr(self, "_" + name)(*args)
                except Refused as error:
                    return error.args[0]
                except (KeyError, ValueError):
                    return INVALID_VALUE
                return 0

        return call

    @property
    def stack(self):
        return self._contexts.__dict__.setdefault("stack", [])

    @property
    def balanced(self):
        return not (self.stack or self.retained or self.streams or self.allocated or self.opened or self.pending)

    def _cuGetErrorName(self, error, text):
        if error not in NAMES:
            raise Refused(INVALID_VALUE)
        text[0] = NAMES[error]

    def _cuGetErrorString(self, error, text):
        text[0] = b"in other words"

    def _cuInit(self, flags):
        if flags:
            raise Refused(INVALID_VALUE)

    def _cuDeviceGetCount(self, count):
        count[0] = len(self.visible)

    def _cuDeviceGet(self, device, ordinal):
        device[0] = 100 + self.visible[ordinal]  # a device is not its number

    def _cuDeviceGetUuid_v2(self, found, device):
        ctypes.memmove(found, self.machine.uuids[device - 100], 16)

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context[0] = 0x7FFF_0000_0000 + device  # does not fit into an int
        self.retained.append(device)

    def _cuDevicePrimaryCtxRelease_v2(self, device):
        self.retained.remove(device)

    def _cuCtxPushCurrent_v2(self, context):
        if context is None or context - 0x7FFF_0000_0000 not in self.retained:
            raise Refused(INVALID_CONTEXT)
        self.stack.append(context)

    def _cuCtxPopCurrent_v2(self, context):
        context[0] = self.stack.pop()

    def _cuCtxSynchronize(self):
        self._run(None)

    def _cuStreamCreate(self, stream, flags):
        if flags != 1:
            raise Refused(INVALID_VALUE)
        stream[0] = next(self._numbers)
        self.streams.add(stream[0])

    def _cuStreamDestroy_v2(self, stream):
        self.streams.remove(stream)

    def _cuStreamSynchronize(self, stream):
        if stream not in self.streams:
            raise Refused(INVALID_HANDLE)
        self._run(stream)

    def _run(self, stream):
        for copy in [one for one in self.pending if stream in (None, one[0])]:
            self.pending.remove(copy)
            ctypes.memmove(*copy[1:])

    def _cuMemAlloc_v2(self, address, nbytes):
        if nbytes == 0:
            raise Refused(INVALID_VALUE)
        buffer = (ctypes.c_ubyte * nbytes)()
        address[0] = ctypes.addressof(buffer)
        self.allocated[address[0]] = buffer

    def _cuMemFree_v2(self, address):
        del self.allocated[address]
        self.machine.exported = {data: found for data, found in self.machine.exported.items() if found[1] != address}

    def _cuIpcGetMemHandle(self, handle, address):
        assert len(self.allocated[address]) % (2 << 20) == 0
        data = (b"\xfe\0handle" + address.to_bytes(8, "little")).ljust(64, b"\xff")
        ctypes.memmove(handle, data, 64)
        self.machine.exported[data] = self, address

    def _cuIpcOpenMemHandle_v2(self, address, handle, flags):
        data = ctypes.string_at(ctypes.addressof(handle), 64)
        if flags != 1:
            raise Refused(INVALID_VALUE)
        if data not in self.machine.exported:
            raise Refused(INVALID_HANDLE)
        owner, found = self.machine.exported[data]
        if owner is self:
            raise Refused(INVALID_CONTEXT)
        self.opened.append(found)
        address[0] = found

    def _cuIpcCloseMemHandle(self, address):
        self.opened.remove(address)

    def _copy(self, target, source, nbytes, stream):
        if stream not in self.streams or not nbytes:
            raise Refused(INVALID_HANDLE)
        self.pending.append((stream, target, source, nbytes))

    _cuMemcpyDtoDAsync_v2 = _cuMemcpyHtoDAsync_v2 = _cuMemcpyDtoHAsync_v2 = _copy


class GpuTensor(torch.Tensor):
    """A host tensor that says that it is on a GPU: with the double, device addresses are host addresses."""

    @property
    def device(self):
        return torch.device(f"cuda:{getattr(self, 'gpu', 0)}")


def on_gpu(tensor, gpu=0):
    made = tensor.as_subclass(GpuTensor)
    made.gpu = gpu
    return made


@pytest.fixture
def trainer():
    return Libcuda(Machine())


@pytest.fixture
def device(trainer):
    device = CudaDevice(0, CudaDriver(trainer))
    yield device
    device.close()
    assert trainer.balanced


def put(device, tensor, memory, offset=0):
    for block in device.blocks("x", tensor):
        device.copy(block, memory, offset)
        offset += block.nbytes
    device.synchronise()


RANDOM = torch.from_numpy(np.random.default_rng(5).standard_normal((300, 70)).astype(np.float32))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(on_gpu(RANDOM), id="gpu"),
        pytest.param(on_gpu(RANDOM.T), id="gpu, transposed"),
        pytest.param(on_gpu(RANDOM[3:9].to(torch.bfloat16)), id="gpu, a slice"),
        pytest.param(RANDOM, id="host"),
        pytest.param(RANDOM.T, id="host, transposed"),
        pytest.param(RANDOM.numpy()[::2, ::3], id="NumPy, strided"),
        pytest.param(on_gpu(torch.empty(0, 4)), id="gpu, nothing"),
    ],
)
def test_another_process_reads_the_bytes_of_a_tensor(trainer, device, tensor, monkeypatch):
    monkeypatch.setattr(cuda_memory, "BLOCK_NBYTES", 4096)
    monkeypatch.setattr(cuda_memory, "HOST_BLOCK_NBYTES", 4096)
    plain = torch.as_tensor(tensor).as_subclass(torch.Tensor)
    expected = plain.contiguous().view(torch.uint8).numpy().tobytes()
    memory = device.allocate(len(expected) + 24)
    put(device, tensor, memory, offset=24)
    assert bytes(device.read(memory, 24, 24 + len(expected))) == expected

    engine = Libcuda(trainer.machine)
    theirs = CudaDevice(0, CudaDriver(engine))
    opened = theirs.open(device.export(memory), lambda _: pytest.fail("no descriptor is needed"))
    assert bytes(theirs.read(opened, 24, 24 + len(expected))) == expected
    opened.close()
    opened.close()
    theirs.close()
    memory.close()
    memory.close()
    assert engine.balanced


def test_nothing_is_copied_before_all_that_makes_the_tensor_is_done(trainer, device):
    memory = device.allocate(1 << 20)
    trainer.calls.clear()
    put(device, on_gpu(RANDOM.T), memory)
    first = next(n for n, name in enumerate(trainer.calls) if name == "cuMemcpyDtoDAsync_v2")
    assert "cuCtxSynchronize" in trainer.calls[:first]
    memory.close()


@pytest.mark.parametrize("tensor", [on_gpu(RANDOM.T), RANDOM.T.contiguous().T], ids=["gpu", "host"])
def test_blocks_outlive_the_copies_that_were_begun_from_them(trainer, device, tensor, monkeypatch):
    monkeypatch.setattr(cuda_memory, "HOST_BLOCK_NBYTES", 4096)
    memory = device.allocate(1 << 20)
    offset, before = 0, 0
    for block in device.blocks("x", tensor):
        if tensor.device.type == "cpu":
            assert not trainer.pending  # the block before was gathered into memory that is used again
        device.copy(block, memory, offset)
        offset, before = offset + block.nbytes, before + 1
        assert trainer.pending
    assert before
    assert not trainer.pending
    blocks = device.blocks("x", tensor)
    device.copy(next(blocks), memory, 0)
    blocks.close()
    assert not trainer.pending
    memory.close()


def test_memory_is_not_freed_under_a_copy(trainer, device):
    memory = device.allocate(100)
    block = next(blocks := device.blocks("x", on_gpu(RANDOM)))
    device.copy(block.part(0, 100), memory, 0)
    memory.close()
    assert trainer.calls[-3:-1] == ["cuStreamSynchronize", "cuMemFree_v2"]
    blocks.close()


def test_parts_of_blocks_are_where_they_should_be(device):
    memory = device.allocate(8)
    blocks = device.blocks("x", np.arange(100, dtype=np.uint8))
    device.copy(next(blocks).part(20, 30).part(2, 5), memory, 5)
    assert bytes(device.read(memory, 0, 8)) == bytes([0, 0, 0, 0, 0, 22, 23, 24])
    blocks.close()
    memory.close()


def test_a_read_is_valid_until_the_next_one_of_the_same_thread(device):
    memory = device.allocate(2000)
    put(device, np.arange(2000, dtype=np.uint16).astype(np.uint8), memory)
    view = device.read(memory, 0, 1000)
    others = []
    thread = threading.Thread(target=lambda: others.append(bytes(device.read(memory, 500, 1500))))
    thread.start()
    thread.join()
    assert bytes(view) == bytes(n % 256 for n in range(1000))
    assert others == [bytes(n % 256 for n in range(500, 1500))]
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    assert np.frombuffer(device.read(memory, 7, 9), dtype=np.uint8).ctypes.data == address  # no memory is made for each
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    assert bytes(device.read(memory, 4, 4)) == b""
    memory.close()


def test_bytes_outside_of_a_memory_are_refused(trainer, device):
    memory = device.allocate(100)
    blocks = device.blocks("x", np.arange(50, dtype=np.uint8))
    block = next(blocks)
    for offset in (51, -1):
        with pytest.raises(InvalidInput, match="100 bytes"):
            device.copy(block, memory, offset)
    for start, stop in ((0, 101), (-1, 4), (3, 2)):
        with pytest.raises(InvalidInput, match="are not in"):
            device.read(memory, start, stop)
        with pytest.raises(InvalidInput, match="are not in"):
            block.part(start, stop)
    blocks.close()
    memory.close()
    with pytest.raises(WrongState, match="closed"):
        device.read(memory, 0, 1)
    with pytest.raises(WrongState, match="closed"):
        device.export(memory)
    assert not trainer.stack


def test_small_memories_get_pages_of_their_own(trainer, device):
    memories = [device.allocate(nbytes) for nbytes in (0, 1, 2 << 20, (2 << 20) + 1)]
    assert [memory.nbytes for memory in memories] == [0, 1, 2 << 20, (2 << 20) + 1]
    assert [len(trainer.allocated[memory.address(0, 0)]) >> 20 for memory in memories] == [2, 2, 2, 4]
    for memory in memories:
        memory.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_lack_of_gpu_memory_is_told_in_the_words_of_the_driver(trainer, device):
    trainer.refuse["cuMemAlloc_v2"] = OUT_OF_MEMORY
    with pytest.raises(StorageFailed, match="cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY: in other words"):
        device.allocate(10)
    trainer.refuse["cuMemAlloc_v2"] = 4711
    with pytest.raises(StorageFailed, match="error 4711"):
        device.allocate(10)
    with pytest.raises(InvalidInput, match="-1 bytes"):
        device.allocate(-1)


def test_handles_that_cannot_be_opened_are_refused(trainer, device):
    def handle(**changes):
        return Handle(**{"kind": "cuda", "id": 8, "nbytes": 10, "data": bytes(64), "device": device.uuid} | changes)

    for wrong in (handle(), handle(data=bytes(63)), handle(data=b""), handle(nbytes=-1), handle(kind="memfd")):
        with pytest.raises(SourceFailed, match="memory 8 cannot be opened"):
            device.open(wrong, lambda _: pytest.fail("no descriptor is needed"))
    memory = device.allocate(10)
    with pytest.raises(SourceFailed, match="CUDA_ERROR_INVALID_CONTEXT"):
        device.open(device.export(memory), lambda _: -1)  # one's own
    gone = device.export(memory)
    memory.close()
    theirs = CudaDevice(0, CudaDriver(Libcuda(trainer.machine)))
    with pytest.raises(SourceFailed, match="Is its owner alive"):
        theirs.open(gone, lambda _: -1)
    theirs.close()


def test_tensors_that_are_elsewhere_or_cannot_be_carried_are_refused_by_name(device):
    with pytest.raises(InvalidInput, match=r"'w' is on cuda:1.*on cuda:0"):
        next(device.blocks("w", on_gpu(RANDOM, gpu=1)))
    with pytest.raises(UnsupportedTensor, match=r"'w'.*complex128"):
        next(device.blocks("w", on_gpu(RANDOM.to(torch.complex128))))


def test_a_device_that_is_not_there_is_refused(trainer):
    for ordinal in (2, -1):
        with pytest.raises(InvalidInput, match="can see 2"):
            CudaDevice(ordinal, CudaDriver(trainer))
    trainer.refuse["cuStreamCreate"] = OUT_OF_MEMORY
    with pytest.raises(StorageFailed, match="cuStreamCreate"):
        CudaDevice(0, CudaDriver(trainer))
    assert trainer.balanced


def test_drivers_that_cannot_be_used_are_refused(trainer, monkeypatch):
    trainer.refuse["cuInit"] = 100
    with pytest.raises(InvalidInput, match="no GPU that it can use"):
        CudaDriver(trainer)
    del trainer.refuse["cuInit"]
    del trainer.cuDeviceGetUuid_v2
    with pytest.raises(InvalidInput, match=r"lacks cuDeviceGetUuid_v2.*11\.4"):
        CudaDriver(trainer)
    monkeypatch.setattr("weightcast.transports.ipc.cuda_driver.LIBRARY", "libcuda-that-is-not-there.so.1")
    load_driver.cache_clear()
    with pytest.raises(InvalidInput, match="needs the NVIDIA driver"):
        load_driver()


# -- which GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver_of(monkeypatch):
    devices._cuda.cache_clear()

    def use(library):
        driver = CudaDriver(library)
        monkeypatch.setattr(devices, "load_driver", lambda: driver)

    yield use
    devices._cuda.cache_clear()


def test_a_gpu_is_found_by_its_uuid_whatever_its_number(driver_of):
    machine = Machine(gpus=3)
    driver_of(Libcuda(machine, visible=[2, 1]))
    assert device_called("cuda:0").uuid == f"GPU-{uuid.UUID(bytes=machine.uuids[2])}"
    assert device_called("cuda:0") is device_called("cuda:0")
    handle = Handle(kind="cuda", id=4, nbytes=1, data=bytes(64), device=f"GPU-{uuid.UUID(bytes=machine.uuids[1])}")
    assert device_for(handle).ordinal == 1


def test_a_gpu_that_cannot_be_seen_is_an_error_that_lists_those_that_can(driver_of):
    machine = Machine(gpus=3)
    driver_of(Libcuda(machine, visible=[2]))
    handle = Handle(kind="cuda", id=4, nbytes=1, data=bytes(64), device=f"GPU-{uuid.UUID(bytes=machine.uuids[0])}")
    with pytest.raises(SourceFailed, match=f"it has GPU-{uuid.UUID(bytes=machine.uuids[2])}"):
        device_for(handle)
    driver_of(Libcuda(Machine(gpus=0)))
    with pytest.raises(SourceFailed, match="no GPU"):
        device_for(handle)


def test_a_process_without_a_driver_cannot_open_gpu_memory(monkeypatch):
    def refuse():
        raise InvalidInput("there is no driver")

    monkeypatch.setattr(devices, "load_driver", refuse)
    with pytest.raises(SourceFailed, match="GPU-7, and here is none: there is no driver"):
        device_for(Handle(kind="cuda", id=4, nbytes=1, data=bytes(64), device="GPU-7"))


# -- bare handles in a legacy metadata file ----------------------------------------------------------------------------


def test_bare_handles_of_a_legacy_file_are_opened_on_the_gpu_that_was_named(trainer, device, driver_of, tmp_path):
    tensors = {"w": np.arange(3 << 20, dtype=np.int16), "b": np.float32([1, 2, 3])}
    path = tmp_path / "ipc_metas_0"
    memories = []

    def publish(offset):
        memory = device.allocate(offset + (8 << 20))
        memories.append(memory)
        listed = {}
        for name, index in (("w", 5), ("b", 10)):
            put(device, tensors[name], memory, offset)
            text = device.export(memory).data.decode("latin-1")
            listed[name] = [text, offset, tensors[name].nbytes, index, list(tensors[name].shape), [], 0]
            offset += tensors[name].nbytes
        path.write_bytes(pickle.dumps(listed))

    def received():
        manifest = receiver.manifest("v", deadline=Deadline.after(10))
        found = {name: bytearray() for name in tensors}
        for piece in receiver.pieces(manifest, deadline=Deadline.after(10)):
            assert piece.offset == len(found[piece.tensor])
            found[piece.tensor] += piece.data
        return found

    engine = Libcuda(trainer.machine, visible=[1, 0])
    driver_of(engine)
    receiver = LegacyIpcReceiver(tmp_path, "0", device="cuda:1")
    for offset in (0, 512):
        publish(offset)
        assert received() == {name: array.tobytes() for name, array in tensors.items()}
        assert len(engine.opened) == 1  # that of the file before was let go of

    manifest = receiver.manifest("v", deadline=Deadline.after(10))
    pieces = receiver.pieces(manifest, deadline=Deadline.after(10))
    next(pieces)
    publish(1024)
    with pytest.raises(SourceFailed, match="was replaced while"):
        list(pieces)
    receiver.close()
    receiver.close()
    assert not engine.opened
    for memory in memories:
        memory.close()
