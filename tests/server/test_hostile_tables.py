"""Clients that write whatever they like into their tables, any number of them, in any
order with what others do.

What was pinned once stays where and what it is until its own row goes, whatever else
stands in that table or another. No call of anybody else fails for it, and when the rows
are gone all room is there again.
"""

from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infinistore.allocators.bitmap import BitmapAllocator
from infinistore.core import Pool, StoreCore, Watermarks, create_arena
from infinistore.core.arena import Mapping
from infinistore.core.clients import Client
from infinistore.core.index import Entry
from infinistore.core.pins import HazardPins
from infinistore.errors import LimitExceeded, OutOfMemory
from infinistore.protocol.codec import encode_head
from infinistore.protocol.messages import Keys, Message, Release, Touch
from infinistore.protocol.packed_offsets import pack_offset
from infinistore.protocol.shared_tables import HAZARD_SLOTS, READER_BYTES, TouchLog
from infinistore.server.connection import ClientTables
from infinistore.server.movers.shm import PublishedRemovals

UNIT_BYTES = 256
POOL_BYTES = 4096
KEYS = list("abcdef")
MOST = 2**64 - 1
CLOSED, USED, APPENDED, TAKEN, COMMITTED, EPOCH = range(6)
FIRST_SLOT = 8

which = st.integers(0, 1)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)
counts = st.integers(0, MOST) | st.sampled_from([0, 1, UNIT_BYTES, POOL_BYTES, HAZARD_SLOTS, 2**48, MOST])
wild_rows = st.tuples(counts, counts, counts, counts)
wide_rows = st.builds(lambda start: (start * UNIT_BYTES, POOL_BYTES - start * UNIT_BYTES, 0, 7), st.integers(0, 15))


def frame(body: bytes) -> bytes:
    """A frame of the right kind with any body."""
    plain = encode_head(Touch(Keys(["k"])), request_id=0)
    return (plain[:12] + len(body).to_bytes(4, "little") + plain[16:32] + body).ljust(
        -(-(32 + len(body)) // 64) * 64, b"\0"
    )


scalars = st.none() | st.booleans() | st.integers(-1, MOST) | st.binary(max_size=4) | st.text(max_size=4)
bodies = st.dictionaries(scalars | st.sampled_from(["keys", "read"]), scalars, max_size=3).map(msgpack.packb)
logged = st.one_of(
    st.binary(max_size=200),
    bodies.map(frame),
    st.binary(max_size=40).map(frame),
    some_keys.map(lambda keys: encode_head(Touch(Keys(keys)), request_id=0)),
    st.just(encode_head(Release(1), request_id=0)),
)


@attrs.define(eq=False)
class Table:
    """A client and what it may write: all of its memory."""

    client: Client
    served: ClientTables
    numbers: Any
    log: TouchLog
    pinned: dict[int, tuple[Entry, bytes]] = attrs.field(factory=dict)
    """By slot: what this client reads, as it should."""
    epoch: int = 0

    def write_row(self, slot: int, row: tuple[int, int, int, int]) -> None:
        for column, number in enumerate(row):
            self.numbers[FIRST_SLOT + column * HAZARD_SLOTS + slot] = number

    def count_epoch(self) -> None:
        self.epoch += 1
        self.numbers[EPOCH] = self.epoch


class HostileTables(RuleBasedStateMachine):
    """Two clients with tables, which read as they should and write anything besides,
    and others that have none.
    """

    @initialize()
    def start(self) -> None:
        pool = Pool(BitmapAllocator(UNIT_BYTES))
        pool.add_arena(create_arena(0, POOL_BYTES))
        self.core = StoreCore(pool, clock=lambda: 0.0, watermarks=Watermarks(0.5, 1.0))
        self.tables = PublishedRemovals(POOL_BYTES, UNIT_BYTES)
        self.tables.watch(self.core)
        self.made = [self.make(f"client {index}") for index in range(2)]
        self.writer = self.core.open_client("writer")
        self.seen: list[Entry] = []
        self.reads = 0

    def make(self, name: str) -> Table:
        client, served = self.core.open_client(name), ClientTables()

        def hear(touch: Message) -> None:
            assert isinstance(touch, Touch)
            self.core.note_use(touch.keys, read=touch.read)

        served.watch(self.core, client, hear)
        memory = Mapping(served.share(), READER_BYTES, writable=True).memory
        return Table(client, served, memory.cast("Q"), TouchLog(memory))

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        for table in self.made:
            self.core.close_client(table.client)
            table.served.close()
        self.core.purge()
        statistics = self.core.statistics()
        assert (statistics.used_bytes, statistics.pinned_bytes, statistics.condemned_bytes) == (0, 0, 0)
        self.core.abort(self.core.reserve(self.writer, [POOL_BYTES]))
        self.tables.close()
        self.core.pool.close()

    # What others do

    @rule(keys=some_keys, units=st.integers(1, 6))
    def put(self, keys: list[str], units: int) -> None:
        try:
            reservation = self.core.reserve(self.writer, [units * UNIT_BYTES] * len(keys))
        except (OutOfMemory, LimitExceeded):
            return
        checksums = [len(self.seen) + index + 1 for index in range(len(keys))]
        for view, checksum in zip(reservation.views, checksums, strict=True):
            view[:] = checksum.to_bytes(4, "big") * (len(view) // 4)
        self.core.commit(reservation, keys, checksums)
        self.seen += reservation.entries(checksums)

    @rule(keys=some_keys)
    def delete(self, keys: list[str]) -> None:
        self.core.delete(keys)

    @rule(low=st.sampled_from([0.0, 0.3, 0.6]))
    def evict(self, low: float) -> None:
        self.core.evict(low, low)

    @rule(keys=some_keys)
    def lease(self, keys: list[str]) -> None:
        self.core.release(self.core.lease(self.writer, keys))

    @rule()
    def statistics(self) -> None:
        assert self.core.statistics().pinned_bytes <= POOL_BYTES

    # What clients do

    @rule(at=which, key=st.sampled_from(KEYS), slot=st.integers(0, 5))
    def pin(self, at: int, key: str, slot: int) -> None:
        """As it should be done, wherever the slot is."""
        table = self.made[at]
        entry = self.core.index.get(key)
        if entry is None or slot in table.pinned:
            return
        self.reads += 1
        table.write_row(slot, (pack_offset(*entry[:2]), *entry[2:], self.reads))
        table.numbers[USED] = max(6, min(table.numbers[USED], HAZARD_SLOTS))
        table.count_epoch()
        table.pinned[slot] = entry, bytes(self.core.pool.view(entry[:3]))

    @precondition(lambda self: any(table.pinned for table in self.made))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        at, slot = data.draw(st.sampled_from([(i, slot) for i, table in enumerate(self.made) for slot in table.pinned]))
        table = self.made[at]
        del table.pinned[slot]
        table.write_row(slot, (0, 0, 0, 0))
        table.count_epoch()

    @rule(
        at=which, rows=st.lists(wild_rows | wide_rows, min_size=1, max_size=3), first=st.integers(0, 9), data=st.data()
    )
    def write_anything(self, at: int, rows: list[tuple[int, int, int, int]], first: int, data: st.DataObject) -> None:
        """In slots that nothing is pinned by: also what was there once, and what is
        there in part.
        """
        table = self.made[at]
        if self.seen:
            entry = data.draw(st.sampled_from(self.seen))
            length = data.draw(st.sampled_from([entry[2], UNIT_BYTES, POOL_BYTES]))
            rows = [*rows, (pack_offset(*entry[:2]), length, entry[3], 9)]
        for slot, row in enumerate(rows, first):
            if slot not in table.pinned:
                table.write_row(slot, row)
        used = data.draw(counts)
        table.numbers[USED] = max(used, 6) if table.pinned else used
        if data.draw(st.booleans()):
            table.count_epoch()

    @rule(at=which)
    def fill_with_rows(self, at: int) -> None:
        """Every slot claims the whole pool, or what was there."""
        table = self.made[at]
        rows = [(pack_offset(*entry[:2]), entry[2], entry[3], 5) for entry in self.seen] + [(0, POOL_BYTES, 0, 5)]
        for slot in range(6, HAZARD_SLOTS, 50):
            table.write_row(slot, rows[slot % len(rows)])
        table.numbers[USED] = MOST
        table.count_epoch()

    @rule(at=which, data=logged, lies=st.booleans(), appended=counts)
    def log(self, at: int, data: bytes, lies: bool, appended: int) -> None:
        table = self.made[at]
        table.log.append(data)
        if lies:
            table.numbers[APPENDED] = appended

    @rule(at=which, number=counts)
    def commit_what_was_not_prepared(self, at: int, number: int) -> None:
        self.made[at].numbers[COMMITTED] = number

    @invariant()
    def what_is_pinned_is_what_it_was(self) -> None:
        for table in getattr(self, "made", []):
            for entry, content in table.pinned.values():
                assert bytes(self.core.pool.view(entry[:3])) == content


def test_what_is_pinned_stays_whatever_is_in_any_table_or_log() -> None:
    run_state_machine_as_test(HostileTables, settings=settings(max_examples=60, stateful_step_count=40))


def test_the_machine_finds_pins_that_are_dropped_for_what_stands_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan_client(self: HazardPins, client: Client) -> None:
        assert client.read_hazards is not None
        reading = client.read_hazards()
        too_many = sum(length for _, _, length, _ in {row[:4] for row in reading}) > POOL_BYTES
        self._set(client, [] if too_many else reading)

    monkeypatch.setattr(HazardPins, "scan_client", scan_client)
    seeking = settings(max_examples=200, stateful_step_count=40, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(HostileTables, settings=seeking)
