"""HiCache's dynamic backend, made by SGLang's own factory, over SGLang's own host
pools.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-integrations")

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from infinistore import blocking
from infinistore.errors import ConfigError
from infinistore.integrations.internal.resets import BlocksLeft
from tests.bad_days.servers import ServerProcess
from tests.cluster_client.clusters import Cluster
from tests.integrations.disks import (
    leave_on_disk,
    no_prefetch,
    running_server_with_disk,
    wait_until_in_memory,
)
from tests.integrations.owners import Owners

EXAMPLE = Path(__file__).parents[3] / "examples" / "sglang" / "hicache.json"
PAGE_TOKENS, PAGES, LAYERS = 4, 8, 3


def host_pool(kind: str = "mha", layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """SGLang's pool over memory of the test's own; its constructor wants the GPU's
    pool, which is not here.
    """
    pool_class = MHATokenToKVPoolHost if kind == "mha" else MLATokenToKVPoolHost
    pool = pool_class.__new__(pool_class)
    pool.layout, pool.dtype, pool.page_size, pool.layer_num = layout, dtype, PAGE_TOKENS, LAYERS
    pool.size = PAGE_TOKENS * PAGES
    if kind == "mha":
        pool.head_num, pool.head_dim = 2, 8
        shape = [2, pool.size, LAYERS, 2, 8]
    else:
        pool.kv_cache_dim, pool.dcp_size, pool.dcp_rank = 24, 1, 0
        pool.kv_lora_rank, pool.qk_rope_head_dim = 16, 8
        shape = [pool.size, LAYERS, 1, 24]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pool.kv_buffer = noise.to(dtype)
    return pool


def storage_config(url: Any, *, rank: int = 0, ranks: int = 1, mla: bool = False, **changes: Any) -> Any:
    usual = {"url": url, "key_prefix": "sglang/tests/"}  # the model has no files
    extra = {**json.loads(EXAMPLE.read_text()), **usual, **changes.pop("extra", {})}
    plain: dict[str, Any] = {
        "tp_rank": rank,
        "tp_size": ranks,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": mla,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "meta-llama/Llama-3.1-8B",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**plain, **changes})


@contextmanager
def running_backend(config: Any, pool: Any) -> Iterator[Any]:
    """Made and attached as SGLang's cache controller does it."""
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    try:
        yield backend
    finally:
        backend.close()


@pytest.fixture
def backend(server: ServerProcess) -> Iterator[Any]:
    with running_backend(storage_config(server.url), host_pool()) as running:
        yield running


@pytest.fixture
def store(server: ServerProcess) -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(server.url) as store:
        yield store


def hashes(count: int, first: int = 0) -> list[str]:
    return [f"{first + number:064x}" for number in range(count)]


def indices(pages: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def page_bytes(pool: Any, page: int) -> list[bytes]:
    """What a page holds, by the tensor: the parts that the pool stores of it."""
    tokens = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
    parts = (
        [pool.kv_buffer[0, tokens], pool.kv_buffer[1, tokens]]
        if pool.kv_buffer.dim() == 5
        else [pool.kv_buffer[tokens]]
    )
    return [bytes(part.contiguous().view(torch.uint8).numpy().tobytes()) for part in parts]


@pytest.mark.parametrize("scheme", ["tcp", "infinistore"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_back_in_place_into_other_slots(kind: str, scheme: str, server: ServerProcess) -> None:
    source, target = host_pool(kind, seed=1), host_pool(kind, seed=2)
    config = storage_config(server.url.replace("tcp", scheme), mla=kind == "mla")
    with running_backend(config, source) as writer, running_backend(config, target) as reader:
        assert writer.batch_exists(hashes(3)) == 0
        assert writer.batch_set_v1(hashes(3), indices([0, 1, 2])) == [True] * 3
        assert reader.batch_exists(hashes(5)) == 3
        untouched = page_bytes(target, 0)
        assert reader.batch_get_v1(hashes(3), indices([7, 5, 3])) == [True] * 3
        for page, slot in enumerate([7, 5, 3]):
            assert page_bytes(target, slot) == page_bytes(source, page)
        assert page_bytes(target, 0) == untouched
        assert reader.counts == {"hits": 3, "misses": 0}


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_head"])
def test_every_layout_of_the_host_pool_can_be_read_in_place(layout: str, server: ServerProcess) -> None:
    pool = host_pool(layout=layout, seed=1)
    before = pool.kv_buffer.clone()
    with running_backend(storage_config(server.url), pool) as backend:
        assert backend.batch_set_v1(hashes(8), indices(range(8))) == [True] * 8
        pool.kv_buffer.zero_()
        assert backend.batch_get_v1(hashes(8), indices(range(8))) == [True] * 8
    assert torch.equal(pool.kv_buffer.view(torch.uint8), before.view(torch.uint8))


def test_a_hole_ends_the_prefix_and_is_one_miss(backend: Any) -> None:
    backend.batch_set_v1([hashes(4)[i] for i in (0, 1, 3)], indices([0, 1, 3]))
    assert backend.batch_exists(hashes(4)) == 2
    assert backend.batch_get_v1(hashes(4), indices([0, 1, 2, 3])) == [True, True, False, True]
    assert backend.exists(hashes(4)[3])
    assert not backend.exists(hashes(4)[2])


def test_a_page_of_which_a_part_is_missing_is_a_miss_and_is_not_held(
    backend: Any, store: blocking.BlockingStore
) -> None:
    backend.batch_set_v1(hashes(2), indices([0, 1]))
    store.delete([name for name in store.keys("sglang/") if name.endswith(f"{hashes(1)[0]}/1")])
    assert backend.batch_exists(hashes(2)) == 0
    assert store.stats().store.holds == 0
    assert backend.batch_get_v1(hashes(2), indices([0, 1])) == [False, True]


@pytest.mark.parametrize("mla", [False, True])
def test_ranks_share_pages_only_where_they_hold_the_same(mla: bool, server: ServerProcess) -> None:
    kind = "mla" if mla else "mha"
    configs = [storage_config(server.url, rank=rank, ranks=2, mla=mla) for rank in range(2)]
    with running_backend(configs[0], host_pool(kind)) as first, running_backend(configs[1], host_pool(kind)) as second:
        first.batch_set_v1(hashes(2), indices([0, 1]))
        assert second.batch_exists(hashes(2)) == (2 if mla else 0)


@pytest.mark.parametrize(
    ("other", "pool"),
    [
        ({"model_name": "Qwen/Qwen3-8B"}, {}),
        ({"pp_size": 2, "pp_rank": 1}, {}),
        ({"attn_cp_size": 2}, {}),
        ({"rank": 0, "ranks": 2}, {}),
        ({"extra": {"key_prefix": "tenant/"}}, {}),
        ({}, {"dtype": torch.float16}),
        ({}, {"layout": "page_first_direct"}),
    ],
)
def test_pages_of_another_model_shard_dtype_or_layout_are_not_found(
    other: dict[str, Any], pool: dict[str, Any], backend: Any, server: ServerProcess
) -> None:
    with running_backend(storage_config(server.url, **other), host_pool(**pool)) as another:
        backend.batch_set_v1(hashes(1), indices([0]))
        assert another.batch_exists(hashes(1)) == 0
        assert another.batch_get_v1(hashes(1), indices([0])) == [False]


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_page_of_another_size_is_a_miss_and_can_be_stored_anew(
    backend: Any, store: blocking.BlockingStore, size: int
) -> None:
    backend.batch_set_v1(hashes(2), indices([0, 1]))
    [name] = [name for name in store.keys("sglang/") if name.endswith(f"{hashes(1)[0]}/0")]
    store.put(name, b"x" * size)
    assert backend.batch_get_v1(hashes(2), indices([2, 3])) == [False, True]
    backend.batch_set_v1(hashes(2), indices([0, 1]))
    assert backend.batch_get_v1(hashes(2), indices([2, 3])) == [True, True]


@pytest.mark.process
def test_what_a_look_up_finds_on_disk_only_is_read_ahead_and_held(tmp_path: Path) -> None:
    with (
        running_server_with_disk(tmp_path) as server,
        running_backend(storage_config(server.url), host_pool()) as backend,
        blocking.open_store(server.url) as store,
    ):
        backend.batch_set_v1(hashes(3), indices([0, 1, 2]))
        names = leave_on_disk(store)
        assert backend.batch_exists(hashes(5)) == 3
        wait_until_in_memory(store, names)
        store.evict(0, 0)
        assert store.exists_many(names).in_memory == len(names)
        assert backend.batch_get_v1(hashes(3), indices([3, 4, 5])) == [True] * 3


def test_a_look_up_of_what_is_in_memory_reads_nothing_ahead(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_prefetch(monkeypatch)
    with running_backend(storage_config(server.url), host_pool()) as backend:
        backend.batch_set_v1(hashes(3), indices([0, 1, 2]))
        assert backend.batch_exists(hashes(5)) == 3
        assert backend.counts == {"stored": 3, "not_stored": 0}


def test_what_a_look_up_found_is_held_until_its_last_page_is_loaded(
    backend: Any, store: blocking.BlockingStore
) -> None:
    backend.batch_set_v1(hashes(6), indices(range(6)))
    assert backend.batch_exists(hashes(8)) == 6
    assert backend.batch_get_v1(hashes(4), indices(range(4))) == [True] * 4
    store.evict(0, 0)
    assert backend.batch_get_v1(hashes(2, first=4), indices([4, 5])) == [True] * 2
    assert store.stats().store.holds == 0


def test_a_load_that_leaves_out_the_head_ends_the_hold(backend: Any, store: blocking.BlockingStore) -> None:
    backend.batch_set_v1(hashes(6), indices(range(6)))
    assert [backend.batch_exists(hashes(3, first)) for first in (0, 3)] == [3, 3]
    assert backend.batch_get_v1(hashes(5, first=1), indices(range(5))) == [True] * 5
    assert store.stats().store.holds == 0


def test_the_store_that_is_killed_costs_misses_and_never_none(
    mortal_server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with running_backend(storage_config(mortal_server.url), host_pool()) as backend:
        assert backend.batch_set_v1(hashes(2), indices([0, 1])) == [True, True]
        mortal_server.kill()
        for _ in range(3):
            assert backend.batch_exists(hashes(2)) == 0
            assert backend.batch_get_v1(hashes(2), indices([0, 1])) == [False, False]
            assert backend.batch_set_v1(hashes(2), indices([0, 1])) == [False, False]
            assert backend.exists(hashes(1)[0]) is False
            with pytest.raises(BlocksLeft, match="Repeat the reset"):
                backend.clear()
    assert [record.levelname for record in caplog.records if record.name.startswith("infinistore")] == ["WARNING"]


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_in_a_cluster_a_page_is_on_one_server_and_a_lost_one_is_a_miss_of_its_pages(
    kind: str, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    source, target, owners = host_pool(kind, seed=1), host_pool(kind, seed=2), Owners(cluster)
    config = storage_config(cluster.url(), mla=kind == "mla")
    with running_backend(config, source) as writer, running_backend(config, target) as reader:
        for page, key in enumerate(hashes(PAGES)):
            assert writer.batch_set_v1([key], indices([page])) == [True]
            assert len(owners.note()) == len(page_bytes(source, page))
        assert reader.batch_exists(hashes(PAGES)) == PAGES
        assert reader.batch_get_v1(hashes(PAGES), indices(range(PAGES)[::-1])) == [True] * PAGES
        for page in range(PAGES):
            assert page_bytes(target, PAGES - 1 - page) == page_bytes(source, page)

        lost = owners.stop_one()
        for _ in range(2):
            assert reader.batch_exists(hashes(PAGES)) == lost[0]
            loaded = reader.batch_get_v1(hashes(PAGES), indices(range(PAGES)))
            assert loaded == [page not in lost for page in range(PAGES)]
        assert "infinistore.integrations" not in caplog.text
        assert writer.batch_set_v1(hashes(PAGES), indices(range(PAGES))) == [False] * PAGES  # not all of them
        assert caplog.text.count("infinistore.integrations") == 1
        for _ in range(2):
            with pytest.raises(BlocksLeft, match=r"Start these nodes, .* and repeat the reset"):
                writer.clear()


def test_a_store_that_is_down_at_start_is_no_error(mortal_server: ServerProcess) -> None:
    mortal_server.kill()
    with running_backend(storage_config(mortal_server.url), host_pool()) as backend:
        assert backend.batch_exists(hashes(1)) == 0
        assert backend.batch_set_v1(hashes(1), indices([0])) == [False]


def test_indices_that_do_not_fit_the_pages_are_misses(backend: Any) -> None:
    assert backend.batch_set_v1(hashes(2), indices([0])) == [False, False]
    assert backend.batch_get_v1(hashes(2), indices([0, 1, 2])) == [False, False]
    assert backend.batch_get_v1([], indices([0])[:0]) == []
    assert backend.batch_exists([]) == 0


def test_many_threads_at_once(server: ServerProcess) -> None:
    pool = host_pool(seed=1)
    with running_backend(storage_config(server.url), pool) as backend, ThreadPoolExecutor(8) as threads:

        def work(page: int) -> bool:
            keys = hashes(1, first=page)
            stored = backend.batch_set_v1(keys, indices([page]))
            return bool(
                stored == backend.batch_get_v1(keys, indices([page])) == [True] and backend.batch_exists(keys) == 1
            )

        assert all(threads.map(work, list(range(PAGES)) * 8))


def test_the_older_interface_moves_tensors(server: ServerProcess) -> None:
    config = storage_config(server.url, extra={"interface_v1": 0})
    with running_backend(config, host_pool()) as backend:
        pages = [torch.randn(2, LAYERS, PAGE_TOKENS, 16).to(torch.bfloat16) for _ in range(2)]
        assert backend.batch_set(hashes(2), pages)
        assert backend.set(hashes(3)[2], pages[0])
        assert backend.batch_exists(hashes(4)) == 3
        targets = [torch.zeros_like(pages[0]) for _ in range(4)]
        got = backend.batch_get(hashes(4), targets)
        assert [page is not None for page in got] == [True, True, True, False]
        assert torch.equal(got[1], pages[1])
        assert torch.equal(backend.get(hashes(1)[0], targets[3]), pages[0])
        assert backend.batch_get(hashes(2)) == [None, None]
        backend.clear()
        assert backend.batch_exists(hashes(4)) == 0


@pytest.mark.parametrize(("ttl_s", "there"), [(3600, 3), (1e-6, 0)])
def test_pages_end_after_the_time_that_is_set(ttl_s: float, there: int, server: ServerProcess) -> None:
    pool = host_pool()
    with running_backend(storage_config(server.url, extra={"ttl_s": ttl_s}), pool) as backend:
        assert backend.batch_set_v1(hashes(3), indices([0, 1, 2])) == [True] * 3
        assert backend.batch_exists(hashes(3)) == there


@pytest.mark.parametrize(("pin_s", "pinned"), [(3600, 4), (1e-6, 0)])
def test_pages_that_were_loaded_are_pinned_for_the_time_that_is_set(
    pin_s: float, pinned: int, server: ServerProcess
) -> None:
    pool = host_pool()
    with (
        running_backend(storage_config(server.url, extra={"pin_s": pin_s}), pool) as backend,
        blocking.open_store(server.url) as look,
    ):
        backend.batch_set_v1(hashes(2), indices([0, 1]))
        assert look.stats().store.protected_keys == 0
        assert backend.batch_get_v1(hashes(3), indices([3, 4, 5])) == [True, True, False]
        assert look.stats().store.protected_keys == pinned
        assert "failed" not in backend.counts


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"url": None},
            "hicache-storage-backend-extra-config names no store; set url, or the variable",
        ),
        ({"url": "localhost"}, "no URL of a store"),
        ({"urls": "tcp://localhost"}, "unknown setting 'urls'; did you mean url"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(extra: dict[str, Any], message: str) -> None:
    config = storage_config("tcp://localhost", extra=extra)
    with pytest.raises(ConfigError, match=message):
        StorageBackendFactory.create_backend("dynamic", config, host_pool())


def test_a_layout_that_cannot_be_read_in_place_is_refused_with_the_remedy(server: ServerProcess) -> None:
    pool = host_pool("mla", layout="something_new")
    backend = StorageBackendFactory.create_backend("dynamic", storage_config(server.url, mla=True), pool)
    with pytest.raises(ConfigError, match="hicache-mem-layout page_first"):
        backend.register_mem_pool_host(pool)
    backend.close()
