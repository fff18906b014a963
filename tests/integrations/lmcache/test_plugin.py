"""`plugin://infinistore` in LMCache's own RemoteBackend: what is stored comes back, no
trouble reaches the engine.
"""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

pytest.importorskip("lmcache", reason="needs LMCache: make test-integrations")

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from lmcache.v1.storage_backend.connector import CreateConnector

from infinistore import blocking
from infinistore.errors import ConfigError
from tests.bad_days.servers import ServerProcess, running_server_process
from tests.cluster_client.clusters import Cluster
from tests.integrations.disks import (
    bring_back,
    leave_on_disk,
    no_prefetch,
    running_server_with_disk,
    wait_until_in_memory,
)
from tests.integrations.lmcache.engine import (
    CHUNK_TOKENS,
    PLUGIN,
    Worker,
    engine_config,
    engine_metadata,
    keys_of,
    running_worker,
)
from tests.integrations.owners import Owners

pytestmark = pytest.mark.filterwarnings("ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning")
LOGS = ["infinistore.integrations.lmcache", "lmcache.v1.storage_backend.remote_backend"]


def plugin_config(url: str, *, extra: dict[str, Any] | None = None, **overrides: Any) -> Any:
    return engine_config("plugin.yaml", extra={PLUGIN + "url": url, **(extra or {})}, **overrides)


@pytest.fixture(params=["tcp", "infinistore"])
def worker(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Worker]:
    """A worker at the server, by TCP and by shared memory."""
    url = server.url.replace("tcp", request.param)
    with running_worker(plugin_config(url), engine_metadata()) as running:
        yield running


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What the plugin warns of, and LMCache of the plugin."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    for name in LOGS:
        logging.getLogger(name).addHandler(handler)
    yield lines
    for name in LOGS:
        logging.getLogger(name).removeHandler(handler)


def assert_same(got: Any, stored: Any) -> None:
    assert bytes(got.byte_array) == bytes(stored.byte_array)
    assert got.get_shapes() == stored.get_shapes()
    assert got.get_dtypes() == stored.get_dtypes()
    assert got.get_memory_format() == stored.get_memory_format()


(PLAIN,) = keys_of(1)


@pytest.mark.parametrize(
    "others",
    [
        [replace(PLAIN, model_name="qwen")],
        [replace(PLAIN, dtype=torch.float16)],
        # A worker of two has half of the heads of one alone.
        [replace(PLAIN, world_size=2, worker_id=rank) for rank in range(2)],
        # In one process, LMCache 0.5.6 keeps users apart by tags, and not by vLLM's
        # `cache_salt`.
        [replace(PLAIN, request_configs={"lmcache.tag.user": user}) for user in ("alice", "bob")],
    ],
    ids=["model", "dtype", "workers", "users"],
)
def test_what_lmcache_tells_apart_has_keys_of_its_own(worker: Worker, others: list[CacheEngineKey]) -> None:
    keys = [PLAIN, *others]
    for seed, key in enumerate(keys):
        assert [worker.backend.contains(one) for one in keys] == [one in keys[:seed] for one in keys]
        worker.put([key], [worker.make_block(seed)])
    for seed, got in enumerate(worker.get(keys)):
        assert_same(got, worker.make_block(seed))


def test_blocks_come_back_as_they_were_stored(worker: Worker) -> None:
    keys, blocks = keys_of(5), [worker.make_block(seed) for seed in range(5)]
    assert worker.backend.batched_contains(keys) == 0
    worker.put(keys, blocks)
    assert worker.backend.batched_contains(keys) == 5
    for got, stored in zip(worker.get(keys), blocks, strict=True):
        assert_same(got, stored)
        assert got is not None
        assert torch.equal(got.tensor.view(torch.uint8), stored.tensor.view(torch.uint8))
    assert worker.connector.counts == {"stored": 5, "not_stored": 0, "hits": 5, "misses": 0}


def test_without_metadata_those_of_the_memory_count(worker: Worker, server: ServerProcess) -> None:
    def create(memory: Any) -> Any:
        made = CreateConnector(
            "plugin://infinistore", worker.loop, memory, plugin_config(server.url), plugin_name="infinistore"
        )
        return made.getWrappedConnector()

    [key], [block] = keys_of(1), [worker.make_block(1)]
    worker.put([key], [block])
    connector = create(worker.memory)
    got = worker.run(connector.get(key))
    assert_same(got, block)
    got.ref_count_down()
    worker.run(connector.close())
    with pytest.raises(ConfigError, match="needs LMCache's metadata: give it to CreateConnector"):
        create(None)


def test_one_block_by_the_calls_for_one(worker: Worker) -> None:
    [key], block = keys_of(1), worker.make_block(1)
    assert not worker.backend.contains(key)
    assert worker.backend.get_blocking(key) is None
    worker.backend.submit_put_task(key, block).result(30)
    assert worker.backend.contains(key)
    assert worker.connector.exists_sync(key)
    assert_same(worker.backend.get_blocking(key), block)
    assert worker.run(worker.connector.list()) == [key.to_string()]
    assert worker.backend.remove(key)
    assert not worker.backend.remove(key)
    assert worker.backend.get_blocking(key) is None


@pytest.mark.parametrize(("ttl_s", "there"), [(3600, 2), (1e-6, 0)])
def test_blocks_end_after_the_time_that_is_set(ttl_s: float, there: int, server: ServerProcess) -> None:
    with running_worker(plugin_config(server.url, extra={PLUGIN + "ttl_s": ttl_s}), engine_metadata()) as worker:
        worker.put(keys_of(2), [worker.make_block(seed) for seed in range(2)])
        assert worker.backend.batched_contains(keys_of(2)) == there


@pytest.mark.parametrize(("pin_s", "pinned"), [(3600, 4), (1e-6, 0)])
def test_blocks_that_were_loaded_are_pinned_with_their_descriptions_for_the_time_that_is_set(
    pin_s: float, pinned: int, server: ServerProcess
) -> None:
    config = plugin_config(server.url, extra={PLUGIN + "pin_s": pin_s})
    with running_worker(config, engine_metadata()) as worker, blocking.open_store(server.url) as look:
        worker.put(keys_of(3), [worker.make_block(seed) for seed in range(3)])
        assert look.stats().store.protected_keys == 0
        assert worker.get([*keys_of(2), *keys_of(1, first=100)])[2] is None
        assert look.stats().store.protected_keys == pinned


def of_one_shape(format_: MemoryFormat, *shape: int) -> dict[str, Any]:
    return {"shapes": [torch.Size(shape)], "dtypes": [torch.float16], "format": format_}


GROUPS = {
    "shapes": [torch.Size([2, 3, CHUNK_TOKENS, 16]), torch.Size([1, 1, CHUNK_TOKENS, 24])],
    "dtypes": [torch.bfloat16, torch.float8_e4m3fn],
}


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 5},  # a last chunk
        GROUPS,
        of_one_shape(MemoryFormat.KV_T2D, CHUNK_TOKENS, 2, 16),
        of_one_shape(MemoryFormat.KV_MLA_FMT, 1, 4, CHUNK_TOKENS, 24),
        of_one_shape(MemoryFormat.EC_TD, 9, 32),
    ],
)
def test_a_block_keeps_its_own_shapes_dtypes_and_format(worker: Worker, given: dict[str, Any]) -> None:
    keys, blocks = keys_of(2), [worker.make_block(0), worker.make_block(1, **given)]
    worker.put(keys, blocks)
    for got, block in zip(worker.get(keys), blocks, strict=True):
        assert_same(got, block)


def test_compressed_blocks_are_bytes_of_any_length(worker: Worker) -> None:
    [key] = keys_of(1)
    worker.run(worker.connector.put(key, BytesBufferMemoryObj(b"compressed" * 321)))
    got = worker.run(worker.connector.get(key))
    assert bytes(got.byte_array) == b"compressed" * 321


def test_a_hole_is_a_miss_and_ends_the_prefix(worker: Worker) -> None:
    keys, blocks = keys_of(4), [worker.make_block(seed) for seed in range(4)]
    worker.put(keys[:2] + keys[3:], blocks[:2] + blocks[3:])
    assert worker.backend.batched_contains(keys) == 2
    assert [block is not None for block in worker.get(keys)] == [True, True, False, True]
    leading = worker.run(worker.backend.batched_get_non_blocking("look-up", keys))
    assert len(leading) == 2
    assert worker.run(worker.backend.batched_async_contains("look-up", keys)) == 2


def test_blocks_that_are_there_are_not_stored_again(worker: Worker, server: ServerProcess) -> None:
    keys = keys_of(1)
    worker.put(keys, [worker.make_block(1)])
    worker.put(keys, [worker.make_block(2)])
    assert_same(worker.get(keys)[0], worker.make_block(1))


def test_a_pinned_look_up_holds_what_it_found_until_it_is_loaded(worker: Worker, server: ServerProcess) -> None:
    keys = keys_of(3)
    worker.put(keys, [worker.make_block(seed) for seed in range(3)])
    with blocking.open_store(server.url) as store:
        assert worker.run(worker.backend.batched_async_contains("request", keys, True)) == 3
        assert store.stats().store.holds == 1
        assert len(worker.run(worker.backend.batched_get_non_blocking("request", keys))) == 3
        assert store.stats().store.holds == 0


@pytest.mark.process
@pytest.mark.parametrize("kind", ["for threads", "for the loop", "pinned"])
def test_a_look_up_reads_ahead_what_is_on_disk_only(kind: str, tmp_path: Path) -> None:
    with (
        running_server_with_disk(tmp_path) as server,
        running_worker(plugin_config(server.url), engine_metadata()) as worker,
        blocking.open_store(server.url) as store,
    ):
        keys, blocks = keys_of(4), [worker.make_block(seed) for seed in range(3)]
        worker.put(keys[:3], blocks)
        names = leave_on_disk(store)  # of the blocks, and of their descriptions
        assert len(names) == 6
        if kind == "for threads":
            assert worker.backend.batched_contains(keys) == 3
        else:
            assert worker.run(worker.backend.batched_async_contains("request", keys, kind == "pinned")) == 3
        wait_until_in_memory(store, names)
        for got, stored in zip(worker.get(keys[:3]), blocks, strict=True):
            assert_same(got, stored)


def test_a_look_up_of_what_is_in_memory_reads_nothing_ahead(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    no_prefetch(monkeypatch)
    keys = keys_of(3)
    worker.put(keys, [worker.make_block(seed) for seed in range(3)])
    assert worker.backend.batched_contains(keys) == 3
    assert worker.run(worker.backend.batched_async_contains("request", keys, True)) == 3
    assert len(worker.run(worker.backend.batched_get_non_blocking("request", keys))) == 3


def test_memory_is_given_back_whatever_happens(worker: Worker, server: ServerProcess) -> None:
    keys, blocks = keys_of(3), [worker.make_block(seed) for seed in range(3)]
    worker.put(keys, blocks)
    for block in blocks:
        block.ref_count_down()
    before = worker.bytes_in_use()
    with blocking.open_store(server.url) as store:
        store.delete(["lmcache/tests/kv/" + keys[1].to_string()])  # its description says that it is there
    for got in worker.get(keys):
        if got is not None:
            got.ref_count_down()
    leading = worker.run(worker.backend.batched_get_non_blocking("request", keys))
    for got in leading:
        got.ref_count_down()
    assert len(leading) == 1
    assert worker.bytes_in_use() == before
    with blocking.open_store(server.url) as store:  # the block may be late, on a disk or on another node
        assert store.exists("lmcache/tests/about/" + keys[1].to_string())


@pytest.mark.parametrize("size", [17, 100_000])
def test_a_block_of_another_size_than_described_is_a_miss_and_is_replaced(
    worker: Worker, server: ServerProcess, size: int
) -> None:
    keys, blocks = keys_of(3), [worker.make_block(seed) for seed in range(3)]
    worker.put(keys, blocks)
    with blocking.open_store(server.url) as store:
        store.put("lmcache/tests/kv/" + keys[1].to_string(), b"x" * size)
    assert [block is not None for block in worker.get(keys)] == [True, False, True]
    worker.put(keys, blocks)
    for got, stored in zip(worker.get(keys), blocks, strict=True):
        assert_same(got, stored)


def test_what_a_disk_may_bring_back_keeps_no_other_block_from_being_loaded(
    worker: Worker, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_back(monkeypatch)
    test_a_block_of_another_size_than_described_is_a_miss_and_is_replaced(worker, server, 17)


@pytest.mark.parametrize(
    "garbage",
    [
        b"x",
        b"\x92\xa7KV_2LTD\x91\x92\xa4cuda\x91\x05",
        b"\x92\xa7KV_2LTD\x90",
        b"\x92\xa7KV_2LTD\x91\x92\xa4half\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x02",
    ],
)
def test_a_description_that_is_none_is_a_miss(worker: Worker, server: ServerProcess, garbage: bytes) -> None:
    keys = keys_of(1)
    worker.put(keys, [worker.make_block(0)])
    with blocking.open_store(server.url) as store:
        store.put("lmcache/tests/about/" + keys[0].to_string(), garbage)
    assert worker.get(keys) == [None]
    worker.put(keys, [worker.make_block(0)])
    assert_same(worker.get(keys)[0], worker.make_block(0))


def test_another_prefix_is_another_cache(server: ServerProcess) -> None:
    for prefix in ("tenant-a/", "tenant-b/"):
        config = plugin_config(server.url, extra={PLUGIN + "key_prefix": prefix})
        with running_worker(config, engine_metadata()) as worker:
            assert worker.backend.batched_contains(keys_of(1)) == 0
            worker.put(keys_of(1), [worker.make_block(0)])
            assert worker.backend.batched_contains(keys_of(1)) == 1


def test_two_stores_side_by_side_are_two_instances(server: ServerProcess, mortal_server: ServerProcess) -> None:
    second = "remote_storage_plugin.infinistore.second."
    extra = {PLUGIN + "url": server.url, second + "url": mortal_server.url}
    extra |= {second + "module_path": "infinistore.integrations.lmcache"}
    extra |= {second + "class_name": "InfiniStoreConnectorAdapter"}
    config = engine_config("plugin.yaml", extra=extra, remote_storage_plugins=["infinistore", "infinistore.second"])
    with running_worker(config, engine_metadata()) as first:
        first.put(keys_of(1), [first.make_block(0)])
        with running_worker(config, engine_metadata(), plugin="infinistore.second") as other:
            assert other.get(keys_of(1)) == [None]
            other.put(keys_of(2), [other.make_block(seed) for seed in range(2)])
        assert first.backend.batched_contains(keys_of(2)) == 1


def test_many_requests_at_once_on_a_uvloop(server: ServerProcess) -> None:
    with running_worker(plugin_config(server.url), engine_metadata(), make=uvloop.new_event_loop) as worker:

        def request(number: int) -> bool:
            keys = keys_of(4, first=4 * number)
            worker.put(keys, [worker.make_block(4 * number + i) for i in range(4)])
            found = worker.backend.batched_contains(keys)
            got = worker.get(keys)
            right = [
                bytes(b.byte_array) == bytes(worker.make_block(4 * number + i).byte_array)
                for i, b in enumerate(got)
                if b
            ]
            return found == 4 and right == [True] * 4

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(request, range(24)))


def test_a_cancelled_load_gives_its_memory_back_and_the_next_works(worker: Worker) -> None:
    keys = keys_of(8)
    blocks = [worker.make_block(seed) for seed in range(8)]
    worker.put(keys, blocks)
    before = worker.bytes_in_use()

    async def cancelled_after(turns: int) -> bool:
        load = asyncio.ensure_future(worker.connector.batched_get(keys))
        for _ in range(turns):
            await asyncio.sleep(0)
        load.cancel()
        done = await asyncio.gather(load, return_exceptions=True)
        if isinstance(done[0], BaseException):
            return True
        for got in done[0]:
            assert got is not None
            got.ref_count_down()
        return False

    outcomes = [worker.run(cancelled_after(turns)) for turns in range(60)]
    assert True in outcomes
    assert worker.bytes_in_use() == before
    for got, stored in zip(worker.get(keys), blocks, strict=True):
        assert_same(got, stored)


@pytest.mark.usefixtures("no_pause")
def test_a_store_that_is_killed_costs_misses_and_one_line_of_log(mortal_server: ServerProcess, log: list[str]) -> None:
    keys = keys_of(2)
    with running_worker(plugin_config(mortal_server.url), engine_metadata()) as worker:
        blocks = [worker.make_block(seed) for seed in range(2)]
        worker.put(keys, blocks)
        mortal_server.kill()
        for _ in range(3):
            assert worker.backend.batched_contains(keys) == 0
            assert worker.get(keys) == [None, None]
            worker.put(keys, blocks)
            assert worker.run(worker.backend.batched_async_contains("request", keys, True)) == 0
            assert worker.run(worker.backend.batched_get_non_blocking("request", keys)) == []
            assert not worker.backend.remove(keys[0])
        assert len(log) == 1
        assert "StoreUnavailable" in log[0]
        assert worker.connector.counts["not_stored"] == 6
        mortal_server.start()
        while not worker.connector.exists_sync(keys[0]):
            worker.put(keys, blocks)
        assert_same(worker.get(keys)[0], blocks[0])
        assert "works again" in log[-1]


@pytest.mark.process
def test_a_wrong_token_costs_misses_and_names_the_remedy(log: list[str], tmp_path: Any) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("secret\n")
    wrong.write_text("guess\n")
    with (
        running_server_process("--token-file", str(right)) as server,
        running_worker(plugin_config(f"{server.url}?token_file={wrong}"), engine_metadata()) as worker,
    ):
        worker.put(keys_of(1), [worker.make_block(0)])
        assert worker.get(keys_of(1)) == [None]
        assert worker.backend.batched_contains(keys_of(1)) == 0
    assert len(log) == 1
    assert "AuthenticationFailed" in log[0]
    assert "token" in log[0]


def test_a_pool_smaller_than_one_prompt_stores_what_it_can(server: ServerProcess, log: list[str]) -> None:
    config = plugin_config(server.url, max_local_cpu_size=0.1)
    with running_worker(config, engine_metadata()) as worker:
        huge = [torch.Size([2, 64, 1024, 80])]
        blocks = [worker.make_block(seed, shapes=huge) for seed in range(1, 3)]  # 20 MiB each, and 16 in the pool
        worker.put(keys_of(2, first=100), blocks)
        worker.put(keys_of(1), [worker.make_block(0)])
        assert worker.get([*keys_of(1), *keys_of(1, first=100)])[1] is None
        assert_same(worker.get(keys_of(1))[0], worker.make_block(0))
    assert any("ValueTooLarge" in line or "OutOfMemory" in line for line in log)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({PLUGIN + "url": None}, "names no store"),
        ({PLUGIN + "url": "redis://localhost:1"}, "unknown scheme"),
        ({PLUGIN + "url": "tcp://localhost", PLUGIN + "urll": 1}, "unknown setting 'urll'"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_told_and_the_engine_goes_on(
    extra: dict[str, Any], message: str, log: list[str]
) -> None:
    with running_worker(engine_config("plugin.yaml", extra=extra), engine_metadata()) as worker:
        assert worker.backend.connection is None
        assert worker.get(keys_of(1)) == [None]
    assert message in "".join(log)


def test_in_a_cluster_a_block_and_its_description_are_on_one_server_and_a_lost_one_is_a_miss_of_its_blocks(
    cluster: Cluster, log: list[str]
) -> None:
    config = plugin_config(cluster.url())
    with running_worker(config, engine_metadata()) as writer, running_worker(config, engine_metadata()) as reader:
        keys, blocks, owners = keys_of(8), [writer.make_block(seed) for seed in range(8)], Owners(cluster)
        for key, block in zip(keys, blocks, strict=True):
            writer.put([key], [block])
            assert len(owners.note()) == 2
        assert reader.run(reader.connector.batched_async_contains("all", keys, pin=True)) == 8
        for got, stored in zip(reader.run(reader.connector.batched_get_non_blocking("all", keys)), blocks, strict=True):
            assert_same(got, stored)
            got.ref_count_down()
        assert sorted(reader.run(reader.connector.list())) == [key.to_string() for key in keys]

        lost = owners.stop_one()
        for lookup in ("before it counts as lost", "after"):
            assert reader.backend.batched_contains(keys) == lost[0]
            assert reader.run(reader.connector.batched_async_contains(lookup, keys, pin=True)) == lost[0]
            loaded = reader.run(reader.connector.batched_get_non_blocking(lookup, keys))
            assert len(loaded) == lost[0]
            for got, stored in zip(loaded, blocks[: lost[0]], strict=True):
                assert_same(got, stored)
                got.ref_count_down()
            loaded = reader.get(keys)
            assert [number for number, got in enumerate(loaded) if got is None] == lost
        assert log == []
        writer.put(keys, blocks)
        assert writer.connector.counts["not_stored"] == 8  # not all of them
    assert len(log) == 1


def test_of_two_copies_a_lost_server_takes_nothing(cluster: Cluster) -> None:
    with running_worker(plugin_config(cluster.url("copies=2")), engine_metadata()) as worker:
        keys, blocks = keys_of(8), [worker.make_block(seed) for seed in range(8)]
        worker.put(keys, blocks)
        cluster.members[0].stop()
        assert worker.backend.batched_contains(keys) == 8
        for got, stored in zip(worker.get(keys), blocks, strict=True):
            assert_same(got, stored)
