"""LMCache's KV cache in a store: a remote storage plugin, for LMCache 0.5.6.

    remote_storage_plugins: ["infinistore"]
    extra_config:
      remote_storage_plugin.infinistore.module_path: infinistore.integrations.lmcache
      remote_storage_plugin.infinistore.class_name: InfiniStoreConnectorAdapter
      remote_storage_plugin.infinistore.url: infinistore://127.0.0.1:22345

Batches of blocks move directly between LMCache's memory objects and the store. Each
block has a small descriptor next to it: memory format, and dtype and shape of each
group of layers. A block that does not match its descriptor is a miss. The engine never
gets an exception: a store that is lost, slow, full or incompatible costs hits, is
counted, and is logged once.

LMCache's own `infinistore://` connector works without this module; `docs/lmcache.md`
compares the two. `infinistore.integrations.lmcache_l2` serves its multi-process mode.
"""

import builtins
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any, TypeVar

import attrs
import msgpack
import torch

from infinistore import aio, blocking
from infinistore.errors import BufferTooSmall, ChecksumMismatch, ConfigError, DiskFailed
from infinistore.integrations.internal.blocking_store_calls import read_ahead as read_ahead_blocking
from infinistore.integrations.internal.held_prefixes import HeldPrefixes
from infinistore.integrations.internal.record import Record
from infinistore.integrations.internal.settings import StoreSettings
from infinistore.integrations.internal.store_calls import match_and_hold, pin_loaded, read_ahead, read_exactly
from infinistore.integrations.internal.tested_release import tested_with
from infinistore.integrations.internal.weights import identity_of_files
from infinistore.sizes import in_units

with tested_with("LMCache", "lmcache", "0.5.6"):
    from lmcache.logging import init_logger
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryFormat, MemoryObj
    from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

__all__ = ["InfiniStoreConnector", "InfiniStoreConnectorAdapter"]

_T = TypeVar("_T")
_log = init_logger(__name__)
_DESCRIPTION_BYTES = 1024  # a descriptor has about 60, and 20 for each further group of layers
_PREFIX, _SCHEME, _TYPE = "lmcache/", "plugin://", "infinistore"


class InfiniStoreConnectorAdapter(ConnectorAdapter):  # type: ignore[misc, unused-ignore]
    """Creates the connector of `infinistore` or `infinistore.NAME` from `extra_config`.

    Raises:
        ConfigError: no store is named, a setting or what the weights are is unknown.
    """

    def __init__(self) -> None:
        super().__init__(_SCHEME + _TYPE)

    def can_parse(self, url: str) -> bool:
        """Whether the URL is `plugin://infinistore` or `plugin://infinistore.NAME`."""
        return url.startswith(_SCHEME) and extract_plugin_type(url.removeprefix(_SCHEME)) == _TYPE

    def create_connector(self, context: ConnectorContext) -> "InfiniStoreConnector":
        """Create a connector. The store need not be up yet.

        Without `metadata`, the CPU backend's metadata is used.
        """
        plugin = context.plugin_name or context.url.removeprefix(_SCHEME)
        section = f"remote_storage_plugin.{plugin}."
        extra = (context.config.extra_config if context.config else None) or {}
        given = {name.removeprefix(section): value for name, value in extra.items() if name.startswith(section)}
        for name in ("module_path", "class_name", *(name for name in given if "." in name)):
            given.pop(name, None)  # LMCache's, or those of another instance: infinistore.NAME beside infinistore
        settings = StoreSettings.from_mapping(given, where=f"extra_config, {section}*", key_prefix=_PREFIX)
        return InfiniStoreConnector(settings, context)


@attrs.frozen
class _Description:
    """The descriptor of a block: what LMCache needs to create its memory object."""

    format: MemoryFormat
    shapes: list[torch.Size]
    dtypes: list[torch.dtype | None]

    @classmethod
    def of(cls, block: MemoryObj) -> "_Description":
        return cls(block.get_memory_format(), block.get_shapes(), block.get_dtypes())

    def pack(self) -> bytes:
        groups = [
            [None if dtype is None else str(dtype).removeprefix("torch."), list(shape)]
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        packed: bytes = msgpack.packb([self.format.name, groups])
        return packed

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> "_Description":
        """Raise `ValueError` for bytes that `pack` has not produced."""
        try:
            name, groups = msgpack.unpackb(packed)
            shapes = [torch.Size(shape) for _, shape in groups]
            dtypes = [None if dtype is None else getattr(torch, dtype) for dtype, _ in groups]
            described = cls(MemoryFormat[name], shapes, dtypes)
            if described.size_bytes <= 0:
                raise ValueError(f"a block of {in_units(described.size_bytes)}")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"a description that this version cannot read: {error}") from None
        return described

    @property
    def size_bytes(self) -> int:
        return sum(
            shape[0] if dtype is None else math.prod(shape) * dtype.itemsize
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )


class InfiniStoreConnector(RemoteConnector):  # type: ignore[misc, unused-ignore]
    """A `RemoteConnector` for one store.

    Its coroutines run in LMCache's loop and use an asyncio store. Calls from LMCache's
    own threads (lookups) use a blocking store, so that they do not wait for the loop.
    """

    def __init__(self, settings: StoreSettings, context: ConnectorContext) -> None:
        memory: LocalCPUBackend = context.local_cpu_backend
        # Both may be left out where the memory for blocks has been made for them.
        config = context.config or getattr(memory, "config", None)
        metadata = context.metadata or getattr(memory, "metadata", None)
        if config is None or metadata is None:
            raise ConfigError(
                "plugin://infinistore needs LMCache's metadata: give it to CreateConnector, with the configuration"
            )
        super().__init__(config, metadata)
        weights = identity_of_files(metadata.model_name, only=True)
        prefix = settings.prefix_of(metadata.model_name, weights, default=_PREFIX)
        self._blocks, self._descriptions = prefix + "kv/", prefix + "about/"
        self._settings, self._memory = settings, memory
        self._record = Record(_log, settings.url)
        self._usual: _Description | None = None
        self._held = HeldPrefixes(settings.hold_s)  # by look-up
        self._open_async: Callable[[], Any] = lambda: aio.open_store(settings.url, **settings.options)
        self._async_store: aio.AsyncStore | None = None
        self._async_exit = AsyncExitStack()
        with ExitStack() as stack:
            self._store = stack.enter_context(blocking.open_store(settings.url, **settings.options))
            self._exit = stack.pop_all()
        self._tag = "{%s}" if self._store.is_cluster else "%s"  # one node has a block and its description

    @property
    def counts(self) -> dict[str, int]:
        """Counts of blocks (`hits`, `misses`, `stored`, `not_stored`) and calls
        (`failed`).
        """
        return self._record.counts

    # Lookups.

    async def exists(self, key: CacheEngineKey) -> bool:
        """Return whether a block exists."""
        return await self._guarded("look-up", self._exists(key), False)

    async def _exists(self, key: CacheEngineKey) -> bool:
        return await (await self._opened()).exists(self._name(key))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Return whether a block exists. For threads."""
        return self._record.guarded("look-up", lambda: self._store.exists(self._name(key)), False)

    def support_batched_contains(self) -> bool:
        """Many keys are looked up at once."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Count the leading blocks that exist; read ahead those on disk only."""
        return self._record.guarded("look-up", lambda: self._match_blocking(keys), 0)

    def _match_blocking(self, keys: Sequence[CacheEngineKey]) -> int:
        match = self._store.match_prefix(map(self._name, keys))
        read_ahead_blocking(self._store, match, self._names(keys[:match]), self._record)
        return int(match)

    def support_batched_async_contains(self) -> bool:
        """Many keys are looked up at once."""
        return True

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Count the leading blocks that exist. Those that are on disk only come into
        memory from now on.

        With `pin`, hold them for the load with the same `lookup_id`.
        """
        return await self._guarded("look-up", self._match(lookup_id, keys, pin), 0)

    async def _match(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool) -> int:
        store = await self._opened()
        names = list(map(self._name, keys))
        match = await match_and_hold(store, names, self._settings.hold_s if pin else 0, self._record)
        if pin:
            self._held.add(lookup_id, match.hold)
        await read_ahead(store, match, self._names(keys[:match]), self._record)
        return int(match)

    def _names(self, keys: Iterable[CacheEngineKey]) -> Iterator[str]:
        """Yield the keys that these blocks have in the store, as a load reads them."""
        for key in keys:
            yield self._description_name(key)
            yield self._name(key)

    # Stores.

    def support_batched_put(self) -> bool:
        """Many blocks are stored at once."""
        return True

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Store one block."""
        await self.batched_put([key], [memory_obj])

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Store blocks from their memory objects; existing ones are not sent again."""
        stored = await self._guarded("store", self._put(keys, memory_objs), 0)
        self._record.count(stored=stored, not_stored=len(keys) - stored)

    async def _put(self, keys: Sequence[CacheEngineKey], blocks: Sequence[MemoryObj]) -> int:
        items: dict[str, Any] = {}
        for key, block in zip(keys, blocks, strict=True):
            # What is first in a batch is evicted last: a description outlives its
            # block.
            items[self._description_name(key)] = _Description.of(block).pack()
            items[self._name(key)] = block.byte_array
            self._note_usual(block)
        await (await self._opened()).put_many(items, replace=False, ttl_s=self._settings.ttl_s)
        return len(keys)

    # Loads.

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Load one block."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Many blocks are loaded at once."""
        return True

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Load blocks into new memory objects; None for a missing or invalid block."""
        blocks = await self._guarded("load", self._get(keys), [None] * len(keys))
        hits = sum(block is not None for block in blocks)
        self._record.count(hits=hits, misses=len(blocks) - hits)
        return blocks

    def support_batched_get_non_blocking(self) -> bool:
        """Many blocks are loaded at once."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:
        """Load the leading blocks that exist, and release the hold of the lookup."""
        try:
            blocks = await self.batched_get(keys)
        finally:
            hold = self._held.pop(lookup_id)
            if hold:
                await self._guarded("release", self._release(hold), False)
        leading = blocks.index(None) if None in blocks else len(blocks)
        _drop(blocks[leading:])
        return blocks[:leading]

    async def _release(self, hold: str) -> bool:
        return await (await self._opened()).release_hold(hold)

    async def _get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        store = await self._opened()
        blocks, others = await self._get_usual(store, keys)
        try:
            if others:
                described = await self._get_described(store, [keys[index] for index in others])
                for index, block in zip(others, described, strict=True):
                    blocks[index] = block
            loaded = self._names(key for key, block in zip(keys, blocks, strict=True) if block is not None)
            await pin_loaded(store, loaded, self._settings.pin_s, self._record)
        except BaseException:
            _drop(blocks)
            raise
        return blocks

    async def _get_usual(
        self, store: aio.AsyncStore, keys: Sequence[CacheEngineKey]
    ) -> tuple[list[MemoryObj | None], list[int]]:
        """Load blocks with the usual descriptor, and their descriptors, in one go.

        Returns them, and the indices of existing blocks with other descriptors.
        """
        usual = self._usual
        blocks = [] if usual is None else [self._allocate(usual) for _ in keys]
        if usual is None or None in blocks:
            _drop(blocks)
            return [None] * len(keys), list(range(len(keys)))
        packed = usual.pack()
        read = [memoryview(bytearray(_DESCRIPTION_BYTES)) for _ in keys]
        items: list[tuple[str, memoryview]] = []
        for key, description, block in zip(keys, read, blocks, strict=True):
            assert block is not None
            items += [(self._description_name(key), description), (self._name(key), memoryview(block.byte_array))]
        others: list[int] = []
        try:
            sizes = await store.get_many_into(items)
        except (BufferTooSmall, ChecksumMismatch):
            _drop(blocks)
            return [None] * len(keys), list(range(len(keys)))
        except BaseException:  # failed or cancelled: the store writes to these no more
            _drop(blocks)
            raise
        for index, block in enumerate(blocks):
            described, size = sizes[2 * index], sizes[2 * index + 1]
            assert block is not None
            if described != len(packed) or read[index][:described] != packed or size != block.get_size():
                block.ref_count_down()
                blocks[index] = None
                if described is not None:
                    others.append(index)
        return blocks, others

    async def _get_described(self, store: aio.AsyncStore, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Load blocks of any kind: first their descriptors, then the blocks."""
        packed = await store.get_many(map(self._description_name, keys))
        blocks: list[MemoryObj | None] = [None] * len(keys)
        bad: list[CacheEngineKey] = []
        try:
            for index, description in enumerate(packed):
                if description is None:
                    continue
                try:
                    blocks[index] = self._allocate(_Description.unpack(description))
                except ValueError as error:
                    self._record.bad_block(error)
                    bad.append(keys[index])
            wanted = [(index, block) for index, block in enumerate(blocks) if block is not None]
            items = [(self._name(keys[index]), memoryview(block.byte_array)) for index, block in wanted]
            hits = await read_exactly(store, items, self._record)
            for (index, block), is_hit in zip(wanted, hits, strict=True):
                if is_hit:
                    self._note_usual(block)
                else:
                    blocks[index] = None
                    block.ref_count_down()
                if is_hit is False:  # unlike one that is missing, which may only be late
                    bad.append(keys[index])
            if bad:  # so that the next store of these blocks is not skipped
                with suppress(DiskFailed):  # which may bring them back when a disk is opened again
                    await store.delete(self._names(bad))
        except BaseException:  # failed or cancelled: the store writes to these no more
            _drop(blocks)
            raise
        return blocks

    def _note_usual(self, block: MemoryObj) -> None:
        """Remember the largest: most blocks are full chunks with equal descriptors."""
        described = _Description.of(block)
        larger = self._usual is None or described.size_bytes > self._usual.size_bytes
        if larger and None not in described.dtypes:
            self._usual = described

    def _allocate(self, described: _Description) -> MemoryObj | None:
        # Without waiting: what would free memory runs in the same loop.
        return self._memory.allocate(described.shapes, described.dtypes, described.format, busy_loop=False)

    # The rest.

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a block. Returns whether it existed."""
        return self._record.guarded("removal", lambda: self._store.delete(self._names([key])) > 0, False)

    async def list(self) -> list[str]:
        """List the keys of all blocks of every model.

        Scans every key of the store: not for hot paths.
        """
        return await self._guarded("list", self._list(), [])

    async def _list(self) -> builtins.list[str]:
        store = await self._opened()
        found: list[str] = []
        while page := await store.keys(self._blocks, after=found[-1] if found else ""):
            found += page
        return [name.removeprefix(self._blocks).strip("{}") for name in found]

    async def close(self) -> None:
        """Release all holds and close the stores."""
        for hold in self._held.pop_all():
            await self._guarded("release", self._release(hold), False)
        self._exit.close()
        await self._async_exit.aclose()

    def _name(self, key: CacheEngineKey) -> str:
        return f"{self._blocks}{self._tag % key.to_string()}"

    def _description_name(self, key: CacheEngineKey) -> str:
        return f"{self._descriptions}{self._tag % key.to_string()}"

    async def _opened(self) -> aio.AsyncStore:
        if self._async_store is None:  # being lazy, it opens without giving another task a turn
            store: aio.AsyncStore = await self._async_exit.enter_async_context(self._open_async())
            self._async_store = store
            memory = getattr(getattr(self._memory, "memory_allocator", None), "buffer", None)
            if memory is not None:  # so that RDMA moves blocks without copying them
                await self._guarded("registration", self._register(store, memory), None)
        return self._async_store

    async def _register(self, store: aio.AsyncStore, memory: torch.Tensor) -> None:
        self._async_exit.callback((await store.register(memory)).close)

    async def _guarded(self, call: str, work: Awaitable[_T], otherwise: _T) -> _T:
        with self._record.trying(call, Exception):
            return await work
        return otherwise


def _drop(blocks: Iterable[MemoryObj | None]) -> None:
    for block in blocks:
        if block is not None:
            block.ref_count_down()
