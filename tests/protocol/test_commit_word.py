"""The commit word: what one end writes the other reads, and nothing else of the memory
that it shares is touched.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.protocol.codec import pack_u64
from infinistore.protocol.shared_tables import HAZARD_SLOTS, READER_BYTES, CommitWord, Hazards, HazardTable, TouchLog

values = st.integers(0, 2**64 - 1)
batches = st.tuples(st.integers(1, 2**64 - 1), st.lists(values, max_size=9) | st.just(list(range(HAZARD_SLOTS))))


def memory() -> memoryview:
    return memoryview(bytearray(READER_BYTES))


@given(st.lists(batches, max_size=6))
def test_the_last_commit_is_seen_with_its_checksums_and_no_other(commits: list[tuple[int, list[int]]]) -> None:
    shared = memory()
    writer, reader = CommitWord(shared), CommitWord(shared)
    for reservation, checksums in commits:
        if writer.checksums_of(reservation, 0) is None:
            assert reader.checksums_of(reservation, len(checksums)) is None
        writer.commit(reservation, pack_u64(checksums))
        assert reader.checksums_of(reservation, len(checksums)) == checksums
        assert reader.checksums_of(reservation, 0) == []
        assert reader.checksums_of(reservation ^ 1, len(checksums)) is None


def test_the_largest_number_of_a_reservation_can_be_committed() -> None:
    shared = memory()
    CommitWord(shared).commit(2**64 - 1, pack_u64([5]))
    assert CommitWord(shared).checksums_of(2**64 - 1, 1) == [5]


def test_nothing_is_committed_at_first() -> None:
    assert CommitWord(memory()).checksums_of(1, 3) is None


@given(st.lists(values, max_size=HAZARD_SLOTS))
def test_checksums_lie_where_there_is_nothing_else(checksums: list[int]) -> None:
    shared = memory()
    word, hazards, log = CommitWord(shared), HazardTable(shared), TouchLog(shared)
    row = pack_u64(range(HAZARD_SLOTS))
    hazard = hazards.add(row, row, row)
    assert hazard is not None
    before = Hazards(shared).look()
    log_bytes = b"touch" * 1000
    assert log.append(log_bytes)
    word.commit(7, pack_u64(checksums))
    assert Hazards(shared).look() == before
    assert TouchLog(shared).take() == log_bytes
    hazards.remove(hazard)
    assert word.checksums_of(7, len(checksums)) == checksums
    assert not hazards.closed


def test_there_are_checksums_for_as_many_blocks_as_there_are_slots_and_no_more() -> None:
    shared = memory()
    word = CommitWord(shared)
    word.commit(1, pack_u64([2**64 - 1] * HAZARD_SLOTS))
    assert word.checksums_of(1, HAZARD_SLOTS) == [2**64 - 1] * HAZARD_SLOTS
    with pytest.raises(ValueError, match=r"."):
        word.commit(2, pack_u64([1] * (HAZARD_SLOTS + 1)))
    assert word.checksums_of(1, 1) == [2**64 - 1]


def test_the_word_is_number_4_and_is_written_after_the_checksums() -> None:
    """A reader that finds the word finds its checksums."""
    shared = memory()
    order: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __setitem__(self, where: object, value: object) -> None:
            order.append(f"{self.name} {where}")

    word = CommitWord(shared)
    word.commit(9, pack_u64([1]))
    assert shared[:64].cast("Q").tolist() == [0, 0, 0, 0, 9, 0, 0, 0]
    word.word, word.checksums = Watched("word"), Watched("checksums")
    word.commit(10, pack_u64([1, 2]))
    assert order == ["checksums slice(None, 2, None)", "word 4"]
