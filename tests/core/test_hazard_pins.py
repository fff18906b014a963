"""Clients that set hazards: what `accept_hazards`, `note_use` and `on_removal` promise,
one promise a test.
"""

from collections.abc import Callable, Sequence

import attrs
import pytest

from infinistore.core import Client, CoreLimits, StoreCore, Watermarks, create_arena
from infinistore.core.clients import Hazard
from infinistore.core.index import Entry
from infinistore.core.space import Growth
from infinistore.errors import LimitExceeded, OutOfMemory
from tests.core.conftest import UNIT_BYTES
from tests.core.test_store import MakeCore, blocks, get, put, recency

MOST = 2**64 - 1


@attrs.define
class Reader:
    """A client that reads by itself. `rows` is what it says when it is asked."""

    core: StoreCore
    client: Client = attrs.field(init=False)
    rows: list[Hazard] = attrs.field(factory=list)
    asked: int = 0
    tells: Callable[[], object] = list

    def __attrs_post_init__(self) -> None:
        self.client = self.core.open_client("reader")
        self.core.accept_hazards(self.client, self.look)

    def look(self) -> list[Hazard]:
        self.asked += 1
        self.tells()
        return list(self.rows)

    def read(self, *keys: str, number: int = 1) -> None:
        self.rows += [(*entry_of(self.core, key), number) for key in keys]


def entry_of(core: StoreCore, key: str) -> Entry:
    entry = core.index.get(key)
    assert entry is not None
    return entry


def full_but_for_one(core: StoreCore) -> None:
    """Leave one place, so that what comes next comes there."""
    put(core, core.open_client("filler"), blocks(*(f"filler {i}" for i in range(63))))


def lose(core: StoreCore, key: str, how: str) -> None:
    """Take a key away, if it can be."""
    if how == "delete":
        assert core.delete([key]) == 1
    elif how == "replace":
        put(core, core.open_client("other"), {key: b"other"})
    elif how == "purge":
        assert core.purge() == 1
    elif how == "verify":
        core.pool.view(entry_of(core, key)[:3])[0] ^= 1
        assert not core.verify(key)
        core.pool.view((0, 0, 1))[0] ^= 1
    else:
        assert core.evict(0.0, 0.0) == 0


# Pins


@pytest.mark.parametrize("how", ["delete", "replace", "purge", "verify", "evict"])
def test_a_block_that_a_client_reads_by_itself_keeps_its_bytes_until_it_says_no_more(core: StoreCore, how: str) -> None:
    reader = Reader(core)
    put(core, core.open_client("a"), {"k": b"precious"})
    entry = entry_of(core, "k")
    reader.read("k")
    lose(core, "k", how)
    while core.pool.used_bytes < core.pool.capacity_bytes:  # whatever is free gets overwritten
        core.reserve(core.open_client("writer"), [64]).views[0][:] = b"!" * 64
    assert bytes(core.pool.view(entry[:3])) == b"precious"
    used = core.pool.used_bytes
    reader.rows.clear()
    statistics = core.statistics()
    assert statistics.used_bytes == (used if how == "evict" else used - 64)
    assert statistics.condemned_bytes == statistics.pinned_bytes == statistics.leases == reader.client.leased_bytes == 0


def test_room_that_a_reader_has_done_with_is_there_for_the_next_reservation(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_pinned_ratio=1.0))
    reader, writer = Reader(core), core.open_client("writer")
    put(core, writer, blocks(*map(str, range(64))))
    reader.read(*map(str, range(64)))
    with pytest.raises(OutOfMemory, match="4 KiB are pinned by readers"):
        core.reserve(writer, [64])
    core.purge()
    with pytest.raises(OutOfMemory):
        core.reserve(writer, [64])
    reader.rows.clear()
    core.reserve(writer, [64] * 64)


def test_eviction_by_hand_takes_no_more_than_it_must_when_a_reader_has_just_done(core: StoreCore) -> None:
    reader = Reader(core)
    put(core, core.open_client("a"), blocks(*map(str, range(64))))
    reader.read("0", "1")
    core.delete(["0", "1"])
    reader.rows.clear()
    assert core.evict(62 / 64, 62 / 64) == 0
    assert len(core) == 62


def test_a_block_read_and_leased_goes_with_the_last_of_both(core: StoreCore) -> None:
    reader, other = Reader(core), core.open_client("other")
    put(core, other, blocks("k"))
    reader.read("k", "k")
    lease = core.lease(other, ["k"])
    core.delete(["k"])
    assert core.statistics().pinned_bytes == 64
    core.release(lease)
    assert core.statistics().condemned_bytes == 64
    reader.rows.pop()
    assert core.statistics().condemned_bytes == 64
    reader.rows.clear()
    assert core.statistics().used_bytes == 0


def test_what_a_client_reads_by_itself_counts_as_leased(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_pinned_ratio=0.25))
    reader = Reader(core)
    put(core, core.open_client("a"), blocks(*map(str, range(20))))
    reader.read("0", "1", number=5)
    reader.read("1", number=7)
    statistics = core.statistics()
    assert (statistics.pinned_bytes, statistics.leases) == (128, 2)
    assert reader.client.leased_bytes == 3 * 64
    lease = core.lease(reader.client, ["2"])
    assert (core.statistics().leases, reader.client.pinned_bytes) == (3, 4 * 64)
    core.release(lease)
    reader.read(*(str(i) for i in range(2, 15)))
    with pytest.raises(LimitExceeded, match="'reader' holds 1 KiB"):
        core.lease(reader.client, ["19"])
    with pytest.raises(LimitExceeded, match="'reader' holds 1 KiB"):
        core.reserve(reader.client, [64])
    reader.rows.clear()
    core.lease(reader.client, ["19"])


def test_a_read_that_takes_the_place_of_another_is_seen(core: StoreCore) -> None:
    """Both of the same blocks, and of others."""
    reader = Reader(core)
    put(core, core.open_client("a"), blocks("a", "b"))
    for number, keys in enumerate((["a"], ["a", "b"], ["b"], ["b"]), 1):
        reader.rows.clear()
        reader.read(*keys, number=number)
        assert (core.statistics().pinned_bytes, core.statistics().leases) == (64 * len(keys), 1)
    core.delete(["a", "b"])
    assert core.statistics().condemned_bytes == 64


def test_of_two_blocks_read_one_after_the_other_the_second_is_pinned(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_pinned_ratio=1.0))
    reader, writer = Reader(core), core.open_client("writer")
    put(core, writer, {"a": b"first", "b": b"second"})
    first, second = entry_of(core, "a"), entry_of(core, "b")
    reader.read("a")
    core.catch_up()
    reader.rows = [(*second, 1)]
    core.delete(["a", "b"])
    assert core.pool.used_bytes == 64
    for view in core.reserve(writer, [64] * 63).views:
        view[:] = b"!" * 64
    assert bytes(core.pool.view(first[:3])) == b"!!!!!"
    assert bytes(core.pool.view(second[:3])) == b"second"


def test_a_client_that_is_closed_is_not_asked_again(core: StoreCore) -> None:
    reader = Reader(core)
    core.close_client(reader.client)
    asked = reader.asked
    core.scan_hazards(reader.client)
    core.catch_up()
    assert reader.asked == asked


@pytest.mark.parametrize(
    "wrong",
    [
        (1, 0, 64, 0),
        (MOST >> 48, MOST & (1 << 48) - 1, MOST, MOST),
        (0, 0, 0, 0),
        (0, 4096, 1, 0),
        (0, 4095, 2, 0),
        (0, 0, 4097, 0),
        (0, 0, MOST, 0),
        (0, 1 << 47, 64, 0),
    ],
)
def test_what_cannot_be_there_is_not_pinned(core: StoreCore, wrong: Entry) -> None:
    reader = Reader(core)
    put(core, core.open_client("a"), blocks("k"))
    reader.rows = [(*wrong, 1), (*wrong, MOST)]
    reader.read("k")
    assert core.statistics().pinned_bytes == reader.client.leased_bytes == 64
    core.delete(["k"])
    assert core.evict(0.0, 0.0) == 0
    reader.rows.clear()
    assert core.statistics().used_bytes == 0


@pytest.mark.parametrize("removed", [False, True])
def test_what_could_be_there_and_is_not_harms_nobody_else(core: StoreCore, removed: bool) -> None:
    """A client that has just begun may name a block that is gone, with another one in
    its place.
    """
    reader, other = Reader(core), core.open_client("other")
    full_but_for_one(core)
    put(core, other, blocks("old"))
    place = entry_of(core, "old")
    reader.read("old")
    reader.rows += [(0, 1, 1000, 5, 1), (0, 64, 2000, 9, 2)]
    rows, reader.rows = reader.rows, []
    core.delete(["old"])
    put(core, other, {"new": b"new"})
    assert entry_of(core, "new")[:2] == place[:2]
    reader.rows = rows
    assert core.statistics().pinned_bytes == reader.client.leased_bytes == 0
    assert get(core, other, "new") == [b"new"]
    if removed:
        core.delete(["new"])
    reader.rows = []
    assert core.statistics().pinned_bytes == 0
    core.purge()
    assert core.statistics().used_bytes == core.statistics().condemned_bytes == 0
    core.reserve(other, [4096])


def test_the_same_bytes_at_the_same_place_are_pinned_by_who_read_them_before(core: StoreCore) -> None:
    """And given back once."""
    reader, other = Reader(core), core.open_client("other")
    full_but_for_one(core)
    put(core, other, {"k": b"same"})
    reader.read("k")
    rows, reader.rows = reader.rows, []
    core.delete(["k"])
    put(core, other, {"k": b"same"})
    assert (*entry_of(core, "k"), 1) == rows[0]
    reader.rows = rows
    core.delete(["k"])
    assert core.statistics().condemned_bytes == 64
    reader.rows = []
    assert core.statistics().used_bytes == 63 * 64


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
def test_what_is_pinned_stays_whatever_else_is_told(core: StoreCore, first: bool) -> None:
    """Rows of blocks that are gone may stand beside those that are read: together they
    may be more than the pool.
    """
    reader, other = Reader(core), core.open_client("other")
    put(core, other, blocks("read", *map(str, range(60))))
    place = entry_of(core, "read")
    reader.read("read")
    core.delete(["read"])
    rows = [(0, 64 * i, 64 * (64 - i), 5, 2) for i in range(64)] + [(0, 0, 4096, 0, 3)]
    reader.rows = rows + reader.rows if first else reader.rows + rows
    assert core.statistics().condemned_bytes == core.statistics().pinned_bytes == 64
    core.purge()
    put(core, other, blocks(*map(str, range(63)), size=64))
    with pytest.raises(OutOfMemory):
        core.reserve(other, [4096])
    assert bytes(core.pool.view(place[:3])) == b"read" * 16
    reader.rows = rows
    assert core.statistics().condemned_bytes == core.statistics().pinned_bytes == 0


def test_a_row_that_claims_an_arena_keeps_no_room_from_anybody(core: StoreCore) -> None:
    reader, other = Reader(core), core.open_client("other")
    reader.rows = [(0, 0, 4096, 0, 1)]
    put(core, other, blocks(*map(str, range(64))))
    put(core, other, blocks(*map(str, range(64, 128))))
    assert core.statistics().pinned_bytes == 0


def test_rows_over_room_that_is_free_by_now_do_not_count(core: StoreCore) -> None:
    """A client that was stopped before it saw that its blocks are gone leaves them."""
    reader, other = Reader(core), core.open_client("other")
    put(core, other, blocks(*map(str, range(64))))
    reader.read(*map(str, range(64)))
    rows, reader.rows = reader.rows, []
    core.purge()
    reader.rows = rows
    assert core.statistics().pinned_bytes == reader.client.leased_bytes == 0
    core.reserve(other, [4096])


def test_a_block_that_its_writer_reads_before_its_commit_was_seen_is_pinned(core: StoreCore) -> None:
    reader, writer = Reader(core), core.open_client("writer")
    reservation = core.reserve(writer, [64])
    written: list[list[int]] = []
    core.prepare(reservation, ["k"], lambda: written[0] if written else None)
    reader.rows = [(*reservation.extents[0], 7, 1)]
    core.scan_hazards(reader.client)  # as when another commit of the same moment replaces something
    written.append([7])
    core.delete(["k"])
    assert core.statistics().condemned_bytes == 64
    reader.rows = []
    assert core.statistics().used_bytes == 0


def test_a_reader_may_read_in_an_arena_that_was_added_later(make_core: MakeCore) -> None:
    core = make_core(4096, growth=Growth(8192))
    reader = Reader(core)
    core.add_arena(create_arena(1, 4096))
    put(core, core.open_client("a"), blocks(*map(str, range(128))))
    key = next(key for key in core.all_keys() if entry_of(core, key)[0])
    reader.read(key)
    core.purge()
    assert core.statistics().condemned_bytes == core.statistics().used_bytes == 64


def test_closing_a_client_ends_what_it_reads_by_itself(core: StoreCore) -> None:
    reader, stays = Reader(core), Reader(core)
    put(core, stays.client, blocks("x", "y"))
    reader.read("x", "y")
    stays.read("y")
    heard: list[str] = []
    reader.tells = lambda: heard.append("the last time")
    core.delete(["x", "y"])
    heard.clear()
    core.close_client(reader.client)
    assert heard == ["the last time"]
    statistics = core.statistics()
    assert (statistics.used_bytes, statistics.condemned_bytes, statistics.clients, statistics.leases) == (64, 64, 1, 1)
    core.close_client(reader.client)
    assert (heard, reader.client.pinned_bytes) == (["the last time"], 0)


def test_a_quarantined_client_keeps_what_it_reads_until_it_says_no_more(core: StoreCore) -> None:
    reader = Reader(core)
    put(core, core.open_client("a"), blocks("x"))
    reader.read("x")
    core.catch_up()
    core.quarantine(reader.client)
    core.delete(["x"])
    assert core.statistics().quarantined_bytes == core.statistics().condemned_bytes == 64
    reader.rows.clear()
    assert core.statistics().quarantined_bytes == core.statistics().used_bytes == 0
    with pytest.raises(ValueError, match="quarantined"):
        core.accept_hazards(reader.client, reader.look)


def test_nobody_is_asked_where_nobody_reads_by_itself(core: StoreCore) -> None:
    reader = Reader(core)
    core.close_client(reader.client)
    asked = reader.asked
    put(core, core.open_client("a"), blocks("x"))
    core.delete(["x"])
    core.statistics()
    assert reader.asked == asked


# Recency


def test_what_a_client_used_by_itself_is_touched_and_counted(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_batch_keys=4))
    put(core, core.open_client("a"), {"a": b"1", "b": b"22", "c": b"333"})
    assert core.note_use(["c", "missing", "b"], read=True) == 5
    assert recency(core) == ["a", "b", "c"]
    statistics = core.statistics()
    assert (statistics.hits, statistics.hit_bytes, statistics.misses) == (2, 5, 0)
    assert core.note_use(["a"], read=False) == core.note_use([], read=True) == core.note_use(["gone"], read=True) == 0
    assert recency(core) == ["b", "c", "a"]
    assert (core.statistics().hits, core.statistics().hit_bytes) == (2, 5)
    with pytest.raises(LimitExceeded, match="max_batch_keys=4"):
        core.note_use(["a"] * 5, read=True)
    assert recency(core) == ["b", "c", "a"]


@pytest.mark.parametrize("by", ["reserve", "evict"])
def test_what_was_used_counts_before_anything_is_evicted(core: StoreCore, client: Client, by: str) -> None:
    for i in range(64):
        put(core, client, blocks(str(i)))
    reader = Reader(core)
    used = [["0", "1"]]
    reader.tells = lambda: core.note_use(used.pop(), read=True) if used else None
    if by == "reserve":
        put(core, client, blocks("new"))
    else:
        assert core.evict(63 / 64, 63 / 64) == 1
    assert core.exists(["0", "1", "2"]) == b"\1\1\0"
    assert core.statistics().hits == 2


def test_a_use_that_is_told_of_while_its_key_goes_counts_as_one_and_the_key_goes(
    core: StoreCore, client: Client
) -> None:
    put(core, client, blocks("k"))
    reader = Reader(core)
    reader.tells = lambda: core.note_use(["k"], read=True)
    assert core.delete(["k"]) == 1
    assert core.statistics().hits == 1
    assert core.exists(["k"]) == b"\0"
    put(core, client, blocks("k"))
    core.purge()
    assert core.pool.used_bytes == 0


# Removals


def fill(core: StoreCore, client: Client, count: int) -> None:
    for i in range(count):
        put(core, client, blocks(f"{i:02}"))


def replace(core: StoreCore, client: Client) -> None:
    put(core, client, {"00": b"new", "x": b"new"})


def replace_and_free_later(core: StoreCore, client: Client) -> None:
    reservation = core.reserve(client, [3])
    core.commit(reservation, ["00"], None, free=False)
    core.free_replaced()


def evict_on_demand(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("large", size=8 * UNIT_BYTES))
    assert core.statistics().evicted.on_demand


def evict_for_larger_pieces(core: StoreCore, client: Client) -> None:
    core.delete([f"{i:02}" for i in range(0, 64, 2)])
    put(core, client, blocks("large", size=8 * UNIT_BYTES))
    assert core.statistics().evicted.fragmentation


def damage(core: StoreCore, client: Client) -> None:
    core.pool.view(entry_of(core, "05")[:3])[0] ^= 1
    assert not core.verify("05")


REMOVALS: dict[str, Callable[[StoreCore, Client], object]] = {
    "replace": replace,
    "replace, free later": replace_and_free_later,
    "delete": lambda core, _: core.delete(["00", "gone", "01"]),
    "purge": lambda core, _: core.purge(),
    "purge some": lambda core, _: core.purge(3),
    "purge in slices": lambda core, _: list(core.purge_in_slices()),
    "on demand": evict_on_demand,
    "fragmentation": evict_for_larger_pieces,
    "periodic": lambda core, _: core.evict(0.5, 0.5, "periodic"),
    "by hand": lambda core, _: core.evict(0.5, 0.9, max_blocks=3),
    "damage": damage,
}


@pytest.mark.parametrize("how", REMOVALS)
def test_every_removal_is_told_before_readers_are_asked_and_room_is_free(make_core: MakeCore, how: str) -> None:
    core = make_core(watermarks=Watermarks(low=0.9, high=1.0))
    client = core.open_client("a")
    fill(core, client, 60 if how.startswith("replace") else 64)
    reader = Reader(core)
    entries = {key: entry_of(core, key) for key in core.all_keys()}
    told: list[Entry] = []
    freed: list[tuple[int, ...]] = []
    free = core.pool.free

    def watched_free(extents: Sequence[tuple[int, int, int]]) -> None:
        asked_for.update(extents)
        freed.extend(extents)
        free(extents)

    asked_for: set[tuple[int, ...]] = set()

    def tell(removed: Sequence[Entry]) -> None:
        assert removed
        assert not {entry[:3] for entry in removed} & set(freed)
        told.extend(removed)
        reader.tells = lambda: asked_about.update(removed)

    asked_about: set[Entry] = set()
    core.on_removal = tell
    core.pool.free = watched_free  # type: ignore[method-assign]
    REMOVALS[how](core, client)
    gone = {entry for key, entry in entries.items() if core.index.get(key) != entry}
    assert gone
    assert gone == set(told)
    assert len(told) == len(gone)
    assert gone <= asked_about  # each time after it was told
    assert {entry[:3] for entry in gone} <= set(freed)


def test_nothing_is_told_where_nothing_loses_its_key(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("k", "l"))
    core.on_removal = lambda _: pytest.fail("told of a removal")
    put(core, client, blocks("k", "new"), replace=False)
    core.abort(core.reserve(client, [64]))
    core.release(core.lease(client, ["k", "gone"]))
    core.release_hold(core.hold_prefix(client, ["k"], 1.0)[1])
    assert core.delete(["gone"]) == core.evict(1.0, 1.0) == core.purge(0) == 0
    assert core.verify("k")


def test_a_block_that_is_pinned_is_told_of_when_it_loses_its_key(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("k"))
    entry = entry_of(core, "k")
    lease = core.lease(client, ["k"])
    told: list[Entry] = []
    core.on_removal = told.extend
    core.delete(["k"])
    assert told == [entry]
    core.release(lease)
    assert told == [entry]
