"""What a store does for memory of GPUs, which RDMA alone can move.

Before a transfer, a call waits for the GPU's earlier work, because a card reads and
writes the memory as it is at that moment. After a read, it makes the card's writes
visible to the GPU, which takes next to no time.
"""

from infinistore.client.memory.buffers import DeviceBatch
from infinistore.client.movers.rdma.device import StoreRdma
from infinistore.client.worker_threads import in_thread
from infinistore.errors import DeviceMemoryUnreachable
from infinistore.transports import cuda as cuda_driver
from infinistore.transports.rdma.verbs import NoRdma

__all__ = ["check_registered", "flush", "wait_for_gpus", "wait_for_gpus_aside"]

_OTHER_WAYS = "infinistore.tensors copies it by way of the host, and tensor.cpu() by hand"


def check_registered(rdma: StoreRdma | None, batch: DeviceBatch) -> None:
    """Refuse what RDMA can never move, before anything is waited for or sent.

    Raises:
        DeviceMemoryUnreachable: the memory is not registered, or there is no RDMA.
    """
    if rdma is None:
        raise DeviceMemoryUnreachable(
            f"the tensor is on {batch.blocks[0].place}, and this store has no RDMA; {_OTHER_WAYS}"
        )
    problem = rdma.why_not_registered(batch.blocks)
    if problem is not None:
        raise DeviceMemoryUnreachable(f"{problem}; {_OTHER_WAYS}")


def wait_for_gpus(batch: DeviceBatch) -> None:
    """Wait for the GPU's work that was queued before the call.

    Raises:
        DeviceMemoryUnreachable: the work has failed.
    """
    try:
        batch.wait()
    except (NoRdma, RuntimeError) as error:  # as CUDA and PyTorch say that the GPU has failed
        raise DeviceMemoryUnreachable(f"what {batch.blocks[0].place} was told before has failed: {error}") from error


async def wait_for_gpus_aside(batch: DeviceBatch) -> None:
    """The same for asynchronous stores: in a thread, unless the GPU is known to be
    done.
    """
    if not batch.is_done():  # asking is faster than a thread
        await in_thread(lambda: wait_for_gpus(batch))


def flush(batch: DeviceBatch) -> None:
    """Make what the card wrote visible to the GPU."""
    cuda = cuda_driver.load_cuda()
    for ordinal in sorted({block.ordinal for block in batch.blocks}):
        cuda.flush(ordinal)
