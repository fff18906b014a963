"""SGLang's HiCache with a store as its third level, by the dynamic backend and its v1
interface (SGLang 0.5.23).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "infinistore",
        "module_path": "infinistore.integrations.sglang", "class_name": "InfiniStoreHiCache", "interface_v1": 1,
        "url": "infinistore://127.0.0.1:22345"}'

Pages move directly between SGLang's host pool and the store. Each part of a page in the
pool (keys and values, or the single latent of MLA) is a block. A block's key contains
model, dtype, layout, parallel rank and the page's hash, so a hit can be used as it is.
Ranks of an MLA model hold the same data and share it.

An exception, or None instead of a list, would end SGLang's prefetch thread. Failures
therefore raise nothing: they are misses, or pages that are not stored. They are
counted, and logged once.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from infinistore import blocking
from infinistore.errors import ConfigError, LimitExceeded
from infinistore.integrations.internal.blocking_exact_reads import read_exactly
from infinistore.integrations.internal.blocking_read_ahead import read_ahead
from infinistore.integrations.internal.held_prefixes import HeldPrefixes
from infinistore.integrations.internal.prefix_keys import fingerprint
from infinistore.integrations.internal.read_outcomes import Outcome
from infinistore.integrations.internal.record import Record
from infinistore.integrations.internal.store_settings import StoreSettings

__all__ = ["InfiniStoreHiCache"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")
"""Keys of the extra configuration that SGLang reads and does not remove."""
_GEOMETRY = ("layout", "dtype", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
"""Attributes of host pools that describe a page's layout; each kind has some."""


class InfiniStoreHiCache(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """A store as HiCache's storage. SGLang calls it from its own threads.

    Raises:
        ConfigError: the configuration names no store or has an unknown setting, or the
            host pool cannot be read in place.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._in_place = bool(extra.get("interface_v1", 0))
        given = {name: value for name, value in extra.items() if name not in _SGLANGS}
        settings = StoreSettings.from_mapping(given, where="hicache-storage-backend-extra-config", key_prefix="sglang/")
        self._settings = settings
        self._config = storage_config
        self._record = Record(_log, settings.url)
        self._held = HeldPrefixes(settings.hold_s)  # by the last page: the first may be left out
        self._set_keys({}, ["page"])
        with ExitStack() as stack:
            self._store = stack.enter_context(blocking.open_store(settings.url, **settings.options))
            self._exit = stack.pop_all()

    @property
    def counts(self) -> dict[str, int]:
        """Counts of pages (`hits`, `misses`, `stored`, `not_stored`) and calls
        (`failed`).
        """
        return self._record.counts

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn the location and layout of pages. SGLang calls this first, once."""
        super().register_mem_pool_host(mem_pool_host)
        parts = ["page"]
        if self._in_place:
            page = torch.arange(self._page_tokens(mem_pool_host))
            try:
                pointers, _ = _flat(*mem_pool_host.get_page_buffer_meta(page))
            except (AttributeError, NotImplementedError, ValueError) as error:
                raise ConfigError(
                    f"pages of {type(mem_pool_host).__name__} cannot be read in place: {error}; choose"
                    " --hicache-mem-layout page_first, or leave interface_v1 out"
                ) from error
            parts = [str(part) for part in range(len(pointers))]
            self._guarded("registration", lambda: self._register(mem_pool_host), None)
        self._set_keys({name: getattr(mem_pool_host, name, None) for name in _GEOMETRY}, parts)

    def _register(self, pool: Any) -> None:
        """Register the pool's memory, so that RDMA moves pages without a copy."""
        for name in ("kv_buffer", "k_buffer", "v_buffer"):
            buffer = getattr(pool, name, None)
            if isinstance(buffer, torch.Tensor) and buffer.is_contiguous():
                self._exit.callback(self._store.register(buffer).close)

    def _set_keys(self, geometry: Mapping[str, Any], parts: Sequence[str]) -> None:
        config = self._config
        shard = {"pp": (config.pp_rank, config.pp_size), "cp": (config.attn_cp_rank, config.attn_cp_size)}
        shard["dcp"] = (config.dcp_rank, config.dcp_size)
        if not config.is_mla_model:  # whose ranks hold the same
            shard["tp"] = (config.tp_rank, config.tp_size)
        facts: dict[str, Any] = {
            "parts": len(parts),
            "page_tokens": self._page_tokens(getattr(self, "mem_pool_host", None)),
        }
        facts |= {"in_place": self._in_place, "mla": config.is_mla_model, **shard, **geometry}
        self._prefix = f"{self._settings.key_prefix}{config.model_name}/{fingerprint(facts)}/"
        self._parts = list(parts)

    def _page_tokens(self, pool: Any) -> int:
        return int(self._config.logical_page_size or getattr(pool, "page_size", 0))

    def _names(self, keys: Sequence[str]) -> list[str]:
        if self._store.is_cluster:  # one node has all parts of a page
            return [f"{self._prefix}{{{key}}}/{part}" for key in keys for part in self._parts]
        return [f"{self._prefix}{key}/{part}" for key in keys for part in self._parts]

    # The v1 interface: pages are read and written in place.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Count the leading pages that exist, and hold them until the last is loaded.

        Those that are on disk only come into memory from now on.
        """
        return self._guarded("look-up", lambda: self._match(keys), 0)

    def _match(self, keys: Sequence[str]) -> int:
        if not keys:
            return 0
        names = self._names(keys)
        try:
            match = self._store.match_prefix(names, hold_s=self._settings.hold_s)
        except LimitExceeded:  # too much is held already; most of it will be there all the same
            match = self._store.match_prefix(names)
        pages = match // len(self._parts)
        if pages:
            self._held.add(keys[pages - 1], match.hold)
            read_ahead(self._store, match, names[: pages * len(self._parts)], self._record)
        else:  # a part of a page, which is of no use
            self._release([match.hold])
        return pages

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the host pool at these indices. Returns success for each
        page.
        """
        loaded = self._guarded("load", lambda: self._load(keys, host_indices), [False] * len(keys))
        self._record.count(hits=sum(loaded), misses=len(loaded) - sum(loaded))
        return loaded

    def _load(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        try:
            return self._read(keys, self._buffers(keys, host_indices))
        finally:
            self._release(self._held.pop_each(keys))

    def _release(self, holds: Sequence[str]) -> None:
        for hold in filter(None, holds):
            self._guarded("release", partial(self._store.release_hold, hold), False)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool at these indices. Returns success for
        each page.
        """
        return self._guarded_write(keys, lambda: self._buffers(keys, host_indices))

    def _buffers(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[memoryview]:
        pointers, sizes = _flat(*self.mem_pool_host.get_page_buffer_meta(host_indices))
        if len(pointers) != len(keys) * len(self._parts):
            raise ValueError(f"the host pool has {len(pointers)} buffers for {len(keys)} pages of {len(self._parts)}")
        return list(map(_memory, pointers, sizes))

    # What both interfaces share.

    def _read(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        names = self._names(keys)
        outcomes = read_exactly(self._store, list(zip(names, buffers, strict=True)), self._record)
        bad = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.BAD]
        if bad:  # so that the next store of these pages is not skipped
            self._store.delete(bad)
        return [
            all(outcome is Outcome.HIT for outcome in outcomes[first : first + len(self._parts)])
            for first in range(0, len(outcomes), len(self._parts))
        ]

    def _guarded_write(self, keys: Sequence[str], buffers: Callable[[], Sequence[Any]]) -> list[bool]:
        def write() -> bool:
            self._store.put_many(dict(zip(self._names(keys), buffers(), strict=True)), replace=False)
            return True

        stored = self._guarded("store", write, False) if keys else True
        self._record.count(stored=len(keys) if stored else 0, not_stored=0 if stored else len(keys))
        return [stored] * len(keys)

    def _guarded(self, call: str, work: Callable[[], _T], otherwise: _T) -> _T:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, SGLang goes on without the store
            self._record.failed(call, error)
            return otherwise
        self._record.succeeded(call)
        return result

    # The older interface: each page is a separate tensor.

    def exists(self, key: str) -> bool:
        """Return whether a page exists."""
        return self._guarded("look-up", lambda: all(self._store.exists_many(self._names([key]))), False)

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load a page into a tensor of its size, and return it; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors of their size, and return them; None for each
        miss.
        """
        targets = list(target_locations or [])
        if self._in_place or len(targets) != len(keys) or any(target is None for target in targets):
            self._record.failed("load", ValueError("give a tensor for each page, and leave interface_v1 out"))
            return [None] * len(keys)
        loaded = self._guarded("load", lambda: self._read(keys, list(map(_bytes, targets))), [False] * len(keys))
        self._record.count(hits=sum(loaded), misses=len(loaded) - sum(loaded))
        return [target if there else None for target, there in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page. Returns success."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages. Returns whether all of them were stored."""
        pages = list(values or [])
        if self._in_place or len(pages) != len(keys):
            self._record.failed("store", ValueError("give a tensor for each page, and leave interface_v1 out"))
            return False
        return all(self._guarded_write(keys, lambda: list(map(_bytes, pages))))

    # The rest.

    def clear(self) -> None:
        """Delete the pages of this model and rank."""
        self._guarded("clear", self._delete_all, None)

    def _delete_all(self) -> None:
        while names := self._store.keys(self._prefix):
            self._store.delete(names)

    def close(self) -> None:
        """Release all holds and close the store."""
        self._release(self._held.pop_all())
        self._exit.close()


def _flat(pointers: Sequence[Any], sizes: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Flatten: some pools return a list of pieces for each part of a page."""
    if not any(isinstance(pointer, list | tuple) for pointer in pointers):
        return list(pointers), list(sizes)
    return [piece for part in pointers for piece in part], [size for part in sizes for size in part]


@lru_cache(maxsize=256)
def _array_type(size: int) -> Any:  # ctypes makes a new type each time, and keeps it
    return ctypes.c_ubyte * size


def _memory(pointer: int, size: int) -> memoryview:
    return memoryview(_array_type(size).from_address(pointer)).cast("B")


def _bytes(tensor: Any) -> memoryview:
    if not tensor.is_contiguous():
        raise ValueError("a page that is not contiguous cannot be moved as it is")
    view: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return view
