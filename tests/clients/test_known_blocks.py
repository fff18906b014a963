"""What a process remembers of where blocks lie: how much, for how long, and that it
believes nothing that is over.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest

from infinistore.client.movers.shm.known_blocks import KnownBlocks, Places
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import MISSING
from infinistore.protocol.shared_tables import RemovalTable, granule_bytes_for, removal_table_bytes

POOL_BYTES = 16 * 1024 * 1024
STEP_BYTES = 64 * 1024


def make_table() -> RemovalTable:
    table = RemovalTable(memoryview(bytearray(removal_table_bytes(POOL_BYTES))), granule_bytes_for(POOL_BYTES))
    table.note(())
    return table


def make_known(most: int = 100) -> KnownBlocks:
    known = KnownBlocks(most)
    known.table = make_table()
    return known


def place_of_number(number: int) -> int:
    return number * STEP_BYTES


def note(known: KnownBlocks, *items: int, removals: int = 1) -> None:
    """Note one batch of blocks, each named by its number, which its place, size and
    checksum are made of.
    """
    known.note(
        [str(number) for number in items],
        pack_u64(map(place_of_number, items)),
        pack_u64(number + 1 for number in items),
        pack_u64(number + 7 for number in items),
        removals,
    )


def found(known: KnownBlocks, *items: int) -> Places | None:
    return known.find([str(number) for number in items])


def are_there(known: KnownBlocks, *items: int) -> bool:
    return known.are_there([str(number) for number in items])


def remove(known: KnownBlocks, *items: int) -> None:
    assert known.table is not None
    known.table.note([place_of_number(number) for number in items])


def known_of(known: KnownBlocks, items: Sequence[int]) -> list[int]:
    return [number for number in items if found(known, number) is not None]


def test_what_was_noted_is_found_in_any_order() -> None:
    known = make_known()
    note(known, 1, 2, 3)
    note(known, 4)
    places = found(known, 4, 2, 2)
    assert places is not None
    assert places.places.tolist() == [4 * STEP_BYTES, 2 * STEP_BYTES, 2 * STEP_BYTES]
    assert places.sizes.tolist() == [5, 3, 3]
    assert places.checksums.tolist() == [11, 9, 9]
    assert list(places.removals) == [1, 1, 1]
    assert known.hold(["4", "2", "2"], places)


def test_a_batch_with_one_that_is_not_known_is_not_found() -> None:
    known = make_known()
    note(known, 1, 2)
    assert found(known, 1, 3) is None
    assert not are_there(known, 1, 3)
    assert are_there(known, 1, 2)


def test_an_empty_batch_is_not_known_of_and_empty_notes_do_no_harm() -> None:
    known = make_known()
    note(known)
    assert found(known) is None
    assert not are_there(known)


def test_what_is_missing_is_skipped() -> None:
    known = make_known()
    known.note(["a", "b", "c"], pack_u64([0, 64, 0]), pack_u64([MISSING, 5, MISSING]), pack_u64([0, 1, 0]), 1)
    known.note(["d"], pack_u64(), pack_u64([MISSING]), pack_u64([0]), 1)
    assert known.find(["a"]) is known.find(["c"]) is known.find(["d"]) is None
    places = known.find(["b"])
    assert places is not None
    assert (places.places.tolist(), places.sizes.tolist()) == ([64], [5])


def test_a_reply_that_tells_of_the_first_keys_only_is_taken_so() -> None:
    known = make_known()
    known.note(["a", "b"], pack_u64([64]), pack_u64([5]), pack_u64([1]), 1)
    assert known.find(["a"]) is not None
    assert known.find(["b"]) is None


@pytest.mark.parametrize(("most", "removals"), [(0, 1), (100, 0)])
def test_nothing_is_noted_where_nothing_is_to_be_known(most: int, removals: int) -> None:
    known = make_known(most)
    note(known, 1, removals=removals)
    assert found(known, 1) is None


def test_without_a_table_nothing_holds() -> None:
    known = KnownBlocks(100)
    note(known, 1)
    places = found(known, 1)
    assert places is not None
    assert not known.hold(["1"], places)
    assert not are_there(known, 1)
    known.table = make_table()
    assert are_there(known, 1)


def test_what_was_removed_is_forgotten_and_what_was_found_before_does_not_hold() -> None:
    known = make_known()
    note(known, 1, 2, 3)
    before = found(known, 1, 2)
    assert before is not None
    remove(known, 2)
    assert not known.hold(["1", "2"], before)
    assert known_of(known, [1, 2, 3]) == [3]
    assert are_there(known, 3)


def test_what_was_noted_before_a_removal_and_heard_of_later_does_not_hold() -> None:
    known = make_known()
    remove(known, 1)
    note(known, 1, removals=1)
    assert not are_there(known, 1)
    note(known, 1, removals=2)
    assert are_there(known, 1)
    remove(known, 1)
    assert not are_there(known, 1)


def test_an_older_note_that_comes_late_is_not_believed() -> None:
    known = make_known()
    remove(known, 1)
    note(known, 1, removals=2)
    note(known, 1, removals=1)
    assert not are_there(known, 1)


@pytest.mark.parametrize("most", [1, 2, 3, 10, 11])
def test_the_half_that_was_used_last_is_kept_and_never_more_than_all(most: int) -> None:
    known = make_known(most)
    for number in range(200):
        note(known, number)
        kept = known_of(known, range(number + 1)) if number % 20 == 19 else []
        assert len(kept) <= most
    for number in range(200):
        note(known, number)
        assert found(known, number) is not None
    last = range(200 - most // 2, 200)
    assert known_of(known, last) == list(last)


def test_what_is_used_again_and_again_is_kept() -> None:
    known = make_known(10)
    note(known, 1000, 1001)
    for number in range(100):
        note(known, number)
        assert found(known, 1000, 1001) is not None
    assert found(known, 0) is None


def test_a_batch_larger_than_what_is_to_be_known_is_known_for_a_while() -> None:
    known = make_known(10)
    note(known, *range(50))
    assert found(known, *range(50)) is not None
    note(known, *range(100, 150))
    note(known, *range(200, 250))
    assert found(known, *range(100, 150)) is not None or known_of(known, range(200, 250))
    assert known_of(known, range(50)) == []


def test_notes_that_nobody_asks_about_are_bounded() -> None:
    known = make_known(1000)
    for number in range(5000):
        note(known, number)
    assert 0 < len(known_of(known, range(5000))) < 5000
    assert found(known, 4999) is not None


def test_long_batches_that_nobody_asks_about_are_no_more_than_what_is_to_be_known() -> None:
    """As of a client that only puts."""
    known = make_known(100)

    class Key(str):
        """Can be referred to weakly."""

    alive: WeakSet[Key] = WeakSet()
    for number in range(50):
        keys = [Key(f"{number} {index}") for index in range(60)]
        alive.update(keys)
        known.note(keys, pack_u64(range(60)), pack_u64([1] * 60), pack_u64(range(60)), 1)
        del keys
        assert len(alive) <= 4 * 60
    assert known.find(["49 7"]) is not None


def test_many_threads_may_use_it() -> None:
    known = make_known(20)

    def work(first: int) -> None:
        for number in range(first, 4000, 4):
            note(known, number, number + 1)
            places = found(known, number)
            if places is not None:
                assert places.places.tolist() == [place_of_number(number)]
            are_there(known, number + 1)
            if number % 3 == 0:
                known.hold([str(number)], Places(pack_u64([0]), pack_u64([1]), pack_u64([1]), [0]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
