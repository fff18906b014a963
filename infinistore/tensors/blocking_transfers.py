# Generated from transfers.py by scripts/generate.py: change that one instead.
"""Puts and gets of the blocks of several tensors, in one batch.

The way of the bytes depends on where the tensor is, and on whether the store's pool is
mapped into this process:

* On the CPU, each block contiguous: the store moves them from and to the tensor.
* On the CPU, scattered: by way of a contiguous copy.
* On a GPU, in memory that is registered for RDMA: between the GPU and the server (see
  `direct_batch`).
* On a device, with the pool mapped: between the device and the pool, under a
  reservation or a lease.
* On a device otherwise: by way of host memory that suits the device.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from infinistore.errors import DeviceMemoryUnreachable, LimitExceeded
from infinistore.tensors.devices import (
    Problem,
    Staging,
    Transfer,
    batch_of,
    copy_in,
    copy_out,
    direct_batch,
    finish,
    longer_blocks_refused,
    pin_pool,
    problems,
    sources,
    targets,
)

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore


def put_blocks(store: "BlockingStore", batch: Sequence[Transfer], staging: Staging, ttl_s: float | None = None) -> None:
    """Store the blocks of all these tensors, which become visible in one step."""
    if (direct := direct_batch(store, batch)) is not None:
        with suppress(DeviceMemoryUnreachable):  # nothing was stored
            store.put_batch(direct, ttl_s=ttl_s)
            return
    if any(transfer.copies for transfer in batch) and pin_pool(store, batch):
        with suppress(LimitExceeded):  # the pool does not take so much at once
            _put_in_place(store, batch, ttl_s)
            return
    store.put_batch(sources(batch, staging), ttl_s=ttl_s)


def get_blocks(store: "BlockingStore", batch: Sequence[Transfer], staging: Staging) -> list[Problem]:
    """Read the blocks of all these tensors. Returns what was wrong with each, or None.

    Raises:
        BlockSizeMismatch: a stored block is longer than its block of the tensor.
            Nothing was written to any tensor.
    """
    if (direct := direct_batch(store, batch)) is not None:
        with suppress(DeviceMemoryUnreachable), longer_blocks_refused():
            return problems(batch, store.get_batch_into(direct))
    if any(transfer.copies for transfer in batch) and pin_pool(store, batch):
        return _get_in_place(store, batch)
    found = targets(batch, staging)
    with longer_blocks_refused():
        lengths = store.get_batch_into(batch_of(found))
    return finish(found, lengths)


def _put_in_place(store: "BlockingStore", batch: Sequence[Transfer], ttl_s: float | None) -> None:
    sizes = {key: transfer.blocks.block_bytes for transfer in batch for key in transfer.blocks.keys}
    with store.reserve(sizes, ttl_s=ttl_s) as views:
        copy_out(batch, views)


def _get_in_place(store: "BlockingStore", batch: Sequence[Transfer]) -> list[Problem]:
    keys = [key for transfer in batch for key in transfer.blocks.keys]
    with store.lease(keys, verify=store.verifies) as views:
        return copy_in(batch, views)
