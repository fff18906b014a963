"""What a server makes of the tables in shared memory: with a core behind them, and a
client's end of their files.
"""

import gc
import mmap
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import attrs
import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.allocators import create_allocator
from infinistore.core import Pool, StoreCore, Watermarks, create_arena
from infinistore.core.arena import Mapping
from infinistore.core.clients import Client
from infinistore.core.limits import CoreLimits
from infinistore.errors import OutOfMemory
from infinistore.protocol.codec import encode_head, head_bytes, pack_u64
from infinistore.protocol.messages import Keys, Message, Purge, Release, Touch
from infinistore.protocol.packed_offsets import pack_offsets
from infinistore.protocol.shared_tables import READER_BYTES, HazardTable, RemovalTable, TouchLog
from infinistore.server.connection import ClientTables
from infinistore.server.movers.shm import PublishedRemovals

POOL_BYTES = 64 * 1024
BLOCK_BYTES = 4096
LOG_BYTES = 32 * 1024
CHECKSUM = 7
HEADER_NUMBERS = 8


def mapped(descriptor: int, *, writable: bool) -> memoryview:
    """A file as a client maps it."""
    return Mapping(descriptor, os.fstat(descriptor).st_size, writable=writable).memory


@attrs.define
class Watching:
    """A core that is watched, and what a client has of the tables."""

    core: StoreCore
    client: Client
    tables: PublishedRemovals
    own: ClientTables
    memory: memoryview
    removals: RemovalTable
    hazards: HazardTable
    log: TouchLog
    heard: list[Message]

    def put(self, *keys: str) -> None:
        client = self.core.open_client("writer")
        reservation = self.core.reserve(client, [BLOCK_BYTES] * len(keys))
        self.core.commit(reservation, keys, [CHECKSUM] * len(keys))
        self.core.close_client(client)

    def place(self, key: str) -> int:
        lease = self.core.lease(self.client, [key])
        self.core.release(lease)
        return pack_offsets(lease.pinned)[0]

    def read(self, *keys: str) -> int:
        """Begin to read without asking; return what ends it."""
        rows = [(self.place(key), BLOCK_BYTES, CHECKSUM) for key in keys]
        slots = self.hazards.add(*map(pack_u64, zip(*rows, strict=True)))
        assert slots is not None
        return slots


def make_watching(limits: CoreLimits | None = None) -> Watching:
    pool = Pool(create_allocator("bitmap", 1024))
    pool.add_arena(create_arena(0, POOL_BYTES))
    core = StoreCore(pool, clock=lambda: 0.0, watermarks=Watermarks(1.0, 1.0), limits=limits)
    tables, own = PublishedRemovals(POOL_BYTES), ClientTables()
    client = core.open_client("reader")
    heard: list[Message] = []
    tables.watch(core)

    def hear(message: Message) -> None:
        assert isinstance(message, Touch)
        core.note_use(message.keys, read=message.read)
        heard.append(message)

    own.watch(core, client, hear)
    memory = mapped(own.share(), writable=True)
    removals = RemovalTable(mapped(tables.share(), writable=False), tables.granule_bytes)
    return Watching(core, client, tables, own, memory, removals, HazardTable(memory), TouchLog(memory), heard)


def end(watching: Watching) -> None:
    watching.core.close_client(watching.client)
    watching.own.close()
    watching.tables.close()
    watching.core.pool.close()


@pytest.fixture
def watching() -> Iterator[Watching]:
    made = make_watching()
    yield made
    end(made)


def touch(*keys: str, read: bool = True) -> bytes:
    return encode_head(Touch(Keys(list(keys)), read), request_id=0)


def touch_with(fields: dict[str | bytes, object]) -> bytes:
    """A Touch of any fields."""
    body: bytes = msgpack.packb(fields)
    head = touch()[:12] + len(body).to_bytes(4, "little") + touch()[16:32]
    return (head + body).ljust(head_bytes(len(body)), b"\0")


# Removals


def remove_by_replacing(watching: Watching) -> None:
    watching.put("a")


def remove_by_deleting(watching: Watching) -> None:
    watching.core.delete(["a"])


def remove_by_purging(watching: Watching) -> None:
    watching.core.purge()


def remove_by_evicting(watching: Watching) -> None:
    watching.core.evict(0.0, 0.0)


def remove_by_filling(watching: Watching) -> None:
    watching.put(*(f"more {index}" for index in range(POOL_BYTES // BLOCK_BYTES)))


def remove_by_verifying(watching: Watching) -> None:
    assert not watching.core.verify("a")  # its checksum was invented


@pytest.mark.parametrize(
    "remove",
    [
        remove_by_replacing,
        remove_by_deleting,
        remove_by_purging,
        remove_by_evicting,
        remove_by_filling,
        remove_by_verifying,
    ],
)
def test_whatever_takes_a_key_away_is_noted_and_the_room_is_not_used_while_it_is_read(
    watching: Watching, remove: Callable[[Watching], None]
) -> None:
    watching.put("a")
    place, known_at = watching.place("a"), watching.tables.count
    assert watching.removals.is_unchanged([place], [known_at])
    slots = watching.read("a")
    with suppress(OutOfMemory):
        remove(watching)
    if remove is remove_by_evicting or remove is remove_by_filling:  # they leave alone what is pinned
        assert watching.removals.is_unchanged([place], [known_at])
        watching.hazards.remove(slots)
        remove(watching)
        assert not watching.removals.is_unchanged([place], [known_at])
        return
    assert not watching.removals.is_unchanged([place], [known_at])
    watching.core.purge()
    assert watching.core.statistics().used_bytes == BLOCK_BYTES
    watching.hazards.remove(slots)
    assert watching.core.statistics().used_bytes == 0


def test_counts_begin_at_1_because_0_says_that_nobody_counts(watching: Watching) -> None:
    assert watching.tables.count == watching.removals.count == 1


def test_a_client_cannot_write_the_removal_table_or_make_the_files_shorter(watching: Watching) -> None:
    descriptor = watching.tables.share()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_WRITE)
    for one in (descriptor, watching.own.share()):
        with pytest.raises(PermissionError):
            os.ftruncate(one, 0)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)


# Reads


def test_a_read_counts_as_a_lease_and_goes_with_its_client(watching: Watching) -> None:
    watching.put("a", "b", "c")
    watching.read("a", "b")
    watching.read("c")
    statistics = watching.core.statistics()
    assert (statistics.leases, statistics.pinned_bytes) == (2, 3 * BLOCK_BYTES)
    watching.core.purge()
    watching.own.end()
    assert watching.hazards.closed
    assert watching.core.statistics().used_bytes == 3 * BLOCK_BYTES
    watching.core.close_client(watching.client)
    assert watching.core.statistics().used_bytes == 0


def test_memory_that_was_closed_is_still_looked_at_while_the_client_is_there(watching: Watching) -> None:
    watching.put("a")
    slots = watching.read("a")
    watching.own.close()
    watching.core.delete(["a"])
    assert watching.core.statistics().used_bytes == BLOCK_BYTES
    watching.hazards.remove(slots)
    assert watching.core.statistics().used_bytes == 0


# The log


def test_what_is_in_the_log_is_heard_in_order_when_listened_to_and_when_room_is_needed(watching: Watching) -> None:
    watching.log.append(touch("a", "b"))
    watching.log.append(touch("c", read=False))
    watching.own.listen()
    assert watching.heard == [Touch(Keys(["a", "b"])), Touch(Keys(["c"]), read=False)]
    watching.log.append(touch("d"))
    watching.core.reserve(watching.client, [BLOCK_BYTES])
    assert watching.heard[2:] == [Touch(Keys(["d"]))]
    watching.log.append(touch("e"))
    watching.core.close_client(watching.client)
    assert watching.heard[3:] == [Touch(Keys(["e"]))]


def test_a_log_is_heard_however_often_it_goes_round(watching: Watching) -> None:
    keys = [f"key {index}".ljust(1000) for index in range(LOG_BYTES // 250)]
    for key in keys:
        assert watching.log.append(touch(key))
        watching.own.listen()
    assert watching.heard == [Touch(Keys([key])) for key in keys]


def test_what_was_used_without_asking_outlives_what_was_not(watching: Watching) -> None:
    for index in range(POOL_BYTES // BLOCK_BYTES):
        watching.put(f"{index}")
    watching.log.append(touch("0", "gone", "2", "2"))
    watching.log.append(touch("4", read=False))
    watching.put("new 1", "new 2", "new 3")
    assert list(watching.core.exists(["0", "1", "2", "3", "4", "5", "6"])) == [1, 0, 1, 0, 1, 0, 1]
    assert watching.core.statistics().hits == 3


JUNK = {
    "not a frame": b"x" * 64,
    "less than a header": b"INFS\x01\x17",
    "a request": encode_head(Purge(), request_id=0),
    "another message without reply": encode_head(Release(1), request_id=0),
    "a body that ends too early": touch("a" * 200)[:128],
    "a body that says nothing": touch("a")[:32] + bytes(64),
    "a payload": encode_head(Touch(Keys(["a"])), request_id=0, payload_bytes=5),
    "an impossible key": encode_head(Touch(Keys(["", "a"])), request_id=0),
    "a header of another version": b"INFS\x09" + touch("a")[5:],
    "a field whose name is bytes": touch_with({"keys": "a", b"keys": "a"}),
    "a name for what is no field": touch_with({"keys": "a", b"\xff": 1, "x": 2}),
    "a header without its end": touch("a")[:24],
    "a body longer than the log": touch("a")[:12] + b"\xff\xff\xff\xff" + touch("a")[16:],
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_in_the_log_disturbs_nobody_and_ends_it(watching: Watching, junk: bytes) -> None:
    watching.put("a")
    watching.log.append(touch("before"))
    watching.log.append(junk)
    watching.log.append(touch("behind"))
    watching.own.listen()
    watching.log.append(touch("later"))
    watching.put("b")
    watching.own.listen()
    assert watching.heard == [Touch(Keys(["before"]))]
    assert list(watching.core.exists(["a", "b"])) == [1, 1]


def test_a_fault_of_ours_while_a_log_is_read_is_logged_and_disturbs_nobody_else(
    watching: Watching, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(keys: Sequence[str], *, read: bool) -> int:
        raise RuntimeError("planned")

    watching.put("a")
    monkeypatch.setattr(watching.core, "note_use", fail)
    watching.log.append(touch("a"))
    assert watching.core.delete(["a"]) == 1
    assert [record.message for record in caplog.records] == ["internal error"]
    assert watching.core.statistics().used_bytes == 0


def test_a_log_that_was_given_up_is_not_even_read(watching: Watching) -> None:
    watching.log.append(b"junk")
    watching.own.listen()
    assert watching.log.append(b"x" * LOG_BYTES)
    watching.own.listen()
    assert not watching.log.append(b"x")


def test_a_touch_of_too_many_keys_ends_the_log_and_disturbs_nobody() -> None:
    watching = make_watching(CoreLimits(max_batch_keys=2))
    watching.put("a", "b")
    watching.log.append(touch("a", "b", "c"))
    watching.log.append(touch("a"))
    watching.put("c")
    assert watching.heard == []
    assert watching.core.statistics().hits == 0
    end(watching)


def test_reads_are_respected_whatever_is_in_the_log(watching: Watching) -> None:
    watching.put("a")
    watching.log.append(b"junk")
    slots = watching.read("a")
    watching.core.delete(["a"])
    assert watching.core.statistics().used_bytes == BLOCK_BYTES
    watching.hazards.remove(slots)
    assert watching.core.statistics().used_bytes == 0


# Whatever a client writes

counts = st.integers(0, 2**64 - 1)
near = st.integers(0, 20) | st.integers(0, 40).map(lambda n: n * 1024) | st.just(READER_BYTES)
headers = st.lists(counts | near, min_size=HEADER_NUMBERS, max_size=HEADER_NUMBERS)
fillings = st.lists(counts | near, min_size=1, max_size=9)


@pytest.fixture(scope="module")
def long_lived() -> Iterator[Watching]:
    """One core for all garbage: what it leaves behind is there for the next."""
    made = make_watching()
    yield made
    end(made)


def write(memory: memoryview, header: Sequence[int], filling: Sequence[int]) -> None:
    """Fill a client's memory: the header, and after it the same numbers over
    and over.
    """
    rest = READER_BYTES // 8 - HEADER_NUMBERS
    memory[:READER_BYTES] = memoryview(array("Q", [*header, *(list(filling) * rest)[:rest]])).cast("B")


@given(garbage=st.lists(st.tuples(headers, fillings), min_size=1, max_size=3))
@example(garbage=[([2**64 - 1] * HEADER_NUMBERS, [2**64 - 1])])
@example(garbage=[([0, 2046, LOG_BYTES, 0, 0, 0, 0, 0], [0]), ([0, 2046, 0, 0, 0, 0, 0, 0], [1])])
def test_garbage_in_a_clients_memory_costs_room_at_most_and_that_only_while_it_is_there(
    long_lived: Watching, garbage: list[tuple[list[int], list[int]]]
) -> None:
    core = long_lived.core
    client, own = core.open_client("hostile"), ClientTables()
    own.watch(core, client, long_lived.heard.append)
    memory = mapped(own.share(), writable=True)
    long_lived.put("a", "b")
    for header, filling in garbage:
        write(memory, header, filling)
        own.listen()
        with suppress(OutOfMemory):
            long_lived.put("a", "c")
        core.delete(["b"])
        core.statistics()
        with suppress(OutOfMemory):
            core.evict(0.0, 0.0)
    own.end()
    core.close_client(client)
    own.close()
    assert core.statistics().pinned_bytes == 0
    core.purge()
    assert core.statistics().used_bytes == 0
    assert long_lived.heard == []
    long_lived.put(*(f"{index}" for index in range(POOL_BYTES // BLOCK_BYTES)))
    core.purge()


def test_no_descriptor_is_left_behind() -> None:
    gc.collect()  # what other tests have left may have some
    before = len(os.listdir("/proc/self/fd"))
    made = make_watching()
    end(made)
    assert len(os.listdir("/proc/self/fd")) == before
