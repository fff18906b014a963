"""Puts by shared memory that their client commits by itself: for everybody else they
are puts like any other.

What is between the copying and the commit word is looked at from there:
`just_before_the_word` runs what a test likes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.client.movers.shm.known_blocks import KnownReads
from infinistore.errors import ChecksumMismatch, OutOfMemory, StoreUnavailable
from infinistore.protocol.shared_tables import HAZARD_SLOTS
from infinistore.server.environment import Environment
from tests.clients.own_reading import READS, needs_tables, values_of
from tests.clients.shared_serving import LONG, Shared, shared_serving
from tests.clients.stores import Loops, damage
from tests.server.running import KIB, MIB, POOL_BYTES

OLD = {"a": b"old a" * 9000, "b": b"old b" * 40_000}
pytestmark = needs_tables


def counts(shared: Shared) -> Counter[str]:
    """How many requests of each kind there were."""
    found: Counter[str] = Counter()
    for one in shared.look(shared.server.server.context.recorder.statistics):
        found[one.kind] += one.count
    return found


@contextmanager
def by_itself(shared: Shared, batches: int = 1) -> Iterator[None]:
    """So many batches are committed by their clients alone."""
    before = counts(shared)
    yield
    new = counts(shared) - before
    assert (new["prepare"], new["commit"], new["put"]) == (batches, 0, 0)


@contextmanager
def by_message(shared: Shared, kind: str = "commit") -> Iterator[None]:
    before = counts(shared)
    yield
    new = counts(shared) - before
    assert (new[kind], new["prepare"]) == (1, 0)


@contextmanager
def just_before_the_word(do: Callable[[], object], *, after: bool = False) -> Iterator[None]:
    """Do something when a client has written a batch and is about to commit it; or just
    `after` it has.

    Once: what this puts itself is left alone.
    """
    commit = KnownReads.commit
    done: list[None] = []

    def committing(own_reads: KnownReads, *arguments: Any) -> None:
        is_first = not done
        done.append(None)
        if is_first and not after:
            do()
        commit(own_reads, *arguments)
        if is_first and after:
            do()

    with mock.patch.object(KnownReads, "commit", committing):
        yield
    assert done


def tcp_store(shared: Shared, **options: Any) -> BlockingStore:
    return shared.stack.enter_context(blocking.open_store(shared.server.url, **options))


def reader_of(shared: Shared, which: str, store: BlockingStore, **options: Any) -> BlockingStore:
    if which == "same":
        return store
    return shared.open(**options) if which == "another" else tcp_store(shared, **options)


def all_read(stores: Sequence[BlockingStore], expected: Sequence[bytes | None], keys: str = "ab") -> None:
    """Each store reads this, and the same again."""
    for store in stores:
        for _ in range(2):
            assert values_of(store, keys) == list(expected)


LOOK_UPS: dict[str, tuple[Callable[[BlockingStore], Any], Any]] = {
    "exists": (lambda store: store.exists_many(["a", "missing", "b"]), [True, False, True]),
    "match_prefix": (lambda store: int(store.match_prefix(["b", "a", "missing"])), 2),
    "hold": (lambda store: int(store.match_prefix(["b", "a"], hold_s=0.01)), 2),
    "keys": (lambda store: sorted(store.keys()), ["a", "b"]),
    "delete": (lambda store: store.delete(["a", "b", "missing"]), 2),
    "purge": (lambda store: store.purge(), 2),
    "evict": (lambda store: store.evict(0, 0), 2),
    "stats": (lambda store: store.stats().store.keys, 2),
    "put without replacing": (lambda store: store.put_many(dict(OLD), replace=False), ["a", "b"]),
}


# Seen at once


@pytest.mark.parametrize("reader", ["same", "another", "tcp"])
def test_a_put_is_read_by_everybody_as_soon_as_it_has_returned(shared: Shared, reader: str) -> None:
    store = shared.open()
    for name, read in READS.items():
        other = reader_of(shared, reader, store)
        for values in (OLD, LONG):
            with by_itself(shared):
                store.put_many(dict(values))
                for _ in range(2):
                    assert read(other) == list(values.values()), name


@pytest.mark.parametrize("reader", ["same", "another", "tcp"])
def test_a_put_is_found_by_everybody_as_soon_as_it_has_returned(one_kind: Shared, reader: str) -> None:
    store = one_kind.open()
    for name, (look, found) in LOOK_UPS.items():
        other = reader_of(one_kind, reader, store)
        with by_itself(one_kind):
            store.put_many(dict(LONG))
        assert look(other) == found, name


def test_a_put_is_there_when_its_store_is_closed_at_once(shared: Shared) -> None:
    with shared.entered() as store:
        store.put_many(dict(LONG))
    assert values_of(shared.open()) == list(LONG.values())
    statistics = shared.core_statistics()
    assert (statistics.reservations, statistics.reserved_bytes) == (0, 0)


def test_what_a_client_put_and_reads_is_counted(shared: Shared) -> None:
    store = shared.open()
    total = sum(map(len, LONG.values()))
    store.put_many(dict(LONG))
    assert values_of(store) == list(LONG.values())
    statistics = shared.core_statistics()
    assert (statistics.puts, statistics.put_bytes) == (2, total)
    assert (statistics.hits, statistics.hit_bytes) == (2, total)
    assert shared.look(lambda: shared.server.server.telemetry.statistics().received_bytes) == total


def test_a_put_takes_its_room_and_names_its_blocks_in_one_request(shared: Shared) -> None:
    store = shared.open()
    store.put_many(dict(LONG))
    for expected in ({"prepare": 1}, {"prepare": 1}, {"prepare": 1, "reserve": 1}, {"prepare": 1, "reserve": 1}):
        before = counts(shared)
        # The same sizes each time but the first: from the second on, the room of the
        # next put is asked for, too.
        store.put("key", bytes(MIB)) if before["prepare"] > 1 else store.put_many(dict(OLD))
        assert counts(shared) - before == expected


def test_puts_of_one_size_find_room_in_a_pool_that_grows(kind: str, loops: Loops) -> None:
    with shared_serving(loops, kind, auto_increase=True, max_pool_bytes=5 * POOL_BYTES) as shared:
        store, other = shared.open(), shared.open()
        puts_after = 0
        for index in count():  # until it has grown, which is done beside the puts; the test's time limit ends it else
            key, value = f"key {index}", bytes([index % 251]) * (MIB + 100)
            store.put(key, value)
            assert store.get(key) == other.get(key) == value
            puts_after += shared.look(lambda: len(shared.core.pool.arenas)) > 1
            if puts_after == 6:
                break


# Checksums


@pytest.mark.parametrize("reader", ["same", "another", "tcp"])
def test_the_checksums_that_the_writer_made_arrive(shared: Shared, reader: str) -> None:
    store = shared.open(verify="always")
    other = reader_of(shared, reader, store, verify="always")
    with by_itself(shared):
        store.put_many(dict(LONG))
    assert values_of(other) == list(LONG.values())
    shared.look(lambda: damage(shared.core, "b"))
    with pytest.raises(ChecksumMismatch):
        other.get_many(["a", "b"])
    assert other.exists_many(["a", "b"]) == [True, False]
    assert values_of(store) == [LONG["a"], None]


def test_a_writer_that_does_not_verify_leaves_no_checksums(shared: Shared) -> None:
    store, other = shared.open(verify="never"), shared.open(verify="always")
    with by_itself(shared):
        store.put_many(dict(LONG))
    shared.look(lambda: damage(shared.core, "b"))
    assert values_of(other) != list(LONG.values())
    assert shared.look(lambda: [entry[3] for entry in map(shared.core.index.get, "ab") if entry]) == [0, 0]


# By message, as before


def test_what_cannot_be_committed_alone_goes_by_message(shared: Shared) -> None:
    store, other = shared.open(), shared.open()
    with by_message(shared):
        assert store.put_many(dict(LONG), replace=False) == []
    with by_message(shared, "put"):
        store.put("short", b"short")
    many = {f"key {index}": bytes([index % 251]) * 100 for index in range(HAZARD_SLOTS + 1)}
    with by_message(shared):
        store.put_many(dict(many))
    assert values_of(other, many) == list(many.values())
    assert values_of(other) == list(LONG.values())
    del many["key 0"]
    with by_itself(shared):
        store.put_many(dict(many))
    assert values_of(other, many) == list(many.values())


def test_without_tables_everything_is_as_it_was(kind: str, loops: Loops) -> None:
    with shared_serving(loops, kind, Environment(tables_are_safe=lambda: False)) as shared:
        store, other = shared.open(), shared.open()
        for values in (OLD, LONG):
            with by_message(shared):
                store.put_many(dict(values))
            for who in (store, other):
                assert values_of(who) == list(values.values())


def test_a_full_pool_refuses_a_put_and_takes_it_when_there_is_room(shared: Shared) -> None:
    store = shared.open()
    store.put_many(dict(OLD))
    with store.lease(["a", "b"]) as views, pytest.raises(OutOfMemory):
        store.put("a", bytes(4 * MIB - 100 * KIB))
    del views
    assert values_of(store) == list(OLD.values())
    assert shared.core_statistics().reservations == 0
    for index in range(12):
        with by_itself(shared):
            store.put(f"filler {index}", bytes(MIB))
    assert store.exists(f"filler {index}")
    assert shared.core_statistics().keys <= 4


# From between the copying and the commit word


def test_nothing_is_seen_before_the_word_and_everything_after_it(one_kind: Shared) -> None:
    store, other, tcp = one_kind.open(), one_kind.open(), tcp_store(one_kind)
    store.put_many(dict(OLD))

    def look(expected: dict[str, bytes]) -> None:
        all_read([other, tcp], list(expected.values()))
        # The store itself, by another connection:
        assert values_of(store) == list(expected.values())

    look(OLD)
    with just_before_the_word(lambda: look(OLD)):
        store.put_many(dict(LONG))
    look(LONG)
    with just_before_the_word(lambda: look(OLD), after=True):
        store.put_many(dict(OLD))
    look(OLD)


@pytest.mark.parametrize("second", ["same", "another", "tcp"])
def test_of_two_puts_of_one_key_at_a_time_the_one_whose_word_comes_last_stays(one_kind: Shared, second: str) -> None:
    stores = {"same": one_kind.open(), "another": one_kind.open(), "tcp": tcp_store(one_kind)}
    store, everybody = stores["same"], list(stores.values())
    between = {"a": b"between" * 9000, "c": b"c" * 50_000}

    def put() -> None:
        stores[second].put_many(dict(between))
        all_read(everybody, [between["a"], None, between["c"]], "abc")

    with just_before_the_word(put):
        store.put_many(dict(LONG))
    all_read(everybody, [*LONG.values(), between["c"]], "abc")
    found = counts(one_kind)
    assert (found["prepare"], found["commit"]) == (1 + (second != "tcp"), int(second != "tcp"))
    puts = [one for one in one_kind.look(one_kind.server.server.telemetry.operations) if one.kind == "put"]
    assert sum(one.count for one in puts) == 2
    statistics = one_kind.core_statistics()
    assert (statistics.puts, statistics.keys) == (4, 3)
    store.purge()
    assert one_kind.core_statistics().used_bytes == 0


@pytest.mark.parametrize("second", ["same", "another", "tcp"])
def test_a_put_just_after_the_word_replaces_it(one_kind: Shared, second: str) -> None:
    stores = {"same": one_kind.open(), "another": one_kind.open(), "tcp": tcp_store(one_kind)}
    with just_before_the_word(lambda: stores[second].put_many(dict(OLD)), after=True):
        stores["same"].put_many(dict(LONG))
    all_read(list(stores.values()), list(OLD.values()))


REMOVALS: dict[str, Callable[[BlockingStore], object]] = {
    "delete": lambda store: store.delete(["a"]),
    "purge": lambda store: store.purge(),
    "evict": lambda store: store.evict(0, 0),
}


@pytest.mark.parametrize("name", REMOVALS)
@pytest.mark.parametrize("after", [False, True])
def test_a_removal_beside_a_put_takes_what_was_there(one_kind: Shared, name: str, after: bool) -> None:
    """Just before the word that is the old block; just after it is the new one, which
    its own store forgets.
    """
    store, other = one_kind.open(), one_kind.open()
    store.put("a", OLD["a"])
    assert other.get("a") == store.get("a") == OLD["a"]
    with just_before_the_word(lambda: REMOVALS[name](other), after=after):
        store.put("a", LONG["a"])
    all_read([store, other], [None if after else LONG["a"]], "a")
    assert one_kind.core_statistics().used_bytes == (0 if after else 100 * KIB)


def test_the_room_of_a_block_that_its_own_store_remembers_is_used_again_only_when_it_knows(one_kind: Shared) -> None:
    """The store notes where its blocks are when they may already have been replaced,
    and their room used again.
    """
    store, other = one_kind.open(), one_kind.open()

    def use_the_room() -> None:
        other.delete(["a", "b"])
        for index in range(30):
            other.put(f"filler {index}", bytes([index]) * 200_000)
        other.put_many(dict(OLD))

    with just_before_the_word(use_the_room, after=True):
        store.put_many(dict(LONG))
    all_read([store], list(OLD.values()))
    assert store.exists_many(["a", "b", "filler 0"]) == [True, True, False]


class Stop(BaseException):
    """What ends a call from outside."""


@pytest.mark.parametrize("after", [False, True])
def test_a_put_that_is_ended_at_its_word_stores_all_or_nothing(one_kind: Shared, after: bool) -> None:
    store, other = one_kind.open(), one_kind.open()
    store.put_many(dict(OLD))

    def stop() -> None:
        raise Stop

    with just_before_the_word(stop, after=after), pytest.raises(Stop):
        store.put_many(dict(LONG))
    for who in (other, store):
        assert values_of(who) == list((LONG if after else OLD).values())
    one_kind.until(reservations=0, reserved_bytes=0, quarantined_bytes=0)
    with by_itself(one_kind):
        store.put_many(dict(LONG))
    assert values_of(other) == list(LONG.values())


def test_a_put_whose_connection_the_server_ends_before_the_word_is_carried_out_on_another(one_kind: Shared) -> None:
    store, other = one_kind.open(), one_kind.open()
    store.put_many(dict(OLD))
    with just_before_the_word(one_kind.end_connections):
        store.put_many(dict(LONG))  # nothing of it was stored, so that it may be repeated
    one_kind.until(reservations=0, reserved_bytes=0, quarantined_bytes=0)
    for who in (other, store):
        assert values_of(who) == list(LONG.values())


@pytest.mark.parametrize("after", [False, True])
def test_a_server_that_drains_at_the_word_of_a_put_waits_for_nobody(loops: Loops, after: bool) -> None:
    with shared_serving(loops, "threads", drain_timeout_s=1000) as shared:
        store = shared.open()

        def drain() -> None:
            shared.look(shared.server.server.drain)
            loops.trio.run(shared.server.finished.wait)

        if after:
            with just_before_the_word(drain, after=True):
                store.put_many(dict(LONG))
        else:
            with just_before_the_word(drain), pytest.raises(StoreUnavailable):
                store.put_many(dict(LONG))
        assert len(shared.core) == (2 if after else 0)
