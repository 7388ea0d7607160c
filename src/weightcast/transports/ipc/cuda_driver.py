"""The part of the CUDA driver API that sharing memory needs, bound with ctypes.

Written from the documentation and the prototypes in cuda.h, and not run on a GPU. libcuda comes with the driver, so neither
torch nor the CUDA toolkit is needed. Every function here but those on devices wants a current context: see `current`.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from weightcast.errors import InvalidInput, StorageFailed

LIBRARY = "libcuda.so.1"
IPC_HANDLE_NBYTES = 64

_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle. It is passed by value, so it must be a structure and not a pointer."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_NBYTES),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


# CUdevice is an int, CUdeviceptr an unsigned long long, CUcontext and CUstream are pointers. cuda.h gives the plain names to
# the functions with _v2: the symbols without it are of an older, different ABI.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_ulonglong), c_size_t),
    "cuMemFree_v2": (c_ulonglong,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_ulonglong),
    "cuIpcOpenMemHandle_v2": (POINTER(c_ulonglong), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_ulonglong,),
    "cuMemcpyDtoDAsync_v2": (c_ulonglong, c_ulonglong, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_ulonglong, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_ulonglong, c_size_t, c_void_p),
}


@functools.cache
def load_driver() -> CudaDriver:
    """The driver of this machine. Raises `InvalidInput` where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise InvalidInput(f"sharing GPU memory needs the NVIDIA driver: {LIBRARY} cannot be loaded ({error}).") from error
    return CudaDriver(library)


class CudaDriver:
    """libcuda, initialised. A call that it refuses raises `StorageFailed` with the driver's own words."""

    def __init__(self, library: object) -> None:
        self._functions: dict[str, Any] = {}
        for name, types in PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is None:
                raise InvalidInput(f"the NVIDIA driver is too old to share memory: it lacks {name}. Use CUDA 11.4 or newer.")
            function.argtypes, function.restype = types, c_int
            self._functions[name] = function
        try:
            self._call("cuInit", 0)
        except StorageFailed as error:
            raise InvalidInput(f"there is an NVIDIA driver, but no GPU that it can use: {error}") from error

    # -- devices and contexts ------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """How many GPUs this process can see."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def device(self, ordinal: int) -> int:
        """The device of a number."""
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        return device.value

    def uuid(self, device: int) -> str:
        """The UUID as nvidia-smi writes it."""
        found = Uuid()
        self._call("cuDeviceGetUuid_v2", byref(found), device)
        return f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}"

    def retain_context(self, device: int) -> int:
        """The primary context, which torch uses too. Given back by `release_context`."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value or 0

    def release_context(self, device: int) -> None:
        """Give the primary context back."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context the one of this thread, and put back the one before."""
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    # -- order ---------------------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream that waits for no other, the default one included."""
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back."""
        self._call("cuStreamDestroy_v2", stream)

    def wait_for_stream(self, stream: int) -> None:
        """Wait for all that was begun on a stream."""
        self._call("cuStreamSynchronize", stream)

    def wait_for_context(self) -> None:
        """Wait for all that was begun in the current context, on any stream of any thread."""
        self._call("cuCtxSynchronize")

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """The address of new memory."""
        address = c_ulonglong()
        self._call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Free what was allocated."""
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """The IPC handle of what was allocated."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open(self, data: bytes) -> int:
        """The address here of what another process exported. The driver refuses handles of this process."""
        address = c_ulonglong()
        self._call("cuIpcOpenMemHandle_v2", byref(address), IpcHandle.from_buffer_copy(data), _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Let go of what was opened."""
        self._call("cuIpcCloseMemHandle", address)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin a copy from GPU to GPU memory."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin a copy from host to GPU memory."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, nbytes, stream)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin a copy from GPU to host memory."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, nbytes, stream)

    def _call(self, name: str, *args: Any) -> None:
        result = self._functions[name](*args)
        if result != 0:
            raise StorageFailed(
                "call", name, OSError(result, f"{self._word('Name', result)}: {self._word('String', result)}")
            )

    def _word(self, kind: str, result: int) -> str:
        text = c_char_p()
        if self._functions[f"cuGetError{kind}"](result, byref(text)) != 0 or text.value is None:
            return f"error {result}"
        return text.value.decode(errors="replace")
