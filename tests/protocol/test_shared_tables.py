"""The tables in shared memory keep what they promise, whatever a client writes there
that it should not.
"""

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, pairwise
from typing import Any, TypeAlias

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.errors import ProtocolError
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Numbers
from infinistore.protocol.packed_offsets import pack_offset
from infinistore.protocol.shared_tables import (
    HAZARD_SLOTS,
    READER_BYTES,
    Hazards,
    HazardTable,
    RemovalTable,
    TouchLog,
    granule_bytes_for,
    removal_table_bytes,
    tables_are_safe_here,
)
from tests.tables import for_each

from .strategies import counts

GRANULE_BYTES = 4096
HEADER_NUMBERS = 8
LOG_BYTES = 32 * 1024
LOG_START = READER_BYTES - 8 * HAZARD_SLOTS - LOG_BYTES
CLOSED, USED, APPENDED, TAKEN = range(4)
EPOCH = 5
"""The numbers that begin a connection's table."""

Row: TypeAlias = tuple[int, int, int]
"""Place, length, checksum."""


# The removal table

places = st.builds(pack_offset, st.sampled_from([0, 0, 0, 1, 2, 65535]), st.integers(0, 40).map(lambda n: n * 1024))
batches = st.lists(places, max_size=6)


def removal_table(entries: int, extra: int = 0) -> RemovalTable:
    """A table of so many entries, in memory that has room for a few more numbers."""
    return RemovalTable(memoryview(bytearray((HEADER_NUMBERS + entries + extra) * 8)), GRANULE_BYTES)


def entry_of(place: int, entries: int) -> int:
    return (place + (place >> 48) * 0x9E3779B97F4A7C15) // GRANULE_BYTES % entries


@given(
    entries_log2=st.integers(0, 5),
    steps=st.lists(st.tuples(st.sampled_from(["note", "ask"]), batches), max_size=30),
    data=st.data(),
)
def test_a_removal_is_never_missed_and_told_of_nobody_but_who_shares_the_entry(
    entries_log2: int, steps: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    entries = 1 << entries_log2
    table = removal_table(entries, extra=data.draw(st.integers(0, entries - 1)))
    removed: dict[int, int] = {}  # place to count
    latest: dict[int, int] = {}  # entry to count
    for what, batch in steps:
        if what == "note":
            before = table.count
            table.note(batch)
            assert table.count == before + 1
            removed |= dict.fromkeys(batch, table.count)
            latest |= dict.fromkeys([entry_of(place, entries) for place in batch], table.count)
        else:
            known_at = [data.draw(st.integers(0, table.count)) for _ in batch]
            pairs = list(zip(batch, known_at, strict=True))
            unchanged = table.is_unchanged(batch, known_at)
            if any(removed.get(place, 0) > count for place, count in pairs):
                assert not unchanged
            assert unchanged == all(latest.get(entry_of(place, entries), 0) <= count for place, count in pairs)
            as_of = data.draw(st.integers(0, table.count))
            as_one = table.are_unchanged(table.entries_of(batch), as_of)
            assert as_one == all(latest.get(entry_of(place, entries), 0) <= as_of for place in batch)


@given(st.lists(st.integers(0, 1023), unique=True), st.lists(st.integers(0, 1023)))
def test_places_of_one_arena_share_no_entry_while_the_pool_is_as_large_as_was_said(
    removed: list[int], asked: list[int]
) -> None:
    table = removal_table(1024)
    table.note([granule * GRANULE_BYTES for granule in removed])
    for granule in asked:
        assert table.is_unchanged([granule * GRANULE_BYTES], [0]) == (granule not in removed)


@given(st.integers(1, 2**46))
@example(2**32)
@example(2**32 + 1)
def test_a_removal_table_has_an_entry_for_each_granule_and_is_never_long(pool_bytes: int) -> None:
    granule_bytes, table_bytes = granule_bytes_for(pool_bytes), removal_table_bytes(pool_bytes)
    entries = table_bytes // 8 - HEADER_NUMBERS
    assert granule_bytes & (granule_bytes - 1) == 0
    assert entries & (entries - 1) == 0
    assert pool_bytes <= entries * granule_bytes
    assert table_bytes <= 8 * 2**20 + 64


@pytest.mark.parametrize(
    ("pool_bytes", "unit_bytes", "granule_bytes", "entries"),
    [
        (1, 1, 4096, 1),
        (4096, 64, 4096, 1),
        (4097, 64, 4096, 2),
        (2**20, 4096, 4096, 256),
        (2**20, 8191, 4096, 256),  # two of the shortest blocks never share a granule for long
        (2**20, 8192, 8192, 128),
        (2**20, 65536, 65536, 16),
        (2**32, 1, 4096, 2**20),  # a million entries is the most
        (2**32 + 1, 1, 8192, 2**20),
    ],
)
def test_a_granule_is_as_short_as_a_million_entries_allow_and_no_shorter_than_half_a_block(
    pool_bytes: int, unit_bytes: int, granule_bytes: int, entries: int
) -> None:
    assert granule_bytes_for(pool_bytes, unit_bytes) == granule_bytes
    assert removal_table_bytes(pool_bytes, unit_bytes) == 8 * (HEADER_NUMBERS + entries)


@pytest.mark.parametrize(
    ("granules", "entries"),
    [
        ([0, 1], slice(8, 10, 1)),
        ([0, 1, 2], slice(8, 11, 1)),
        ([3, 5, 7, 9], slice(11, 18, 2)),
        ([], []),
        ([5], [13]),
        ([5, 5], [13, 13]),
        ([5, 4], [13, 12]),
        ([0, 2, 3], [8, 10, 11]),
        ([15, 16], [23, 8]),  # of a table of 16
    ],
    ids=str,
)
def test_evenly_spaced_offsets_have_a_slice_of_entries(granules: list[int], entries: slice | list[int]) -> None:
    assert removal_table(16).entries_of([granule * GRANULE_BYTES for granule in granules]) == entries


@pytest.mark.parametrize("granules", [[2, 4, 6], [2, 3, 7]], ids=["evenly spaced", "not so"])
def test_a_batch_is_unchanged_as_of_the_last_removal_in_it(granules: list[int]) -> None:
    table = removal_table(16)
    entries = table.entries_of([granule * GRANULE_BYTES for granule in granules])
    assert table.are_unchanged(entries, 0)
    table.note([granules[-1] * GRANULE_BYTES])
    assert not table.are_unchanged(entries, 0)
    assert table.are_unchanged(entries, 1)
    table.note([8 * GRANULE_BYTES])
    assert table.are_unchanged(entries, 1)
    assert table.are_unchanged([], 0)


@pytest.mark.parametrize(("machine", "safe"), [("x86_64", True), ("AMD64", True), ("aarch64", False), ("", False)])
def test_tables_are_used_only_where_a_lock_is_a_fence(
    monkeypatch: pytest.MonkeyPatch, machine: str, safe: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert tables_are_safe_here() is safe


@pytest.mark.process
def test_a_forked_child_can_note_removals() -> None:
    table = removal_table(16)
    child = os.fork()
    if child == 0:
        try:
            table.note([0])
        finally:
            os._exit(0 if table.count == 1 and not table.is_unchanged([0], [0]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_batch_that_knows_its_blocks_from_different_times_is_judged_block_by_block() -> None:
    table = removal_table(16)
    table.note([0])
    table.note([GRANULE_BYTES])
    assert table.is_unchanged([0, GRANULE_BYTES], [1, 2])
    assert not table.is_unchanged([0, GRANULE_BYTES], [2, 1])
    assert table.is_unchanged([], [])


# The hazard table


def own_table() -> memoryview:
    """A connection's memory, as the server makes it."""
    return memoryview(bytearray(READER_BYTES))


def columns(rows: Sequence[Row]) -> tuple[Numbers, Numbers, Numbers]:
    places, sizes, checksums = zip(*rows, strict=True)
    return pack_u64(places), pack_u64(sizes), pack_u64(checksums)


def seen(hazards: Hazards) -> dict[int, list[Row]]:
    """What the server sees, by the number of the read."""
    found: dict[int, list[Row]] = {}
    for arena, offset, length, checksum, read in hazards.look():
        found.setdefault(read, []).append((pack_offset(arena, offset), length, checksum))
    return found


blocks = st.tuples(counts, counts, counts)
reads = st.lists(blocks, min_size=1, max_size=5) | st.builds(
    lambda block, times: [block] * times, blocks, st.sampled_from([400, 1000, HAZARD_SLOTS, HAZARD_SLOTS + 1])
)


@given(st.lists(reads | st.integers(0, 5), max_size=20))
def test_the_server_sees_what_the_client_reads_just_now_and_nothing_else(steps: list[list[Row] | int]) -> None:
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    open_reads: list[tuple[int, list[Row]]] = []
    for step in steps:
        if isinstance(step, list):
            before = seen(server)
            slots = client.add(*columns(step))
            if slots is None:
                assert before or len(step) > HAZARD_SLOTS  # there may be gaps, but only between others
                assert seen(server) == before
            else:
                open_reads.append((slots, step))
        elif open_reads:
            client.remove(open_reads.pop(step % len(open_reads))[0])
        assert sorted(seen(server).values()) == sorted(rows for _, rows in open_reads)
    for slots, _ in open_reads:
        client.remove(slots)
    assert server.look() == []
    assert memory.cast("Q")[USED] == 0


def test_a_full_hazard_table_takes_no_more_until_something_is_removed() -> None:
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    first = client.add(*columns([(0, 1, 0)]))
    rest = client.add(*columns([(4096, 1, 0)] * (HAZARD_SLOTS - 1)))
    assert first is not None
    assert rest is not None
    assert client.add(*columns([(8192, 1, 0)])) is None
    assert len(server.look()) == HAZARD_SLOTS
    client.remove(rest)
    assert seen(server) == {1: [(0, 1, 0)]}
    assert client.add(*columns([(8192, 1, 0)] * (HAZARD_SLOTS - 1))) is not None


def test_no_slot_is_looked_at_again_while_a_client_reads_on_and_on() -> None:
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    assert server.news == 0
    client.add(*columns([(0, 1, 0)] * 1000))
    assert server.news == 1001
    found = server.look()
    accesses: list[None] = []
    server.numbers = Watched(server.numbers, lambda: accesses.append(None))
    assert (server.news, server.look()) == (0, found)
    assert server.look() is found
    assert len(accesses) <= 3 * 2  # epoch, and number of slots
    client.add(*columns([(0, 2, 0)]))
    assert (server.news, len(server.look())) == (1002, 1001)


def test_a_read_that_came_and_went_between_two_looks_changes_nothing() -> None:
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    client.add(*columns([BLOCK]))
    found = server.look()
    slots = client.add(*columns([OTHER]))
    assert slots is not None
    client.remove(slots)
    assert server.news
    assert server.look() is found


@for_each(arena=[0, 1, 2, 65535], offset=[0, 1, 2**48 - 1])
def test_arena_and_offset_are_seen_apart(arena: int, offset: int) -> None:
    memory = own_table()
    HazardTable(memory).add(*columns([(pack_offset(arena, offset), 5, 6)]))
    assert Hazards(memory).look() == [(arena, offset, 5, 6, 1)]


def test_a_client_that_claims_more_slots_than_there_are_is_seen_in_those() -> None:
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    client.add(*columns([BLOCK]))
    memory.cast("Q")[USED] = 2**64 - 1
    assert server.news == 1 + HAZARD_SLOTS
    assert seen(server) == {1: [BLOCK]}


def test_a_client_that_counts_no_epochs_is_looked_at_each_time() -> None:
    """As none did before there were epochs."""
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    for _ in range(2):
        slots = client.add(*columns([BLOCK]))
        memory.cast("Q")[EPOCH] = 0
        assert slots is not None
        assert list(seen(server).values()) == [[BLOCK]]
        client.remove(slots)
        memory.cast("Q")[EPOCH] = 0
        assert seen(server) == {}
        assert server.news == 0


def test_a_client_sees_that_its_table_was_closed() -> None:
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    assert not client.closed
    client.add(*columns([(0, 1, 0)]))
    server.close()
    assert client.closed
    assert seen(server) == {1: [(0, 1, 0)]}


# The order of both


class Watched:
    """Numbers in memory that tell before each access."""

    def __init__(self, memory: Any, tell: Callable[[], object]) -> None:
        self._memory = memory
        self._tell = tell

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, index: Any) -> Any:
        self._tell()
        return self._memory[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._tell()
        self._memory[index] = value


class Recorded:
    """Numbers in memory that keep what is written, for somebody to write it later."""

    def __init__(self) -> None:
        self.writes: list[tuple[Any, Any]] = []

    def __setitem__(self, index: Any, value: Any) -> None:
        self.writes.append((index, value))


BLOCK = (pack_offset(0, 3 * GRANULE_BYTES), 100, 7)
OTHER = (pack_offset(0, 9 * GRANULE_BYTES), 200, 8)


class Race:
    """A client that reads a block which it knows, while the server takes the block's
    key away and uses its room again.

    The client goes one step with each `next`; the server's steps are its accesses to
    the tables, and the last one, by which it uses the room. Every access is taken to be
    seen by the other side at once: what the fences are for.
    """

    def __init__(self, *, closes: bool, history: str, client_is_hasty: bool = False, server_is_hasty: bool = False):
        self.reading = self.used_again = False
        self.server_steps = 0
        self._closes = closes
        self._server_is_hasty = server_is_hasty
        memory = own_table()
        removal_memory = memoryview(bytearray((HEADER_NUMBERS + 16) * 8))
        self._hazards, self._table = HazardTable(memory), RemovalTable(removal_memory, GRANULE_BYTES)
        if history != "none":
            slots = self._hazards.add(*columns([OTHER, OTHER]))
            assert slots is not None
            if history == "slots were used before":
                self._hazards.remove(slots)
        self._known_at = self._table.count
        # The server's end, each access of which is a step; and what the client writes,
        # each number a step, but for what comes before the number of the read, by which
        # alone the server knows that a row is there.
        self._server = Hazards(memory)
        self._server.look()
        self._server.numbers = Watched(self._server.numbers, self._step)
        self._removals = RemovalTable(removal_memory, GRANULE_BYTES)
        self._removals.numbers = Watched(self._removals.numbers, self._step)
        self._own_numbers, self._hazards.numbers = self._hazards.numbers, (recorded := Recorded())
        assert self._hazards.add(*columns([BLOCK])) is not None
        self._hazards.numbers = self._own_numbers
        writes = [recorded.writes[:3], *([write] for write in recorded.writes[3:])]
        pins: list[Callable[[], object]] = [partial(self._write, some) for some in writes]
        checks: list[Callable[[], object]] = [self._check_closed, self._check_removal]
        self._goes_on = True
        order = [*checks, *pins] if client_is_hasty else [*pins, *checks]
        self.client_steps: list[Callable[[], object]] = [*order, self._read]
        self._client = iter(self.client_steps)
        self._schedule: Iterator[int] = iter(())

    def run(self, schedule: Sequence[int]) -> bool:
        """Go so many of the client's steps before each step of the server; return
        whether it went wrong.
        """
        self._schedule = iter(schedule)
        if self._server_is_hasty:
            gone = self._is_free()
            self._remove()
        else:
            self._remove()
            gone = self._is_free()
        self._step()
        self.used_again = gone
        for step in self._client:
            step()
        return self.reading and self.used_again

    def _step(self) -> None:
        self.server_steps += 1
        for _ in range(next(self._schedule, 0)):
            next(self._client)()

    def _remove(self) -> None:
        if self._closes:
            self._server.close()
        else:
            self._removals.note([BLOCK[0]])

    def _is_free(self) -> bool:
        return BLOCK not in [(pack_offset(arena, offset), *rest) for arena, offset, *rest, _ in self._server.look()]

    def _write(self, writes: Sequence[tuple[Any, Any]]) -> None:
        for index, value in writes:
            self._own_numbers[index] = value

    def _check_closed(self) -> None:
        self._goes_on = self._goes_on and not self._hazards.closed

    def _check_removal(self) -> None:
        self._goes_on = self._goes_on and self._table.is_unchanged([BLOCK[0]], [self._known_at])

    def _read(self) -> None:
        self.reading = self._goes_on


def went_wrong(**how: Any) -> Iterator[tuple[int, ...]]:
    """Every order of the client's and the server's steps in which the client reads in
    room that is used again.
    """
    client_steps, server_steps = len(Race(**how).client_steps), 9 if how["closes"] else 11
    taken = 0
    for chosen in combinations(range(client_steps + server_steps), server_steps):
        race = Race(**how)
        schedule = tuple(after - before - 1 for before, after in pairwise((-1, *chosen)))
        if race.run(schedule):
            yield schedule
        taken = max(taken, race.server_steps)
    assert taken == server_steps  # fewer when it finds no pins at once


def look_while_reads_change(one: list[Row], other: list[Row], schedule: Sequence[int]) -> dict[int, list[Row]]:
    """Have the client end a read and begin another in the same slots, so many steps
    before each step of the server.
    """
    memory = own_table()
    client, server = HazardTable(memory), Hazards(memory)
    slots = client.add(*columns(one))
    assert slots is not None
    own_numbers, client.numbers = client.numbers, (recorded := Recorded())
    client.remove(slots)
    assert client.add(*columns(other)) == slots
    assert len(recorded.writes) == 9
    advances, writes = iter(schedule), iter(recorded.writes)

    def change() -> None:
        for _ in range(next(advances)):
            own_numbers.__setitem__(*next(writes))

    server.numbers = Watched(server.numbers, change)
    return seen(server)


@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_in_no_order_of_steps_does_a_server_see_a_mixture_of_two_reads(lengths: tuple[int, int]) -> None:
    looks, changes = 7, 9
    for chosen in combinations(range(looks + changes), looks):
        schedule = [after - before - 1 for before, after in pairwise((-1, *chosen))]
        found = look_while_reads_change([BLOCK] * lengths[0], [OTHER] * lengths[1], schedule)
        assert set(found) <= {1, 2}
        assert set(found.get(1, [])) <= {BLOCK}
        assert set(found.get(2, [])) <= {OTHER}


@pytest.mark.parametrize(
    ("closes", "history"),
    [
        (False, "none"),
        (True, "slots were used before"),
        pytest.param(False, "slots were used before", marks=pytest.mark.nightly),
        pytest.param(False, "another read is open", marks=pytest.mark.nightly),
        pytest.param(True, "none", marks=pytest.mark.nightly),
        pytest.param(True, "another read is open", marks=pytest.mark.nightly),
    ],
)
def test_in_no_order_of_steps_does_a_client_read_in_room_that_is_used_again(closes: bool, history: str) -> None:
    assert list(went_wrong(closes=closes, history=history)) == []


def test_a_client_that_looks_for_removals_before_it_pins_would_read_in_room_that_is_used_again() -> None:
    assert any(went_wrong(closes=False, history="none", client_is_hasty=True))


def test_a_server_that_looks_at_pins_before_it_tells_of_the_removal_would_use_room_that_is_read() -> None:
    assert any(went_wrong(closes=False, history="none", server_is_hasty=True))


# The touch log

pieces = st.binary(max_size=100) | st.sampled_from([0, 1, 20_000, LOG_BYTES - 1, LOG_BYTES, LOG_BYTES + 1]).map(
    lambda length: bytes(range(256)) * (length // 256) + b"x" * (length % 256)
)


@given(st.lists(pieces | st.none(), max_size=30))
def test_what_is_taken_from_a_log_is_what_was_appended_in_order(steps: list[bytes | None]) -> None:
    memory = own_table()
    client, server = TouchLog(memory), TouchLog(memory)
    waiting: deque[bytes] = deque()
    asked = False
    for data in [*steps, None]:
        if data is None:
            assert server.take() == b"".join(waiting)
            waiting.clear()
        else:
            there = sum(map(len, waiting))
            asks = there > LOG_BYTES // 2 and not asked  # once: for the server to take what is there
            asked = there > LOG_BYTES // 2
            has_room = there + len(data) <= LOG_BYTES and not asks
            assert client.append(data) == has_room
            if has_room:
                waiting.append(data)
    assert server.take() == b""
    assert not any(memory[:LOG_START].cast("Q")[TAKEN + 1 :])


def test_a_log_that_is_full_takes_more_when_the_server_has_taken_what_was_there() -> None:
    memory = own_table()
    client, server = TouchLog(memory), TouchLog(memory)
    assert client.append(b"a" * (LOG_BYTES - 10))
    assert not client.append(b"b" * 10)  # once, so that the server is told
    assert not client.append(b"b" * 11)
    assert client.append(b"c" * 10)
    assert not client.append(b"d")
    assert server.take() == b"a" * (LOG_BYTES - 10) + b"c" * 10
    assert client.append(b"d" * LOG_BYTES)
    assert server.take() == b"d" * LOG_BYTES


@for_each(before=[1, 10, LOG_BYTES - 1], length=[2, LOG_BYTES - 1, LOG_BYTES])
def test_what_goes_over_the_end_of_a_log_comes_back_in_one_piece(before: int, length: int) -> None:
    memory = own_table()
    client, server = TouchLog(memory), TouchLog(memory)
    assert client.append(b"-" * before)
    assert server.take() == b"-" * before
    data = bytes(range(1, 252)) * (LOG_BYTES // 251 + 1)
    assert client.append(data[:length])
    assert server.take() == data[:length]


def test_a_log_asks_to_be_taken_when_it_is_more_than_half_full() -> None:
    client = TouchLog(own_table())
    assert client.append(b"a" * (LOG_BYTES // 2))
    assert client.append(b"b")
    assert not client.append(b"c")
    assert client.append(b"c")


liars_counts = counts | st.integers(0, 2 * LOG_BYTES + 200)


@given(st.lists(st.tuples(st.binary(max_size=300), liars_counts, counts), max_size=5))
def test_a_client_that_lies_about_its_log_gets_one_error_or_its_own_bytes(lies: list[tuple[bytes, int, int]]) -> None:
    memory = own_table()
    numbers_there = memory.cast("Q")
    server = TouchLog(memory)
    for data, appended, taken in lies:
        TouchLog(memory).append(data)
        numbers_there[APPENDED], numbers_there[TAKEN] = appended, taken
        try:
            assert len(server.take()) <= LOG_BYTES
        except ProtocolError:
            pass
        else:
            assert server.take() == b""


@for_each(appended=[0, 9, 10 + LOG_BYTES + 1, 2**63, 2**64 - 1])
def test_a_count_that_goes_back_or_too_far_is_a_protocol_error(appended: int) -> None:
    memory = own_table()
    server = TouchLog(memory)
    assert TouchLog(memory).append(b"0123456789")
    assert server.take() == b"0123456789"
    memory.cast("Q")[APPENDED] = appended
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"^the client says that it logged more than there is room for$"):
            server.take()


# Whatever a client writes


@given(
    header=st.lists(counts | st.integers(0, LOG_BYTES), min_size=HEADER_NUMBERS, max_size=HEADER_NUMBERS),
    filling=st.binary(min_size=1, max_size=64),
    patches=st.lists(st.tuples(st.integers(0, READER_BYTES - 1), st.binary(max_size=64)), max_size=5),
)
@example([2**64 - 1] * HEADER_NUMBERS, b"\xff", [])
@example([0, HAZARD_SLOTS, LOG_BYTES, 0, 0, 0, 0, 0], b"\xff", [])
def test_garbage_in_every_byte_of_a_clients_memory_harms_nobody(
    header: list[int], filling: bytes, patches: list[tuple[int, bytes]]
) -> None:
    memory = own_table()
    server, log = Hazards(memory), TouchLog(memory)
    memory[:] = (filling * (READER_BYTES // len(filling) + 1))[:READER_BYTES]
    memory[: HEADER_NUMBERS * 8] = memoryview(array("Q", header)).cast("B")
    for start, patch in patches:
        memory[start : start + len(patch)] = patch[: READER_BYTES - start]
    found = server.look()
    assert len(found) <= HAZARD_SLOTS
    for arena, offset, length, checksum, read in found:
        assert 0 <= arena < 2**16
        assert 0 <= offset < 2**48
        assert max(length, checksum, read) < 2**64
        assert read
    with suppress(ProtocolError):
        assert len(log.take()) <= LOG_BYTES
    server.close()
    assert memory.cast("Q")[CLOSED]
