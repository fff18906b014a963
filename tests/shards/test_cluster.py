"""A server with shards in a cluster: each shard is a node."""

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.cli.root import run
from infinistore.cluster.locate import parse_cluster_url
from infinistore.cluster.membership import NodeState
from infinistore.cluster_io.thread import open_membership
from tests.asking import until
from tests.cluster_client.clusters import PATIENT, Member
from tests.cluster_io.etcd import Etcd, needs_etcd, own_cluster
from tests.transports.certificates import issue

from .conftest import HOST, NAMES, RunningShards, running_shards

pytestmark = [needs_etcd, pytest.mark.process]
KEYS = [f"key {number}" for number in range(64)]


@pytest.fixture(scope="module")
def etcd(etcd_of_all: Etcd) -> Etcd:
    return own_cluster(etcd_of_all)


@pytest.fixture(scope="module")
def two_nodes(environment: dict[str, str], etcd: Etcd) -> Iterator[RunningShards]:
    flags = ("--cluster", etcd.url, "--node-id", "machine", "--node-weight", "50", "--node-warm-up", "0")
    with running_shards(environment, *flags) as started:
        until(lambda: [node["weight"] for node in started.told("/cluster")["nodes"]] == [25, 25])
        yield started


def test_shards_register_one_by_one(two_nodes: RunningShards) -> None:
    told = two_nodes.told("/cluster")
    assert [node["id"] for node in told["nodes"]] == ["machine/0", "machine/1"]
    ports = [shard["port"] for shard in two_nodes.shards()]
    assert [node["address"] for node in told["nodes"]] == [f"infinistore://{HOST}:{port}" for port in ports]
    assert [(one["shard"], one["node"], one["registration"]) for one in told["shards"]] == [
        (0, "machine/0", "registered"),
        (1, "machine/1", "registered"),
    ]


def test_a_client_of_the_cluster_uses_all_by_shared_memory(two_nodes: RunningShards, etcd: Etcd) -> None:
    with blocking.open_store(etcd.url, inline_bytes=0, **PATIENT) as store:
        store.put_many([(key, key.encode()) for key in KEYS])
        assert store.get_many(KEYS) == [bytearray(key.encode()) for key in KEYS]
        cluster = store.stats().cluster
    assert cluster is not None
    found = [node.stats for node in cluster.nodes]
    assert [stats and stats.transport for stats in found] == ["shm", "shm"]
    assert sum(stats.store.keys for stats in found if stats) == len(KEYS)
    assert min(stats.store.keys for stats in found if stats) > 0


def test_a_shard_that_was_killed_is_the_same_node_again(two_nodes: RunningShards) -> None:
    before = two_nodes.shards()[1]
    os.kill(before["pid"], signal.SIGKILL)
    two_nodes.wait_for_restart(1, before["restarts"] + 1)
    until(lambda: two_nodes.told("/cluster")["shards"][1]["registration"] == "registered")
    nodes = two_nodes.told("/cluster")["nodes"]
    assert [(node["id"], node["address"]) for node in nodes][1] == (
        "machine/1",
        f"infinistore://{HOST}:{before['port']}",
    )


def test_a_shard_whose_id_another_server_has_ends_all_with_one_line(etcd: Etcd, environment: dict[str, str]) -> None:
    url = etcd.url_of(f"{etcd.cluster}-taken")
    other = Member(cluster=url, node_id="machine/1")
    try:
        flags = ("--cluster", url, "--node-id", "machine")
        with running_shards(environment, *flags) as started:
            _, errors = started.process.communicate(timeout=100)  # it waits for as long as a lease may last
    finally:
        other.stop()
    assert started.process.returncode == 2
    (line,) = (line for line in errors.splitlines() if line.startswith("infinistore: "))
    assert "shard 1: another server, at " in line
    assert "give each its own --node-id" in line


def test_at_sighup_all_shards_of_a_node_take_a_renewed_certificate_and_authority(
    etcd: Etcd, environment: dict[str, str], tmp_path: Path
) -> None:
    files = issue(tmp_path, *NAMES)
    url = etcd.url_of(f"{etcd.cluster}-tls")
    flags = ["--cluster", url, "--node-id", "secure", "--node-warm-up", "0", "--tls-cert", str(files.cert)]
    flags += ["--tls-key", str(files.key), "--tls-peer-ca", str(files.ca)]
    with running_shards(environment, *flags) as started, closing(open_membership(parse_cluster_url(url))) as membership:
        until(lambda: [node.state for node in membership.view.nodes] == [NodeState.SERVING] * 2)
        ports = [int(node.address.rpartition(":")[2]) for node in membership.view.nodes]

        def shown() -> list[str]:
            return [ssl.get_server_certificate((HOST, port), timeout=60) for port in ports]

        before = shown()
        assert before[0] == before[1]
        issue(tmp_path, *NAMES, ca="two", into=files)
        started.process.send_signal(signal.SIGHUP)
        until(lambda: not set(before).intersection(shown()))
        with blocking.open_store(f"{url}?ca={files.ca}", **PATIENT) as store:
            store.put_many({key: key.encode() for key in KEYS})
            # It passes its blocks on to the other, which has the new authority only.
            assert run(["cluster", "drain", "secure/0", url]) == 0
            assert store.get_many(KEYS) == [bytearray(key.encode()) for key in KEYS]
