"""`InfinityConnection`: the client of the original.

Look-ups, and whatever else blocks there, go through a blocking store; the asynchronous reads and writes through an
asyncio store, which belongs to no loop. Both connect by themselves, share no lock, and may be used by any thread while
the other is at work. A cancelled read or write has let go of the caller's memory when it returns, since no thread works
for it in the background.
"""

import logging
import threading
import weakref
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

from infinistore.client.asyncio_store import RemoteAsyncioStore
from infinistore.client.device_memory import DeviceMemory
from infinistore.client.options import make_options
from infinistore.client.registration import Registration
from infinistore.client.thread_store import RemoteThreadStore
from infinistore.dropin.arguments import block_size_bytes, checked_key, key_list, keys_and_offsets, whole_number
from infinistore.dropin.config import TYPE_RDMA, ClientConfig
from infinistore.dropin.logger import Logger
from infinistore.dropin.memory import Region, Regions, address_and_size, find_region, readable_memory
from infinistore.errors import ConfigError, InfiniStoreException, InvalidRequest, KeyNotFound, StoreUnavailable
from infinistore.statistics import Stats

if TYPE_CHECKING:
    import numpy

__all__ = ["InfinityConnection"]

_log = logging.getLogger("infinistore.dropin")
_DONE = 200
"""What the original answers when all went well; it took the codes of HTTP."""


class _Stores:
    """The two stores of a connection, for one server."""

    def __init__(self, config: ClientConfig) -> None:
        config.verify()  # it may have been changed
        address, options = make_options(config.url, config.options)
        assert address is not None
        self.blocking = RemoteThreadStore(address, options)
        self.asynchronous = RemoteAsyncioStore(address, options)
        self._registrations: dict[int, Registration] = {}

    def register(self, region: Region) -> None:
        """Make memory known to RDMA, where there is any; what was registered at this address before is not any more.

        Only for what moves registered memory, which is the asyncio store.
        """
        before = self._registrations.pop(region.address, None)
        if before is not None:
            before.close()
        # `register` waits for nothing, but only says so to an event loop, and none may be running here.
        self._registrations[region.address] = self.asynchronous._register(region.view)

    def close(self) -> None:
        self.blocking.close()
        self.asynchronous.close()


class InfinityConnection:
    """A connection to a server. Any number of threads and event loops may use it at once.

    Every method may raise, besides what it says itself:

    * `StoreUnavailable`: not connected, or the server cannot be reached any more; the next call tries again;
    * `DeadlineExceeded`: no answer within 30 seconds;
    * `InvalidRequest`: an argument that makes no sense; nothing was sent.

    Raises:
        ConfigError: a setting that cannot be used.
    """

    def __init__(self, config: ClientConfig) -> None:
        if not isinstance(config, ClientConfig):
            raise ConfigError(f"give a ClientConfig, not {type(config).__name__}")
        config.verify()
        self.config = config
        self.rdma_connected = False
        """Whether the connection is of `TYPE_RDMA` and open; `transport` tells how the bytes go."""
        self._lock = threading.Lock()
        self._stores: _Stores | None = None
        self._close_stores: weakref.finalize[Any, Any] | None = None
        self._regions = Regions()
        if config.log_level is not None:
            Logger.set_log_level(config.log_level)

    def connect(self) -> None:
        """Connect, and wait for it. Call it outside of event loops, or where they may wait.

        Raises:
            StoreUnavailable: no server answers there.
            AuthenticationFailed: the server wants another token than the one in INFINISTORE_TOKEN.
            VersionMismatch: the server is of another version.
            InfiniStoreException: it is connected already.
        """
        self._check_unconnected()
        stores = _Stores(self.config)
        try:
            stores.blocking.connect()
            self._keep(stores, stores.blocking.stats())
        except BaseException:
            stores.close()
            raise

    async def connect_async(self) -> None:
        """Connect, while other tasks run. Errors are those of `connect`."""
        self._check_unconnected()
        stores = _Stores(self.config)
        try:
            await stores.asynchronous.connect()
            self._keep(stores, await stores.asynchronous.stats())
        except BaseException:
            stores.close()
            raise

    def reconnect(self) -> None:
        """Close and connect again, with the settings of now; what was registered stays so. Errors are those of
        `connect`, and leave the connection closed.

        A server that was restarted is found again without it.
        """
        self._let_go()
        self.connect()

    def close(self) -> None:
        """Close the connection and forget what was registered. Any number of times.

        Calls under way end by themselves.
        """
        self._let_go()
        self._regions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def transport(self) -> str:
        """How the bytes go: "shm", "tcp" or another name of a path; docs/moving-from-infinistore.md tells when."""
        return self._connected().blocking.stats().transport

    def register_mr(self, arg: Any, size: int | None = None) -> int:
        """Make memory known, so that blocks can be read into it and written from it. Returns 0.

        `arg` is an address, with `size` in bytes; or a tensor, or a writable buffer. It stays the caller's: keep it
        until the connection is closed, or no call uses it any more. Registering the same address again replaces its
        size. By RDMA it may be memory of a GPU, whose blocks have no checksums; see docs/rdma.md.

        Raises:
            InvalidRequest: no memory of this process, or it cannot be written; or a GPU's, and there is no RDMA.
            LimitExceeded: RDMA is in use, and the system does not let so much memory be pinned.
            DeviceMemoryUnreachable: the system does not let memory of a GPU be registered.
        """
        stores = self._connected_by_rdma()
        if isinstance(arg, Integral):
            if size is None:
                raise InvalidRequest("give the size of the memory in bytes beside its address")
            address = int(arg)
        else:
            address, whole = address_and_size(arg)
            size = whole if size is None else size
            if whole_number("size", size) > whole:
                raise InvalidRequest(f"the memory has {whole} bytes, not {size}")
        region = find_region(address, whole_number("size", size))
        if isinstance(region.view, DeviceMemory) and (path := stores.blocking.stats().transport) != "rdma":
            raise InvalidRequest(
                f"RDMA alone can reach {region.view!r}, and this connection goes by {path}; copy it to the CPU first"
            )
        stores.register(region)
        self._regions.add(region)
        return 0

    async def rdma_write_cache_async(self, blocks: Sequence[tuple[str, int]], block_size: int, ptr: int) -> int:
        """Write blocks of `block_size` bytes. Returns 200.

        `blocks` are pairs of a key and an offset in bytes from `ptr`, an address in registered memory. What a key had
        before is replaced; of a key that is named twice the last block counts. All of them become visible at once, or
        after an error none.

        Raises:
            OutOfMemory, ValueTooLarge: the server has no room for it.
        """
        store = self._connected_by_rdma().asynchronous
        keys, offsets = keys_and_offsets(blocks)
        length = block_size_bytes(block_size)
        base = whole_number("ptr", ptr)
        region = self._regions.at(base)
        views = [region.block(base + offset, length) for offset in offsets]
        await store.put_many(dict(zip(keys, views, strict=True)))
        return _DONE

    async def rdma_read_cache_async(self, blocks: Sequence[tuple[str, int]], block_size: int, ptr: int) -> int:
        """Read blocks into memory, all or nothing. Returns 200.

        `blocks` are pairs of a key and an offset in bytes from `ptr`, an address in registered memory. A stored value
        may be shorter than `block_size`; then only its bytes are written.

        Raises:
            InfiniStoreKeyNotFound: one of the keys is not there; nothing was written to memory.
            BufferTooSmall: a stored value is longer than `block_size`; nothing was written to memory.
            ChecksumMismatch: the bytes are not those that were written.
        """
        store = self._connected_by_rdma().asynchronous
        keys, offsets = keys_and_offsets(blocks)
        length = block_size_bytes(block_size)
        base = whole_number("ptr", ptr)
        region = self._regions.at(base)
        views = [region.block(base + offset, length, clip=True) for offset in offsets]
        await store.get_many_into(list(zip(keys, views, strict=True)), all_or_nothing=True)
        return _DONE

    def tcp_write_cache(self, key: str, ptr: int, size: int, **kwargs: object) -> None:
        """Write `size` bytes at the address `ptr`, which need not be registered; what the key had before is replaced.

        Raises:
            OutOfMemory, ValueTooLarge: the server has no room for it.
        """
        store = self._connected().blocking
        store.put(checked_key(key), readable_memory(whole_number("ptr", ptr), whole_number("size", size)))

    def tcp_read_cache(self, key: str, **kwargs: object) -> "numpy.ndarray[Any, Any] | memoryview | None":
        """Read one value: a writable array of uint8, of exactly its length; None if the key is not there.

        Without numpy it is a memoryview.

        Raises:
            ChecksumMismatch: the bytes are not those that were written.
        """
        store = self._connected().blocking
        value = store.get_many([checked_key(key)])[0]
        if value is None:
            return None
        try:
            import numpy
        except ImportError:
            return memoryview(value)
        return numpy.frombuffer(value, numpy.uint8)

    def check_exist(self, key: str) -> bool:
        """Tell whether the key is there."""
        return self._connected().blocking.exists(checked_key(key))

    def get_match_last_index(self, keys: Sequence[str]) -> int:
        """Return the highest index in `keys` of a key that is there.

        Raises:
            InfiniStoreKeyNotFound: none of them is.
        """
        store = self._connected().blocking
        keys = key_list(keys)
        found = store.exists_many(keys)
        for index in range(len(found) - 1, -1, -1):
            if found[index]:
                return index
        raise KeyNotFound(f"can't find a match: none of the {len(keys)} keys is in the store")

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Delete keys; returns how many were there."""
        return self._connected().blocking.delete(key_list(keys))

    def _keep(self, stores: _Stores, statistics: Stats) -> None:
        with self._lock:
            self._check_unconnected()
            for region in self._regions.all():
                stores.register(region)
            self._stores = stores
            # At the end of this object, and of the process: while threads still run, which closing may have to join.
            self._close_stores = weakref.finalize(self, stores.close)
            self.rdma_connected = self.config.connection_type == TYPE_RDMA
        self._tell_path(statistics.transport, statistics.transport_reason)

    def _tell_path(self, path: str, reason: str) -> None:
        device = self.config.dev_name
        if self.rdma_connected and device is not None and path == "tcp":  # slower than what was asked for by name
            _log.warning("connected to %s by TCP, without the RDMA device %s: %s", self.config.url, device, reason)
        else:
            _log.info("connected to %s by %s: %s", self.config.url, path, reason)

    def _let_go(self) -> None:
        with self._lock:
            close = self._close_stores
            self._stores = self._close_stores = None
            self.rdma_connected = False
        if close is not None:
            close()

    def _check_unconnected(self) -> None:
        if self._stores is not None:
            raise InfiniStoreException(f"already connected to {self.config.url}; close this connection first")

    def _connected(self) -> _Stores:
        stores = self._stores
        if stores is None:
            raise StoreUnavailable("this connection is not open; call connect() or connect_async() first")
        return stores

    def _connected_by_rdma(self) -> _Stores:
        if self.config.connection_type != TYPE_RDMA:
            raise InvalidRequest("this method is for connections of TYPE_RDMA; this one is of TYPE_TCP")
        return self._connected()
