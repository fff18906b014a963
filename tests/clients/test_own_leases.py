"""Leases of blocks that a client knows, taken without asking the server: they are kept
like any lease.
"""

import gc

import pytest

from infinistore.errors import LimitExceeded, StoreUnavailable
from infinistore.protocol.shared_tables import HAZARD_SLOTS
from tests.bad_days.test_fork import in_child
from tests.clients.own_reading import READS, REMOVALS, SHORT, arrays_of, knows, needs_tables, values_of
from tests.clients.shared_serving import LONG, Shared, shared_serving
from tests.clients.stores import Loops
from tests.server.running import KIB, MIB

pytestmark = [needs_tables, pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse")]


@pytest.mark.parametrize("how", REMOVALS)
def test_a_block_that_is_leased_without_asking_outlives_its_key(shared: Shared, how: str) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    with shared.without_a_request():
        first, second = arrays_of(store, "a", "b"), arrays_of(store, "b")
    assert (shared.core_statistics().leases, shared.core_statistics().pinned_bytes) == (2, 101 * KIB - KIB + 69 * KIB)
    REMOVALS[how](other)
    gone = 0 if how.startswith("evict") else 169 * KIB
    assert shared.core_statistics().condemned_bytes == gone
    for index in range(12):
        other.put(f"more {index}", bytes([index]) * 400_000)
    assert [array.tobytes() for array in first] == list(LONG.values())
    part = first[0][5:8]
    del first
    gc.collect()
    assert shared.core_statistics().condemned_bytes == gone
    assert part.tobytes() == LONG["a"][5:8]
    del part
    assert shared.core_statistics().condemned_bytes == bool(gone) * 69 * KIB
    assert second[0].tobytes() == LONG["b"]
    del second
    statistics = shared.core_statistics()
    assert (statistics.condemned_bytes, statistics.pinned_bytes, statistics.leases) == (0, 0, 0)
    other.put("large", bytes(3 * MIB))
    assert store.get("large") == bytes(3 * MIB)


def test_an_array_read_without_asking_outlives_its_store(shared: Shared) -> None:
    writer = shared.open()
    writer.put_many(LONG)
    with shared.entered() as store:
        knows(store, LONG)
        arrays = arrays_of(store, "a", "b")
    del store
    writer.purge()
    for index in range(12):
        writer.put(f"more {index}", bytes([index]) * 400_000)
    assert [array.tobytes() for array in arrays] == list(LONG.values())
    shared.until(clients=2, quarantined_clients=0, condemned_bytes=169 * KIB)
    del arrays[0]
    shared.until(clients=2, condemned_bytes=169 * KIB)
    arrays.clear()
    shared.until(clients=1, condemned_bytes=0, leases=0)


def test_an_array_read_without_asking_outlives_the_end_of_its_connection(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    arrays = arrays_of(store, "a")
    shared.end_connections()
    shared.until(quarantined_clients=1, quarantined_bytes=100 * KIB)
    other.purge()
    for index in range(12):
        other.put(f"more {index}", bytes([index]) * 400_000)
    assert arrays[0].tobytes() == LONG["a"]
    assert values_of(store, ["a", "more 11"]) == [None, bytes([11]) * 400_000]
    assert arrays[0].tobytes() == LONG["a"]
    arrays.clear()
    store.exists("a")  # whoever calls next closes it
    shared.until(quarantined_clients=0, condemned_bytes=0, leases=0)


def test_after_the_server_ended_a_connection_nothing_is_read_over_it(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    shared.end_connections()
    other.put_many(SHORT)
    assert store.exists_many(["a", "b"]) == [True, True]
    knows(store, SHORT)
    with shared.without_a_request():
        assert READS["get_many"](store) == list(SHORT.values())
    assert READS["lease"](store) == list(SHORT.values())


def test_more_leases_than_a_client_can_pin_by_itself(loops: Loops) -> None:
    blocks = {f"key {i}": bytes([i]) * KIB for i in range(100)}
    with shared_serving(loops, "threads", prealloc_bytes=16 * MIB) as shared:
        store = shared.open(inline_bytes=0)
        store.put_many(blocks)
        knows(store, blocks)
        held = [arrays_of(store, *blocks) for _ in range(HAZARD_SLOTS // 100 + 5)]
        assert shared.core_statistics().leases == len(held)
        assert READS["get_many"](shared.open()) == [b"", b""]
        del held[3:]
        held += [arrays_of(store, *blocks) for _ in range(3)]
        shared.until(leases=6)
        store.purge()
        for arrays in held:
            assert [array.tobytes() for array in arrays] == list(blocks.values())
        del held, arrays
        store.exists("key 1")
        shared.until(leases=0, pinned_bytes=0, used_bytes=0)


def test_a_batch_of_more_blocks_than_a_client_can_pin_by_itself_is_asked_for(one_kind: Shared) -> None:
    blocks = {f"{i:x}": i.to_bytes(2, "big") for i in range(HAZARD_SLOTS + 1)}
    store = one_kind.open()
    store.put_many(blocks)
    knows(store, {"1": b"\0\1"})
    with one_kind.with_a_request():
        knows(store, blocks)
    with store.lease(list(blocks)) as views:
        assert [bytes(view or b"") for view in views] == list(blocks.values())
    some = dict(list(blocks.items())[1:])
    with one_kind.without_a_request():
        assert store.exists_many(list(blocks)) == [True] * len(blocks)
        with store.lease(list(some)) as views:
            assert [bytes(view or b"") for view in views] == list(some.values())
    one_kind.until(leases=0)


@pytest.mark.process
def test_the_end_of_a_forked_child_leaves_what_the_parent_reads_alone(one_kind: Shared) -> None:
    store, other = one_kind.open(), one_kind.open()
    other.put_many(LONG)
    knows(store, LONG)
    arrays = arrays_of(store, "a", "b")

    def check() -> None:
        with pytest.raises(StoreUnavailable, match="fork"):
            store.get("a")
        arrays.clear()
        gc.collect()

    in_child(check)
    other.purge()
    assert one_kind.core_statistics().condemned_bytes == 169 * KIB
    other.put("filler", bytes(3 * MIB))
    assert [array.tobytes() for array in arrays] == list(LONG.values())


def test_a_lease_beside_what_is_leased_without_asking_is_bounded_by_the_share(one_kind: Shared) -> None:
    blocks = {f"key {index}": bytes(700_000) for index in range(4)}
    store = one_kind.open()
    store.put_many(blocks)
    knows(store, {"key 0": blocks["key 0"], "key 1": blocks["key 1"], "key 2": blocks["key 2"]})
    held = arrays_of(store, "key 0", "key 1")
    with pytest.raises(LimitExceeded, match="release"):
        arrays_of(store, "key 3", "missing", "key 2")
    del held
    assert len(arrays_of(store, "key 3", "missing", "key 2")) == 2


def test_the_parts_of_a_lease_without_asking_count_together(loops: Loops) -> None:
    """Else a second part could be pinned by itself above the share, or hold more than
    the pool has.
    """
    with shared_serving(loops, "threads", max_batch_keys=2) as shared:
        store = shared.open()
        blocks = {f"key {index}": bytes(500_000) for index in range(6)}
        for key, value in blocks.items():
            store.put(key, value)
        knows(store, blocks)
        with pytest.raises(LimitExceeded, match="release"):
            arrays_of(store, *blocks)
        shared.until(leases=0, pinned_bytes=0)
        with shared.without_a_request():
            held = arrays_of(store, "key 0", "key 1", "key 2", "key 3")
        assert shared.core_statistics().leases == 2
        with pytest.raises(LimitExceeded, match="release"):
            arrays_of(store, "key 4")
        del held
        with shared.without_a_request():
            arrays_of(store, "key 4")
