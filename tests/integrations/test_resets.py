"""All blocks of an engine are deleted; where some may be left, that is said."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.errors import PermissionDenied
from infinistore.integrations.internal.resets import BlocksLeft, delete_all
from tests.cluster_client.clusters import Cluster
from tests.integrations.disks import leave_on_disk, wait_until_in_memory

OWN = [f"vllm/one/{number}" for number in range(60)]
OTHERS = ["vllm/one", "vllm/two/1"]


def open_cluster(servers: Cluster, *options: str) -> AbstractContextManager[blocking.BlockingStore]:
    return blocking.open_store(servers.url(*options))


def test_what_has_the_prefix_is_deleted_and_nothing_else() -> None:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        store.put_many(dict.fromkeys([*OWN, *OTHERS], b"block"))

        assert delete_all(store, ["vllm/one/"]) == len(OWN)
        assert delete_all(store, ["vllm/one/"]) == 0
        assert store.keys() == OTHERS


def test_what_is_on_disk_alone_is_left_and_told_of(tmp_path: Path) -> None:
    disk = f"{tmp_path / 'disk'}:64MiB"
    with blocking.open_store(
        pool_bytes=1 << 20, minimal_allocate_bytes=4096, disk=disk, disk_admission="eager"
    ) as store:
        store.put_many(dict.fromkeys(OWN, b"block"))
        leave_on_disk(store)
        for _ in range(2):
            with pytest.raises(BlocksLeft, match=rf"^{len(OWN)} blocks are on disks, .*infinistore purge"):
                delete_all(store, ["vllm/one/"])

        store.prefetch(OWN)
        wait_until_in_memory(store, OWN)
        assert delete_all(store, ["vllm/one/"]) == len(OWN)


def test_a_store_that_does_not_answer_has_to_be_reset_again() -> None:
    with (
        blocking.open_store("infinistore://127.0.0.1:1", lazy=True) as store,
        pytest.raises(BlocksLeft, match=r"^blocks under a/, b/ may be left, .*\. Repeat the reset$"),
    ):
        delete_all(store, {"b/", "a/"})


def test_who_may_not_know_whether_there_are_disks_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionDenied("Statistics needs the role monitor")

    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        monkeypatch.setattr(store, "stats", denied)
        with pytest.raises(BlocksLeft, match=r"Give its tenant the role monitor$"):
            delete_all(store, ["vllm/one/"])


@pytest.mark.parametrize("copies", [1, 2])
def test_a_node_that_may_have_some_still_is_named_and_the_others_have_none(cluster: Cluster, copies: int) -> None:
    """tests/cluster_client/test_by_prefix.py has one that is silent."""
    with open_cluster(cluster, f"copies={copies}") as store:
        store.put_many(dict.fromkeys([*OWN, *OTHERS], b"block"))
        member = cluster.members[1]
        member.stop()
        for _ in range(2):  # before the node counts as lost, and after
            with pytest.raises(BlocksLeft, match=member.address):
                delete_all(store, ["vllm/one/", "vllm/two/"])
            assert set(store.keys()) <= {"vllm/one"}  # of all prefixes


def test_a_reset_is_complete_when_the_node_is_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinistore.client.connection.circuit_breaker.FIRST_PAUSE_S", 0.0)
    with open_cluster(cluster) as store:
        store.put_many(dict.fromkeys(OWN, b"block"))
        member = cluster.members[1]
        had = member.keys()
        member.stop()
        with pytest.raises(BlocksLeft):
            delete_all(store, ["vllm/one/"])
        member.start()
        with blocking.open_store(f"tcp://{member.address}") as alone:  # as if it had kept them
            alone.put_many(dict.fromkeys(had, b"block"))
        while not had.issubset(store.keys()):  # until the client knows that it is back
            store.get_many(OWN)

        assert delete_all(store, ["vllm/one/"]) == len(had)
        assert member.keys() == set()
