"""The second level of LMCache's multi-process mode: its protocol and its locks, and
LMCache's storage manager on it.
"""

import json
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="needs LMCache: make test-integrations")

from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from infinistore import blocking
from infinistore.errors import ConfigError
from infinistore.integrations.lmcache_l2 import InfiniStoreL2Adapter
from tests.bad_days.servers import ServerProcess
from tests.cluster_client.clusters import Cluster
from tests.integrations.disks import (
    leave_on_disk,
    no_prefetch,
    running_server_with_disk,
    wait_until_in_memory,
)
from tests.integrations.lmcache.engine import EXAMPLES, Worker, engine_config, engine_metadata, running_worker
from tests.integrations.owners import Owners

pytestmark = pytest.mark.filterwarnings("ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning")
LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 16, 16])], [torch.bfloat16])


def object_keys(count: int, *, model: str = "llama", rank: int = 0, group: int = 0, salt: str = "") -> list[Any]:
    return [ObjectKey(number.to_bytes(8, "big"), model, rank, group, salt) for number in range(count)]


@pytest.fixture
def memory() -> Iterator[Worker]:
    """LMCache's memory objects, without a store."""
    with running_worker(engine_config("plugin.yaml"), engine_metadata()) as worker:
        yield worker


@contextmanager
def running_adapter(url: str, **parameters: Any) -> Iterator[InfiniStoreL2Adapter]:
    adapter = InfiniStoreL2Adapter({"url": url, "key_prefix": "lmcache-mp/tests/", **parameters})
    try:
        yield adapter
    finally:
        adapter.close()


@pytest.fixture(params=["tcp", "infinistore"])
def adapter(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[InfiniStoreL2Adapter]:
    with running_adapter(server.url.replace("tcp", request.param)) as running:
        yield running


def wait_for(descriptor: int) -> None:
    """What LMCache's controllers do: wait for the descriptor, and take the signal."""
    ready, _, _ = select.select([descriptor], [], [], 30)
    assert ready
    with open(descriptor, "rb", closefd=False, buffering=0) as signal:
        signal.read(8)


def store(adapter: InfiniStoreL2Adapter, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
    task = adapter.submit_store_task(list(keys), list(objects))
    wait_for(adapter.get_store_event_fd())
    done = adapter.pop_completed_store_tasks()
    assert adapter.pop_completed_store_tasks() == {}
    return done[task]


def look_up(adapter: InfiniStoreL2Adapter, keys: Sequence[Any]) -> list[int]:
    task = adapter.submit_lookup_and_lock_task(list(keys), {0: LAYOUT})
    wait_for(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    assert found is not None
    return list(found.get_indices_list())


def load(adapter: InfiniStoreL2Adapter, keys: Sequence[Any], objects: Sequence[Any]) -> list[int]:
    task = adapter.submit_load_task(list(keys), list(objects))
    wait_for(adapter.get_load_event_fd())
    loaded = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    assert loaded is not None
    return list(loaded.get_indices_list())


def holds(server: ServerProcess) -> int:
    with blocking.open_store(server.url) as other:
        return other.stats().store.holds


def test_objects_come_back_as_they_were_stored(adapter: InfiniStoreL2Adapter, memory: Worker) -> None:
    keys, objects = object_keys(4), [memory.make_block(seed) for seed in range(4)]
    assert look_up(adapter, keys) == []
    result = store(adapter, keys, objects)
    assert result.is_successful()
    assert result.bytes_transferred() == 4 * objects[0].get_size()
    assert look_up(adapter, keys) == [0, 1, 2, 3]
    targets = [memory.make_block(99) for _ in range(4)]
    assert load(adapter, keys, targets) == [0, 1, 2, 3]
    assert [bytes(target.byte_array) for target in targets] == [bytes(block.byte_array) for block in objects]
    adapter.submit_unlock(keys)


def test_the_three_descriptors_are_distinct(adapter: InfiniStoreL2Adapter) -> None:
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3


def test_what_is_there_is_not_stored_again(adapter: InfiniStoreL2Adapter, memory: Worker) -> None:
    store(adapter, object_keys(2), [memory.make_block(seed) for seed in range(2)])
    result = store(adapter, object_keys(3), [memory.make_block(seed) for seed in range(3)])
    assert result.is_successful()
    assert result.bytes_transferred() == memory.make_block(0).get_size()


@pytest.mark.process
def test_a_look_up_reads_ahead_what_is_on_disk_only_and_locks_it(tmp_path: Path, memory: Worker) -> None:
    with running_server_with_disk(tmp_path) as server, running_adapter(server.url) as adapter:
        keys, objects = object_keys(4), [memory.make_block(seed) for seed in range(4)]
        store(adapter, [keys[0], keys[2]], [objects[0], objects[2]])
        with blocking.open_store(server.url) as other:
            names = leave_on_disk(other)
            assert look_up(adapter, keys) == [0, 2]
            wait_until_in_memory(other, names)
            other.evict(0, 0)
            assert other.exists_many(names).in_memory == 2
        target = memory.make_block(99)
        assert load(adapter, [keys[2]], [target]) == [0]
        assert bytes(target.byte_array) == bytes(objects[2].byte_array)


def test_a_look_up_of_what_is_in_memory_reads_nothing_ahead(
    adapter: InfiniStoreL2Adapter, memory: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_prefetch(monkeypatch)
    keys = object_keys(2)
    store(adapter, keys, [memory.make_block(seed) for seed in range(2)])
    assert look_up(adapter, keys) == [0, 1]


def test_a_look_up_finds_what_comes_after_a_hole_too(adapter: InfiniStoreL2Adapter, memory: Worker) -> None:
    ranks = [object_keys(6, rank=rank) for rank in range(2)]
    present = [ranks[0][i] for i in (0, 1, 3, 5)] + [ranks[1][i] for i in (2, 3, 4)]
    store(adapter, present, [memory.make_block(seed) for seed in range(len(present))])
    assert look_up(adapter, ranks[0] + ranks[1]) == [0, 1, 3, 5, 8, 9, 10]


def test_what_a_look_up_locks_survives_until_it_is_unlocked(
    adapter: InfiniStoreL2Adapter, memory: Worker, server: ServerProcess
) -> None:
    keys = object_keys(3)
    store(adapter, keys, [memory.make_block(seed) for seed in range(3)])
    assert look_up(adapter, keys) == [0, 1, 2]
    with blocking.open_store(server.url) as other:
        other.evict(0, 0)
        assert load(adapter, keys, [memory.make_block(9) for _ in keys]) == [0, 1, 2]
        adapter.submit_unlock(keys[:2])
        assert holds(server) == 1
        adapter.submit_unlock(keys[2:])
        look_up(adapter, object_keys(1, model="none"))  # behind the unlocking, in a queue of its own
        while holds(server):
            pass
        other.evict(0, 0)
    assert look_up(adapter, keys) == []


def test_two_look_ups_lock_twice(adapter: InfiniStoreL2Adapter, memory: Worker, server: ServerProcess) -> None:
    keys = object_keys(2)
    store(adapter, keys, [memory.make_block(seed) for seed in range(2)])
    look_up(adapter, keys)
    look_up(adapter, keys[:1])
    assert adapter.report_status()["locked_keys"] == 3
    adapter.submit_unlock(keys)
    assert adapter.report_status()["locked_keys"] == 1
    adapter.submit_unlock(keys)  # one of them is not locked any more
    assert adapter.report_status()["locked_keys"] == 0
    while holds(server):
        pass


def test_a_hold_that_the_server_refuses_is_a_look_up_without_lock(server: ServerProcess, memory: Worker) -> None:
    with running_adapter(server.url, hold_s=100_000.0) as adapter:
        store(adapter, object_keys(2), [memory.make_block(seed) for seed in range(2)])
        assert look_up(adapter, object_keys(2)) == [0, 1]
        assert adapter.report_status()["locked_keys"] == 0


@pytest.mark.parametrize("size", [17, 1 << 20])
def test_an_object_of_another_size_is_not_loaded_and_can_be_stored_anew(
    adapter: InfiniStoreL2Adapter, memory: Worker, server: ServerProcess, size: int
) -> None:
    keys, objects = object_keys(3), [memory.make_block(seed) for seed in range(3)]
    store(adapter, keys, objects)
    with blocking.open_store(server.url) as other:
        [name] = [name for name in other.keys("lmcache-mp/") if name.endswith(keys[1].chunk_hash.hex())]
        other.put(name, b"x" * size)
    assert load(adapter, keys, [memory.make_block(9) for _ in keys]) == [0, 2]
    store(adapter, keys, objects)
    assert load(adapter, keys, [memory.make_block(9) for _ in keys]) == [0, 1, 2]


def test_another_model_rank_group_or_salt_is_another_object(adapter: InfiniStoreL2Adapter, memory: Worker) -> None:
    store(adapter, object_keys(1), [memory.make_block(0)])
    for other in ({"model": "qwen"}, {"rank": 1}, {"group": 1}, {"salt": "tenant"}):
        assert look_up(adapter, object_keys(1, **other)) == []


def test_lmcache_is_told_of_what_is_stored_loaded_and_deleted(adapter: InfiniStoreL2Adapter, memory: Worker) -> None:
    told: list[str] = []

    class Listener(L2AdapterListener):  # type: ignore[misc, unused-ignore]
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            told.append(f"stored {len(keys)}")

        def on_l2_keys_accessed(self, keys: list[Any]) -> None:
            told.append(f"loaded {len(keys)}")

        def on_l2_keys_deleted(self, keys: list[Any]) -> None:
            told.append(f"deleted {len(keys)}")

    adapter.register_listener(Listener())
    keys, objects = object_keys(2), [memory.make_block(seed) for seed in range(2)]
    store(adapter, keys, objects)
    load(adapter, object_keys(3), [memory.make_block(9) for _ in range(3)])
    assert adapter.get_usage().total_bytes_used == 2 * objects[0].get_size()
    adapter.delete([*object_keys(4)[1:], *object_keys(1, rank=1)])
    assert adapter.get_usage().total_bytes_used == objects[0].get_size()
    adapter.delete(keys)
    adapter.delete(keys)
    assert adapter.get_usage().total_bytes_used == 0
    assert told == ["stored 2", "loaded 2", "deleted 1", "deleted 1"]
    assert look_up(adapter, keys) == []


def test_a_store_that_is_killed_finds_and_stores_nothing(mortal_server: ServerProcess, memory: Worker) -> None:
    with running_adapter(mortal_server.url) as adapter:
        keys, objects = object_keys(2), [memory.make_block(seed) for seed in range(2)]
        store(adapter, keys, objects)
        look_up(adapter, keys)
        mortal_server.kill()
        assert not store(adapter, keys, objects).is_successful()
        assert look_up(adapter, keys) == []
        assert load(adapter, keys, objects) == []
        adapter.submit_unlock(keys)
        adapter.delete(keys)
        assert adapter.report_status()["is_healthy"] is False


def test_engines_with_another_number_of_workers_have_other_keys(adapter: InfiniStoreL2Adapter, memory: Worker) -> None:
    of_two, of_four = (object_keys(2, rank=ObjectKey.ComputeKVRank(size, 0, size, 0)) for size in (2, 4))
    store(adapter, of_two, [memory.make_block(seed) for seed in range(2)])
    assert look_up(adapter, of_four) == []
    assert look_up(adapter, of_two) == [0, 1]


@pytest.mark.parametrize(("ttl_s", "found"), [(None, [0, 1, 2]), (3600, [0, 1, 2]), (1e-6, [])])
def test_objects_end_after_the_time_that_is_set(
    ttl_s: float | None, found: list[int], server: ServerProcess, memory: Worker
) -> None:
    objects = [memory.make_block(seed) for seed in range(3)]
    with running_adapter(server.url, ttl_s=ttl_s) as adapter:
        store(adapter, object_keys(3), objects)
        assert look_up(adapter, object_keys(3)) == found


@pytest.mark.parametrize(("pin_s", "pinned"), [(None, 0), (3600, 2), (1e-6, 0)])
def test_objects_that_were_loaded_are_pinned_for_the_time_that_is_set(
    pin_s: float | None, pinned: int, server: ServerProcess, memory: Worker
) -> None:
    objects = [memory.make_block(seed) for seed in range(3)]
    with running_adapter(server.url, pin_s=pin_s) as adapter, blocking.open_store(server.url) as look:
        store(adapter, object_keys(3), objects)
        assert load(adapter, [*object_keys(2), *object_keys(1, rank=1)], objects) == [0, 1]
        assert look.stats().store.protected_keys == pinned
        assert "failed" not in adapter.report_status()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "adapter_params names no store; set url, or the variable INFINISTORE_URL, to infinistore://"),
        ({"url": "localhost:1"}, "no URL of a store"),
        ({"url": "tcp://localhost", "hold": 3}, "unknown setting 'hold'; did you mean hold_s"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InfiniStoreL2Adapter(parameters)


@contextmanager
def running_manager(url: str) -> Iterator[Any]:
    """LMCache's storage manager, configured as on the command line of its server."""
    [flag, text] = (EXAMPLES / "l2-adapter.args").read_text().split(maxsplit=1)
    adapter = json.loads(text.strip().strip("'"))
    adapter["adapter_params"] |= {"url": url, "key_prefix": "lmcache-mp/tests/"}
    flags = ["--l1-size-gb", "0.02", "--no-l1-use-lazy", "--eviction-policy", "LRU", flag, json.dumps(adapter)]
    config = parse_args(flags)
    config.l1_manager_config.memory_config.shm_name = ""  # two managers in one process would share the name
    assert isinstance(config.l2_adapter_config, L2AdaptersConfig)
    manager = StorageManager(config)
    try:
        yield manager
    finally:
        manager.close()


def prefetch(manager: Any, keys: Sequence[Any]) -> int:
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(keys), 0, LAYOUT)]))
    assert manager.wait_prefetch_status(handle, 30)
    hits: int = manager.query_prefetch_status(handle).l2_hit_count
    return hits


def write(manager: Any, keys: Sequence[Any]) -> None:
    objects = manager.reserve_write(list(keys), LAYOUT)
    for number, key in enumerate(keys):
        objects[key].tensor.fill_(number + 1)
    manager.finish_write(list(keys))


def test_one_lmcache_server_finds_what_another_one_stored(server: ServerProcess) -> None:
    keys = object_keys(4)
    with running_manager(server.url) as writer:
        write(writer, keys)
        with blocking.open_store(server.url) as other:
            while len(other.keys("lmcache-mp/")) < 4:  # its store controller works in the background
                pass
    with running_manager(server.url) as reader:
        assert prefetch(reader, object_keys(6)) == 4
        with reader.read_prefetched_results(keys) as objects:
            assert [set(block.tensor.flatten().tolist()) for block in objects] == [{1.0}, {2.0}, {3.0}, {4.0}]
        reader.finish_read_prefetched(keys)
        [status] = reader.report_status()["l2_adapters"]
        assert status["is_healthy"] is True
        assert status["hits"] == 4


def test_the_storage_manager_goes_on_when_the_store_is_killed(mortal_server: ServerProcess) -> None:
    with running_manager(mortal_server.url) as manager:
        write(manager, object_keys(2))
        mortal_server.kill()
        assert prefetch(manager, object_keys(3, rank=1)) == 0
        write(manager, object_keys(2, rank=2))
        assert prefetch(manager, object_keys(2, rank=3)) == 0


def test_in_a_cluster_a_lost_server_is_a_miss_of_its_objects(cluster: Cluster, memory: Worker) -> None:
    with running_adapter(cluster.url()) as writer, running_adapter(cluster.url()) as reader:
        keys, objects, owners = object_keys(8), [memory.make_block(seed) for seed in range(8)], Owners(cluster)
        for key, block in zip(keys, objects, strict=True):
            assert store(writer, [key], [block]).is_successful()
            assert len(owners.note()) == 1
        targets = [memory.make_block(99) for _ in range(8)]
        assert look_up(reader, keys) == list(range(8))
        assert load(reader, keys, targets) == list(range(8))
        assert [bytes(target.byte_array) for target in targets] == [bytes(block.byte_array) for block in objects]
        reader.submit_unlock(keys)

        lost = owners.stop_one()
        left = [number for number in range(8) if number not in lost]
        for _ in range(2):
            assert look_up(reader, keys) == left
            assert load(reader, keys, targets) == left
            reader.submit_unlock([keys[number] for number in left])
        assert reader.report_status()["is_healthy"]
        assert not store(writer, keys, objects).is_successful()  # not all of them
