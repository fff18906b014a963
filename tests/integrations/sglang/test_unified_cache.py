"""SGLang's UnifiedRadixCache with its HybridCacheController, its host pools and its
threads, and a real server: what SGLang's test kit for them does with files.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-integrations")

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import mixins
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

from infinistore import blocking
from tests.bad_days.servers import ServerProcess
from tests.cluster_client.clusters import Cluster
from tests.integrations.owners import Owners

EXAMPLE = Path(__file__).parents[3] / "examples" / "sglang" / "hicache.json"
FULL = CacheConfig(page_size=4, num_layers=4, full_attention_layer_ids=(1, 3))
WINDOWS = replace(FULL, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=8)
STATES = replace(
    FULL, components=(ComponentType.FULL, ComponentType.MAMBA), enable_mamba_extra_buffer=True, mamba_cache_size=60
)
KINDS = pytest.mark.parametrize("cfg", [FULL, WINDOWS, STATES], ids=["full", "windows", "states"])
PLAIN = pytest.mark.parametrize("cfg", [FULL], ids=["full"])
WITHOUT_STATES = pytest.mark.parametrize("cfg", [FULL, WINDOWS], ids=["full", "windows"])


class Kit(UnifiedRadixCacheStorageFixtures, CustomTestCase):  # type: ignore[misc, unused-ignore]
    """SGLang's kit, with its storage in a server. Where it fills and compares the first
    layer of full attention, this does it with all layers, of windows, too.
    """

    __test__ = False
    url = ""

    def _init_hicache(self, cache: Any, **given: Any) -> None:
        super()._init_hicache(cache, **given)
        if given.get("storage_backend"):
            backend = cache.cache_controller.storage_backend
            assert type(backend).__name__ == "InfiniStoreHiCache"
            self.addCleanup(backend.close)

    def _rows(self, allocator: Any, indices: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        full = self._get_full_kv_pool(allocator)
        pools = [(full, indices)]
        if self.cfg.has_swa:
            window = allocator.full_to_swa_index_mapping[indices[-self.cfg.sliding_window_size :]]
            pools.append((allocator.get_kvcache().swa_kv_pool, window))
        for pool, rows in pools:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                yield buffer, rows

    def _fill_full_kv(self, allocator: Any, indices: torch.Tensor, marker: int) -> None:
        generator = torch.Generator().manual_seed(marker)
        for buffer, rows in self._rows(allocator, indices):
            buffer[rows] = torch.randn(buffer[rows].shape, generator=generator).to(buffer.dtype)
        if self.cfg.has_mamba:  # which slot is the request's does not matter: all are the same
            for states in states_of(allocator):
                states[:] = marker

    def _snapshot_full_kv(self, allocator: Any, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(buffer[rows].clone() for buffer, rows in self._rows(allocator, indices))


def states_of(allocator: Any) -> list[torch.Tensor]:
    """The states of all slots, by their kind; a slot is in the second dimension."""
    cache = allocator.get_kvcache().mamba_pool.mamba_cache
    return [cache.temporal, *cache.conv]


@pytest.fixture
def kit(cfg: CacheConfig, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    made = Kit()
    made.cfg, made.url = cfg, server.url
    plain = mixins.ServerArgs

    def with_store(**given: Any) -> Any:
        if given.get("hicache_storage_backend") == "file":
            extra = {
                **json.loads(given["hicache_storage_backend_extra_config"] or "{}"),
                **json.loads(EXAMPLE.read_text()),
                "url": made.url,
                "key_prefix": "sglang/tests/",
            }
            given["hicache_storage_backend"] = "dynamic"
            given["hicache_storage_backend_extra_config"] = json.dumps(extra)
        return plain(**given, hicache_mem_layout="page_first")

    monkeypatch.setattr(mixins, "ServerArgs", with_store)
    yield made
    made.doCleanups()


def sequence(cfg: CacheConfig, pages: int = 6) -> list[int]:
    return list(range(1, 1 + pages * cfg.page_size))


def equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))


@KINDS
def test_what_one_cache_has_stored_another_loads(kit: Kit, cfg: CacheConfig) -> None:
    tokens = sequence(cfg)
    expected = kit._l3_produce("", tokens, marker=5)
    cache, allocator, requests = kit._l3_consumer("")

    kit._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))
    kit._load_back_through_admission(cache, requests, tokens)
    kit._finish_pending_loads(cache)

    found = match_prefix(cache, tokens)
    assert found.device_prefix_len == len(tokens)
    assert equal(kit._snapshot_full_kv(allocator, cache.path_device_indices(found.last_device_node)), expected)
    if cfg.has_mamba:
        slot = node_device_value(cache, found.last_device_node, ComponentType.MAMBA)
        assert all(bool((states[:, slot] == 5).all()) for states in states_of(allocator))
    cache.sanity_check()


@WITHOUT_STATES
def test_a_cache_that_keeps_nothing_on_its_host_loads_from_the_store(kit: Kit, cfg: CacheConfig) -> None:
    tokens = sequence(cfg)
    _, expected = kit._produce_buffer_l3("", tokens, marker=9)
    cache, allocator, _ = kit._build_buffer_hicache_fixture("")
    free = kit._host_avail_sizes(cache)
    request = CacheRequestHandle("request", 0)

    cache.prefetch_from_storage(request, cache.root_node_handle(), array("q", tokens), None, None)
    kit._run_prefetch_to_completion(cache, request)

    found = match_prefix(cache, tokens)
    assert found.device_prefix_len == len(tokens)
    assert equal(kit._snapshot_full_kv(allocator, cache.path_device_indices(found.last_device_node)), expected)
    assert kit._host_avail_sizes(cache) == free
    cache.sanity_check()


@KINDS
def test_a_store_that_is_emptied_is_a_miss(kit: Kit, cfg: CacheConfig) -> None:
    tokens = sequence(cfg)
    kit._l3_produce("", tokens, marker=5)
    cache, _, _ = kit._l3_consumer("")
    assert cache.clear_storage_backend()
    with blocking.open_store(kit.url) as store:
        assert store.keys() == []

    kit._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))

    assert match_prefix(cache, tokens).host_hit_length == 0
    cache.sanity_check()


@KINDS
def test_a_store_that_is_killed_is_a_miss_and_the_cache_goes_on(
    kit: Kit, cfg: CacheConfig, mortal_server: ServerProcess
) -> None:
    kit.url = mortal_server.url
    tokens = sequence(cfg)
    kit._l3_produce("", tokens, marker=5)
    cache, allocator, requests = kit._l3_consumer("")
    mortal_server.kill()

    kit._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))
    assert match_prefix(cache, tokens).host_hit_length == 0

    kit._insert(cache, allocator, requests, tokens)
    leaf = match_prefix(cache, tokens).last_device_node
    kit._backup_node(cache, leaf)
    kit._write_path_to_l3(cache, leaf)
    kit._flush_l3_backups(cache)  # fails, and every thread goes on
    kit._consume_prefetch(cache, sequence(cfg)[::-1], CacheRequestHandle("other", 0))
    cache.sanity_check()
    assert cache.clear_storage_backend() is False


@PLAIN
def test_in_a_cluster_a_cache_loads_what_is_before_the_pages_of_a_lost_server(
    kit: Kit, cfg: CacheConfig, cluster: Cluster
) -> None:
    kit.url = cluster.url()
    tokens, owners = sequence(cfg), Owners(cluster)
    for end in range(cfg.page_size, len(tokens) + 1, cfg.page_size):
        kit._l3_produce("", tokens[:end])
        owners.note()

    def loaded() -> int:
        cache, _, _ = kit._l3_consumer("")
        kit._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))
        cache.sanity_check()
        return int(match_prefix(cache, tokens).host_hit_length)

    assert loaded() == len(tokens)
    lost = owners.stop_one()
    assert loaded() == lost[0] * cfg.page_size


@PLAIN
def test_sglang_tells_a_look_up_less_of_the_prefix_than_a_store(
    kit: Kit, cfg: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So pages cannot be named by the prefix. Once this fails, they may be: see
    docs/sglang.md.
    """
    told: dict[str, tuple[list[str], list[str]]] = {}
    tokens, half = sequence(cfg), len(sequence(cfg)) // 2

    def told_cache(*ends: int) -> Any:
        """A cache whose host has so many of the tokens, each a node of its tree."""
        cache, allocator, requests = build_fixture(cfg)
        extra = {"hicache_storage_pass_prefix_keys": True}
        kit._init_hicache(cache, storage_backend="file", storage_dir="", prefetch_threshold=1, storage_extra=extra)
        backend = cache.cache_controller.storage_backend
        for name in ("batch_set_v1", "batch_exists", "batch_get_v1"):
            monkeypatch.setattr(backend, name, recorded(name, getattr(backend, name)))
        for end in ends:
            kit._insert(cache, allocator, requests, tokens[:end])
            kit._backup_node(cache, match_prefix(cache, tokens[:end]).last_device_node)
        return cache

    def recorded(name: str, plain: Any) -> Any:
        def call(keys: list[str], *arguments: Any) -> Any:
            told[name] = (arguments[-1].prefix_keys or [], keys)
            return plain(keys, *arguments)

        return call

    cache = told_cache(half, len(tokens))
    kit._write_path_to_l3(cache, match_prefix(cache, tokens).last_device_node)
    kit._flush_l3_backups(cache)
    prefix, keys = told["batch_set_v1"]
    assert (len(prefix), len(keys)) == (half // cfg.page_size, (len(tokens) - half) // cfg.page_size)

    cache, request = told_cache(half), CacheRequestHandle("request", 0)
    node = match_prefix(cache, tokens).last_host_node
    # As SGLang's scheduler does it.
    last, of_node = cache.get_last_hash_value(node), cache.get_prefix_hash_values(node)
    cache.prefetch_from_storage(request, node, array("q", tokens[half:]), last, of_node)
    kit._run_prefetch_to_completion(cache, request)

    assert last == prefix[-1]
    assert told["batch_exists"] == told["batch_get_v1"] == ([], keys)
    assert match_prefix(cache, tokens).host_hit_length == len(tokens) - half  # and the rest is on the device
