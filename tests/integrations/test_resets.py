"""All blocks of an engine are deleted; where some may be left, that is said."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.errors import StoreUnavailable
from infinistore.integrations.internal.resets import count_on_disks, delete_all
from tests.cluster_client.clusters import Cluster, running_cluster
from tests.integrations.disks import leave_on_disk, wait_until_in_memory

OWN = [f"vllm/one/{number}" for number in range(60)]
OTHERS = ["vllm/one", "vllm/two/1"]


@pytest.fixture(scope="module")
def three_servers() -> Iterator[Cluster]:
    with running_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def three(three_servers: Cluster) -> Iterator[Cluster]:
    """Three servers, empty and awake."""
    three_servers.clear()
    yield three_servers
    three_servers.clear()


def open_cluster(cluster: Cluster, *options: str) -> AbstractContextManager[blocking.BlockingStore]:
    return blocking.open_store(cluster.url(*options), deadline_s=600.0, lookup_deadline_s=0.4)


def test_what_has_the_prefix_is_deleted_and_nothing_else() -> None:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        store.put_many(dict.fromkeys([*OWN, *OTHERS], b"block"))

        assert delete_all(store, "vllm/one/") == len(OWN)
        assert delete_all(store, "vllm/one/") == 0
        assert store.keys() == OTHERS


def test_what_is_on_disk_alone_is_left_and_counted(tmp_path: Path) -> None:
    disk = f"{tmp_path / 'disk'}:64MiB"
    with blocking.open_store(
        pool_bytes=1 << 20, minimal_allocate_bytes=4096, disk=disk, disk_admission="eager"
    ) as store:
        store.put_many(dict.fromkeys(OWN, b"block"))
        leave_on_disk(store)
        assert delete_all(store, "vllm/one/") == 0
        assert count_on_disks(store) == len(OWN)

        store.prefetch(OWN)
        wait_until_in_memory(store, OWN)
        assert delete_all(store, "vllm/one/") == len(OWN)
        assert count_on_disks(store) == 0


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("lost", ["stopped", "silent"])
def test_a_node_that_may_have_some_still_is_named_and_the_others_have_none(
    three: Cluster, lost: str, copies: int
) -> None:
    with open_cluster(three, f"copies={copies}") as store:
        store.put_many(dict.fromkeys([*OWN, *OTHERS], b"block"))
        member = three.members[1]
        if lost == "stopped":
            member.stop()
        else:
            member.silence()
        for _ in range(2):  # before the node counts as lost, and after
            with pytest.raises(StoreUnavailable, match=member.address):
                delete_all(store, "vllm/one/")
            assert store.keys("vllm/one/") == []


def test_a_reset_is_complete_when_the_node_is_back(three: Cluster) -> None:
    with open_cluster(three) as store:
        store.put_many(dict.fromkeys(OWN, b"block"))
        member = three.members[1]
        had = member.keys()
        member.silence()
        with pytest.raises(StoreUnavailable):
            delete_all(store, "vllm/one/")
        member.wake()
        while not had.issubset(store.keys()):  # until the client knows that it is back
            store.get_many(OWN)

        assert delete_all(store, "vllm/one/") == len(had)
        assert member.keys() == set()
