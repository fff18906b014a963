"""Clients that read and commit by themselves, and a server that takes blocks away and
uses their room again, on processors with store buffers: nobody reads anything but what
they have leased.

All of it is the real thing but for the messages between them: the tables at both ends,
what a client knows and pins, and the store. In each block stands its checksum, so that
a reader sees at once what it reads. Faults that are put in on purpose have to be found.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from infinistore.allocators.bitmap import BitmapAllocator
from infinistore.client.movers.shm.known_blocks import KnownBlocks, PinnedBlocks
from infinistore.client.movers.shm.known_blocks import KnownReads as ClientsReads
from infinistore.core import Pool, StoreCore, Watermarks, create_arena
from infinistore.core.clients import Client as CoreClient
from infinistore.core.index import Entry
from infinistore.core.pins import HazardPins
from infinistore.errors import LimitExceeded, OutOfMemory
from infinistore.protocol import shared_tables
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import MISSING
from infinistore.protocol.packed_offsets import offset_of, pack_offsets
from infinistore.protocol.shared_tables import CommitWord, HazardTable, RemovalTable
from infinistore.server.connection import ClientTables
from infinistore.server.movers.shm import PublishedRemovals
from tests.server.store_buffers import Actor, Numbers, Processors

UNIT_BYTES = 512
POOL_BYTES = 4096
KEYS = ["a", "b", "c"]
SIZES = [1, 4, 6]
"""Of blocks, in units: two may fill the pool, and those that a client knew once are
soon more than it has.
"""
STEPS = 40
"""How often each client does something in a run: some thousand accesses in all."""
RUNS = 60
MOST_RUNS = 600
"""How many runs may be needed to find a fault: the rarest of those below shows in one
of fifty.
"""


class World:
    """A server, and the memory that it shares."""

    def __init__(self, seed: int) -> None:
        self.processors = Processors(seed)
        self.random = self.processors.random
        pool = Pool(BitmapAllocator(UNIT_BYTES))
        pool.add_arena(create_arena(0, POOL_BYTES))
        self.core = StoreCore(pool, clock=lambda: 0.0, watermarks=Watermarks(0.6, 1.0), random=self.random)
        self.tables = PublishedRemovals(POOL_BYTES, UNIT_BYTES)
        self.tables.table.numbers = self.shared(self.tables.table.numbers)
        self.tables.watch(self.core)
        self.contents = self.shared(array("Q", bytes(8 * (POOL_BYTES // UNIT_BYTES))))
        self.checksums = count(1)
        self._answering = False

    def shared(self, memory: Any) -> Numbers:
        return Numbers(self.processors, memory)

    @contextmanager
    def asked(self) -> Iterator[StoreCore]:
        """The server answers one request at a time."""
        while self._answering:
            self.processors.step()
        self._answering = True
        try:
            with self.processors.on("server"):
                yield self.core
        finally:
            self._answering = False

    def write(self, entry: Entry) -> None:
        for unit in units_of(*entry[1:3]):
            self.contents[unit] = entry[3]

    def check(self, offset: int, length: int, checksum: int) -> None:
        """Look at a block that is leased."""
        for unit in units_of(offset, length):
            assert self.contents[unit] == checksum

    def close(self) -> None:
        self.core.purge()
        statistics = self.core.statistics()
        assert (statistics.used_bytes, statistics.pinned_bytes, statistics.condemned_bytes) == (0, 0, 0)
        self.tables.close()
        self.core.pool.close()


def units_of(offset: int, length: int) -> range:
    return range(offset // UNIT_BYTES, (offset + length) // UNIT_BYTES)


class Client:
    """One that reads, leases in parts, puts and deletes, as it likes."""

    def __init__(self, world: World, name: str, steps: int, counts_late: bool) -> None:
        self.world = world
        self.counts_late = counts_late
        self.actor = Actor(name, partial(self.act, steps))
        self.client: CoreClient = world.core.open_client(name)
        self.served = ClientTables()
        memory = self.served.arena.memory
        hazards, word = HazardTable(memory), CommitWord(memory)
        removals = RemovalTable(world.tables.arena.memory, world.tables.granule_bytes)
        self.served.hazards.numbers = hazards.numbers = world.shared(hazards.numbers)
        self.served.commit_word.word = word.word = world.shared(word.word)
        self.served.commit_word.checksums = word.checksums = world.shared(word.checksums)
        removals.numbers = world.tables.table.numbers
        self.served.watch(world.core, self.client, lambda _: None)
        self.known = KnownBlocks(100)
        self.known.table = removals
        pins: Any = SimpleNamespace(hazards=hazards, leased_bytes=0)
        self.pins = pins
        self.reads = ClientsReads(self.known, pins)
        self.reads.commit_word = word
        self.reads.max_pinned_bytes, self.reads.unit_bytes = world.core.max_pinned_bytes, UNIT_BYTES
        self.numbers = count(1)

    def act(self, steps: int) -> None:
        random = self.world.random
        for _ in range(steps):
            do = random.choice([self.lease, self.lease, self.lease, self.put, self.put_by_itself, self.delete])
            do(random.sample(KEYS, random.choice([1, 2, 3] if do == self.lease else [1, 1, 2])))

    def lease(self, keys: list[str]) -> None:
        """Lease keys part by part, without asking where that goes, and look at them.
        One that counts late does not let a part depend on what those before it pin: as
        clients once did."""
        held: list[PinnedBlocks] = []
        most = self.world.random.choice([1, 1, 2])
        for part in (keys[first : first + most] for first in range(0, len(keys), most)):
            found = self.known.find(part)
            read = None if found is None else self.reads.pin(part, found)
            if read is not None:
                held.append(read)
                self.pins.leased_bytes += 0 if self.counts_late else sum(read.sizes)
            else:
                self.learn(part)
            for one in held:
                self.look(one)
        for one in self.world.random.sample(held, len(held)):
            for _ in range(4):
                self.look(one)
            self.pins.leased_bytes -= 0 if self.counts_late else sum(one.sizes)
            self.reads.unpin(one)

    def look(self, read: PinnedBlocks) -> None:
        for place, size, checksum in zip(read.places, read.sizes, read.checksums, strict=True):
            self.world.check(offset_of(place), size, checksum)

    def learn(self, keys: list[str]) -> None:
        with self.world.asked() as core:
            try:
                lease = core.lease(self.client, keys)
            except LimitExceeded:
                return
            removals = 0 if core.is_being_written(keys) else self.world.tables.count
        entries = [entry or (0, 0, MISSING, 0) for entry in lease.entries]
        sizes, checksums = (pack_u64([entry[i] for entry in entries]) for i in (2, 3))
        self.known.note(keys, pack_u64(pack_offsets(entries)), sizes, checksums, removals)
        for entry in lease.pinned:
            self.world.check(*entry[1:])
        with self.world.asked() as core:
            core.release(lease)

    def put(self, keys: list[str]) -> None:
        with self.world.asked() as core, suppress(OutOfMemory, LimitExceeded):
            reservation = core.reserve(self.client, self.sizes(keys))
            checksums = [next(self.world.checksums) for _ in keys]
            for entry in reservation.entries(checksums):
                self.world.write(entry)  # as what comes through a socket
            core.commit(reservation, keys, checksums)

    def put_by_itself(self, keys: list[str]) -> None:
        sizes = self.sizes(keys)
        number = next(self.numbers)
        with self.world.asked() as core:
            try:
                reservation = core.reserve(self.client, sizes)
            except (OutOfMemory, LimitExceeded):
                return
            written = partial(self.served.commit_word.checksums_of, number, len(keys))
            accepted = core.prepare(reservation, keys, written)
            removals = self.world.tables.count
        checksums = [next(self.world.checksums) for _ in keys]
        for entry in reservation.entries(checksums):
            self.world.write(entry)
        if accepted:
            self.reads.commit(number, pack_u64(checksums))
            places = pack_u64(pack_offsets(reservation.extents))
            self.known.note(keys, places, pack_u64(sizes), pack_u64(checksums), removals)
            return
        with self.world.asked() as core:
            core.commit(reservation, keys, checksums)

    def delete(self, keys: list[str]) -> None:
        with self.world.asked() as core:
            how = self.world.random.choice(["delete", "evict", "look"])
            if how == "delete":
                core.delete(keys)
            elif how == "evict":
                core.evict(0.3, 0.3)
            else:
                core.statistics()

    def sizes(self, keys: list[str]) -> list[int]:
        return [self.world.random.choice(SIZES) * UNIT_BYTES for _ in keys]

    def close(self) -> None:
        self.world.core.close_client(self.client)
        self.served.close()


def run(seed: int, monkeypatch: pytest.MonkeyPatch, *, counts_late: bool) -> None:
    """Let clients do what they like; AssertionError if one of them reads what it should
    not.
    """
    world = World(seed)
    monkeypatch.setattr(shared_tables, "fence", world.processors.fence)
    made = [Client(world, f"client {i}", STEPS, counts_late) for i in range(3)]
    try:
        world.processors.run(*(client.actor for client in made))
    finally:
        for client in made:
            client.close()
        world.close()


@pytest.mark.parametrize("counts_late", [False, True])
def test_nobody_reads_anything_but_what_they_have_leased(monkeypatch: pytest.MonkeyPatch, counts_late: bool) -> None:
    for seed in range(RUNS):
        run(seed, monkeypatch, counts_late=counts_late)


# Faults


class Write(NamedTuple):
    index: Any
    value: Any


FENCE = Write(None, None)


def reordered(add: Callable[..., int | None], order: Callable[[list[Write]], list[Write]]) -> Callable[..., int | None]:
    """Have what `HazardTable.add` writes, and its fence, come in another order."""

    def wrong(self: HazardTable, *columns: Any) -> int | None:
        own, fence = self.numbers, shared_tables.fence
        writes: list[Write] = []
        self.numbers = Recorded(writes)
        shared_tables.fence = partial(writes.append, FENCE)
        try:
            first = add(self, *columns)
        finally:
            self.numbers, shared_tables.fence = own, fence
        for write in order(writes):
            if write is FENCE:
                fence()
            else:
                own[write.index] = write.value
        return first

    return wrong


class Recorded:
    def __init__(self, writes: list[Write]) -> None:
        self._writes = writes

    def __setitem__(self, index: Any, value: Any) -> None:
        self._writes.append(Write(index, value))


def is_epoch(write: Write) -> bool:
    return bool(write.index == 5)


def epoch_first(writes: list[Write]) -> list[Write]:
    return sorted(writes, key=lambda write: not is_epoch(write))


def epoch_behind_the_fence(writes: list[Write]) -> list[Write]:
    return sorted(writes, key=is_epoch)


def no_epoch(writes: list[Write]) -> list[Write]:
    return [write for write in writes if not is_epoch(write)]


def no_fence(writes: list[Write]) -> list[Write]:
    return [write for write in writes if write is not FENCE]


@pytest.mark.parametrize(
    ("order", "found_by"), [(epoch_first, 21), (epoch_behind_the_fence, 0), (no_epoch, 0), (no_fence, 0)]
)
def test_hazards_that_are_written_in_another_order_are_found(
    order: Callable[[list[Write]], list[Write]], found_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HazardTable, "add", reordered(HazardTable.add, order))
    assert is_found(monkeypatch, found_by)


def is_found(monkeypatch: pytest.MonkeyPatch, found_by: int, *, counts_late: bool = False) -> bool:
    """Whether any run finds the fault; the one that did so last goes first."""
    for seed in (*range(found_by, MOST_RUNS), *range(found_by)):
        try:
            run(seed, monkeypatch, counts_late=counts_late)
        except AssertionError:
            return True
    return False


def test_a_server_without_a_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(self: RemovalTable, places: Any) -> None:
        fence, shared_tables.fence = shared_tables.fence, lambda: None
        try:
            right(self, places)
        finally:
            shared_tables.fence = fence

    right = RemovalTable.note
    monkeypatch.setattr(RemovalTable, "note", note)
    assert is_found(monkeypatch, 12)


def test_a_server_that_drops_all_pins_of_who_tells_of_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it once did: a part of a lease that is pinned beside one that is about to be
    found stale.
    """

    def scan_client(self: HazardPins, client: CoreClient) -> None:
        assert client.read_hazards is not None
        reading = client.read_hazards()
        too_many = sum(length for _, _, length, _ in {row[:4] for row in reading}) > POOL_BYTES
        self._set(client, [] if too_many else reading)

    monkeypatch.setattr(HazardPins, "scan_client", scan_client)
    assert is_found(monkeypatch, 70, counts_late=True)
