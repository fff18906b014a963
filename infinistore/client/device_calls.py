"""Calls that move memory of GPUs: by RDMA, or not at all.

Before: what the GPU was told is waited for, since a card reads and writes its memory as it is at that moment; by
asynchronous stores in a thread. After a read: the GPU is asked to see what the card wrote, which takes next to no time.
"""

from typing import TYPE_CHECKING

from infinistore.client.device_memory import DeviceBatch
from infinistore.client.operations import Operation, Operations
from infinistore.client.rdma_operations import RdmaOperations
from infinistore.client.remote_operations import RemoteOperations
from infinistore.client.threads import in_thread
from infinistore.errors import DeviceMemoryUnreachable
from infinistore.transports import cuda_driver
from infinistore.transports.rdma_choice import NoRdma

if TYPE_CHECKING:
    from infinistore.client.async_store import AsyncStore
    from infinistore.client.blocking_store import BlockingStore

__all__ = ["get_device_into", "get_device_into_async", "put_device", "put_device_async"]

_OTHER_WAYS = "infinistore.tensors copies it by way of the host, and tensor.cpu() by hand"


def put_device(store: "BlockingStore", batch: DeviceBatch, replace: bool) -> list[str]:
    """Store a batch that lies on GPUs; return the keys that were skipped.

    Raises:
        DeviceMemoryUnreachable: it is not registered, or there is no RDMA. Nothing was stored.
    """
    _check_registered(store, batch)
    _wait(batch)
    return store._call(_put(batch, replace), idempotent=False, payload=True)


async def put_device_async(store: "AsyncStore", batch: DeviceBatch, replace: bool) -> list[str]:
    """The same for an asynchronous store."""
    _check_registered(store, batch)
    await _wait_aside(batch)
    return await store._call(_put(batch, replace), idempotent=False, payload=True)


def get_device_into(store: "BlockingStore", batch: DeviceBatch, all_or_nothing: bool) -> list[int | None]:
    """Read a batch into memory of GPUs; return the stored lengths, None for what is missing.

    Raises:
        DeviceMemoryUnreachable: it is not registered, or there is no RDMA.
    """
    _check_registered(store, batch)
    _wait(batch)
    lengths = store._call(_get(batch, all_or_nothing), payload=True)
    _flush(batch)
    return lengths


async def get_device_into_async(store: "AsyncStore", batch: DeviceBatch, all_or_nothing: bool) -> list[int | None]:
    """The same for an asynchronous store."""
    _check_registered(store, batch)
    await _wait_aside(batch)
    lengths = await store._call(_get(batch, all_or_nothing), payload=True)
    _flush(batch)
    return lengths


def _put(batch: DeviceBatch, replace: bool) -> Operation[list[str]]:
    return lambda ops: _by_rdma(ops, batch).put_device(batch, replace)


def _get(batch: DeviceBatch, all_or_nothing: bool) -> Operation[list[int | None]]:
    return lambda ops: _by_rdma(ops, batch).get_device_into(batch, all_or_nothing)


def _check_registered(store: "BlockingStore | AsyncStore", batch: DeviceBatch) -> None:
    """Refuse, before anything is waited for or sent, what can never be moved."""
    place = batch.blocks[0].place
    rdma = store._rdma()
    if rdma is None:
        raise DeviceMemoryUnreachable(f"the tensor is on {place}, and this store has no RDMA; {_OTHER_WAYS}")
    problem = rdma.why_not_registered(batch.blocks)
    if problem is not None:
        raise DeviceMemoryUnreachable(f"{problem}; {_OTHER_WAYS}")


def _by_rdma(ops: Operations, batch: DeviceBatch) -> RdmaOperations:
    if isinstance(ops, RdmaOperations):
        return ops
    assert isinstance(ops, RemoteOperations)  # an embedded store has been refused
    way, why = ops._path
    raise DeviceMemoryUnreachable(
        f"the tensor is on {batch.blocks[0].place}, which RDMA alone can reach, and the store is reached by {way}"
        f" ({why}); {_OTHER_WAYS}"
    )


def _wait(batch: DeviceBatch) -> None:
    try:
        batch.wait()
    except (NoRdma, RuntimeError) as error:  # as CUDA and PyTorch say that the GPU has failed
        raise DeviceMemoryUnreachable(f"what {batch.blocks[0].place} was told before has failed: {error}") from error


async def _wait_aside(batch: DeviceBatch) -> None:
    if not batch.is_done():  # a thread takes longer than to ask
        await in_thread(lambda: _wait(batch))


def _flush(batch: DeviceBatch) -> None:
    cuda = cuda_driver.load_cuda()
    for ordinal in sorted({block.ordinal for block in batch.blocks}):
        cuda.flush(ordinal)
