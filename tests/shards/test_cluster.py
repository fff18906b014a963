"""A server with shards in a cluster: each shard is a node."""

import os
import signal
from collections.abc import Iterator

import pytest

from infinistore import blocking
from tests.cluster_io.etcd import Etcd, needs_etcd

from .conftest import RunningShards, running_shards

KEYS = [f"key {number}" for number in range(64)]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    running = Etcd(tmp_path_factory.mktemp("etcd"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def two_nodes(environment: dict[str, str], etcd: Etcd) -> Iterator[RunningShards]:
    flags = ("--cluster", etcd.url, "--node-id", "machine", "--node-weight", "50", "--node-warm-up", "0")
    with running_shards(environment, *flags) as started:
        while [node["weight"] for node in started.told("/cluster")["nodes"]] != [25, 25]:
            pass  # the test's own timeout is the limit
        yield started


@needs_etcd
def test_shards_register_one_by_one(two_nodes: RunningShards) -> None:
    told = two_nodes.told("/cluster")
    assert [node["id"] for node in told["nodes"]] == ["machine/0", "machine/1"]
    ports = [shard["port"] for shard in two_nodes.shards()]
    assert [node["address"] for node in told["nodes"]] == [f"infinistore://127.0.0.1:{port}" for port in ports]
    assert [(one["shard"], one["node"], one["registration"]) for one in told["shards"]] == [
        (0, "machine/0", "registered"),
        (1, "machine/1", "registered"),
    ]


@needs_etcd
def test_a_client_of_the_cluster_uses_all_by_shared_memory(two_nodes: RunningShards, etcd: Etcd) -> None:
    with blocking.open_store(etcd.url, inline_bytes=0) as store:
        store.put_many([(key, key.encode()) for key in KEYS])
        assert store.get_many(KEYS) == [bytearray(key.encode()) for key in KEYS]
        cluster = store.stats().cluster
    assert cluster is not None
    found = [node.stats for node in cluster.nodes]
    assert [stats and stats.transport for stats in found] == ["shm", "shm"]
    assert sum(stats.store.keys for stats in found if stats) == len(KEYS)
    assert min(stats.store.keys for stats in found if stats) > 0


@needs_etcd
def test_a_shard_that_was_killed_is_the_same_node_again(two_nodes: RunningShards) -> None:

    before = two_nodes.shards()[1]
    os.kill(before["pid"], signal.SIGKILL)
    two_nodes.wait_for_restart(1, before["restarts"] + 1)
    while two_nodes.told("/cluster")["shards"][1]["registration"] != "registered":
        pass
    nodes = two_nodes.told("/cluster")["nodes"]
    assert [(node["id"], node["address"]) for node in nodes][1] == (
        "machine/1",
        f"infinistore://127.0.0.1:{before['port']}",
    )
