"""Memory of a GPU over real verbs, as far as that goes without a GPU: it is memory of
this process by another name.

The descriptor that stands for it is no dmabuf, and Soft-RoCE takes none at all. So this
is about the refusal, which comes from pyverbs and the kernel, about peer memory, and
about reading back what was written.
"""

import mmap
import os

import pytest

from infinistore.client.memory.buffers import DeviceBatch
from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import DeviceMemory, Dmabuf
from infinistore.transports.rdma.ibverbs import open_device
from infinistore.transports.rdma.memory import address_of
from infinistore.transports.rdma.verbs import NoRdma
from tests.rdma.conftest import Host
from tests.rdma.serving import opened

LENGTH = 1 << 16


class Cuda:
    """A driver of GPUs that exports what is no dmabuf."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def ordinal_at(self, address: int) -> None:
        pass

    def export(self, memory: DeviceMemory) -> Dmabuf:
        self.fds.append(os.memfd_create("no dmabuf"))
        return Dmabuf(self.fds[-1], 100)

    def order_copies(self, memory: DeviceMemory) -> None:
        pass

    def record(self, ordinal: int) -> None:
        pass

    def is_done(self, event: None) -> bool:
        return True

    def wait(self, event: None) -> None:
        pass

    def flush(self, ordinal: int) -> None:
        pass


def test_what_is_no_dmabuf_is_refused_in_one_line(hosts: tuple[Host, Host]) -> None:
    device = open_device(hosts[1].device)
    fd = os.memfd_create("no dmabuf")
    try:
        with pytest.raises(NoRdma, match=f"{hosts[1].device} does not register a dmabuf: Failed to register"):
            device.register_dmabuf(fd, 100, 4096)
    finally:
        device.close()
        os.close(fd)


@pytest.mark.nightly
async def test_blocks_go_from_and_to_peer_memory(hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(cuda_driver, "load_cuda", lambda: cuda)
    memory = mmap.mmap(-1, LENGTH)
    content = bytes(range(256)) * (LENGTH // 256)
    memory[:] = content
    whole = DeviceMemory(address_of(memoryview(memory)), LENGTH, 0, memory)
    batch = DeviceBatch(["a", "b", "c"], [whole[:1000], whole[5000:9000], whole[60_000:60_001]], lambda: None)
    async with opened(hosts) as (_, store):
        registration = store._register(whole)
        assert registration.registered
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(cuda.fds[0])
        await store.put_batch(batch)
        assert await store.get("a") == content[:1000]
        assert await store.get("b") == content[5000:9000]
        memory[:] = bytes(LENGTH)
        assert await store.get_batch_into(batch) == [1000, 4000, 1]
        assert memory[:1000] + memory[5000:9000] + memory[60_000:60_001] == (
            content[:1000] + content[5000:9000] + content[60_000:60_001]
        )
        assert not any(memory[1000:5000])
        registration.close()
        assert (await store.stats()).transport == "rdma"
