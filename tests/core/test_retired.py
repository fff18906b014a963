"""How seldom clients that pin by themselves are looked at, and that nobody lacks room
for it.
"""

import pytest

from infinistore.core import CoreLimits, StoreCore, Watermarks
from infinistore.core.clients import Hazard
from infinistore.core.pins import HAZARDS_PER_BLOCK
from infinistore.errors import OutOfMemory
from tests.core.conftest import UNIT_BYTES
from tests.core.test_hazard_pins import entry_of
from tests.core.test_store import MakeCore, blocks, put


class Busy:
    """A client that always has so much to tell of, though it pins `rows` only."""

    def __init__(self, core: StoreCore, news: int) -> None:
        self.news = news
        self.rows: list[Hazard] = []
        self.asked = 0
        self.client = core.open_client("busy")
        core.accept_hazards(self.client, self.look, lambda: self.news)

    def look(self) -> list[Hazard]:
        self.asked += 1
        return list(self.rows)


def filled(make_core: MakeCore, news: int, count: int = 64) -> tuple[StoreCore, Busy]:
    core = make_core(limits=CoreLimits(max_pinned_ratio=1.0))
    busy = Busy(core, news)
    for i in range(count):
        put(core, core.open_client("a"), blocks(str(i)))
    return core, busy


def test_puts_into_room_that_is_free_look_at_clients_in_turns_and_at_little_each_time(make_core: MakeCore) -> None:
    core = make_core(64 * UNIT_BYTES * 64)
    busy = [Busy(core, 10 * HAZARDS_PER_BLOCK), Busy(core, 20 * HAZARDS_PER_BLOCK), Busy(core, 0)]
    for i in range(1024):  # more than what is there at first is good for
        put(core, core.open_client("a"), blocks(str(i)))
    before = [one.asked for one in busy]
    for i in range(300):
        put(core, core.open_client("a"), blocks(f"more {i}"))
    assert [one.asked - asked for one, asked in zip(busy, before, strict=True)] == [10, 10, 0]


def test_clients_are_looked_at_in_the_order_in_which_they_came_whoever_asks(core: StoreCore) -> None:
    first, second, third = (Busy(core, 8192) for _ in range(3))  # as much as there can be
    core.reserve(core.open_client("a"), [64])
    assert (first.asked, second.asked, third.asked) == (1, 0, 0)
    for one in (first, second, third):
        one.news = HAZARDS_PER_BLOCK  # a reservation is good for one of them
    core.reserve(core.open_client("a"), [64])
    assert (first.asked, second.asked, third.asked) == (1, 1, 0)
    core.reserve(core.open_client("a"), [64])
    assert (first.asked, second.asked, third.asked) == (1, 1, 1)
    core.reserve(core.open_client("a"), [64])
    assert (first.asked, second.asked, third.asked) == (2, 1, 1)


def test_a_put_of_a_client_that_pins_by_itself_looks_at_it_once_and_at_others_in_turn(core: StoreCore) -> None:
    one = Busy(core, 1)
    core.reserve(one.client, [64])
    assert one.asked == 1
    other = Busy(core, 1)
    core.reserve(one.client, [64])
    assert other.asked == 1
    core.close_client(one.client)
    before = other.asked
    core.reserve(core.open_client("a"), [64])
    assert other.asked == before + 1


@pytest.mark.parametrize(
    ("news", "asked"),
    [
        ((2 * HAZARDS_PER_BLOCK,), 1),  # as much as one block is worth, and the look itself
        ((2 * HAZARDS_PER_BLOCK + 1,), 0),
        ((HAZARDS_PER_BLOCK, HAZARDS_PER_BLOCK), 1),
        ((HAZARDS_PER_BLOCK + 1, HAZARDS_PER_BLOCK), 0),
        ((HAZARDS_PER_BLOCK, HAZARDS_PER_BLOCK, 1), 0),
    ],
    ids=str,
)
def test_what_all_clients_have_to_tell_together_decides_whether_a_removal_looks_at_them(
    core: StoreCore, news: tuple[int, ...], asked: int
) -> None:
    put(core, core.open_client("a"), blocks("1", "2"))
    busy = [Busy(core, one) for one in news]
    core.delete(["1"])
    assert [one.asked for one in busy] == [asked] * len(busy)
    assert core.pool.used_bytes == (1 if asked else 2) * UNIT_BYTES


def test_pins_that_are_known_are_nothing_new(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks("1", "2", "3"))
    busy = Busy(core, 1)
    busy.rows = [(*entry_of(core, "1"), 1), (*entry_of(core, "2"), 1)]
    core.catch_up()
    busy.news = 0
    core.delete(["3"])
    assert busy.asked == 1
    assert core.pool.used_bytes == 2 * UNIT_BYTES


@pytest.mark.parametrize("how", ["delete", "replace"])
def test_who_has_nothing_new_to_tell_is_not_looked_at(make_core: MakeCore, how: str) -> None:
    core, busy = filled(make_core, 0, count=40)
    if how == "delete":
        core.delete(["1", "2"])
    else:
        put(core, core.open_client("a"), blocks("1", "2"))
    assert busy.asked == 0
    assert core.pool.used_bytes == (38 if how == "delete" else 40) * UNIT_BYTES


def test_removals_look_at_no_more_than_they_are_worth(make_core: MakeCore) -> None:
    """Until so much waits that it would be missed: a 32nd of the pool, here two
    blocks.
    """
    core = make_core(64 * UNIT_BYTES * 64)
    busy = Busy(core, 10**6)
    for i in range(600):
        put(core, core.open_client("a"), blocks(str(i)))
    busy.news = 40 * HAZARDS_PER_BLOCK
    for i in range(38):
        core.delete([str(i)])
    assert busy.asked == 0
    assert core.pool.used_bytes == 600 * UNIT_BYTES
    assert core.exists(["0", "38"]) == b"\0\1"
    core.delete(["38"])
    assert busy.asked == 1
    assert core.pool.used_bytes == 561 * UNIT_BYTES
    busy.news = 10**6
    for i in range(39, 39 + 129):
        core.delete([str(i)])
    assert busy.asked == 1
    core.delete(["168"])
    assert busy.asked == 2
    assert core.pool.used_bytes == 431 * UNIT_BYTES


def test_statistics_look_at_everybody_and_give_all_room_back(make_core: MakeCore) -> None:
    core, busy = filled(make_core, 1_000_000)
    core.delete(["1"])
    assert (busy.asked, core.pool.used_bytes) == (0, 64 * UNIT_BYTES)
    assert core.statistics().used_bytes == 63 * UNIT_BYTES
    assert busy.asked == 1


def test_room_that_waits_is_had_as_soon_as_it_is_wanted_and_nothing_is_evicted_for_it(make_core: MakeCore) -> None:
    core, busy = filled(make_core, 1_000_000)
    for asked in (1, 2):
        core.delete([str(asked)])
        put(core, core.open_client("a"), blocks(f"new {asked}"))
        assert busy.asked == asked
        assert len(core) == 64


def test_what_waits_already_is_freed_with_what_a_lease_kept(make_core: MakeCore) -> None:
    core, busy = filled(make_core, 0)
    client = core.open_client("a")
    lease = core.lease(client, ["2"])
    core.delete(["2"])
    busy.news = 10_000
    core.delete(["1"])
    core.release(lease)
    assert core.pool.used_bytes == 64 * UNIT_BYTES
    busy.news = 0
    core.catch_up()
    assert core.pool.used_bytes == 62 * UNIT_BYTES


def test_what_waits_and_is_pinned_keeps_its_room_until_its_pin_ends(make_core: MakeCore) -> None:
    core, busy = filled(make_core, 1_000_000)
    entry = entry_of(core, "1")
    busy.rows = [(*entry, 1)]
    core.delete(["1"])
    put(core, core.open_client("a"), blocks("new"))
    assert core.statistics().condemned_bytes == UNIT_BYTES
    assert bytes(core.pool.view(entry[:3])) == b"1" * 64
    busy.rows = []
    assert core.statistics().condemned_bytes == 0


def test_a_batch_that_does_not_fit_beside_what_is_pinned_evicts_nothing_however_much_there_is_to_look_at(
    make_core: MakeCore,
) -> None:
    core, busy = filled(make_core, 10_000)
    busy.rows = [(*entry_of(core, str(i)), 1) for i in range(60)]
    with pytest.raises(OutOfMemory, match="pinned by readers"):
        core.reserve(core.open_client("a"), [UNIT_BYTES] * 5)
    assert len(core) == 64
    busy.rows = []
    core.reserve(core.open_client("a"), [UNIT_BYTES] * 5)


@pytest.mark.parametrize("little", [1, 512])
def test_who_tells_of_little_is_not_evicted_from_for_who_tells_of_much(make_core: MakeCore, little: int) -> None:
    core = make_core(watermarks=Watermarks(0.5, 1.0))
    much = Busy(core, 10**6)
    reader = Busy(core, little)
    for i in range(64):
        put(core, core.open_client("a"), blocks(str(i)))
    reader.rows = [(*entry_of(core, str(i)), 1) for i in range(3)]
    put(core, core.open_client("a"), blocks("new"))
    assert core.exists(["0", "1", "2", "3"]) == b"\1\1\1\0"
    assert much.asked == 1  # where space is used again, not to choose what is evicted


def test_a_lease_that_ends_frees_what_lost_its_key_meanwhile(make_core: MakeCore) -> None:
    core, busy = filled(make_core, 0)
    client = core.open_client("a")
    lease = core.lease(client, ["1"])
    core.delete(["1"])
    assert core.pool.used_bytes == 64 * UNIT_BYTES
    core.release(lease)
    assert core.pool.used_bytes == 63 * UNIT_BYTES
    assert busy.asked == 0
