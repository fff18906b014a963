"""Clients on the server's host read again what they know without asking.

That they never read it wrongly: `test_own_reads_machine.py`; leases:
`test_own_leases.py`; many threads: `test_own_reads_at_once.py`.
"""

from typing import Any

import pytest

from infinistore.client.movers.shm.mover import TIMED_READS
from infinistore.core.arena import Arena, create_arena
from infinistore.errors import (
    BufferTooSmall,
    ChecksumMismatch,
    KeyNotFound,
    OutOfMemory,
    StoreUnavailable,
)
from infinistore.protocol.versions import LAST_RELEASE
from infinistore.server.environment import Environment
from tests.clients.own_reading import LOOKUPS, READS, REMOVALS, SHORT, arrays_of, knows, needs_tables, values_of
from tests.clients.shared_serving import LONG, Shared, shared_serving
from tests.clients.stores import Loops, damage, servers_offer
from tests.server.running import KIB, MIB

pytestmark = [needs_tables, pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse")]


# Without a request


@pytest.mark.parametrize(
    ("blocks", "verify"),
    [(LONG, "always"), (SHORT, "always"), (LONG, "never")],
    ids=["long", "short", "without checksums"],
)
def test_what_was_read_once_is_read_again_without_a_request(
    shared: Shared, blocks: dict[str, bytes], verify: str
) -> None:
    store, writer = shared.open(), shared.open(verify=verify)
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
    knows(store, {"first": bytes(100_000)})  # so that it has the tables
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


@pytest.mark.parametrize("how", REMOVALS)
def test_what_another_client_takes_away_is_not_read_again(shared: Shared, how: str) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    REMOVALS[how](other)
    expected: list[Any] = [b"new a" * 5000, b"new b" * 6000] if how == "replace" else [None, None]
    assert store.exists_many(["a", "b"]) == [value is not None for value in expected]
    assert values_of(store) == expected
    other.put_many(SHORT)
    assert READS["get"](store) == list(SHORT.values())


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


def test_another_client_is_told_of_reads_without_asking(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    other.put_many(LONG)
    knows(store, LONG)
    total = sum(map(len, LONG.values()))
    before = other.stats()
    with shared.without_a_request():
        for _ in range(3):
            store.get_many(LONG)
            with store.lease(["a", "b"]):
                pass
        store.match_prefix(["a", "b"])
        store.exists("a")
    after = other.stats()
    assert (after.store.hits, after.store.misses) == (before.store.hits + 12, before.store.misses)
    assert after.store.hit_bytes == before.store.hit_bytes + 6 * total
    assert before.server is not None and after.server is not None
    assert after.server.sent_bytes == before.server.sent_bytes + 6 * total


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


def test_puts_and_gets_are_counted_as_such_whether_the_server_was_asked_or_not(one_kind: Shared) -> None:
    store, other = one_kind.open(name="one"), one_kind.open(name="other")
    store.put_many(LONG)
    total = sum(map(len, LONG.values()))
    with one_kind.without_a_request():
        for _ in range(3):
            store.get_many(LONG)
    for _ in range(2):
        other.get_many(LONG)
    with other.lease(list(LONG)):
        pass
    telemetry = one_kind.server.server.telemetry
    operations = {(one.kind, one.transport): one for one in one_kind.look(telemetry.operations)}
    put, get = operations.pop(("put", "shm")), operations.pop(("get", "shm"))
    assert (put.count, put.payload_bytes, put.outcome) == (1, total, "ok")
    assert (get.count, get.payload_bytes, get.outcome) == (6, 6 * total, "ok")
    assert sum(put.latency_counts) == 1
    assert sum(get.latency_counts) == 2, "of the one for which the server was asked, and of one without that was timed"
    assert {kind for kind, _ in operations} <= {"map_arenas", "map_tables", "release"}
    clients = {one.name: one for one in one_kind.look(telemetry.clients)}
    assert {(one.transport, one.sent_bytes) for one in clients.values()} == {("shm", 3 * total)}
    assert one_kind.look(telemetry.statistics).requests == sum(one.requests for one in clients.values())


def test_of_the_gets_without_a_request_some_are_timed_and_told_with_the_next(one_kind: Shared) -> None:
    store = one_kind.open()
    store.put_many(LONG)
    with one_kind.without_a_request():
        for _ in range(2 * TIMED_READS + 1):
            store.get_many(LONG)
    operations = one_kind.look(one_kind.server.server.telemetry.operations)
    [get] = [one for one in operations if one.kind == "get"]
    assert (get.count, sum(get.latency_counts)) == (2 * TIMED_READS + 1, 2)
    assert get.latency_sum_s > 0


def test_a_server_of_the_last_release_is_told_no_times(kind: str, loops: Loops) -> None:
    """It knows no field for them, and would listen no more."""
    with servers_offer(LAST_RELEASE), shared_serving(loops, kind) as shared:
        store = shared.open()
        store.put_many(LONG)
        with shared.without_a_request():
            for _ in range(3):
                store.get_many(LONG)
        operations = shared.look(shared.server.server.telemetry.operations)
        [get] = [one for one in operations if one.kind == "get"]
        assert (get.count, sum(get.latency_counts)) == (3, 0)


def test_a_put_for_which_there_is_no_room_is_a_failed_put_by_shared_memory_too(one_kind: Shared) -> None:
    store = one_kind.open()
    for replace in (True, False):
        with pytest.raises(OutOfMemory):
            store.put_many({"a": bytes(3 * MIB), "b": bytes(3 * MIB)}, replace=replace)
    failed = [one for one in one_kind.look(one_kind.server.server.telemetry.operations) if one.outcome != "ok"]
    assert [(one.kind, one.transport, one.outcome, one.count) for one in failed] == [("put", "shm", "OutOfMemory", 2)]


def test_bytes_read_without_asking_are_not_counted_for_the_request_that_follows(one_kind: Shared) -> None:
    store = one_kind.open()
    store.put_many(LONG)
    knows(store, LONG)
    store.get_many(LONG)
    store.exists("not there")
    operations = one_kind.look(one_kind.server.server.telemetry.operations)
    assert [operation.payload_bytes for operation in operations if operation.kind == "exists"] == [0]


# A server that is gone


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("with_arrays", [False, True])
def test_a_server_that_has_drained_is_unavailable(shared: Shared, with_arrays: bool) -> None:
    store = shared.open()
    store.put_many(LONG)
    knows(store, LONG)
    arrays = arrays_of(store, "a", "b") if with_arrays else []
    shared.look(shared.server.server.drain)
    shared.look(lambda: None)
    for call in (*READS.values(), *LOOKUPS):
        with pytest.raises(StoreUnavailable):
            call(store)
    assert [array.tobytes() for array in arrays] == list(LONG.values())[: len(arrays)]


# Bounds


def test_with_known_blocks_0_the_server_is_always_asked(shared: Shared) -> None:
    store = shared.open(known_blocks=0)
    store.put_many(LONG)
    knows(store, LONG)
    for read in (*READS.values(), *LOOKUPS):
        with shared.with_a_request():
            read(store)


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

    shared.look(lambda: damage(shared.core, "b"))
    with shared.without_a_request():
        assert careless.get("b") != LONG["b"]
    with pytest.raises(ChecksumMismatch, match="'b'"):
        READS[read](store)
    assert shared.core_statistics().checksum_drops == 1
    assert values_of(store, ["a", "b"]) == values_of(careless, ["a", "b"]) == [LONG["a"], None]
    shared.until(leases=0, condemned_bytes=0)


# A server without tables


@pytest.mark.parametrize("why", ["not safe here", "no memory", "no descriptors"])
def test_with_a_server_that_has_no_tables_all_is_as_before(kind: str, loops: Loops, why: str) -> None:

    def create(index: int, length: int, **options: Any) -> Arena:
        if options.get("name") == "reader":
            if why == "no memory":
                raise OutOfMemory("none left")
            if why == "no descriptors":
                raise OSError(24, "Too many open files")
        return create_arena(index, length, **options)

    environment = Environment(create_arena=create, tables_are_safe=lambda: why != "not safe here")
    with shared_serving(loops, kind, environment) as shared:
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
        assert shared.look(lambda: shared.server.server.telemetry.statistics().errors) == 0
