"""LMCache's KV cache in a store: a remote storage plugin, for LMCache 0.5.6.

    remote_storage_plugins: ["infinistore"]
    extra_config:
      remote_storage_plugin.infinistore.module_path: infinistore.integrations.lmcache
      remote_storage_plugin.infinistore.class_name: InfiniStoreConnectorAdapter
      remote_storage_plugin.infinistore.url: infinistore://127.0.0.1:22345

Blocks go straight from LMCache's memory objects into the store and back, in batches. Each has a short description
beside it: memory format, and dtype and shape of each group of layers. What does not come back as it was described is a
miss. Nothing is raised into the engine: a store that is lost, slow, full or of another kind costs hits, is counted, and
told to the log once.

LMCache's own `infinistore://` connector needs none of this; `docs/lmcache.md` compares the two. Its multi-process mode
has `infinistore.integrations.lmcache_l2`.
"""

import builtins
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any, TypeVar

import attrs
import msgpack
import torch
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from infinistore import aio, blocking
from infinistore.errors import BufferTooSmall, ChecksumMismatch, LimitExceeded
from infinistore.integrations.exact_reads import Outcome, read_exactly_async
from infinistore.integrations.held_prefixes import HeldPrefixes
from infinistore.integrations.record import Record
from infinistore.integrations.store_settings import StoreSettings

__all__ = ["InfiniStoreConnector", "InfiniStoreConnectorAdapter"]

_T = TypeVar("_T")
_log = init_logger(__name__)
_DESCRIPTION_BYTES = 1024
"""Room for a description: one has some 60 bytes, and 20 more for each further group of layers."""
_SCHEME = "plugin://"
_TYPE = "infinistore"


class InfiniStoreConnectorAdapter(ConnectorAdapter):  # type: ignore[misc, unused-ignore]
    """Makes the connector for `infinistore`, and for `infinistore.NAME` where there are several, from `extra_config`.

    Raises:
        ConfigError: the configuration names no store, or has a setting that is none.
    """

    def __init__(self) -> None:
        super().__init__(_SCHEME + _TYPE)

    def can_parse(self, url: str) -> bool:
        """Tell whether a URL is ours: `plugin://infinistore` or `plugin://infinistore.NAME`."""
        return url.startswith(_SCHEME) and extract_plugin_type(url.removeprefix(_SCHEME)) == _TYPE

    def create_connector(self, context: ConnectorContext) -> "InfiniStoreConnector":
        """Make a connector. The store need not be there yet."""
        plugin = context.plugin_name or context.url.removeprefix(_SCHEME)
        section = f"remote_storage_plugin.{plugin}."
        extra = (context.config.extra_config if context.config else None) or {}
        given = {name.removeprefix(section): value for name, value in extra.items() if name.startswith(section)}
        for name in ("module_path", "class_name", *(name for name in given if "." in name)):
            given.pop(name, None)  # LMCache's, or those of another instance: infinistore.NAME beside infinistore
        settings = StoreSettings.from_mapping(given, where=f"extra_config, {section}*", key_prefix="lmcache/")
        return InfiniStoreConnector(settings, context)


@attrs.frozen
class _Description:
    """What a block is: what LMCache needs to make a memory object for it."""

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
        """Raise `ValueError` for what `pack` has not made."""
        try:
            name, groups = msgpack.unpackb(packed)
            shapes = [torch.Size(shape) for _, shape in groups]
            dtypes = [None if dtype is None else getattr(torch, dtype) for dtype, _ in groups]
            described = cls(MemoryFormat[name], shapes, dtypes)
            if described.size_bytes <= 0:
                raise ValueError(f"a block of {described.size_bytes} bytes")
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
    """A `RemoteConnector` over one store.

    Its coroutines run in LMCache's loop, over an asyncio store; what LMCache calls from its own threads (look-ups) goes
    over a blocking one, past whatever the loop is busy with.
    """

    def __init__(self, settings: StoreSettings, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        self._blocks = settings.key_prefix + "kv/"
        self._descriptions = settings.key_prefix + "about/"
        self._hold_s = settings.hold_s
        self._memory: LocalCPUBackend = context.local_cpu_backend
        self._record = Record(_log, settings.url)
        self._usual: _Description | None = None
        self._held = HeldPrefixes(settings.hold_s)  # by look-up
        self._open_async: Callable[[], Any] = lambda: aio.open_store(settings.url, **settings.options)
        self._async_store: aio.AsyncStore | None = None
        self._async_exit = AsyncExitStack()
        with ExitStack() as stack:
            self._store = stack.enter_context(blocking.open_store(settings.url, **settings.options))
            self._exit = stack.pop_all()

    @property
    def counts(self) -> dict[str, int]:
        """What was counted: blocks as `hits`, `misses`, `stored` and `not_stored`, and calls that `failed`."""
        return self._record.counts

    # Look-ups.

    async def exists(self, key: CacheEngineKey) -> bool:
        """Tell whether a block is there."""
        return await self._guarded("look-up", self._exists(key), False)

    async def _exists(self, key: CacheEngineKey) -> bool:
        return await (await self._opened()).exists(self._name(key))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Tell whether a block is there, to a thread."""
        return self._guarded_sync("look-up", lambda: self._store.exists(self._name(key)), False)

    def support_batched_contains(self) -> bool:
        """Many keys are looked up at once."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Count the leading blocks that are there."""
        return self._guarded_sync("look-up", lambda: int(self._store.match_prefix(map(self._name, keys))), 0)

    def support_batched_async_contains(self) -> bool:
        """Many keys are looked up at once."""
        return True

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Count the leading blocks that are there; with `pin`, keep them for the load of the same `lookup_id`."""
        return await self._guarded("look-up", self._match(lookup_id, keys, pin), 0)

    async def _match(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool) -> int:
        store = await self._opened()
        names = list(map(self._name, keys))
        if not pin:
            return int(await store.match_prefix(names))
        try:
            match = await store.match_prefix(names, hold_s=self._hold_s)
        except LimitExceeded:  # too much is held already; most of it will be there all the same
            return int(await store.match_prefix(names))
        self._held.add(lookup_id, match.hold)
        return int(match)

    # Stores.

    def support_batched_put(self) -> bool:
        """Many blocks are stored at once."""
        return True

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Store one block."""
        await self.batched_put([key], [memory_obj])

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Store blocks, straight from their memory objects; those that are there already are not moved again."""
        stored = await self._guarded("store", self._put(keys, memory_objs), 0)
        self._record.count(stored=stored, not_stored=len(keys) - stored)

    async def _put(self, keys: Sequence[CacheEngineKey], blocks: Sequence[MemoryObj]) -> int:
        items: dict[str, Any] = {}
        for key, block in zip(keys, blocks, strict=True):
            # What is first in a batch is evicted last: a description outlives its block.
            items[self._description_name(key)] = _Description.of(block).pack()
            items[self._name(key)] = block.byte_array
            self._note_usual(block)
        await (await self._opened()).put_many(items, replace=False)
        return len(keys)

    # Loads.

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Load one block."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Many blocks are loaded at once."""
        return True

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Load blocks, straight into new memory objects; None for each that is not there or not what it should be."""
        blocks = await self._guarded("load", self._get(keys), [None] * len(keys))
        hits = sum(block is not None for block in blocks)
        self._record.count(hits=hits, misses=len(blocks) - hits)
        return blocks

    def support_batched_get_non_blocking(self) -> bool:
        """Many blocks are loaded at once."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:
        """Load the leading blocks that are there, and let go of what the look-up kept for this."""
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
        except BaseException:
            _drop(blocks)
            raise
        return blocks

    async def _get_usual(
        self, store: aio.AsyncStore, keys: Sequence[CacheEngineKey]
    ) -> tuple[list[MemoryObj | None], list[int]]:
        """Load blocks that are described like most, with their descriptions, in one round trip.

        Return them, and the places of those that are there and described otherwise.
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
        """Load blocks of any kind: first their descriptions, then them."""
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
            outcomes = await read_exactly_async(store, items, self._record)
            for (index, block), outcome in zip(wanted, outcomes, strict=True):
                if outcome is Outcome.HIT:
                    self._note_usual(block)
                else:
                    blocks[index] = None
                    block.ref_count_down()
                if outcome is Outcome.BAD:
                    bad.append(keys[index])
            if bad:  # so that the next store of these blocks is not skipped
                await store.delete([*map(self._name, bad), *map(self._description_name, bad)])
        except BaseException:  # failed or cancelled: the store writes to these no more
            _drop(blocks)
            raise
        return blocks

    def _note_usual(self, block: MemoryObj) -> None:
        """Most blocks are full chunks, all alike: the largest. Compressed blocks are all different."""
        described = _Description.of(block)
        larger = self._usual is None or described.size_bytes > self._usual.size_bytes
        if larger and None not in described.dtypes:
            self._usual = described

    def _allocate(self, described: _Description) -> MemoryObj | None:
        # Without waiting: what would free memory runs in the same loop.
        return self._memory.allocate(described.shapes, described.dtypes, described.format, busy_loop=False)

    # The rest.

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a block; tell whether it was there."""
        names = [self._name(key), self._description_name(key)]
        return self._guarded_sync("removal", lambda: self._store.delete(names) > 0, False)

    async def list(self) -> list[str]:
        """List the keys of all blocks, of every model. Looks at every key of the store: for people, not for hot
        paths."""
        return await self._guarded("list", self._list(), [])

    async def _list(self) -> builtins.list[str]:
        store = await self._opened()
        found: list[str] = []
        while page := await store.keys(self._blocks, after=found[-1] if found else ""):
            found += page
        return [name.removeprefix(self._blocks) for name in found]

    async def close(self) -> None:
        """Let go of the store, and of what look-ups found there."""
        for hold in self._held.pop_all():
            await self._guarded("release", self._release(hold), False)
        self._exit.close()
        await self._async_exit.aclose()

    def _name(self, key: CacheEngineKey) -> str:
        name: str = key.to_string()
        return self._blocks + name

    def _description_name(self, key: CacheEngineKey) -> str:
        name: str = key.to_string()
        return self._descriptions + name

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
        try:
            result = await work
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without the store
            self._record.failed(call, error)
            return otherwise
        self._record.succeeded(call)
        return result

    def _guarded_sync(self, call: str, work: Callable[[], _T], otherwise: _T) -> _T:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without the store
            self._record.failed(call, error)
            return otherwise
        self._record.succeeded(call)
        return result


def _drop(blocks: Iterable[MemoryObj | None]) -> None:
    for block in blocks:
        if block is not None:
            block.ref_count_down()
