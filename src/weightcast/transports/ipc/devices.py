"""Which device a publisher was told to use, and which one a handle belongs to."""

from __future__ import annotations

import functools
import re

from weightcast.errors import InvalidInput, SourceFailed
from weightcast.transports.ipc.cuda_driver import CudaDriver, load_driver
from weightcast.transports.ipc.cuda_memory import CudaDevice
from weightcast.transports.ipc.device import Device, Handle
from weightcast.transports.ipc.host_memory import HostDevice

_CUDA = re.compile(r"cuda:(0|[1-9][0-9]{0,3})")


def device_called(name: str) -> Device:
    """The device a publisher's memory shall be on: `host`, or `cuda:N` with N as the process itself numbers its GPUs."""
    if name == "host":
        return HostDevice()
    found = _CUDA.fullmatch(name)
    if found is None:
        raise InvalidInput(f"{name!r} is not a device for shared memory: use 'host' or 'cuda:0', 'cuda:1' and so on.")
    return _cuda(load_driver(), int(found[1]))


def device_for(handle: Handle) -> Device:
    """The device that can open a handle. GPUs are told apart by UUID: their numbers differ between processes."""
    if handle.kind == "memfd":
        return HostDevice()
    try:
        driver = load_driver()
        uuids = [driver.uuid(driver.device(ordinal)) for ordinal in range(driver.device_count())]
    except InvalidInput as error:
        raise SourceFailed(f"memory {handle.id} lies on {handle.device or 'a GPU'}, and here is none: {error}") from error
    if handle.device not in uuids:
        raise SourceFailed(
            f"memory {handle.id} lies on {handle.device or 'a GPU without a UUID'}, which this process cannot see: "
            f"it has {', '.join(uuids) or 'no GPU'}. Make that GPU visible to it, or publish from host memory."
        )
    return _cuda(driver, uuids.index(handle.device))


@functools.cache
def _cuda(driver: CudaDriver, ordinal: int) -> CudaDevice:
    """One for the life of the process: it holds the GPU's primary context, which torch holds too."""
    return CudaDevice(ordinal, driver)
