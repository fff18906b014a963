"""`InfinityConnection`: the client of the original.

Arguments are checked and normalised before anything is sent. Misuse is `InvalidRequest`
here, and not `ValueError` or `TypeError` as elsewhere in this package: programs of the
original know one tree of errors.

Lookups and the other blocking methods use a blocking store; asynchronous reads and
writes use an asyncio store, which belongs to no loop. The two stores have separate
connections, share no lock, and can be used by different threads at the same time. No
background thread works for a read or write, so a cancelled one no longer accesses the
caller's memory when it returns.
"""

import logging
import operator
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from infinistore.client import Registration
from infinistore.client.extension import DeviceMemory, make_asyncio_store, make_blocking_store, make_options
from infinistore.dropin.config import TYPE_RDMA, ClientConfig, Logger
from infinistore.dropin.memory import Region, Regions, address_and_size, find_region, readable_memory
from infinistore.errors import (
    ConfigError,
    InfiniStoreException,
    InvalidRequest,
    KeyNotFound,
    PermissionDenied,
    StoreUnavailable,
)
from infinistore.keys import check_keys
from infinistore.sizes import in_units
from infinistore.statistics import Stats

if TYPE_CHECKING:
    import numpy


class Desc(NamedTuple):
    """A block of its own size: its key, an address in registered memory, and its size
    in bytes.
    """

    key: str
    ptr: int
    size: int


def checked_key(key: str) -> str:
    """Return the key if it is valid."""
    _check([key])
    return key


def key_list(keys: Iterable[str]) -> list[str]:
    """Return the keys as a list."""
    if isinstance(keys, str):
        raise InvalidRequest(f"give a list of keys, not the one text {keys[:60]!r}")
    try:
        listed = list(keys)
    except TypeError:
        raise InvalidRequest(f"give a list of keys, not {type(keys).__name__}") from None
    _check(listed)
    return listed


def checked_offsets(blocks: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return pairs of a key and an offset in bytes if they are valid."""
    try:
        pairs = [(key, offset) for key, offset in blocks]
    except (TypeError, ValueError):
        raise InvalidRequest("blocks must be pairs of a key and an offset in bytes, such as [('key', 0)]") from None
    if not pairs:
        raise InvalidRequest("there are no blocks; give at least one pair of a key and an offset")
    _check([key for key, _ in pairs])
    whole = [(key, whole_number("an offset", offset)) for key, offset in pairs]
    lowest = min(offset for _, offset in whole)
    if lowest < 0:
        raise InvalidRequest(f"an offset must be 0 or more bytes, not {lowest}")
    return whole


def checked_descriptors(descriptors: Iterable[Desc | tuple[str, int, int]]) -> list[Desc]:
    """Return the blocks if they are valid."""
    try:
        given = [Desc(*descriptor) for descriptor in descriptors]
    except TypeError:
        raise InvalidRequest("blocks must be a list of Desc(key, ptr, size)") from None
    if not given:
        raise InvalidRequest("there are no blocks; give at least one Desc(key, ptr, size)")
    _check([descriptor.key for descriptor in given])
    return [Desc(key, whole_number("ptr", ptr), _size_bytes("the size of a block", size)) for key, ptr, size in given]


def _size_bytes(name: str, value: object) -> int:
    size = whole_number(name, value)
    if size <= 0:
        raise InvalidRequest(f"{name} must be at least 1 byte, not {size}")
    return size


def whole_number(name: str, value: object) -> int:
    """Return an integer, also from integer types such as numpy's, as an int."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(f"{name} must be a whole number, not {type(value).__name__}") from None


def _check(keys: Sequence[str]) -> None:
    try:
        check_keys(keys)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from None


_log = logging.getLogger("infinistore.dropin")
_DONE = 200
"""The original's return value for success, an HTTP status code."""
_THERE, _MISSING = 0, -1
"""The original's values for a block that was moved, and one that does not exist."""


class _Stores:
    """The two stores of a connection, for one server."""

    def __init__(self, config: ClientConfig) -> None:
        config.verify()  # it may have been changed
        address, options = make_options(config.url, config.options)
        assert address is not None
        self.blocking = make_blocking_store(address, options)
        self.asynchronous = make_asyncio_store(address, options)
        self._registrations: dict[int, Registration] = {}

    def register(self, region: Region) -> None:
        """Register memory with RDMA, if available; replaces a region at its address.

        Only the asyncio store needs it: it moves registered memory.
        """
        before = self._registrations.pop(region.address, None)
        if before is not None:
            before.close()
        # `register` waits for nothing, but only says so to an event loop, and none may
        # be running here.
        self._registrations[region.address] = self.asynchronous._register(region.view)

    def close(self) -> None:
        self.blocking.close()
        self.asynchronous.close()


class InfinityConnection:
    """A connection to a server, for any number of threads and event loops.

    Every method may raise, in addition to its own errors:

    * `StoreUnavailable`: not connected, or the server cannot be reached any more; the
      next call tries again;
    * `DeadlineExceeded`: no answer within 30 seconds;
    * `InvalidRequest`: an invalid argument; nothing was sent.

    Raises:
        ConfigError: a setting is invalid.
    """

    def __init__(self, config: ClientConfig) -> None:
        if not isinstance(config, ClientConfig):
            raise ConfigError(f"give a ClientConfig, not {type(config).__name__}")
        config.verify()
        self.config = config
        self.rdma_connected = False
        """Whether the connection has `TYPE_RDMA` and is open. See also `transport`."""
        self._lock = threading.Lock()
        self._stores: _Stores | None = None
        self._close_stores: weakref.finalize[Any, Any] | None = None
        self._regions = Regions()
        if config.log_level is not None:
            Logger.set_log_level(config.log_level)

    def connect(self) -> None:
        """Connect. Blocks; in an event loop use `connect_async`.

        Raises:
            StoreUnavailable: no server answers at the address.
            AuthenticationFailed: the server requires a token other than the one in
                INFINISTORE_TOKEN.
            VersionMismatch: the server has an incompatible version.
            InfiniStoreException: already connected.
        """
        self._check_unconnected()
        stores = _Stores(self.config)
        try:
            stores.blocking.connect()
            self._keep(stores)
            with suppress(PermissionDenied):
                self._tell(stores.blocking.stats())
        except BaseException:
            stores.close()
            raise

    async def connect_async(self) -> None:
        """Connect without blocking the event loop. Raises as `connect`."""
        self._check_unconnected()
        stores = _Stores(self.config)
        try:
            await stores.asynchronous.connect()
            self._keep(stores)
            with suppress(PermissionDenied):
                self._tell(await stores.asynchronous.stats())
        except BaseException:
            stores.close()
            raise

    def reconnect(self) -> None:
        """Close and connect again with the current settings.

        Memory stays registered. Raises as `connect`, which leaves the connection
        closed. Not needed for a server that restarts: later calls reconnect.
        """
        self._let_go()
        self.connect()

    def close(self) -> None:
        """Close the connection and unregister all memory. Idempotent.

        Running calls finish.
        """
        self._let_go()
        self._regions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def transport(self) -> str:
        """The transport, such as "shm" or "tcp": docs/moving-from-infinistore.md."""
        return self._connected().blocking.stats().transport

    def register_mr(self, arg: Any, size: int | None = None) -> int:
        """Register memory to read blocks into and write them from. Returns 0.

        `arg` is an address, with `size` in bytes; or a tensor, or a writable buffer.
        The caller owns the memory and must keep it until the connection is closed or no
        call uses it any more. Registering the same address again replaces its size.
        With RDMA it may be GPU memory, whose blocks have no checksums; see
        docs/rdma.md.

        Raises:
            InvalidRequest: not memory of this process, or not writable; or GPU memory
                without RDMA.
            LimitExceeded: RDMA is in use, and the system does not allow pinning that
                much memory.
            DeviceMemoryUnreachable: the system does not allow registering GPU memory.
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
                raise InvalidRequest(f"the memory has {in_units(whole)}, not {in_units(size)}")
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

        `blocks` are pairs of a key and an offset in bytes from `ptr`, an address in
        registered memory. Existing keys are replaced; for a duplicate key, the last
        block counts. All blocks become visible in one step, or none after an error.

        Raises:
            OutOfMemory, ValueTooLarge: the server has no space for the blocks.
        """
        store = self._connected_by_rdma().asynchronous
        await store.put_many(dict(self._views(blocks, block_size, ptr)), ttl_s=self.config.ttl_s)
        return _DONE

    async def rdma_read_cache_async(self, blocks: Sequence[tuple[str, int]], block_size: int, ptr: int) -> int:
        """Read blocks into memory, all or nothing. Returns 200.

        `blocks` are pairs of a key and an offset in bytes from `ptr`, an address in
        registered memory. A stored value may be shorter than `block_size`; then only
        its bytes are written.

        Raises:
            InfiniStoreKeyNotFound: a key does not exist. The memory is undefined.
            BufferTooSmall: a stored value is longer than `block_size`. Nothing was
                written.
            ChecksumMismatch: the bytes are not those that were written.
        """
        store = self._connected_by_rdma().asynchronous
        await store.get_many_into(self._views(blocks, block_size, ptr, clip=True), all_or_nothing=True)
        return _DONE

    async def rdma_write_cache_async2(self, descs: Sequence[Desc]) -> list[int]:
        """Write blocks of any sizes from any addresses. Returns 0 for each block.

        As `rdma_write_cache_async` in all else.
        """
        store = self._connected_by_rdma().asynchronous
        given = checked_descriptors(descs)
        blocks = {key: self._regions.at(ptr).block(ptr, size) for key, ptr, size in given}
        await store.put_many(blocks, ttl_s=self.config.ttl_s)
        return [_THERE] * len(given)

    async def rdma_read_cache_async2(self, descs: Sequence[Desc]) -> list[int]:
        """Read blocks of any sizes to any addresses. Returns 0 for each block that was
        read, and -1 for each whose key does not exist, whose memory stays as it is.

        Raises:
            BufferTooSmall: a stored value is longer than its size here. Nothing was
                written.
            ChecksumMismatch: the bytes are not those that were written.
        """
        store = self._connected_by_rdma().asynchronous
        given = checked_descriptors(descs)
        blocks = [(key, self._regions.at(ptr).block(ptr, size, clip=True)) for key, ptr, size in given]
        lengths = await store.get_many_into(blocks)
        return [_MISSING if length is None else _THERE for length in lengths]

    def tcp_write_cache(self, key: str, ptr: int, size: int, **kwargs: object) -> None:
        """Write `size` bytes at the address `ptr`, which need not be registered.

        An existing key is replaced.

        Raises:
            OutOfMemory, ValueTooLarge: the server has no space for the value.
        """
        store = self._connected().blocking
        name = checked_key(key)
        value = readable_memory(whole_number("ptr", ptr), whole_number("size", size))
        store.put(name, value, ttl_s=self.config.ttl_s)

    def tcp_read_cache(self, key: str, **kwargs: object) -> "numpy.ndarray[Any, Any] | memoryview | None":
        """Read one value: a writable array of uint8; None if the key does not exist.

        Without numpy, a memoryview.

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
        """Return whether the key exists."""
        return self._connected().blocking.exists(checked_key(key))

    def get_match_last_index(self, keys: Sequence[str]) -> int:
        """Return the highest index in `keys` of a key that exists.

        Raises:
            InfiniStoreKeyNotFound: none of the keys exists.
        """
        store = self._connected().blocking
        keys = key_list(keys)
        found = store.exists_many(keys)
        for index in range(len(found) - 1, -1, -1):
            if found[index]:
                return index
        raise KeyNotFound(f"can't find a match: none of the {len(keys)} keys is in the store")

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Delete keys. Returns how many of them existed."""
        return self._connected().blocking.delete(key_list(keys))

    def _views(
        self, blocks: Sequence[tuple[str, int]], block_size: int, ptr: int, *, clip: bool = False
    ) -> list[tuple[str, memoryview | DeviceMemory]]:
        """Return the keys and the memory of blocks of one size."""
        offsets = checked_offsets(blocks)
        length = _size_bytes("block_size", block_size)
        base = whole_number("ptr", ptr)
        region = self._regions.at(base)
        return [(key, region.block(base + offset, length, clip=clip)) for key, offset in offsets]

    def _keep(self, stores: _Stores) -> None:
        with self._lock:
            self._check_unconnected()
            for region in self._regions.all():
                stores.register(region)
            self._stores = stores
            # At the end of this object, and of the process: while threads still run,
            # which closing may have to join.
            self._close_stores = weakref.finalize(self, stores.close)
            self.rdma_connected = self.config.connection_type == TYPE_RDMA

    def _tell(self, statistics: Stats) -> None:
        """Log what the connection goes over; a tenant without the role monitor does not
        hear of it.
        """
        path, reason, device = statistics.transport, statistics.transport_reason, self.config.dev_name
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
