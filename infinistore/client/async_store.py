"""The methods of an asynchronous store: the same for Trio and asyncio, for a server and for the embedded engine.

How an operation is carried out is the business of the subclasses, which have one method: `_call`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TypeVar

from infinistore.client.arguments import (
    Pairs,
    batch_to_get,
    batch_to_put,
    check_all_there,
    check_hold,
    check_hold_token,
    check_page,
    check_ratios,
    key_list,
    sizes_to_reserve,
)
from infinistore.client.buffers import BufferLike
from infinistore.client.device_calls import get_device_into_async as get_device_into
from infinistore.client.device_calls import put_device_async as put_device
from infinistore.client.device_memory import DeviceBatch, registrable
from infinistore.client.in_place import Kept
from infinistore.client.leasing import AsyncLease, AsyncReservation
from infinistore.client.operations import Batch, Operation
from infinistore.client.prefix_match import PrefixMatch
from infinistore.client.rdma import ClientRdma
from infinistore.client.registration import Registration
from infinistore.errors import KeyNotFound
from infinistore.statistics import Stats
from infinistore.transports.device_memory import DeviceMemory

__all__ = ["AsyncStore"]

_T = TypeVar("_T")


class AsyncStore(ABC):
    """A store of blocks by key. Made by `open_store`; used by any number of tasks at once.

    Data and buffers are anything contiguous with the buffer protocol, and PyTorch tensors: on the CPU, or on a GPU if
    `register` knows them. Each method has a deadline (`deadline_s` of `open_store`) and may be cancelled. Every method
    may raise:

    * `StoreUnavailable`: the server cannot be reached, or was lost; a put that ends so may have been stored;
    * `DeadlineExceeded`: the same, after the deadline;
    * `ValueError`, `TypeError`: wrong arguments; nothing was sent.
    """

    @abstractmethod
    async def _call(
        self,
        operation: Operation[_T],
        *,
        idempotent: bool = True,
        payload: bool = False,
        pinning: bool = False,
        kept: Kept | None = None,
    ) -> _T:
        """Carry out an operation. `idempotent`: it may be tried again; `payload`: it moves blocks; `pinning`: what it
        pins may outlive it; `kept`: it begins or ends a reservation, which belongs to one connection."""

    async def put(self, key: str, data: BufferLike) -> None:
        """Store one block; what the key had before is replaced.

        Raises:
            OutOfMemory: no room, even after evicting.
            ValueTooLarge: larger than the store takes.
        """
        await self.put_many([(key, data)])

    async def put_many(self, items: Pairs, replace: bool = True) -> list[str]:
        """Store a batch, visible all at once. Returns the keys that were skipped.

        `items` is a mapping or pairs of key and data. With `replace=False`, keys that are there are skipped and their
        bytes not moved. A batch over the server's limits is stored in parts, each of them at once.

        Raises:
            OutOfMemory: no room, even after evicting.
            ValueTooLarge: a block is larger than the store takes.
            LimitExceeded: a bound of the server was reached.
        """
        checked = batch_to_put(items)
        if isinstance(checked, DeviceBatch):
            return await put_device(self, checked, replace)
        return await self._put_batch(checked, replace)

    async def _put_batch(self, batch: Batch, replace: bool = True) -> list[str]:
        """Store a batch that was checked."""
        return await self._call(lambda ops: ops.put_many(batch, replace), idempotent=False, payload=True)

    async def get(self, key: str) -> bytearray:
        """Read one block.

        Raises:
            KeyNotFound: it is not there.
            ChecksumMismatch: the bytes are not those that were written.
        """
        value = (await self.get_many([key]))[0]
        if value is None:
            raise KeyNotFound(f"{key!r} is not in the store")
        return value

    async def get_many(self, keys: Iterable[str]) -> list[bytearray | None]:
        """Read blocks; None for each that is not there.

        Raises:
            ChecksumMismatch: the bytes are not those that were written.
        """
        checked = key_list(keys)
        return await self._call(lambda ops: ops.get_many(checked), payload=True)

    async def get_into(self, key: str, buffer: BufferLike) -> int:
        """Read one block into the caller's memory. Returns its length in bytes; the rest of the buffer is left as it
        is.

        Raises:
            KeyNotFound: it is not there.
            BufferTooSmall: it is longer than the buffer, which is left as it is.
            ChecksumMismatch: the bytes are not those that were written.
        """
        length = (await self.get_many_into([(key, buffer)]))[0]
        if length is None:
            raise KeyNotFound(f"{key!r} is not in the store")
        return length

    async def get_many_into(self, items: Pairs, all_or_nothing: bool = False) -> list[int | None]:
        """Read blocks into the caller's memory. Returns the stored length in bytes of each, None for what is not there.

        `items` is a mapping or pairs of key and buffer. With `all_or_nothing`, a key that is not there is an error.
        After any error but `KeyNotFound` and `BufferTooSmall`, what is in the buffers is undefined.

        Raises:
            KeyNotFound: with `all_or_nothing`, one is not there; as with the next, no byte was written.
            BufferTooSmall: a block is longer than its buffer; no byte was written to any buffer. (A batch over the
                server's limits is read in parts, and this holds for each of them.)
            ChecksumMismatch: the bytes are not those that were written.
        """
        checked = batch_to_get(items)
        if isinstance(checked, DeviceBatch):
            lengths = await get_device_into(self, checked, all_or_nothing)
        else:
            lengths = await self._call(lambda ops: ops.get_many_into(checked, all_or_nothing), payload=True)
        if all_or_nothing:
            check_all_there(checked.keys, lengths)
        return lengths

    def lease(self, keys: Iterable[str], *, verify: bool = False) -> AsyncLease:
        """Read blocks where they lie: `async with store.lease(keys) as views`.

        `views` is a list of read-only memoryviews of the pool, None for each key that is not there. By TCP the views
        are of a copy. What is leased stays as it is, whatever becomes of its key, and takes room until the last view,
        slice, array or tensor of it is gone, even if the store is closed before or the server dies. When the block is
        left, the views are released: using them is a ValueError from then on. Arrays and tensors made from them are
        still good, keep all of the lease, and are worth the warning `LeaseStillInUse`.

        `verify` hashes the blocks where they lie. What a reader of shared memory changes, with a tensor for example,
        is changed for everybody.

        Raises:
            ChecksumMismatch: with `verify`, the bytes are not those that were written. By TCP also without.
            LimitExceeded: the server pins no more for this client; let go of other leases.
        """
        return AsyncLease(self._call, key_list(keys), verify)

    def reserve(self, sizes: Mapping[str, int]) -> AsyncReservation:
        """Write blocks where they will lie: `async with store.reserve({key: size_bytes}) as views`.

        `views` is a list of writable memoryviews, in the order of the mapping; what is in them at first is undefined.
        When the block is left, the blocks are hashed and stored, visible all at once, as by `put_many`; if it is left
        by an error, nothing is. By TCP, or where clients may not write to the pool, the views are of private memory,
        and the blocks are put when the block is left. Nobody may write to arrays or tensors made from the views
        afterwards: readers would find a wrong checksum. If any is alive, `LeaseStillInUse` warns.

        Raises:
            OutOfMemory: no room, even after evicting.
            ValueTooLarge: a block is larger than the store takes.
            LimitExceeded: more than can be stored at once, or than the server reserves for this client.
        """
        return AsyncReservation(self._call, *sizes_to_reserve(sizes))

    async def exists(self, key: str) -> bool:
        """Tell whether the key is there. Does not count as a use of it."""
        return (await self.exists_many([key]))[0]

    async def exists_many(self, keys: Iterable[str]) -> list[bool]:
        """Tell for each key whether it is there. Does not count as a use of them."""
        checked = key_list(keys)
        return await self._call(lambda ops: ops.exists_many(checked))

    async def match_prefix(self, keys: Iterable[str], hold_s: float = 0) -> PrefixMatch:
        """Count the leading keys that are there, up to the first that is not.

        With `hold_s`, what was counted stays for so many seconds, or until `release_hold(match.hold)`.

        Raises:
            LimitExceeded: the hold is too long, or too much would be held.
        """
        checked = key_list(keys)
        check_hold(hold_s)
        matched, hold = await self._call(lambda ops: ops.match_prefix(checked, hold_s))
        return PrefixMatch(matched, hold)

    async def release_hold(self, hold: str) -> bool:
        """End a hold before its time. False if it has ended already, or was another server's."""
        check_hold_token(hold)
        return bool(hold) and await self._call(lambda ops: ops.release_hold(hold), idempotent=False)

    async def delete(self, keys: Iterable[str]) -> int:
        """Delete keys; returns how many were there."""
        checked = key_list(keys)
        return await self._call(lambda ops: ops.delete(checked), idempotent=False)

    async def keys(self, prefix: str = "", limit: int = 1000, after: str = "") -> list[str]:
        """List up to `limit` keys that begin with `prefix` and come after `after`, in code point order.

        For the next page, give the last key of this one as `after`. Looks at every key of the store: not for hot paths.
        """
        check_page(prefix, limit, after)
        return await self._call(lambda ops: ops.keys(prefix, limit, after))

    async def evict(self, min_ratio: float, max_ratio: float) -> int:
        """If more than `max_ratio` of the pool is used, evict cold blocks until at most `min_ratio` is; returns how
        many.

        Ratios are of the pool's bytes, 0 to 1.
        """
        low, high = check_ratios(min_ratio, max_ratio)
        return await self._call(lambda ops: ops.evict(low, high), idempotent=False)

    async def purge(self) -> int:
        """Delete everything; returns how many keys there were."""
        return await self._call(lambda ops: ops.purge(), idempotent=False)

    async def register(self, buffer: BufferLike) -> Registration:
        """Register memory for RDMA, once: blocks in it are then moved without being copied.

        Close what this returns before the memory is used for something else; it keeps the memory alive. Without RDMA
        it does nothing more than look at its argument, so that callers need not know which path is in use. Registering
        pins the memory and takes 0.1 s and more per GiB, in which this process waits: never do it for each transfer.

        The memory may be a GPU's: a CUDA tensor. By RDMA, `put`, `put_many`, `get_into` and `get_many_into` then take
        slices of it, and so does `infinistore.tensors`; no byte of them passes this process's memory. They are moved
        when this thread's current stream has done what it was told before the call, and they have no checksum, written
        or checked, whatever `verify` says. Without RDMA such a call is a `DeviceMemoryUnreachable`.

        Raises:
            LimitExceeded: the system does not let so much memory be pinned.
            DeviceMemoryUnreachable: memory of a GPU cannot be registered here; the message names the remedy.
        """
        return self._register(registrable(buffer))

    def _register(self, memory: memoryview | DeviceMemory) -> Registration:
        return Registration(len(memory))

    def _rdma(self) -> ClientRdma | None:
        """What is registered for RDMA, if this store may ever use that."""
        return None

    def _mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """For `infinistore.tensors`: the pool as it is mapped into this process, each arena to be read and, if that is
        allowed, to be written. Empty where the pool is out of reach, or not known yet."""
        return []

    def _verifies(self) -> bool:
        """For `infinistore.tensors`: whether readers check what they read."""
        return True

    async def stats(self, details: bool = False) -> Stats:
        """Statistics of the store; `transport` says which path is in use, `transport_reason` why.

        With `details`, a server also tells of its operations, connections, arenas and keys by prefix, which takes
        it longer: a few milliseconds.
        """
        return await self._call(lambda ops: ops.stats(details))
