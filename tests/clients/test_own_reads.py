"""Clients on the server's host read again what they know without asking, and never wrongly.

What another client has replaced, deleted or evicted is seen at once; what is leased so is kept like any lease.
"""

import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trio

import infinistore
from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.errors import (
    BufferTooSmall,
    ChecksumMismatch,
    KeyNotFound,
    LimitExceeded,
    OutOfMemory,
    StoreUnavailable,
)
from infinistore.protocol.shared_tables import HAZARD_SLOTS, tables_are_safe_here
from infinistore.server import service, shared_memory
from tests.clients.shared_serving import LONG, Shared, shared_serving
from tests.clients.stores import Loops
from tests.clients.test_cancellation import cancel_at_each_await
from tests.clients.test_shared_memory import server_process
from tests.server.running import KIB, MIB, make_config, running_server

SHORT = {"a": b"aaa", "b": b"a few bytes"}
pytestmark = [
    pytest.mark.skipif(not tables_are_safe_here(), reason="clients read by themselves on x86-64 only"),
    pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse"),
]


def knows(store: BlockingStore, blocks: dict[str, bytes]) -> None:
    """Have a store know these blocks, which are there, and have asked for all that it needs to read them."""
    for _ in range(2):
        assert values_of(store, blocks) == list(blocks.values())


def values_of(store: BlockingStore, keys: Iterable[str]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in store.get_many(keys)]


def arrays_of(store: BlockingStore, *keys: str) -> list[Any]:
    """Arrays that outlive the block of their lease."""
    with store.lease(list(keys)) as views:
        return [np.frombuffer(view, np.uint8) for view in views if view is not None]


def get_into(store: BlockingStore) -> list[bytes]:
    buffers = [bytearray(200_000), bytearray(200_000)]
    return [bytes(buffer[: store.get_into(key, buffer)]) for key, buffer in zip("ab", buffers, strict=True)]


def get_many_into(store: BlockingStore, **options: bool) -> list[bytes]:
    buffers = [bytearray(200_000), bytearray(200_000)]
    lengths = store.get_many_into(list(zip("ab", buffers, strict=True)), **options)
    return [bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]


def lease(store: BlockingStore, **options: bool) -> list[bytes]:
    with store.lease(["a", "b"], **options) as views:
        return [bytes(view) for view in views if view is not None]


READS: dict[str, Callable[[BlockingStore], list[bytes]]] = {
    "get": lambda store: [bytes(store.get("a")), bytes(store.get("b"))],
    "get_many": lambda store: [bytes(value or b"") for value in store.get_many(["a", "b"])],
    "get_into": get_into,
    "get_many_into": get_many_into,
    "all_or_nothing": lambda store: get_many_into(store, all_or_nothing=True),
    "lease": lease,
    "lease and verify": lambda store: lease(store, verify=True),
}
LOOKUPS: list[Callable[[BlockingStore], object]] = [
    lambda store: store.exists("a"),
    lambda store: store.match_prefix(["a", "b"]),
]
REMOVALS: dict[str, Callable[[BlockingStore], object]] = {
    "replace": lambda store: store.put_many({"a": b"new a" * 5000, "b": b"new b" * 6000}),
    "delete": lambda store: store.delete(["a", "b"]),
    "purge": lambda store: store.purge(),
    "evict by hand": lambda store: store.evict(0, 0),
    "evict by puts": lambda store: [store.put_many({f"filler {i}": bytes(500 * KIB)}) for i in range(9)],
}


# Without a request


@pytest.mark.parametrize("blocks", [LONG, SHORT], ids=["long", "short"])
def test_what_was_read_once_is_read_again_without_a_request(shared: Shared, blocks: dict[str, bytes]) -> None:
    store, writer = shared.open(), shared.open()
    writer.put_many(blocks)
    knows(store, blocks)
    with shared.without_a_request():
        for _ in range(3):
            for name, read in READS.items():
                assert read(store) == list(blocks.values()), name
        assert store.exists("a")
        assert store.exists_many(["b", "a", "b"]) == [True] * 3
        assert store.match_prefix(["a", "b"]) == 2
        assert values_of(store, ["b", "b", "a"]) == [blocks["b"], blocks["b"], blocks["a"]]
    shared.until(leases=0, pinned_bytes=0)


@pytest.mark.parametrize("name", READS)
def test_whatever_reads_a_block_first_lets_it_be_read_without_a_request(shared: Shared, name: str) -> None:
    shared.open().put_many({**LONG, "c": b"c" * 100_000})
    store = shared.open()
    knows(store, {"c": b"c" * 100_000})
    with shared.with_a_request():
        assert READS[name](store) == list(LONG.values())
    with shared.without_a_request():
        assert values_of(store, ["a", "b", "c"]) == [*LONG.values(), b"c" * 100_000]


def test_what_this_process_has_put_is_read_without_a_request(shared: Shared) -> None:
    store = shared.open()
    store.put("first", bytes(100_000))
    knows(store, {"first": bytes(100_000)})
    for number in range(3):
        blocks = {key: value + bytes([number]) for key, value in LONG.items()}
        store.put_many(blocks)
        with shared.without_a_request():
            assert READS["get_many"](store) == list(blocks.values())


@pytest.mark.parametrize("missing", ["a block that is not there", "a block that is not known"])
def test_a_batch_with_what_is_not_known_is_asked_for(shared: Shared, missing: str) -> None:
    store, writer = shared.open(), shared.open()
    writer.put_many(LONG)
    knows(store, LONG)
    values: list[bytes | None] = [*LONG.values(), None]
    if missing == "a block that is not known":
        writer.put("c", b"c")
        values[-1] = b"c"
    with shared.with_a_request():
        assert values_of(store, ["a", "b", "c"]) == values
    assert store.exists_many(["a", "b", "c"]) == [True, True, values[-1] is not None]
    assert store.match_prefix(["a", "b", "c"]) == 2 + (values[-1] is not None)


def test_a_prefix_that_is_to_be_held_is_asked_for(shared: Shared) -> None:
    store = shared.open()
    store.put_many(LONG)
    knows(store, LONG)
    match = store.match_prefix(["a", "b"], hold_s=30)
    assert (match, shared.core_statistics().holds) == (2, 1)
    assert store.release_hold(match.hold)


def test_an_empty_batch_is_one_all_the_same(shared: Shared) -> None:
    store = shared.open()
    store.put_many(LONG)
    knows(store, LONG)
    assert values_of(store, []) == []
    assert store.get_many_into([]) == []
    assert store.exists_many([]) == []
    assert store.match_prefix([]) == 0
    with store.lease([]) as views:
        assert views == []


# Never wrong


@pytest.mark.parametrize("how", REMOVALS)
def test_what_another_client_takes_away_is_not_read_again(shared: Shared, how: str) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    REMOVALS[how](other)
    expected: list[Any] = [b"new a" * 5000, b"new b" * 6000] if how == "replace" else [None, None]
    assert store.exists_many(["a", "b"]) == [value is not None for value in expected]
    assert store.match_prefix(["a", "b"]) == 2 * (how == "replace")
    assert values_of(store, ["a", "b"]) == expected
    assert [store.get_many([key])[0] for key in "ab"] == expected
    with store.lease(["a", "b"], verify=True) as views:
        assert views == expected
        del views
    if how == "replace":
        with shared.without_a_request():
            assert READS["get_many_into"](store) == expected
    else:
        with pytest.raises(KeyNotFound):
            store.get("a")
        other.put_many(SHORT)
        assert READS["get"](store) == list(SHORT.values())


def test_a_key_that_others_put_again_and_again_is_always_read_as_it_is(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    for number in range(20):
        value = number.to_bytes(2, "big") * (1, 40_000, 300)[number % 3]
        (store if number % 4 == 3 else other).put("key", value)
        for reader in (store, other):
            assert reader.get("key") == value
            assert reader.get("key") == value


# Leases


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
    with shared_serving(loops, "threads", prealloc_bytes=16 * MIB) as shared:
        lease_more_than_fit_the_table(shared)


def lease_more_than_fit_the_table(shared: Shared) -> None:
    blocks = {f"key {i}": bytes([i]) * KIB for i in range(100)}
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


def test_the_end_of_a_forked_child_leaves_what_the_parent_reads_alone(one_kind: Shared) -> None:
    from tests.bad_days.test_fork import in_child

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


# Recency and statistics


@pytest.mark.parametrize("use", ["get", "lease", "match_prefix"])
def test_a_read_without_asking_counts_as_a_use_before_anything_is_evicted(shared: Shared, use: str) -> None:
    store, writer = shared.open(), shared.open()
    for index in range(8):
        writer.put(f"key {index}", bytes([index]) * 400_000)
    blocks = {f"key {index}": bytes([index]) * 400_000 for index in (1, 2)}
    knows(store, blocks)
    writer.get_many([f"key {index}" for index in (7, 6, 5, 4, 3, 0)])
    with shared.without_a_request():
        if use == "get":
            store.get_many(blocks)
        elif use == "match_prefix":
            assert store.match_prefix(blocks) == 2
        else:
            with store.lease(blocks):
                pass
        assert store.exists("key 1")
    for index in range(5):
        writer.put(f"new {index}", bytes(400_000))
    assert writer.exists_many([f"key {index}" for index in range(5)]) == [False, True, True, False, False]


def test_reads_without_asking_are_counted(shared: Shared) -> None:
    store, writer = shared.open(), shared.open()
    writer.put_many(LONG)
    knows(store, LONG)
    total = sum(map(len, LONG.values()))
    before, sent = shared.core_statistics(), shared.look(lambda: shared.server.server.statistics().sent_bytes)
    with shared.without_a_request():
        for _ in range(3):
            store.get_many(LONG)
            with store.lease(["a", "b"]):
                pass
        store.match_prefix(["a", "b"])
        store.exists("a")
    assert shared.look(lambda: shared.server.server.statistics().sent_bytes) == sent + 6 * total
    statistics = shared.core_statistics()
    assert statistics.hits == before.hits + 12
    assert statistics.hit_bytes == before.hit_bytes + 6 * total
    assert statistics.misses == before.misses


def test_another_client_is_told_of_reads_without_asking(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    before = other.stats()
    store.get_many(LONG)
    after = other.stats()
    assert after.server is not None
    assert before.server is not None
    total = sum(map(len, LONG.values()))
    assert (after.store.hits, after.store.hit_bytes) == (before.store.hits + 2, before.store.hit_bytes + total)
    assert after.server.sent_bytes == before.server.sent_bytes + total


def test_no_use_is_lost_when_there_are_more_than_the_server_has_room_to_hear_of(shared: Shared) -> None:
    store = shared.open()
    store.put_many(SHORT)
    knows(store, SHORT)
    before = shared.core_statistics()
    for _ in range(1000):
        store.get("a")
    long_key = "k" * 1000
    for count in (10, 30):  # some fit the log, and some never do
        blocks = {f"{long_key}{i}": b"x" for i in range(count)}
        store.put_many(blocks)
        knows(store, blocks)
        store.get_many(blocks)
    statistics = shared.core_statistics()
    assert statistics.hits == before.hits + 1000 + 3 * 40
    assert statistics.hit_bytes == before.hit_bytes + 3000 + 3 * 40
    assert READS["get"](store) == list(SHORT.values())


def test_bytes_read_without_asking_are_not_counted_for_the_request_that_follows(one_kind: Shared) -> None:
    store = one_kind.open()
    store.put_many(LONG)
    knows(store, LONG)
    store.get_many(LONG)
    store.exists("not there")
    operations = one_kind.look(one_kind.server.server.operations)
    assert [operation.payload_bytes for operation in operations if operation.kind == "exists"] == [0]


# A server that is gone


def test_a_server_that_was_killed_is_unavailable_and_another_one_serves_its_own(tmp_path: Path) -> None:
    url = f"shm://{tmp_path}/store.sock"
    with server_process(tmp_path) as server, blocking.open_store(url, deadline_s=1) as store:
        store.put_many(LONG)
        knows(store, LONG)
        arrays = arrays_of(store, "a")
        server.kill()
        for call in (*READS.values(), *LOOKUPS):
            with pytest.raises(StoreUnavailable):
                call(store)
        server.start()
        with blocking.open_store(url) as other:
            assert values_of(other, ["a", "b"]) == [None, None]
            until_it_answers(store)
            assert values_of(store, ["a", "b"]) == [None, None]
            assert not store.exists("a")
            other.put_many(SHORT)
            for _ in range(3):
                assert READS["get_many"](store) == list(SHORT.values())
        assert arrays[0].tobytes() == LONG["a"]


def until_it_answers(store: BlockingStore) -> None:
    while True:
        with suppress(StoreUnavailable):
            store.exists("anything")
            return


@pytest.mark.parametrize("with_arrays", [False, True])
def test_a_server_that_has_drained_is_unavailable(shared: Shared, with_arrays: bool) -> None:
    store = shared.open(deadline_s=0.3)
    store.put_many(LONG)
    knows(store, LONG)
    arrays = arrays_of(store, "a", "b") if with_arrays else []
    shared.look(shared.server.server.drain)
    shared.look(lambda: None)
    for call in (*READS.values(), *LOOKUPS):
        with pytest.raises(StoreUnavailable):
            call(store)
    assert [array.tobytes() for array in arrays] == list(LONG.values())[: len(arrays)]


async def test_a_server_restarted_at_the_same_path_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    config = make_config(unix_socket=str(tmp_path / "store.sock"))
    async with infinistore.open_store(f"shm://{tmp_path}/store.sock", lazy=True, deadline_s=5) as store:
        for number in range(3):
            async with running_server(config):
                blocks = {key: value + bytes([number]) for key, value in LONG.items()}
                for _ in range(2):
                    assert await store.get_many(["a", "b"]) == [None, None]
                    assert await store.exists_many(["a", "b"]) == [False, False]
                await store.put_many(blocks)
                for _ in range(3):
                    assert await store.get_many(["a", "b"]) == list(map(bytearray, blocks.values()))


# Bounds


def test_with_known_blocks_0_the_server_is_always_asked(shared: Shared) -> None:
    store = shared.open(known_blocks=0)
    store.put_many(LONG)
    knows(store, LONG)
    for read in (*READS.values(), *LOOKUPS):
        with shared.with_a_request():
            read(store)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_more_blocks_than_are_to_be_known(shared: Shared, most: int) -> None:
    store, other = shared.open(known_blocks=most), shared.open()
    blocks = {f"key {i}": bytes([i]) * (i + 1) for i in range(10)}
    other.put_many(blocks)
    for number in range(4):
        for key, value in blocks.items():
            assert store.get(key) == value
            assert store.get(key) == value
        assert values_of(store, blocks) == list(blocks.values())
        blocks[f"key {number}"] = b"another"
        other.put(f"key {number}", b"another")


def test_a_batch_longer_than_one_request_takes_is_read_in_parts(kind: str, loops: Loops) -> None:
    with shared_serving(loops, kind, max_batch_keys=3, max_batch_bytes=64 * KIB, max_value_bytes=64 * KIB) as shared:
        store, other = shared.open(inline_bytes=0), shared.open()
        blocks = {f"key {i}": bytes([i]) * 1000 for i in range(8)} | {"x": bytes(50 * KIB), "y": bytes(60 * KIB)}
        store.put_many(blocks)
        knows(store, blocks)
        some = {key: value for key, value in blocks.items() if key not in {"x", "y"}}
        with shared.without_a_request():
            assert values_of(store, some) == list(some.values())
            assert store.exists_many(blocks) == [True] * 10
            with store.lease(list(some)) as views:
                assert list(map(bytes, filter(None, views))) == list(some.values())
                assert shared.core_statistics().leases == 3
                del views
        other.delete(["key 4"])
        assert values_of(store, blocks) == [None if key == "key 4" else value for key, value in blocks.items()]
        assert store.match_prefix(blocks) == 4
        with store.lease(list(blocks)) as views:
            assert views == [None if key == "key 4" else value for key, value in blocks.items()]
            del views
        shared.until(leases=0)


@pytest.mark.parametrize("blocks", [LONG, SHORT], ids=["long", "short"])
def test_a_buffer_that_is_too_small_is_refused_and_nothing_is_written(shared: Shared, blocks: dict[str, bytes]) -> None:
    store = shared.open()
    store.put_many(blocks)
    knows(store, blocks)
    small = bytearray(b"." * (len(blocks["b"]) - 1))
    with pytest.raises(BufferTooSmall):
        store.get_into("b", small)
    other = bytearray(b"." * 200_000)
    with pytest.raises(BufferTooSmall):
        store.get_many_into([("a", other), ("b", small)])
    assert not small.strip(b".")
    assert not other.strip(b".")
    exact = bytearray(len(blocks["b"]))
    with shared.without_a_request():
        assert store.get_many_into([("a", other), ("b", exact)]) == list(map(len, blocks.values()))
    assert [bytes(other.rstrip(b".")), bytes(exact)] == list(blocks.values())
    shared.until(leases=0)


def test_all_or_nothing_leaves_the_buffers_alone_when_a_known_block_is_gone(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    other.delete(["b"])
    buffers = [bytearray(200_000), bytearray(200_000)]
    with pytest.raises(KeyNotFound):
        store.get_many_into(list(zip("ab", buffers, strict=True)), all_or_nothing=True)
    assert not any(map(any, buffers))
    assert store.get_many_into(list(zip("ab", buffers, strict=True))) == [len(LONG["a"]), None]


@pytest.mark.parametrize("read", ["get", "get_into", "lease and verify"])
def test_a_block_that_rots_is_found_by_who_knows_it_and_dropped(shared: Shared, read: str) -> None:
    store, careless = shared.open(), shared.open(verify="never")
    store.put_many(LONG)
    knows(store, LONG)
    knows(careless, LONG)

    def rot() -> None:
        entry = shared.core._index.get("b")
        assert entry is not None
        shared.core.pool.view(entry[:3])[77] ^= 1

    shared.look(rot)
    with shared.without_a_request():
        assert careless.get("b") != LONG["b"]
    with pytest.raises(ChecksumMismatch, match="'b'"):
        READS[read](store)
    assert shared.core_statistics().checksum_drops == 1
    assert values_of(store, ["a", "b"]) == values_of(careless, ["a", "b"]) == [LONG["a"], None]
    shared.until(leases=0, condemned_bytes=0)


def test_blocks_put_without_checksums_are_read_without_them(shared: Shared) -> None:
    store, careless = shared.open(), shared.open(verify="never")
    careless.put_many(LONG)
    for reader in (store, careless):
        knows(reader, LONG)
        with shared.without_a_request():
            for name, read in READS.items():
                assert read(reader) == list(LONG.values()), name


# A server without tables


@pytest.mark.parametrize("why", ["not safe here", "no memory", "no descriptors"])
def test_with_a_server_that_has_no_tables_all_is_as_before(kind: str, loops: Loops, why: str) -> None:
    if why == "not safe here":
        without = mock.patch.object(service, "tables_are_safe_here", return_value=False)
    elif why == "no memory":
        without = mock.patch.object(shared_memory, "OwnReads", side_effect=OutOfMemory("none left"))
    else:
        without = mock.patch.object(shared_memory, "OwnReads", side_effect=OSError(24, "Too many open files"))
    with without, shared_serving(loops, kind) as shared:
        store, other = shared.open(), shared.open()
        other.put_many(LONG)
        for _ in range(2):
            for name, read in READS.items():
                with shared.with_a_request():
                    assert read(store) == list(LONG.values()), name
            assert store.exists_many(["a", "b"]) == [True, True]
            assert store.match_prefix(["a", "b"]) == 2
        other.put_many(SHORT)
        assert READS["get"](store) == list(SHORT.values())
        assert shared.core_statistics().leases == 0
        assert shared.look(lambda: shared.server.server.statistics().errors) == 0


# Calls that are given up, and many at a time


@pytest.mark.parametrize("method", ["get_many", "get_many_into", "lease"])
async def test_a_read_without_asking_that_is_cancelled_anywhere_leaves_nothing_pinned(
    tmp_path: Path, method: str
) -> None:
    config = make_config(unix_socket=str(tmp_path / "store.sock"), prealloc_bytes=16 * MIB)
    url = f"shm://{tmp_path}/store.sock"
    blocks = {"a": b"a" * (3 * MIB), "b": b"b" * (3 * MIB), "c": b"c" * 10}
    async with running_server(config) as server, infinistore.open_store(url) as keeper:
        await keeper.put_many(blocks)

        async def call() -> None:
            async with infinistore.open_store(url, copy_threads=1) as store:
                for _ in range(3):
                    if method == "get_many":
                        assert await store.get_many(blocks) == list(map(bytearray, blocks.values()))
                    elif method == "get_many_into":
                        buffers = [bytearray(len(value)) for value in blocks.values()]
                        await store.get_many_into(list(zip(blocks, buffers, strict=True)))
                        assert buffers == list(blocks.values())
                    else:
                        async with store.lease(list(blocks), verify=True) as views:
                            await trio.lowlevel.checkpoint()
                            del views

        async def after() -> None:
            with trio.fail_after(30):
                while server.server.statistics().connections_open > 1:
                    await trio.lowlevel.checkpoint()
            found = server.core.statistics()
            assert (found.leases, found.pinned_bytes, found.quarantined_bytes) == (0, 0, 0)
            assert await keeper.get("c") == blocks["c"]

        assert await cancel_at_each_await(call, after) > 10


KEYS = [f"key {index}" for index in range(6)]


class Struggle:
    """Threads that write and threads that read, until the writers are done. Checksums are off: only what lies in the
    memory counts. Each value is one number again and again."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.written = dict.fromkeys(KEYS, 0)  # the least that a reader may find
        self.over = threading.Event()

    def write(self, store: BlockingStore, mine: list[str]) -> None:
        for number in range(1, 40):
            for key in mine:
                if number % 7 == 3:
                    store.delete([key])
                store.put(key, number.to_bytes(2, "big") * (4000 + 1000 * (number % 3)))
                self.written[key] = number

    def read(self, store: BlockingStore) -> None:
        kept: list[list[Any]] = []
        while not self.over.is_set():
            least = dict(self.written)
            for key, value in zip(KEYS, store.get_many(KEYS), strict=True):
                if value is not None:
                    assert value == value[:2] * (len(value) // 2)
                    assert int.from_bytes(value[:2], "big") >= least[key]
            kept.append(arrays_of(store, *KEYS[:3]))
            if len(kept) > 2:
                assert all(len(set(array[start::2].tolist())) == 1 for array in kept.pop(0) for start in (0, 1))

    def work(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001
            self.failures.append(error)

    def thread(self, function: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=self.work, args=(function, *arguments))
        thread.start()
        return thread


def test_many_threads_read_replace_and_delete_at_once_and_see_no_wrong_byte(tmp_path: Path) -> None:
    url = f"shm://{tmp_path}/store.sock"
    options: dict[str, Any] = {"verify": "never", "inline_bytes": 0}
    with (
        server_process(tmp_path, "--prealloc-size", "1MiB"),
        blocking.open_store(url, **options) as one,
        blocking.open_store(url, **options) as two,
    ):
        struggle = Struggle()
        writers = [struggle.thread(struggle.write, store, mine) for store, mine in ((one, KEYS[:3]), (two, KEYS[3:]))]
        readers = [struggle.thread(struggle.read, store) for store in (one, one, two)]
        for thread in writers:
            thread.join()
        struggle.over.set()
        for thread in readers:
            thread.join()
        assert struggle.failures == []
        gc.collect()
        while one.stats().store.leases:
            one.exists("anything")


def test_one_store_in_many_threads_keeps_apart_what_each_reads(one_kind: Shared) -> None:
    blocks = {f"key {index}": bytes([index]) * 50_000 for index in range(8)}
    store, other = one_kind.open(), one_kind.open()
    other.put_many(blocks)
    knows(store, blocks)
    failures: list[BaseException] = []

    def work(key: str) -> None:
        try:
            for _ in range(40):
                assert store.get(key) == blocks[key]
                (array,) = arrays_of(store, key)
                assert array.tobytes() == blocks[key]
                assert store.exists(key)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    one_kind.until(leases=0, pinned_bytes=0)
    assert one_kind.core_statistics().hits >= 8 * 80


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
