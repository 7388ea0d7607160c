"""GPU memory shared by CUDA IPC handles. Written from the documentation and not run on a GPU: see `cuda_driver`.

CUDA tensors of torch are copied on the GPU; everything else, Paddle's GPU tensors included, goes through the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from weightcast.errors import InvalidInput, SourceFailed, StorageFailed, WrongState
from weightcast.tensors.bridges import framework_of, host_array, is_distributed, spec_of
from weightcast.tensors.flat import Bytes, byte_blocks
from weightcast.transports.ipc.cuda_driver import IPC_HANDLE_NBYTES, CudaDriver
from weightcast.transports.ipc.device import Block, Descriptor, Handle, Kind, Memory
from weightcast.transports.ipc.host_memory import MEMORY_IDS

BLOCK_NBYTES = 32 << 20  # there is no cache to stay in: only few enough to be worth a call each
HOST_BLOCK_NBYTES = 4 << 20
_PAGE_NBYTES = 2 << 20  # smaller allocations share a page with others, and a handle opens the whole page


class CudaMemory:
    """Memory of a GPU, allocated here or opened. It is closed only once no thread is in the middle of using it."""

    def __init__(self, nbytes: int, address: int, release: Callable[[int], None], *, memory_id: int = 0) -> None:
        self.nbytes, self.id = nbytes, memory_id
        self.lock = threading.Lock()
        self._address: int | None = address
        self._release = release

    def address(self, start: int, stop: int) -> int:
        """Where some bytes of it are, checked. To be asked for and used under `lock`."""
        if self._address is None:
            raise WrongState("use GPU memory", "closed", ["open"])
        if not 0 <= start <= stop <= self.nbytes:
            raise InvalidInput(f"bytes {start} to {stop} are not in a memory of {self.nbytes} bytes.")
        return self._address + start

    def close(self) -> None:
        """Free it, or close the mapping of it."""
        with self.lock:
            if self._address is not None:
                address, self._address = self._address, None
                self._release(address)


class CudaBlock:
    """Bytes at an address of the GPU or, with `on_host`, of this process. `owner` keeps them there."""

    def __init__(self, address: int, nbytes: int, owner: object, *, on_host: bool) -> None:
        self.address, self.nbytes, self.owner, self.on_host = address, nbytes, owner, on_host

    def part(self, start: int, stop: int) -> CudaBlock:
        """Some of them."""
        if not 0 <= start <= stop <= self.nbytes:
            raise InvalidInput(f"bytes {start} to {stop} are not in a block of {self.nbytes} bytes.")
        return CudaBlock(self.address + start, stop - start, self.owner, on_host=self.on_host)


class CudaDevice:
    """One GPU. Copies run on a stream of its own, so that they wait for nothing that the trainer computes next."""

    kind: Kind = "cuda"

    def __init__(self, ordinal: int, driver: CudaDriver) -> None:
        count = driver.device_count()
        if not 0 <= ordinal < count:
            raise InvalidInput(f"there is no GPU cuda:{ordinal}: this process can see {count}.")
        self.ordinal = ordinal
        self._driver = driver
        self._device = driver.device(ordinal)
        self.uuid = driver.uuid(self._device)
        self._context = driver.retain_context(self._device)
        try:
            with driver.current(self._context):
                self._stream = driver.create_stream()
        except StorageFailed:
            driver.release_context(self._device)
            raise
        self._buffers = threading.local()

    def close(self) -> None:
        """Give back what the device itself holds. No memory of it may be in use any more."""
        with self._driver.current(self._context):
            self._driver.destroy_stream(self._stream)
        self._driver.release_context(self._device)

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> CudaMemory:
        """New GPU memory, in whole pages of its own."""
        if nbytes < 0:
            raise InvalidInput(f"memory cannot have {nbytes} bytes.")
        pages = max(1, -(-nbytes // _PAGE_NBYTES))
        with self._driver.current(self._context):
            address = self._driver.allocate(pages * _PAGE_NBYTES)
        return CudaMemory(nbytes, address, self._free, memory_id=next(MEMORY_IDS))

    def export(self, memory: Memory) -> Handle:
        """The IPC handle and the GPU that it is for."""
        owned = cast("CudaMemory", memory)
        with owned.lock, self._driver.current(self._context):
            data = self._driver.export(owned.address(0, 0))
        return Handle(kind="cuda", id=owned.id, nbytes=owned.nbytes, data=data, device=self.uuid)

    def open(self, handle: Handle, descriptor: Descriptor) -> CudaMemory:  # noqa: ARG002 - the handle is all that is needed
        """Map what another process exported."""
        if handle.kind != self.kind or len(handle.data) != IPC_HANDLE_NBYTES or handle.nbytes < 0:
            raise SourceFailed(
                f"memory {handle.id} cannot be opened on {self.uuid}: it is of kind {handle.kind!r}, has {handle.nbytes} "
                f"bytes and a handle of {len(handle.data)} bytes, not {IPC_HANDLE_NBYTES}."
            )
        try:
            with self._driver.current(self._context):
                address = self._driver.open(handle.data)
        except StorageFailed as error:
            raise SourceFailed(f"memory {handle.id} cannot be opened on {self.uuid}: {error} Is its owner alive?") from error
        return CudaMemory(handle.nbytes, address, self._unmap)

    def _free(self, address: int) -> None:
        with self._driver.current(self._context):
            self._driver.wait_for_stream(self._stream)
            self._driver.free(address)

    def _unmap(self, address: int) -> None:
        with self._driver.current(self._context):
            self._driver.wait_for_stream(self._stream)
            self._driver.close(address)

    # -- copies --------------------------------------------------------------------------------------------------------

    def blocks(self, name: str, tensor: object) -> Iterator[Block]:
        """Slices of a CUDA tensor of torch where it is; other tensors as the host sees them."""
        plain = framework_of(tensor) == "torch" and not is_distributed(tensor)
        on_gpu = plain and cast("Any", tensor).device.type == "cuda"
        return self._device_blocks(name, tensor) if on_gpu else self._host_blocks(name, tensor)

    def _device_blocks(self, name: str, tensor: Any) -> Iterator[Block]:
        if tensor.device.index != self.ordinal:
            raise InvalidInput(f"tensor {name!r} is on {tensor.device}, and the publisher's memory on cuda:{self.ordinal}.")
        spec_of(name, tensor)  # refuses what cannot be carried
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        address, nbytes = flat.data_ptr(), flat.nbytes
        # All streams: the thread that walks the blocks need not be the one whose current stream computed the tensor.
        with self._driver.current(self._context):
            self._driver.wait_for_context()
        try:
            for start in range(0, nbytes, BLOCK_NBYTES):
                yield CudaBlock(address + start, min(BLOCK_NBYTES, nbytes - start), flat, on_host=False)
        finally:
            self.synchronise()  # torch gives the memory of `flat` to somebody else as soon as it is forgotten here

    def _host_blocks(self, name: str, tensor: object) -> Iterator[Block]:
        for data in byte_blocks(host_array(name, tensor), HOST_BLOCK_NBYTES):
            try:
                yield CudaBlock(data.ctypes.data, len(data), data, on_host=True)
            finally:
                self.synchronise()  # a copy from pinned memory may not even have begun

    def copy(self, block: Block, memory: Memory, offset: int) -> None:
        """Begun when this returns."""
        source, target = cast("CudaBlock", block), cast("CudaMemory", memory)
        with target.lock, self._driver.current(self._context):
            address = target.address(offset, offset + source.nbytes)
            if source.nbytes == 0:
                return
            copy = self._driver.copy_to_device if source.on_host else self._driver.copy_on_device
            copy(address, source.address, source.nbytes, self._stream)

    def synchronise(self) -> None:
        """Wait for all copies of all threads."""
        with self._driver.current(self._context):
            self._driver.wait_for_stream(self._stream)

    def read(self, memory: Memory, start: int, stop: int) -> memoryview:
        """A copy, in a buffer that this thread uses for every read. It comes after the copies that were begun before."""
        source = cast("CudaMemory", memory)
        with source.lock, self._driver.current(self._context):
            address = source.address(start, stop)
            buffer = self._buffer(stop - start)
            if stop > start:
                self._driver.copy_to_host(buffer.ctypes.data, address, stop - start, self._stream)
                self._driver.wait_for_stream(self._stream)
        return buffer[: stop - start].data.toreadonly()

    def _buffer(self, nbytes: int) -> Bytes:
        buffer: Bytes | None = getattr(self._buffers, "bytes", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers.bytes = np.empty(nbytes, dtype=np.uint8)
        return buffer
