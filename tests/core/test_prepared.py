"""Reservations that have names before they are written: they become visible at the
moment when they are written.
"""

from collections.abc import Callable, Sequence

import attrs
import pytest
import xxhash

from infinistore.core import Client, CoreLimits, Reservation, StoreCore
from infinistore.core.index import Entry
from infinistore.errors import UnknownReservation
from tests.core.test_store import MakeCore, blocks, get, put, recency


@attrs.define(eq=False)
class Writer:
    """Somebody who writes blocks alone. `asked` counts how often the store looked."""

    reservation: Reservation
    values: dict[str, bytes]
    hashed: bool = True
    written: bool = False
    asked: int = 0

    @property
    def keys(self) -> list[str]:
        return list(self.values)

    def look(self) -> Sequence[int] | None:
        self.asked += 1
        if not self.written:
            return None
        return list(map(xxhash.xxh3_64_intdigest, self.values.values())) if self.hashed else []

    def write(self) -> None:
        self.written = True


def reserve(core: StoreCore, client: Client, values: dict[str, bytes], *, hashed: bool = True) -> Writer:
    reservation = core.reserve(client, [len(value) for value in values.values()])
    for view, value in zip(reservation.views, values.values(), strict=True):
        view[:] = value
    return Writer(reservation, values, hashed)


def prepare(core: StoreCore, client: Client, values: dict[str, bytes], *, hashed: bool = True) -> Writer:
    writer = reserve(core, client, values, hashed=hashed)
    assert core.prepare(writer.reservation, writer.keys, writer.look)
    return writer


class Removals:
    """Notes what is told of blocks that lose their keys."""

    def __init__(self, core: StoreCore) -> None:
        self.told: list[list[Entry]] = []
        core.on_removal = lambda entries: self.told.append(list(entries))

    def take(self) -> list[list[Entry]]:
        told, self.told = self.told, []
        return told


def entry_of(core: StoreCore, key: str) -> Entry:
    entry = core.index.get(key)
    assert entry is not None
    return entry


# Visible when written, and not before


def test_a_prepared_batch_is_invisible_until_it_is_written_and_then_visible_as_a_whole(
    core: StoreCore, client: Client
) -> None:
    put(core, client, {"x": b"old"})
    writer = prepare(core, client, {"x": b"new", "y": b"another"})
    assert core.exists(["x", "y"]) == b"\1\0"
    assert get(core, client, "x", "y") == [b"old", None]
    writer.write()
    assert core.exists(["x", "y"]) == b"\1\1"
    assert get(core, client, "x", "y") == [b"new", b"another"]
    statistics = core.statistics()
    assert (statistics.reservations, statistics.reserved_bytes, statistics.used_bytes) == (0, 0, 128)
    assert (statistics.puts, statistics.put_bytes) == (3, 3 + 3 + 7)
    assert writer.reservation.state == "committed"


LOOK_UPS: dict[str, tuple[Callable[[StoreCore, Client], object], object]] = {
    "exists": (lambda core, client: core.exists(["k"]), b"\1"),
    "match_prefix": (lambda core, client: core.match_prefix(["k"]), 1),
    "hold_prefix": (lambda core, client: core.hold_prefix(client, ["k"], 1)[0], 1),
    "lease": (lambda core, client: get(core, client, "k"), [b"value"]),
    "delete": (lambda core, client: core.delete(["k"]), 1),
    "purge": (lambda core, client: core.purge(), 1),
    "purge_in_slices": (lambda core, client: list(core.purge_in_slices()), [1]),
    "evict": (lambda core, client: core.evict(0, 0), 1),
    "keys": (lambda core, client: core.keys(), ["k"]),
    "all_keys": (lambda core, client: core.all_keys(), ["k"]),
    "sample": (lambda core, client: core.sample(9), [("k", 5)]),
    "statistics": (lambda core, client: core.statistics().keys, 1),
    "len": (lambda core, client: len(core), 1),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_whatever_looks_finds_what_was_written_and_nothing_before(make_core: MakeCore, name: str) -> None:
    look, found = LOOK_UPS[name]
    core = make_core()
    client, other = core.open_client("a"), core.open_client("b")
    writer = prepare(core, client, {"k": b"value"})
    assert look(core, other) != found
    writer.write()
    assert look(core, other) == found


def test_verification_finds_what_was_written(core: StoreCore, client: Client) -> None:
    writer = prepare(core, client, {"k": b"value"})
    assert core.verify("k")
    writer.reservation.views[0][:] = b"wrong"
    writer.write()
    assert not core.verify("k")
    assert core.exists(["k"]) == b"\0"


def test_a_commit_replaces_what_was_written_before_it(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    writer = prepare(core, client, {"k": b"first"})
    writer.write()
    put(core, other, {"k": b"second"})
    assert get(core, other, "k") == [b"second"]
    assert core.statistics().puts == 2


def test_a_commit_that_does_not_replace_skips_what_was_written_before_it(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    writer = prepare(core, client, {"k": b"first"})
    writer.write()
    assert put(core, other, {"k": b"second"}, replace=False) == [0]
    assert get(core, other, "k") == [b"first"]


def test_what_is_written_after_a_commit_replaces_it(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    writer = prepare(core, client, {"k": b"last"})
    put(core, other, {"k": b"first"})
    assert get(core, other, "k") == [b"first"]
    writer.write()
    assert get(core, other, "k") == [b"last"]
    core.close_client(client)
    assert core.statistics().used_bytes == 64


def test_what_is_written_after_a_deletion_stays(core: StoreCore, client: Client) -> None:
    put(core, client, {"k": b"old"})
    writer = prepare(core, client, {"k": b"new"})
    assert core.delete(["k"]) == 1
    assert core.exists(["k"]) == b"\0"
    writer.write()
    assert get(core, client, "k") == [b"new"]


def test_a_reservation_finds_the_room_that_something_written_has_replaced(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    put(core, client, blocks("k", size=2048))
    writer = prepare(core, client, blocks("k", size=1024))
    writer.write()
    core.reserve(other, [2048, 1024])
    assert core.exists(["k"]) == b"\1"
    assert core.statistics().evicted.on_demand == 0


def test_several_become_visible_in_any_order(core: StoreCore) -> None:
    clients = [core.open_client(name) for name in "abc"]
    writers = [prepare(core, client, blocks(client.name)) for client in clients]
    for position, expected in ((2, b"\0\0\1"), (0, b"\1\0\1"), (1, b"\1\1\1")):
        writers[position].write()
        assert core.exists(["a", "b", "c"]) == expected


def test_several_that_are_written_before_anybody_looks_all_become_visible(core: StoreCore) -> None:
    clients = [core.open_client(name) for name in "abc"]
    for writer in [prepare(core, client, blocks(client.name)) for client in clients]:
        writer.write()
    assert sorted(core.all_keys()) == ["a", "b", "c"]


def test_what_was_written_is_the_warmest_and_its_first_key_the_warmest_of_all(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("old", "y"))
    writer = prepare(core, client, blocks("x", "y"))
    writer.write()
    assert core.all_keys() == ["old", "y", "x"]
    assert recency(core) == ["old", "y", "x"]


def test_checksums_come_with_what_was_written_or_there_are_none(core: StoreCore, client: Client) -> None:
    for key, hashed in (("hashed", True), ("bare", False)):
        prepare(core, client, {key: b"value"}, hashed=hashed).write()
    lease = core.lease(client, ["hashed", "bare"])
    assert lease.checksums == [xxhash.xxh3_64_intdigest(b"value"), 0]


def test_nobody_is_asked_again_after_it_was_written(core: StoreCore, client: Client) -> None:
    writer = prepare(core, client, {"k": b"value"})
    writer.write()
    core.commit_written()
    asked = writer.asked
    core.commit_written()
    assert core.exists(["k"]) == b"\1"
    assert writer.asked == asked


def test_a_leased_block_survives_what_is_written_in_its_place(core: StoreCore) -> None:
    client, reader = core.open_client("a"), core.open_client("b")
    put(core, client, {"k": b"old"})
    writer = prepare(core, client, {"k": b"new"})
    lease = core.lease(reader, ["k"])
    writer.write()
    assert get(core, client, "k") == [b"new"]
    assert b"".join(lease.merged_views) == b"old"
    assert core.statistics().condemned_bytes == 64
    core.release(lease)
    assert core.statistics().used_bytes == 64


def test_no_eviction_takes_what_is_prepared(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_pinned_ratio=1.0))
    client = core.open_client("a")
    writer = prepare(core, client, blocks("k", size=2048))
    put(core, client, blocks("other", size=2048))
    put(core, client, blocks("another", size=2048))
    assert core.purge() == 1
    writer.write()
    assert get(core, client, "k") == list(blocks("k", size=2048).values())


# The end of it


def test_one_that_is_aborted_is_never_seen(core: StoreCore, client: Client) -> None:
    put(core, client, {"k": b"old"})
    writer = prepare(core, client, {"k": b"new"})
    core.abort(writer.reservation)
    writer.write()
    assert get(core, client, "k") == [b"old"]
    assert not core.is_being_written(["k"])
    assert core.statistics().used_bytes == 64


@pytest.mark.parametrize("quarantined", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_one_whose_client_is_closed_stays_if_it_was_written(
    core: StoreCore, client: Client, written: bool, quarantined: bool
) -> None:
    other = core.open_client("b")
    put(core, other, {"k": b"old"})
    writer = prepare(core, client, {"k": b"new"})
    if quarantined:
        core.quarantine(client)
        assert get(core, other, "k") == [b"old"]
        assert core.is_being_written(["k"])
    writer.written = written
    core.close_client(client)
    writer.write()  # too late
    assert get(core, other, "k") == [b"new" if written else b"old"]
    assert not core.is_being_written(["k"])
    statistics = core.statistics()
    assert (statistics.used_bytes, statistics.reserved_bytes, statistics.quarantined_bytes) == (64, 0, 0)


def test_a_client_in_quarantine_may_still_write_what_was_prepared(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    writer = prepare(core, client, {"k": b"value"})
    core.quarantine(client)
    core.abort(writer.reservation)  # does nothing
    assert core.statistics().quarantined_bytes == 64
    writer.write()
    assert get(core, other, "k") == [b"value"]
    assert core.statistics().quarantined_bytes == 0
    core.close_client(client)
    assert get(core, other, "k") == [b"value"]


# Who else writes


def test_a_key_that_somebody_is_writing_can_be_prepared_by_nobody_else(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    first = prepare(core, client, blocks("k", "l"))
    second = reserve(core, other, {"m": b"second", "l": b"second"})
    assert not core.prepare(second.reservation, second.keys, second.look)
    assert core.is_being_written(["l", "m"])
    assert not core.is_being_written(["m"])
    second.write()
    assert core.exists(["k", "l", "m"]) == b"\0\0\0"
    assert second.asked == 0
    core.commit(second.reservation, second.keys, None)
    first.write()
    assert get(core, other, "l", "m") == [first.values["l"], b"second"]
    assert not core.is_being_written(["k", "l", "m"])


@pytest.mark.parametrize("end", ["written", "aborted", "closed"])
def test_a_key_can_be_prepared_again_when_who_wrote_it_is_done(core: StoreCore, client: Client, end: str) -> None:
    other = core.open_client("b")
    first = prepare(core, client, {"k": b"first"})
    if end == "written":
        first.write()
    elif end == "aborted":
        core.abort(first.reservation)
    else:
        core.close_client(client)
    second = prepare(core, other, {"k": b"second"})
    assert core.exists(["k"]) == (b"\1" if end == "written" else b"\0")
    second.write()
    assert get(core, other, "k") == [b"second"]


# What is told of removals


def test_what_will_be_replaced_is_told_before_and_what_was_replaced_after(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    put(core, client, blocks("k", "l"))
    removals = Removals(core)
    first, unchanged = entry_of(core, "k"), entry_of(core, "l")
    writer = prepare(core, client, blocks("k", "l", "new"))
    assert removals.take() == [[first, unchanged]]
    assert core.exists(["k", "l", "new"]) == b"\1\1\0"
    put(core, other, {"k": b"between"})
    assert removals.take() == [[first]]
    between = entry_of(core, "k")
    writer.write()
    assert not removals.told
    core.commit_written()
    assert removals.take() == [[between, unchanged]]
    assert core.statistics().used_bytes == 3 * 64


def test_nothing_is_told_of_what_is_new_refused_or_wrong(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    put(core, client, {"k": b"old"})
    removals = Removals(core)
    prepare(core, client, {"new": b"1"}).write()
    core.commit_written()
    assert not removals.told
    prepare(core, client, {"l": b"1"})
    writer = reserve(core, other, {"k": b"1", "l": b"2"})
    assert not core.prepare(writer.reservation, writer.keys, writer.look)
    with pytest.raises(ValueError, match="as many keys"):
        core.prepare(writer.reservation, ["k"], writer.look)
    assert not removals.told


# Bad input


def test_a_prepare_that_does_not_fit_changes_nothing(core: StoreCore, client: Client) -> None:
    put(core, client, {"k": b"old"})
    writer = reserve(core, client, {"k": b"new", "l": b"new"})
    before = core.statistics()
    for keys, why in ((["k"], "as many keys"), (["k", "l", "m"], "as many keys"), (["k", "k"], "there twice")):
        with pytest.raises(ValueError, match=why):
            core.prepare(writer.reservation, keys, writer.look)
        assert not core.is_being_written(["k", "l", "m"])
    assert core.statistics() == before
    writer.write()
    assert core.exists(["k", "l"]) == b"\1\0"
    assert core.prepare(writer.reservation, writer.keys, writer.look)
    assert get(core, client, "k", "l") == [b"new", b"new"]


def test_one_that_is_prepared_can_be_neither_prepared_again_nor_committed(core: StoreCore, client: Client) -> None:
    writer = prepare(core, client, {"k": b"value"})
    before = core.statistics()
    with pytest.raises(ValueError, match="was prepared"):
        core.prepare(writer.reservation, ["other"], writer.look)
    with pytest.raises(ValueError, match="was prepared"):
        core.commit(writer.reservation, ["other"], None)
    assert not core.is_being_written(["other"])
    assert core.statistics() == before
    writer.write()
    assert core.all_keys() == ["k"]


def test_a_commit_of_what_was_written_changes_nothing(core: StoreCore, client: Client) -> None:
    writer = prepare(core, client, {"k": b"value"})
    writer.write()
    assert core.commit(writer.reservation, ["k"], None) == []
    assert core.statistics().puts == 1


@pytest.mark.parametrize("end", ["committed", "written", "aborted", "closed"])
def test_what_is_over_cannot_be_prepared(core: StoreCore, client: Client, end: str) -> None:
    writer = reserve(core, client, {"k": b"value"})
    if end == "committed":
        core.commit(writer.reservation, writer.keys, None)
    elif end == "written":
        assert core.prepare(writer.reservation, writer.keys, writer.look)
        writer.write()
    elif end == "aborted":
        core.abort(writer.reservation)
    else:
        core.close_client(client)
    with pytest.raises(UnknownReservation):
        core.prepare(writer.reservation, ["l"], writer.look)
    assert not core.is_being_written(["k", "l"])
    assert core.exists(["k", "l"]) == (b"\1\0" if end in {"committed", "written"} else b"\0\0")


def test_a_client_in_quarantine_prepares_nothing(core: StoreCore, client: Client) -> None:
    writer = reserve(core, client, {"k": b"value"})
    core.quarantine(client)
    with pytest.raises(ValueError, match="quarantined"):
        core.prepare(writer.reservation, writer.keys, writer.look)
    assert not core.is_being_written(["k"])


def test_an_empty_batch_can_be_prepared(core: StoreCore, client: Client) -> None:
    writer = prepare(core, client, {})
    assert core.statistics().reservations == 1
    writer.write()
    assert core.statistics().reservations == 0
