"""SGLang's HiCache with a store as its third level, by the dynamic backend and its v1
and v2 interfaces (SGLang 0.5.23).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "infinistore",
        "module_path": "infinistore.integrations.sglang", "class_name": "InfiniStoreHiCache", "interface_v1": 1,
        "url": "infinistore://127.0.0.1:22345"}'

Pages move directly between SGLang's host pool and the store. Most pools say where the
parts of a page lie in memory; these are read and written in place. Others copy a whole
page, by an index, from and to a flat tensor. Each part of a page in the pool (keys and
values, or the single latent of MLA) is a block. A block's key contains model, weights,
dtype, layout, parallel rank and the page's hash, so a hit can be used as it is.
Ranks of an MLA model hold the same data and share it.

Hybrid models have further pools, of sliding windows or of states, which go by the v2
interface: a prefix is of use if each pool has what it needs at the prefix's end.

An exception, or None instead of a list, would end SGLang's prefetch thread. Failures
therefore raise nothing: they are misses, or pages that are not stored. They are
counted, and logged once. `clear` alone says that it has failed.
"""

import ctypes
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch

from infinistore import blocking
from infinistore.errors import ConfigError
from infinistore.integrations.internal.blocking_store_calls import match_and_hold, pin_loaded, read_ahead, read_exactly
from infinistore.integrations.internal.held_prefixes import HeldPrefixes
from infinistore.integrations.internal.prefix_keys import fingerprint
from infinistore.integrations.internal.record import Record
from infinistore.integrations.internal.resets import delete_all
from infinistore.integrations.internal.settings import StoreSettings
from infinistore.integrations.internal.tested_release import tested_with
from infinistore.integrations.internal.weights import identity_of_files

with tested_with("SGLang", "sglang", "0.5.23"):
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.runtime_context import get_server_args

__all__ = ["InfiniStoreHiCache"]


_KV_GEOMETRY = (
    *("layout", "dtype", "layer_num", "head_num", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim"),
)
_GEOMETRY = (
    *_KV_GEOMETRY,
    *("num_mamba_layers", "temporal_dtype", "temporal_state_shape", "conv_dtype", "conv_state_shapes"),
)
"""Attributes of host pools that describe a page's layout; each kind has some."""


class HostPages:
    """Where a pool's pages lie. `reason` says why they are not read in place."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        self.reason = ""
        self.sizes: list[int] = []
        try:
            _, self.sizes = _flat(*pool.get_page_buffer_meta(torch.arange(self.page_tokens)))
        except (AttributeError, NotImplementedError, ValueError) as error:
            self.reason = str(error)

    @property
    def parts(self) -> list[str]:
        """The names of a page's parts."""
        return ["page"] if self.reason else [str(part) for part in range(len(self.sizes))]

    def tensors(self) -> list[torch.Tensor]:
        """The memory of the pool, as far as it is contiguous, for RDMA."""
        names = ("kv_buffer", "k_buffer", "v_buffer", "temporal_buffer", "conv_buffer")
        found = [getattr(self.pool, name, None) for name in names]
        flat = [each for one in found for each in (one if isinstance(one, list | tuple) else [one])]
        return [each for each in flat if isinstance(each, torch.Tensor) and each.is_contiguous() and each.nbytes]

    def sources(self, keys: Sequence[str], indices: torch.Tensor) -> list[memoryview]:
        """Return the parts of pages, to be stored; ValueError if `indices`, of tokens,
        do not fit the keys.
        """
        if not self.reason:
            return self._in_place(keys, indices)
        return [bytes_of(self.pool.get_data_page(index, flat=True)) for index in self._first_tokens(keys, indices)]

    def load(
        self, keys: Sequence[str], indices: torch.Tensor, read: Callable[[list[memoryview]], list[bool]]
    ) -> list[bool]:
        """Load pages by `read`, which fills buffers and returns which pages are
        complete; ValueError as `sources`.
        """
        if not self.reason:
            return read(self._in_place(keys, indices))
        first_tokens = self._first_tokens(keys, indices)
        pages = [self.pool.get_dummy_flat_data_page() for _ in keys]
        loaded = read(list(map(bytes_of, pages)))
        for page, index, is_loaded in zip(pages, first_tokens, loaded, strict=True):
            if is_loaded:
                self.pool.set_from_flat_data_page(index, page)
        return loaded

    def _in_place(self, keys: Sequence[str], indices: torch.Tensor) -> list[memoryview]:
        pointers, sizes = _flat(*self.pool.get_page_buffer_meta(indices)) if len(indices) else ([], [])
        if len(pointers) != len(keys) * len(self.sizes):
            raise ValueError(f"the host pool has {len(pointers)} buffers for {len(keys)} pages of {len(self.sizes)}")
        return list(map(_memory, pointers, sizes))

    def _first_tokens(self, keys: Sequence[str], indices: torch.Tensor) -> list[int]:
        if len(indices) != len(keys) * self.page_tokens:
            raise ValueError(f"{len(indices)} indices for {len(keys)} pages of {self.page_tokens} tokens")
        first: list[int] = indices[:: self.page_tokens].tolist()
        return first


def bytes_of(tensor: Any) -> memoryview:
    """Return the memory of a tensor; ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("a page that is not contiguous cannot be moved as it is")
    view: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


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


_FROM_FILES: Final = {
    *("auto", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "gguf", "bitsandbytes"),
    *("layered", "sharded_state", "presharded", "runai_streamer"),
}
"""The load formats with which SGLang reads the files of a model's path."""
_SETTINGS: Final = (
    *("dtype", "quantization", "quantization_param_path", "quantize_and_serve", "modelopt_quant", "rl_quant_profile"),
    *("kv_cache_dtype", "mamba_ssm_dtype", "qsa_indexer_dtype", "json_model_override_args", "context_length"),
    *("mm_process_config", "language_model_only", "model_impl", "speculative_algorithm", "speculative_num_steps"),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
)
"""The arguments that change what a model computes, or what is kept of it."""


def settings_of_engine() -> dict[str, object]:
    """Return the arguments of this process's engine that change values; nothing if
    SGLang has not told them.
    """
    engine = _engine()
    return {} if engine is None else {name: getattr(engine, name, None) for name in _SETTINGS}


def weights_of_engine() -> str:
    """Return what stands for the weights of this process's engine: those of the model,
    of a draft model, and of the adapters that it starts with, whose numbers are made of
    their names and paths. Nothing if one of them is not known.
    """
    engine = _engine()
    if engine is None or getattr(engine, "custom_weight_loader", None):
        return ""
    found = [
        identity_of_files(where, revision=revision, cache=engine.download_dir) if load_format in _FROM_FILES else ""
        for where, revision, load_format in _sources(engine)
    ]
    return " ".join(found) if all(found) else ""


def _sources(engine: Any) -> Iterator[tuple[str, str | None, str]]:
    """Yield path, revision and load format of all that is loaded."""
    yield engine.model_path, engine.revision, engine.load_format
    draft = engine.speculative_draft_model_path
    if draft and draft != engine.model_path:
        load_format = engine.speculative_draft_load_format or engine.load_format
        yield draft, engine.speculative_draft_model_revision, load_format
    for adapter in engine.lora_paths or ():
        yield getattr(adapter, "lora_path", adapter), None, "auto"


def _engine() -> Any:
    try:
        return get_server_args()
    except ValueError:  # as of a cache without an engine
        return None


_log = logging.getLogger(__name__)
_PREFIX = "sglang/"
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")
"""Keys of the extra configuration that SGLang reads and does not remove."""


class _Pool(NamedTuple):
    """A host pool: where its pages lie, if known, and how their parts are named."""

    prefix: str
    parts: Sequence[str]
    pages: HostPages | None
    tag: str  # "{}" in a cluster, so that one node has all parts of a page

    def names(self, keys: Sequence[str]) -> list[str]:
        opening, closing = self.tag[:1], self.tag[1:]
        return [f"{self.prefix}{opening}{key}{closing}/{part}" for key in keys for part in self.parts]


class InfiniStoreHiCache(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """A store as HiCache's storage. SGLang calls it from its own threads.

    Raises:
        ConfigError: the configuration names no store or has an unknown setting, the
            host pool cannot be read in place, or it is not known what the weights are.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._in_place = bool(extra.get("interface_v1", 0))
        given = {name: value for name, value in extra.items() if name not in _SGLANGS}
        settings = StoreSettings.from_mapping(given, where="hicache-storage-backend-extra-config", key_prefix=_PREFIX)
        self._settings = settings
        self._config = storage_config
        self._engine = {"weights": weights_of_engine(), "settings": settings_of_engine()}
        settings.prefix_of(str(storage_config.model_name), str(self._engine["weights"]), default=_PREFIX)
        self._record = Record(_log, settings.url)
        self._held = HeldPrefixes(settings.hold_s)  # by the last page: the first may be left out
        with ExitStack() as stack:
            self._store = stack.enter_context(blocking.open_store(settings.url, **settings.options))
            self._exit = stack.pop_all()
        self._kv = self._named(str(PoolName.KV), None, {}, int(self._config.logical_page_size or 0))
        self._others: dict[str, _Pool] = {}  # by str(name): a PoolName equals its text, and has another hash

    @property
    def counts(self) -> dict[str, int]:
        """Counts of pages (`hits`, `misses`, `stored`, `not_stored`) and calls
        (`failed`).
        """
        return self._record.counts

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn the location and layout of pages. SGLang calls this first, once."""
        super().register_mem_pool_host(mem_pool_host)
        page_tokens = int(self._config.logical_page_size or getattr(mem_pool_host, "page_size", 0))
        geometry = _geometry(mem_pool_host, _KV_GEOMETRY)
        if not self._in_place:
            self._kv = self._named(str(PoolName.KV), None, geometry, page_tokens)
            return
        pages = HostPages(mem_pool_host)
        if pages.reason:
            raise ConfigError(
                f"pages of {type(mem_pool_host).__name__} cannot be read in place: {pages.reason}; choose"
                " --hicache-mem-layout page_first, or leave interface_v1 out"
            )
        self._register(pages)
        self._kv = self._named(str(PoolName.KV), pages, geometry, page_tokens)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Learn of a pool of a hybrid model, after `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool is getattr(self, "mem_pool_host", None) and self._kv.pages is not None:
            self._others[str(host_pool_name)] = self._kv
            return
        pages, name = HostPages(host_pool), str(host_pool_name)
        self._register(pages)
        geometry = _geometry(host_pool, _GEOMETRY)
        facts = {**geometry, "kind": type(host_pool).__name__, "sizes": pages.sizes, "pool": name}
        self._others[name] = self._named(name, pages, facts, pages.page_tokens)

    def _register(self, pages: HostPages) -> None:
        """Register the pool's memory, so that RDMA moves pages without a copy."""
        with self._record.trying("registration", Exception):
            for memory in pages.tensors():
                self._exit.callback(self._store.register(memory).close)

    def _named(self, name: str, pages: HostPages | None, geometry: Mapping[str, Any], page_tokens: int) -> _Pool:
        parts = ["page"] if pages is None else pages.parts
        config = self._config
        shard = {"pp": (config.pp_rank, config.pp_size), "cp": (config.attn_cp_rank, config.attn_cp_size)}
        shard["dcp"] = (config.dcp_rank, config.dcp_size)
        # Ranks of an MLA model hold the same, but for its states.
        if not config.is_mla_model or name == str(PoolName.MAMBA):
            shard["tp"] = (config.tp_rank, config.tp_size)
        facts: dict[str, Any] = {"parts": len(parts), "page_tokens": page_tokens}
        facts |= {"in_place": self._in_place, "mla": config.is_mla_model, **shard, **geometry, **self._engine}
        prefix = f"{self._settings.key_prefix}{config.model_name}/{fingerprint(facts)}/"
        return _Pool(prefix, parts, pages, "{}" if self._store.is_cluster else "")

    # The v1 interface: pages are read and written in place.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Count the leading pages that exist, and hold them until the last is loaded.

        Those that are on disk only come into memory from now on.
        """
        return self._record.guarded("look-up", lambda: self._match(keys), 0)

    def _match(self, keys: Sequence[str]) -> int:
        pages, hold = self._match_pool(self._kv, keys)
        if pages:
            self._held.add(keys[pages - 1], hold)
        return pages

    def _match_pool(self, pool: _Pool, keys: Sequence[str]) -> tuple[int, str]:
        """Return the leading pages that exist, and their hold."""
        if not keys:
            return 0, ""
        names = pool.names(keys)
        match = match_and_hold(self._store, names, self._settings.hold_s, self._record)
        pages = match // len(pool.parts)
        if pages:
            read_ahead(self._store, match, names[: pages * len(pool.parts)], self._record)
            return pages, match.hold
        self._release([match.hold])  # of a part of a page, which is of no use
        return 0, ""

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the host pool at these indices; return success for each."""
        return self._guarded_load(self._kv, keys, host_indices, keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool at these indices; return success for each."""
        return self._guarded_store(self._kv, keys, host_indices)

    # The v2 interface: pages of several pools.

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return how many leading pages are of use, to all pools together.

        A pool needs all of these pages, or, by TRAILING_PAGES, as many at their end as
        its transfer has keys. What is found is held until it is loaded.
        """
        found = self._record.guarded("look-up", lambda: self._match_all(keys, pool_transfers or []), None)
        return PoolTransferResult.empty() if found is None else found

    def _match_all(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        pages, hold = self._match_pool(self._kv, keys)
        held: list[tuple[str, str]] = []
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        usable, trailing = set(range(1, pages + 1)), list[PoolTransfer]()
        for transfer in transfers:
            if not usable or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:  # which is never a condition
                continue
            pool = self._others.get(str(transfer.name))
            if pool is None:
                fit: set[int] = set()
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing.append(transfer)
                fit = self._ends(pool, keys[:pages], len(transfer.keys or ()) or 1)
            else:
                count, of_pool = self._match_pool(pool, keys[:pages])
                held.append((str(transfer.name), of_pool))
                fit = set(range(1, count + 1))
            if fit:
                hits[transfer.name] = max(fit)
            usable &= fit
        end = max(usable, default=0)
        if not end:
            self._release([hold, *(each for _, each in held)])
            return PoolTransferResult(0, hits, [])
        last = keys[end - 1]
        self._held.add(last, hold)
        for name, of_pool in held:
            self._held.add((name, last), of_pool)
        for transfer in trailing:
            window = keys[max(0, end - (len(transfer.keys or ()) or 1)) : end]
            name = str(transfer.name)
            self._held.add((name, last), self._match_pool(self._others[name], window)[1])
        return PoolTransferResult(end, hits, sorted(usable))

    def _ends(self, pool: _Pool, keys: Sequence[str], window: int) -> set[int]:
        """Return the ends of prefixes whose last `window` pages the pool has."""
        found, parts = self._store.exists_many(pool.names(keys)), len(pool.parts)
        ends, run = set[int](), 0
        for page in range(len(keys)):
            run = run + 1 if all(found[page * parts : (page + 1) * parts]) else 0
            if run >= min(window, page + 1):
                ends.add(page + 1)
        return ends

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into their pools. Returns success for each page of each pool."""
        loaded: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            held = [(str(transfer.name), key) for key in keys]
            loaded[transfer.name] = self._guarded_load(
                self._others.get(str(transfer.name)), keys, transfer.host_indices, held
            )
        return loaded

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of these pools. Returns success for each page of each pool."""
        return {
            transfer.name: self._guarded_store(
                self._others.get(str(transfer.name)), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    # What these two share.

    def _guarded_load(
        self, pool: _Pool | None, keys: Sequence[str], indices: torch.Tensor | None, held: Sequence[Hashable]
    ) -> list[bool]:
        def load() -> list[bool]:
            try:
                known, pages, where = _placed(pool, indices)
                return pages.load(keys, where, partial(self._read, known, keys))
            finally:
                self._release(self._held.pop_each(held))

        loaded = self._record.guarded("load", load, [False] * len(keys))
        self._record.count(hits=sum(loaded), misses=len(loaded) - sum(loaded))
        return loaded

    def _guarded_store(self, pool: _Pool | None, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        def pages() -> dict[str, memoryview]:
            known, pages, where = _placed(pool, indices)
            return dict(zip(known.names(keys), pages.sources(keys, where), strict=True))

        return self._guarded_write(keys, pages)

    def _release(self, holds: Sequence[str]) -> None:
        for hold in filter(None, holds):
            self._record.guarded("release", partial(self._store.release_hold, hold), False)

    # What all interfaces share.

    def _read(self, pool: _Pool, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        names, parts = pool.names(keys), len(pool.parts)
        hits = read_exactly(self._store, list(zip(names, buffers, strict=True)), self._record)
        read = [name for name, is_hit in zip(names, hits, strict=True) if is_hit]
        pin_loaded(self._store, read, self._settings.pin_s, self._record)
        return [all(hits[first : first + parts]) for first in range(0, len(hits), parts)]

    def _guarded_write(self, keys: Sequence[str], pages: Callable[[], dict[str, memoryview]]) -> list[bool]:
        def write() -> bool:
            self._store.put_many(pages(), replace=False, ttl_s=self._settings.ttl_s)
            return True

        stored = self._record.guarded("store", write, False) if keys else True
        self._record.count(stored=len(keys) if stored else 0, not_stored=0 if stored else len(keys))
        return [stored] * len(keys)

    # The older interface: each page is a separate tensor.

    def exists(self, key: str) -> bool:
        """Return whether a page exists."""
        return self._record.guarded("look-up", lambda: all(self._store.exists_many(self._kv.names([key]))), False)

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load a page into a tensor of its size, and return it; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors of their size; return them, None for each miss."""
        targets = list(target_locations or [])
        if self._in_place or len(targets) != len(keys) or any(target is None for target in targets):
            self._record.failed("load", ValueError("give a tensor for each page, and leave interface_v1 out"))
            return [None] * len(keys)
        loaded = self._record.guarded(
            "load", lambda: self._read(self._kv, keys, list(map(bytes_of, targets))), [False] * len(keys)
        )
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
        names = self._kv.names(keys)
        return all(self._guarded_write(keys, lambda: dict(zip(names, map(bytes_of, pages), strict=True))))

    # The rest.

    def clear(self) -> None:
        """Delete the pages of this model and rank, of all its pools.

        Raises:
            BlocksLeft: some may be left. SGLang logs it as its error.
        """
        delete_all(self._store, {pool.prefix for pool in (self._kv, *self._others.values())})

    def close(self) -> None:
        """Release all holds and close the store."""
        self._release(self._held.pop_all())
        self._exit.close()


def _geometry(pool: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(pool, name, None) for name in names}


def _placed(pool: _Pool | None, indices: torch.Tensor | None) -> tuple[_Pool, HostPages, torch.Tensor]:
    """Check that it is known where pages lie."""
    if pool is None:
        raise ValueError("SGLang has registered no pool of that name")
    if pool.pages is None:
        raise ValueError("pages of this pool are not read in place: set interface_v1 to 1")
    if indices is None:
        raise ValueError("SGLang gave no indices of the host pool")
    return pool, pool.pages, indices
