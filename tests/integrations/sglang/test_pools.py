"""HiCache's v2 interface, for models whose layers have pools of several kinds: SGLang's
own host pools, and what SGLang's own backend for files answers, as the measure.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="needs SGLang: make test-integrations")

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from infinistore import blocking
from tests.bad_days.servers import ServerProcess, running_server_process
from tests.cluster_client.clusters import Cluster
from tests.integrations.disks import leave_on_disk, running_server_with_disk, wait_until_in_memory
from tests.integrations.owners import Owners
from tests.integrations.sglang.test_hicache import (
    PAGES,
    hashes,
    host_pool,
    indices,
    page_bytes,
    running_backend,
    storage_config,
)

WINDOW = 2


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ServerProcess]:
    """One where no other module's look-ups have left holds, which last for seconds."""
    with running_server_process("--unix-socket", "auto") as server:
        yield server


def mamba_pool(*, seed: int = 0, side_state: bool = False) -> Any:
    """SGLang's pool of states, over memory of the test's own. With a side state, its
    pages cannot be read in place.
    """
    pool = MambaPoolHost.__new__(MambaPoolHost)
    pool.layout, pool.page_size, pool.size, pool.num_mamba_layers = "page_first", 1, PAGES, 3
    pool.device, pool.pin_memory = "cpu", False
    pool.temporal_dtype, pool.conv_dtype = torch.float32, torch.bfloat16
    pool.temporal_state_shape, pool.conv_state_shapes = (2, 8), [(4, 3), (2,)]
    pool.temporal_state_elem_size, pool.conv_state_elem_sizes = 16, [12, 2]
    generator = torch.Generator().manual_seed(seed)
    pool.temporal_buffer = torch.randn(PAGES, 3, 2, 8, generator=generator)
    pool.conv_buffer = [
        torch.randn(PAGES, 3, *shape, generator=generator).to(torch.bfloat16) for shape in pool.conv_state_shapes
    ]
    pool.size_per_token = 3 * (16 * 4 + 14 * 2)
    if side_state:
        pool.slot_state_device_tensors = (torch.zeros(1),)
        pool.slot_state_buffers = [torch.randn(PAGES, 5, generator=generator)]
        pool.size_per_token += 5 * 4
    return pool


def state_bytes(pool: Any, slot: int) -> bytes:
    tensors = [pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers]
    return b"".join(tensor[slot].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


@contextmanager
def running_pools(config: Any, pools: dict[PoolName, Any]) -> Iterator[Any]:
    """A backend that knows these pools, as SGLang's controller attaches them."""
    with running_backend(config, pools[PoolName.KV]) as backend:
        for name, pool in pools.items():
            backend.register_mem_host_pool_v2(pool, name)
        yield backend


def hybrid_pools(seed: int = 0, *, side_state: bool = False) -> dict[PoolName, Any]:
    return {
        PoolName.KV: host_pool(seed=seed),
        PoolName.SWA: host_pool(seed=seed + 1),
        PoolName.MAMBA: mamba_pool(seed=seed + 2, side_state=side_state),
    }


def states(keys: Sequence[str], where: torch.Tensor | None = None) -> PoolTransfer:
    return PoolTransfer(
        name=PoolName.MAMBA, keys=list(keys), host_indices=where, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def window(keys: Sequence[str], where: torch.Tensor | None = None) -> PoolTransfer:
    return PoolTransfer(name=PoolName.SWA, keys=list(keys), host_indices=where, hit_policy=PoolHitPolicy.TRAILING_PAGES)


@pytest.mark.parametrize("side_state", [False, True])
def test_each_pool_gets_its_pages_back_in_other_slots(side_state: bool, server: ServerProcess) -> None:
    source, target = hybrid_pools(10, side_state=side_state), hybrid_pools(20, side_state=side_state)
    config = storage_config(server.url)
    with running_pools(config, source) as writer, running_pools(config, target) as reader:
        keys = hashes(3)
        assert writer.batch_set_v1(keys, indices([0, 1, 2])) == [True] * 3
        stored = writer.batch_set_v2([window(keys[1:], indices([1, 2])), states(keys[2:], slots(4))])
        assert stored == {PoolName.SWA: [True] * 2, PoolName.MAMBA: [True]}

        found = reader.batch_exists_v2(hashes(5), [window(keys[1:]), states(keys[2:])])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
        assert reader.batch_get_v1(keys, indices([5, 6, 7])) == [True] * 3
        loaded = reader.batch_get_v2([window(keys[1:], indices([3, 4])), states(keys[2:], slots(6))])

        assert loaded == {PoolName.SWA: [True] * 2, PoolName.MAMBA: [True]}
        assert page_bytes(target[PoolName.KV], 7) == page_bytes(source[PoolName.KV], 2)
        assert page_bytes(target[PoolName.SWA], 4) == page_bytes(source[PoolName.SWA], 2)
        assert state_bytes(target[PoolName.MAMBA], 6) == state_bytes(source[PoolName.MAMBA], 4)
        assert state_bytes(target[PoolName.MAMBA], 5) == state_bytes(
            hybrid_pools(20, side_state=side_state)[PoolName.MAMBA], 5
        )


class Both:
    """Our backend and SGLang's for files, which are told the same."""

    def __init__(self, ours: Any, files: Any) -> None:
        self.backends = (ours, files)

    def have(self, name: PoolName, keys: list[str]) -> None:
        ours, files = self.backends
        if not keys:
            return
        pages = range(len(keys))
        if name == PoolName.KV:
            assert ours.batch_set_v1(keys, indices(pages)) == [True] * len(keys)
            for key in keys:
                files.set(key, torch.zeros(1))
        else:
            where = slots(*pages) if name == PoolName.MAMBA else indices(pages)
            transfer = PoolTransfer(name=name, keys=keys, host_indices=where)
            for backend in self.backends:
                assert backend.batch_set_v2([transfer]) == {name: [True] * len(keys)}


POOLS = (PoolName.KV, PoolName.SWA, PoolName.MAMBA, PoolName.DRAFT)
STORED = st.fixed_dictionaries({name: st.sets(st.integers(0, PAGES - 1)) for name in POOLS})


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=STORED, asks=st.lists(st.booleans(), min_size=3, max_size=3))
def test_of_use_is_what_sglangs_own_backend_for_files_finds_of_use(
    stored: dict[PoolName, set[int]],
    asks: list[bool],
    server: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pools = {**hybrid_pools(), PoolName.DRAFT: host_pool()}
    every = hashes(PAGES)
    config = storage_config(server.url)
    files = HiCacheFile(storage_config("tcp://unused"), str(tmp_path_factory.mktemp("files")))
    asked = [window(every[:WINDOW]), states(every[:1]), PoolTransfer(name=PoolName.DRAFT)]
    asked = [transfer for transfer, is_asked in zip(asked, asks, strict=True) if is_asked]
    with running_pools(config, pools) as ours:
        for name, pool in pools.items():
            files.register_mem_host_pool_v2(pool, name)
        both = Both(ours, files)
        for name, pages in stored.items():
            both.have(name, [every[page] for page in sorted(pages)])

        found, expected = (backend.batch_exists_v2(every, asked) for backend in both.backends)

        assert found == expected
        ours.clear()
        assert ours.batch_exists_v2(every, asked).kv_hit_pages == 0
    with blocking.open_store(server.url) as store:
        assert store.keys() == []
        assert store.stats().store.holds == 0


def test_what_was_found_is_held_in_every_pool_until_it_is_loaded(server: ServerProcess) -> None:
    with running_pools(storage_config(server.url), hybrid_pools()) as backend, blocking.open_store(server.url) as store:
        keys = hashes(4)
        backend.batch_set_v1(keys, indices(range(4)))
        backend.batch_set_v2([window(keys, indices(range(4))), states(keys[3:], slots(0))])
        assert backend.batch_exists_v2(keys, [window(keys[2:]), states(keys[3:])]).kv_hit_pages == 4
        store.evict(0, 0)

        assert backend.batch_get_v1(keys, indices(range(4))) == [True] * 4
        loaded = backend.batch_get_v2([window(keys[2:], indices([6, 7])), states(keys[3:], slots(1))])

        assert loaded == {PoolName.SWA: [True] * 2, PoolName.MAMBA: [True]}
        assert store.stats().store.holds == 0


def test_what_is_of_no_use_is_not_held(server: ServerProcess) -> None:
    with running_pools(storage_config(server.url), hybrid_pools()) as backend, blocking.open_store(server.url) as store:
        backend.batch_set_v1(hashes(4), indices(range(4)))
        assert backend.batch_exists_v2(hashes(4), [states(hashes(1))]).kv_hit_pages == 0
        assert store.stats().store.holds == 0


@pytest.mark.process
def test_what_is_on_disk_only_is_read_ahead_for_every_pool(tmp_path: Path) -> None:
    with (
        running_server_with_disk(tmp_path) as server,
        running_pools(storage_config(server.url), hybrid_pools()) as backend,
        blocking.open_store(server.url) as store,
    ):
        keys = hashes(2)
        backend.batch_set_v1(keys, indices([0, 1]))
        backend.batch_set_v2([window(keys, indices([0, 1])), states(keys[1:], slots(0))])
        names = leave_on_disk(store)
        assert backend.batch_exists_v2(keys, [window(keys), states(keys[1:])]).kv_hit_pages == 2
        wait_until_in_memory(store, names)


@pytest.mark.parametrize(("mla", "shared"), [(True, {"kv", "draft"}), (False, set())])
def test_ranks_share_the_pools_that_are_the_same_on_all(mla: bool, shared: set[str], server: ServerProcess) -> None:
    """SGLang has the first rank alone write what ranks of an MLA model share, and each
    rank its states.
    """
    kind = "mla" if mla else "mha"
    pools = {PoolName.KV: host_pool(kind), PoolName.DRAFT: host_pool(kind), PoolName.MAMBA: mamba_pool()}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(running_pools(storage_config(server.url, rank=rank, ranks=2, mla=mla), pools))
            for rank in range(2)
        )
        first.batch_set_v1(hashes(1), indices([0]))
        draft = PoolTransfer(name=PoolName.DRAFT, keys=hashes(1), host_indices=indices([0]))
        first.batch_set_v2([draft, states(hashes(1), slots(0))])
        found = {
            str(name) for name, pages in second.batch_get_v2([draft, states(hashes(1), slots(1))]).items() if all(pages)
        }
        found |= {"kv"} if second.batch_exists(hashes(1)) else set()
    assert found == shared


def test_a_state_of_another_shape_is_not_found(server: ServerProcess) -> None:
    one, other = hybrid_pools(), hybrid_pools()
    other[PoolName.MAMBA].temporal_state_shape = (8, 2)
    config = storage_config(server.url)
    with running_pools(config, one) as writer, running_pools(config, other) as reader:
        writer.batch_set_v1(hashes(1), indices([0]))
        writer.batch_set_v2([states(hashes(1), slots(0))])
        assert reader.batch_get_v2([states(hashes(1), slots(0))]) == {PoolName.MAMBA: [False]}


@pytest.mark.parametrize("where", [None, slots(0, 1, 2), slots()])
@pytest.mark.parametrize("side_state", [False, True])
def test_indices_that_do_not_fit_are_misses(where: Any, side_state: bool, server: ServerProcess) -> None:
    with running_pools(storage_config(server.url), hybrid_pools(side_state=side_state)) as backend:
        transfer = states(hashes(2), where)
        assert backend.batch_set_v2([transfer]) == {PoolName.MAMBA: [False, False]}
        assert backend.batch_get_v2([transfer]) == {PoolName.MAMBA: [False, False]}


def test_a_pool_that_nobody_registered_has_nothing(server: ServerProcess) -> None:
    with running_backend(storage_config(server.url), host_pool()) as backend:
        backend.batch_set_v1(hashes(1), indices([0]))
        assert backend.batch_exists_v2(hashes(1), [states(hashes(1))]).kv_hit_pages == 0
        assert backend.batch_set_v2([states(hashes(1), slots(0))]) == {PoolName.MAMBA: [False]}
        assert backend.batch_get_v2([states(hashes(1), slots(0))]) == {PoolName.MAMBA: [False]}


def test_a_second_form_of_pages_is_no_condition(server: ServerProcess) -> None:
    blocks = PoolTransfer(name=PoolName.DRAFT, keys=hashes(1), hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    with running_backend(storage_config(server.url), host_pool()) as backend:
        backend.batch_set_v1(hashes(2), indices([0, 1]))
        assert backend.batch_exists_v2(hashes(2), [blocks]).kv_hit_pages == 2


def test_the_store_that_is_killed_costs_misses(mortal_server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    with running_pools(storage_config(mortal_server.url), hybrid_pools()) as backend:
        backend.batch_set_v1(hashes(1), indices([0]))
        backend.batch_set_v2([states(hashes(1), slots(0))])
        mortal_server.kill()
        for _ in range(3):
            found = backend.batch_exists_v2(hashes(1), [states(hashes(1))])
            assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {})
            assert backend.batch_get_v2([states(hashes(1), slots(0))]) == {PoolName.MAMBA: [False]}
            assert backend.batch_set_v2([states(hashes(1), slots(0))]) == {PoolName.MAMBA: [False]}
    assert [record.levelname for record in caplog.records if record.name.startswith("infinistore")] == ["WARNING"]


def test_in_a_cluster_one_server_has_a_page_in_all_pools(cluster: Cluster) -> None:
    every, owners = hashes(PAGES), Owners(cluster)
    with (
        running_pools(storage_config(cluster.url()), hybrid_pools(10)) as writer,
        running_pools(storage_config(cluster.url()), hybrid_pools(20)) as reader,
    ):
        for page, key in enumerate(every):
            assert writer.batch_set_v1([key], indices([page])) == [True]
            stored = writer.batch_set_v2([window([key], indices([page])), states([key], slots(page))])
            assert stored == {PoolName.SWA: [True], PoolName.MAMBA: [True]}
            owners.note()
        asked = [window(every[:WINDOW]), states(every[:1])]
        assert reader.batch_exists_v2(every, asked).restorable_prefix_pages == list(range(1, PAGES + 1))

        lost = owners.stop_one()
        left = list(range(1, lost[0] + 1))
        assert reader.batch_exists_v2(every, asked).restorable_prefix_pages == left
        loaded = reader.batch_get_v2([window(every, indices(range(PAGES))), states(every, slots(*range(PAGES)))])
        there = [page not in lost for page in range(PAGES)]
        assert loaded == {PoolName.SWA: there, PoolName.MAMBA: there}
