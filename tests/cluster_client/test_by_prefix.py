"""What is done by prefix in a cluster of which a node does not answer: all that the
others have, and then it is said.
"""

from collections.abc import Iterator

import pytest

from infinistore import blocking
from infinistore.blocking import PAGE_KEYS, do_by_prefix, key_pages
from infinistore.errors import DiskFailed, StoreUnavailable
from tests.cluster_client.clusters import Cluster

NAMES = [f"one/{number}" for number in range(60)]


@pytest.fixture
def store(three: Cluster) -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(three.url(), deadline_s=600.0, lookup_deadline_s=60.0) as store:
        store.put_many(dict.fromkeys([*NAMES, "two"], b"block"))
        yield store


def test_pages_of_every_node_have_what_the_others_have_and_end_with_the_one_that_is_lost(
    three: Cluster, store: blocking.BlockingStore
) -> None:
    stopped = three.members[1]
    lost = stopped.keys()
    stopped.stop()
    pages: list[list[str]] = []
    with pytest.raises(StoreUnavailable, match=stopped.address):
        pages.extend(key_pages(store, "one/", every_node=True))
    left = sorted(set(NAMES) - lost)
    assert pages == [left]
    assert [key for page in key_pages(store, "one/") for key in page] == left


def test_a_node_that_is_lost_between_the_listing_and_the_work_is_told_of(
    three: Cluster, store: blocking.BlockingStore
) -> None:
    lost = three.members[1].keys()

    def delete_after_a_loss(page: list[str]) -> int:
        three.members[1].stop()
        return store.delete(page)

    count, error = do_by_prefix(store, "one/", delete_after_a_loss)
    assert count == 0  # of a call that failed, nobody knows
    assert three.members[1].address in error
    assert set(store.keys()) == {"two"} - lost


def test_of_all_nodes_that_answer_the_sum_is_returned(store: blocking.BlockingStore) -> None:
    assert do_by_prefix(store, "one/", store.delete) == (len(NAMES), "")
    assert store.keys() == ["two"]


def test_a_store_that_is_no_cluster_raises() -> None:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        store.put("one/1", b"block")

        def fail(page: list[str]) -> int:
            raise StoreUnavailable("no answer")

        with pytest.raises(StoreUnavailable, match="no answer"):
            do_by_prefix(store, "one/", fail)


def test_what_a_disk_may_bring_back_keeps_no_page_from_being_deleted() -> None:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        store.put_many({f"one/{number}": b"block" for number in range(PAGE_KEYS + 1)})

        def delete(page: list[str]) -> int:
            store.delete(page)
            raise DiskFailed("what was deleted may be back")

        with pytest.raises(DiskFailed, match="may be back"):
            do_by_prefix(store, "one/", delete)
        assert store.keys() == []
