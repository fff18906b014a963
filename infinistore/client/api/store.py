"""The methods of an asynchronous store, with a server and embedded alike, and the
context managers that `open_store`, `lease` and `reserve` return.

The methods check the arguments. A subclass carries the operations out, by one method:
`_call`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

from infinistore.client.api.arguments import (
    REQUIRED,
    Pairs,
    batch_to_get,
    batch_to_put,
    block_to_get,
    block_to_put,
    check_hold_token,
    check_page,
    check_ratios,
    hold_in_us,
    key_list,
    sizes_to_reserve,
    ttl_in_us,
)
from infinistore.client.api.results import AsyncRemovals, PrefixMatch
from infinistore.client.memory.buffers import BufferLike, DeviceBatch, Registration, registrable
from infinistore.client.memory.views import Leased, ReservationLink, ReservedRoom
from infinistore.client.movers.rdma import StoreRdma, check_registered, flush, wait_for_gpus_aside
from infinistore.client.requests import (
    Batch,
    Commit,
    Get,
    GetInto,
    GetToDevice,
    Lease,
    ListKeysOfEveryNode,
    Put,
    PutFromDevice,
    ReleaseHolds,
    Reserve,
    check_all_there,
)
from infinistore.errors import KeyNotFound
from infinistore.keys import CheckedKeys
from infinistore.protocol.messages import (
    Delete,
    Evict,
    Exists,
    Flush,
    Found,
    ListKeys,
    MatchPrefix,
    Pin,
    Prefetch,
    Prefetched,
    Purge,
    Statistics,
    StoreRequest,
)
from infinistore.statistics import Stats
from infinistore.transports.cuda import DeviceMemory


class AsyncLease:
    """Entering it returns read-only views, None for each key that does not exist."""

    def __init__(self, call: Callable[..., Any], keys: list[str], verify: bool) -> None:
        self._call = call
        self._keys = keys
        self._verify = verify
        self._leased: Leased | None = None

    async def __aenter__(self) -> list[memoryview | None]:
        if self._leased is not None:
            raise RuntimeError("this lease was entered already; call `lease` again for another one")
        leased: Leased = await self._call(Lease(self._keys, self._verify))
        self._leased = leased
        return leased.handed

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._leased is not None
        leased, self._leased = self._leased, None
        leased.leave(quietly=kind is not None, stacklevel=2)


class AsyncReservation:
    """Entering it returns writable views; a normal exit commits them as one batch."""

    def __init__(self, call: Callable[..., Any], keys: list[str], sizes: list[int], ttl_us: int) -> None:
        self._call = call
        self._keys = keys
        self._sizes = sizes
        self._ttl_us = ttl_us
        self._reserved: ReservedRoom | None = None
        self._kept = ReservationLink()

    async def __aenter__(self) -> list[memoryview]:
        if self._reserved is not None:
            raise RuntimeError("this reservation was entered already; call `reserve` again for another one")
        try:
            reserved: ReservedRoom = await self._call(Reserve(self._keys, self._sizes, self._kept))
        except BaseException:
            self._kept.let_go()
            raise
        self._reserved = reserved
        return reserved.handed

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reserved, self._reserved = self._reserved, None
        assert reserved is not None
        committed = False
        try:
            if kind is None:
                reserved.take_back()
                await self._call(Commit(reserved, self._kept, self._ttl_us))
                committed = True
        finally:  # what was not committed goes back when none of its memory is in use any more
            try:
                if not committed:
                    reserved.take_back()
                reserved.leave(quietly=not committed, stacklevel=2)
            finally:
                self._kept.let_go()


_T = TypeVar("_T")
_Default = TypeVar("_Default")


class AsyncOpening:
    """Entering it opens a store, and returns it. Leaving it closes the store."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._entered = False
        self._store: AsyncStore | None = None

    async def __aenter__(self) -> "AsyncStore":
        if self._entered:
            raise RuntimeError("this store was opened already; call `open_store` again for another one")
        self._entered = True
        store: AsyncStore = await self._connect()
        self._store = store
        return store

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._store is not None
        await self._store.aclose()

    if not TYPE_CHECKING:  # which knows by itself that there is no such method

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"open_store returns no store, and has no {name!r}: write `async with open_store(...) as store`, or"
                " `store = await connect(...)`"
            )


class AsyncStore(ABC):
    """A store of blocks by key, which any number of tasks may use. `open_store` and
    `connect` open one.

    Data and buffers are contiguous objects with the buffer protocol, or PyTorch tensors
    on the CPU; tensors on a GPU if their memory is registered (see `register`).

    Any call may be cancelled.

    Each call has a deadline, `deadline_s` of `open_store`. Every method may raise:

    * `StoreUnavailable`: the server cannot be reached, or the connection was lost. A
      put that fails so may have been stored.
    * `DeadlineExceeded`: the same, because the deadline has passed.
    * `ValueError`, `TypeError`: wrong arguments. Nothing was sent.
    """

    verifies: bool = True
    """Whether reads check checksums: the option `verify` of `open_store`."""
    is_cluster: bool = False
    """Whether the URL names a cluster: keys are spread over its nodes by their hash
    tags. False for a server with shards, which is found by the first connection.
    """
    place: str = "in this process"
    """Where the blocks are: the URL without its options."""

    def __repr__(self) -> str:
        return f"<AsyncStore {self.place}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store cannot be copied or pickled: open one in each process")

    async def aclose(self) -> None:  # noqa: B027  # not every store has something to close
        """Close the store, and wait until its work in the background has ended. Any
        number of times. `async with open_store(...)` does so by itself.
        """

    @abstractmethod
    async def _call(self, request: StoreRequest[_T]) -> _T:
        """Carry out a request, and return its result."""

    async def put(self, key: str, data: BufferLike, *, ttl_s: float | None = None) -> None:
        """Store one block. It replaces what the key had before.

        With `ttl_s`, the key is gone after that many seconds, as if deleted. Such a
        block is in memory only, never on disk.

        Raises:
            OutOfMemory: no space, even after eviction.
            ValueTooLarge: the block is larger than the store takes.
        """
        checked = block_to_put(key, data)
        if isinstance(checked, DeviceBatch):
            await self.put_batch(checked, ttl_s=ttl_s)
        else:
            await self._call(Put(checked, ttl_us=ttl_in_us(ttl_s)))

    async def put_many(self, items: Pairs, replace: bool = True, *, ttl_s: float | None = None) -> list[str]:
        """Store a batch, which becomes visible all at once. Returns the skipped keys.

        `items` is a mapping, or pairs of key and data. With `replace=False`, keys that
        exist are skipped and their bytes are not moved. A batch over the server's
        limits is stored in parts, each of which becomes visible at once. `ttl_s` is as
        of `put`, for the keys that are not skipped.

        Raises:
            OutOfMemory: no space, even after eviction.
            ValueTooLarge: a block is larger than the store takes.
            LimitExceeded: a limit of the server was reached.
        """
        checked = batch_to_put(items)
        if isinstance(checked, DeviceBatch):
            return await self.put_batch(checked, replace, ttl_s=ttl_s)
        return await self._call(Put(checked, replace, ttl_in_us(ttl_s)))

    @overload
    async def get(self, key: str) -> bytearray: ...
    @overload
    async def get(self, key: str, default: _Default) -> bytearray | _Default: ...
    async def get(self, key: str, default: Any = REQUIRED) -> Any:
        """Read one block. Returns `default`, if one is given, for a key that does not
        exist.

        Raises:
            KeyNotFound: the key does not exist, and there is no default.
            ChecksumMismatch: the bytes are not those that were written.
        """
        value = (await self._call(Get(CheckedKeys((key,)))))[0]
        if value is not None:
            return value
        if default is REQUIRED:
            raise KeyNotFound(f"{key!r} is not in the store")
        return default

    async def get_many(self, keys: Iterable[str]) -> list[bytearray | None]:
        """Read blocks. Returns None for each key that does not exist.

        Raises:
            ChecksumMismatch: the bytes are not those that were written.
        """
        checked = key_list(keys)
        return await self._call(Get(checked))

    async def get_into(self, key: str, buffer: BufferLike) -> int:
        """Read one block into a buffer. Returns the block's length in bytes.

        The rest of the buffer is left as it is, and so is all of it if the block is
        longer. But if the connection breaks meanwhile, the block is read again: then
        any byte may have been written before.

        Raises:
            KeyNotFound: the key does not exist.
            BufferTooSmall: the block is longer than the buffer.
            ChecksumMismatch: the bytes are not those that were written.
        """
        length = (await self._get_into(block_to_get(key, buffer)))[0]
        if length is None:
            raise KeyNotFound(f"{key!r} is not in the store")
        return length

    async def get_many_into(self, items: Pairs, all_or_nothing: bool = False) -> list[int | None]:
        """Read blocks into buffers. Returns stored lengths in bytes, None for a miss.

        `items` is a mapping, or pairs of key and buffer. With `all_or_nothing`, a key
        that does not exist is an error. After any error but `BufferTooSmall`, the
        contents of the buffers are undefined.

        Raises:
            KeyNotFound: with `all_or_nothing`, a key does not exist. Bytes of the other
                blocks were written only if the batch was read in parts, or if the
                connection broke meanwhile and the batch was read again.
            BufferTooSmall: a block is longer than its buffer. No byte was written to
                any buffer, unless the connection broke meanwhile and the batch was read
                again. (A batch over the server's limits is read in parts, and this
                holds for each part.)
            ChecksumMismatch: the bytes are not those that were written.
        """
        lengths = await self._get_into(checked := batch_to_get(items), all_or_nothing)
        if all_or_nothing:
            check_all_there(checked.keys, lengths)
        return lengths

    async def _get_into(self, checked: Batch | DeviceBatch, all_or_nothing: bool = False) -> list[int | None]:
        if isinstance(checked, DeviceBatch):
            return await self.get_batch_into(checked, all_or_nothing)
        return await self._call(GetInto(checked, all_or_nothing))

    def lease(self, keys: Iterable[str], *, verify: bool = False) -> AsyncLease:
        """Read blocks in place: `async with store.lease(keys) as views`.

        `views` is a list of read-only memoryviews of the pool, None for each key that
        does not exist. Over TCP they are views of a copy.

        A leased block does not change, whatever becomes of its key. It takes space
        until the last view, slice, array or tensor of it is gone, even if the store is
        closed before or the server dies. At the end of the `with` block the views are
        released: using one is a ValueError from then on. Arrays and tensors made from
        them stay valid and keep all of the lease alive; the warning `LeaseStillInUse`
        says so.

        `verify` hashes the blocks in place. A reader who writes to shared memory, by a
        tensor for example, changes the block for everybody.

        Raises:
            ChecksumMismatch: with `verify`, the bytes are not those that were written.
                Over TCP without it, too.
            LimitExceeded: the server pins no more blocks for this client. Release other
                leases.
        """
        return AsyncLease(self._call, key_list(keys), verify)

    def reserve(self, sizes: Mapping[str, int], *, ttl_s: float | None = None) -> AsyncReservation:
        """Write blocks in place: `async with store.reserve(sizes) as views`.

        `sizes` is a mapping of keys to sizes in bytes. `views` is a list of writable
        memoryviews in the order of the mapping; their contents are undefined at first.

        At the end of the `with` block, the blocks are hashed and stored, and become
        visible all at once, as by `put_many`. If the `with` block raises, nothing is
        stored. Over TCP, or where clients may not write to the pool, the views are of
        private memory, and the blocks are put at the end. Do not write to arrays or
        tensors made from the views afterwards: readers would find a wrong checksum. If
        one is still alive, the warning `LeaseStillInUse` says so. `ttl_s` is as of
        `put`, from the end of the `with` block on.

        Raises:
            OutOfMemory: no space, even after eviction.
            ValueTooLarge: a block is larger than the store takes.
            LimitExceeded: more than can be stored at once, or than the server reserves
                for this client.
        """
        return AsyncReservation(self._call, *sizes_to_reserve(sizes), ttl_in_us(ttl_s))

    async def exists(self, key: str) -> bool:
        """Tell whether the key exists. Does not count as a use of the block."""
        return (await self.exists_many([key]))[0]

    async def exists_many(self, keys: Iterable[str]) -> Found:
        """Tell for each key whether it exists, in a list. Does not count as a use of a
        block.

        `in_memory` of the list says how many of the keys are in memory: all that exist,
        unless the store has disks.
        """
        checked = key_list(keys)
        return cast("Found", await self._call(Exists(checked)))

    async def match_prefix(self, keys: Iterable[str], hold_s: float = 0) -> PrefixMatch:
        """Count the leading keys that exist, up to the first that does not.

        With `hold_s`, the counted blocks are not evicted for that many seconds, or
        until `release_hold(match.hold)`. `match.in_memory` of the counted keys are in
        memory: all, unless the store has disks.

        Raises:
            LimitExceeded: the hold is too long, or too much would be held.
        """
        return PrefixMatch(*await self._call(MatchPrefix(key_list(keys), hold_in_us(hold_s))))

    async def prefetch(self, keys: Iterable[str], hold_s: float = 0) -> Prefetched:
        """Begin to read blocks that are on disk into memory, the first ones first.

        Returns at once: a later read of the keys finds them in memory, or waits for
        less. Reading ahead takes a bounded part of the pool, so the last keys may be
        skipped. With `hold_s`, what is there is not evicted for that many seconds, or
        until `release_hold(prefetched.hold)`. A store without disks reads nothing.

        Raises:
            LimitExceeded: the hold is too long, or too much would be held.
        """
        return await self._call(Prefetch(key_list(keys), hold_in_us(hold_s)))

    async def flush(self, keys: Iterable[str]) -> int:
        """Write blocks to disk now, and wait until they are durable.

        Durable blocks survive a crash of the store and of its machine. Returns how many
        of the keys have a durable block: fewer than given if some do not exist, or if a
        disk has no room for them or fails. A store without disks returns 0 at once.
        """
        return await self._call(Flush(key_list(keys)))

    async def release_hold(self, hold: str) -> bool:
        """End a hold early. False if it has ended before, or is another server's."""
        check_hold_token(hold)
        return bool(hold) and await self._call(ReleaseHolds(hold))

    async def pin(self, keys: Iterable[str], *, ttl_s: float | None = None) -> int:
        """Keep keys from being evicted, until `unpin`, or for `ttl_s` seconds from now
        on. Pins have no owner: a key that is pinned for longer, or without an end,
        stays so. Returns how many are pinned now.

        Keys that do not exist, or are on disk only, are not pinned. A pinned key can
        still be deleted, and ends with its time to live. If it is put again, its new
        block is pinned. A server that restarts without a take-over forgets all pins.

        Raises:
            LimitExceeded: all pinned keys together would take more of the pool than the
                server's `--max-protected-ratio`. None was pinned on that server.
        """
        return sum(await self._call(Pin(key_list(keys), ttl_us=ttl_in_us(ttl_s))))

    async def unpin(self, keys: Iterable[str]) -> int:
        """Let keys be evicted again. Returns how many of them were pinned."""
        return sum(await self._call(Pin(key_list(keys), pinned=False)))

    async def delete(self, keys: Iterable[str]) -> int:
        """Delete keys. Returns how many of them existed."""
        return await self._call(Delete(key_list(keys)))

    async def keys(
        self, prefix: str = "", limit: int = 1000, after: str = "", *, every_node: bool = False
    ) -> list[str]:
        """List up to `limit` keys that begin with `prefix`, in code point order.

        Only keys after `after` are listed: for the next page, give the last key of this
        one. Looks at every key of the store: not for hot paths.

        Nodes of a cluster that do not answer are passed over; with `every_node`, the
        call then raises `StoreUnavailable`, which names them.
        """
        check_page(prefix, limit, after)
        kind = ListKeysOfEveryNode if every_node else ListKeys
        return await self._call(kind(prefix, after, limit))

    def removals(self, wait_s: float = 10.0) -> AsyncRemovals:
        """Follow which keys the store removes: `async for batch in store.removals()`.

        Each batch has the keys that were evicted or deleted, or whose time to live was
        over, and that a read does not find; none after `wait_s` seconds (10 at most)
        without any. `batch.gap` tells that removals were missed, `batch.problem` that
        the server did not answer. It goes on from there; closing the store ends it.

        Raises:
            VersionMismatch: the server is of an older release.
        """
        return AsyncRemovals(self._call, wait_s)

    async def evict(self, min_ratio: float, max_ratio: float) -> int:
        """Evict cold blocks if more than `max_ratio` of the pool is used.

        Eviction stops when at most `min_ratio` is used. Returns how many blocks were
        evicted. Ratios are of the pool's bytes, 0 to 1.
        """
        low, high = check_ratios(min_ratio, max_ratio)
        return await self._call(Evict(low, high))

    async def purge(self) -> int:
        """Delete everything. Returns how many keys there were."""
        return await self._call(Purge())

    async def register(self, buffer: BufferLike) -> Registration:
        """Register memory for RDMA: blocks in it are moved without a copy.

        The returned registration keeps the memory alive. Close it before the memory is
        used for something else. Without RDMA the call only checks its argument, so that
        callers need not know which path is in use. Registering pins the memory and
        takes 0.1 s or more per GiB, during which this process waits: register once, not
        for each transfer.

        The memory may be a GPU's: a CUDA tensor. `put`, `put_many`, `get_into`,
        `get_many_into` and `infinistore.tensors` then take slices of it by RDMA, which
        bypass this process's memory. A transfer waits for the work that this thread's
        current stream was given before the call. Such blocks have no checksum, whatever
        `verify` says. Without RDMA such a call raises `DeviceMemoryUnreachable`.

        Raises:
            LimitExceeded: the system does not let so much memory be pinned.
            DeviceMemoryUnreachable: memory of a GPU cannot be registered here. The
                message names the remedy.
        """
        return self._register(registrable(buffer))

    def _register(self, memory: memoryview | DeviceMemory) -> Registration:
        return Registration(len(memory))

    def has_registered(self, blocks: Sequence[DeviceMemory]) -> bool:
        """Tell whether an RDMA device knows all of this memory of GPUs."""
        rdma = self._rdma()
        return rdma is not None and rdma.device_memory.locate(blocks) is not None

    def _rdma(self) -> StoreRdma | None:
        """What is registered for RDMA, if this store may ever use that."""
        return None

    async def put_batch(
        self, batch: Batch | DeviceBatch, replace: bool = True, *, ttl_s: float | None = None
    ) -> list[str]:
        """Store a batch that was checked before. Returns the skipped keys.

        For packages that extend the client: as `put_many`, but keys and memory are not
        checked again. A batch on GPUs is stored after the work that `batch.wait` waits
        for, instead of that of this thread's current stream.

        Raises:
            DeviceMemoryUnreachable: memory of a GPU is not registered, or there is no
                RDMA. Nothing was stored.
        """
        if not isinstance(batch, DeviceBatch):
            return await self._call(Put(batch, replace, ttl_in_us(ttl_s)))
        check_registered(self._rdma(), batch)
        await wait_for_gpus_aside(batch)
        return await self._call(PutFromDevice(batch, replace, ttl_in_us(ttl_s)))

    async def get_batch_into(self, batch: Batch | DeviceBatch, all_or_nothing: bool = False) -> list[int | None]:
        """Read into a batch that was checked before. Returns stored lengths in bytes.

        It is to `get_many_into` what `put_batch` is to `put_many`. With
        `all_or_nothing`, the caller looks for missing keys in the result.

        Raises:
            DeviceMemoryUnreachable: memory of a GPU is not registered, or there is no
                RDMA.
        """
        if not isinstance(batch, DeviceBatch):
            return await self._call(GetInto(batch, all_or_nothing))
        check_registered(self._rdma(), batch)
        await wait_for_gpus_aside(batch)
        lengths = await self._call(GetToDevice(batch, all_or_nothing))
        flush(batch)
        return lengths

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the pool as far as it is mapped into this process.

        There is one pair for each arena: its bytes for reading, and for writing if
        clients may write. Copy only what a lease or a reservation covers. The list is
        empty if the pool is out of reach, and before the first connection.
        """
        return []

    async def stats(self, details: bool = False) -> Stats:
        """Return statistics of the store.

        `transport` says which path is in use, `transport_reason` why. With `details`, a
        server adds its operations, connections, arenas and keys by prefix, which takes
        it a few milliseconds.
        """
        return await self._call(Statistics(details))
