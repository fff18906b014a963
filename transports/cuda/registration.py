"""Memory of GPUs that a peer may read and write by RDMA: how it is registered, and
where it is.

There are two ways to register it. As a dmabuf: the GPU's driver hands the pages to the
card's through the kernel. As peer memory: the card's driver asks a module of the GPU's
(nvidia-peermem) what the address means, as if it were this process's memory. The first
is tried first; what each said is in the error if neither works.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence

from infinistore.transports.cuda.memory import Cuda, DeviceMemory
from infinistore.transports.rdma.memory import RemoteSpan, SpanTable
from infinistore.transports.rdma.plan import Placement
from infinistore.transports.rdma.verbs import Device, NoRdma, Region

__all__ = ["DeviceSpan", "RegisteredDeviceMemory"]

_REMEDY = (
    "as root: modprobe nvidia-peermem; or install NVIDIA's open kernel modules, on Linux 5.12 or newer (infinistore"
    " doctor tells what is there). Not registered, it is copied by way of the host by infinistore.tensors"
)


class DeviceSpan(RemoteSpan):
    """A span of a GPU's memory that an RDMA device knows. It keeps the memory alive,
    and is gone after `close`.
    """

    def __init__(self, device: Device, memory: DeviceMemory, cuda: Cuda) -> None:
        self.memory: DeviceMemory | None = memory
        super().__init__(memory.address, len(memory), _register(device, memory, cuda))
        # What is written to the device by a synchronous copy should be there when
        # somebody reads it by RDMA.
        cuda.order_copies(memory)

    def close(self) -> None:
        """Unregister: when this returns, no peer reads or writes here any more.
        Idempotent.
        """
        super().close()
        self.memory = None


def _register(device: Device, memory: DeviceMemory, cuda: Cuda) -> Region:
    try:
        return _register_dmabuf(device, memory, cuda)
    except NoRdma as error:
        as_dmabuf = str(error)
    try:
        return device.register(memory.address, len(memory), remote=True)
    except NoRdma as error:
        raise NoRdma(
            f"memory of {memory.place} cannot be registered as a dmabuf ({as_dmabuf}), nor as peer memory ({error})",
            _REMEDY,
        ) from error


def _register_dmabuf(device: Device, memory: DeviceMemory, cuda: Cuda) -> Region:
    fd, offset = cuda.export(memory)
    try:
        return device.register_dmabuf(fd, offset, len(memory))
    finally:
        os.close(fd)


class RegisteredDeviceMemory(SpanTable[DeviceSpan]):
    """The spans of GPUs' memory that a caller has registered, to be found by
    address.
    """

    def locate(self, blocks: Sequence[DeviceMemory]) -> Placement | None:
        """Return where the peer finds these blocks; None unless every one of them lies
        in registered memory.

        Where spans overlap, the one that begins last counts.
        """
        spans, starts = self.table
        addresses: list[int] = []
        keys: list[int] = []
        for block in blocks:
            found = bisect_right(starts, block.address) - 1
            if found < 0 or block.address + len(block) > spans[found].end:
                return None
            addresses.append(block.address + spans[found].shift)
            keys.append(spans[found].key)
        return Placement(addresses, keys)
