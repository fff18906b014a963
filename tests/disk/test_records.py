"""The index of a disk is a map, however its shards grow and whatever ends in it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.disk.records import MOST_SAVED_PAGES, SHARDS, Loader, Records, Rows, fingerprints

SEGMENTS = 4


def rows_of(lows: list[int], segment: int = 0, length: int = 1, live: bool = True) -> Rows:
    count = len(lows)
    low = np.array(lows, np.uint64)
    return Rows(
        low,
        seal=low ^ np.uint64(segment + 77),
        segment=np.full(count, segment, np.uint32),
        page=(low >> np.uint64(3)).astype(np.uint32) & np.uint32(0xFFFF),
        length=np.full(count, length, np.uint32),
        saved=(low % np.uint64(MOST_SAVED_PAGES + 1)).astype(np.uint16),
        own=low % np.uint64(2) == 0,
        live=np.full(count, live, np.bool_),
    )


def found(records: Records, lows: list[int]) -> list[tuple[int, int, int] | None]:
    """Segment, seal and length of each live record, if it has the rest, too."""
    slots = records.find(np.array(lows, np.uint64))
    live = records.live(slots)
    rows = records.rows(slots)
    expected = rows_of(lows)
    for name in ("page", "saved", "own"):
        assert (getattr(rows, name) == getattr(expected, name))[live].all(), name
    values = zip(rows.segment.tolist(), rows.seal.tolist(), rows.length.tolist(), strict=True)
    return [value if there else None for there, value in zip(live.tolist(), values, strict=True)]


# Few shards and few buckets, so that these collide; and any others.
lows = st.one_of(
    st.integers(2, 40), st.integers(0, 40).map(lambda one: (5 << 58) + (one << 40)), st.integers(2, 2**64 - 1)
)
batches = st.lists(st.lists(lows, min_size=1, max_size=60, unique=True), min_size=1, max_size=8)
changes = st.sampled_from(["insert", "insert", "stale", "remove", "end", "sweep", "load"])


@given(batches=batches, kinds=st.lists(changes, min_size=8, max_size=8))
def test_it_is_a_map(batches: list[list[int]], kinds: list[str]) -> None:
    records = Records(2000, SEGMENTS)
    model: dict[int, tuple[int, int, int]] = {}
    for number, (batch, kind) in enumerate(zip(batches, kinds, strict=False)):
        segment = number % SEGMENTS
        new = {low: (segment, low ^ (segment + 77), number + 1) for low in batch}
        slots = records.find(np.array(batch, np.uint64))
        match kind:
            case "insert":
                records.insert(rows_of(batch, segment, number + 1))
                model.update(new)
            case "load":
                loader = Loader(records)
                loader.add(rows_of(batch, segment, number + 1))
                loader.add(rows_of(batch[:2], segment, 0))  # these are removed again
                for _ in loader.merge():
                    pass
                model.update(new)
                for low in batch[:2]:
                    del model[low]
            case "stale" | "remove":
                (records.make_stale if kind == "stale" else records.remove)(slots)
                for low in batch:
                    model.pop(low, None)
                still = records.find(np.array(batch, np.uint64)) >= 0
                assert kind == "stale" or not still.any()
            case "end":
                records.end_segment(segment)
                model = {low: value for low, value in model.items() if value[0] != segment}
            case _:
                for shard in range(SHARDS):
                    records.sweep(shard)
        assert records.live_records == len(model)
        every = sorted({low for some in batches for low in some})
        assert found(records, every) == [model.get(low) for low in every]


@given(batches=batches)
def test_what_is_dumped_is_loaded(batches: list[list[int]]) -> None:
    records, copy = Records(2000, SEGMENTS), Records(2000, SEGMENTS)
    for number, batch in enumerate(batches):
        records.insert(rows_of(batch, number % SEGMENTS, 1, live=number % 3 > 0))
    for shard in range(SHARDS):
        copy.load(shard, records.dump(shard))
    every = sorted({low for some in batches for low in some})
    assert found(copy, every) == found(records, every)
    assert copy.live_records == records.live_records


def test_a_record_takes_at_most_56_bytes() -> None:
    records, chance = Records(400_000, SEGMENTS), np.random.default_rng(1)
    every = np.unique(chance.integers(2, 2**64 - 1, 200_000, dtype=np.uint64)).tolist()
    for start in range(0, len(every), 5000):
        records.insert(rows_of(every[start : start + 5000]))
        if start > 50_000:
            assert records.memory_bytes / records.live_records <= 56


def test_more_records_than_there_may_be_are_refused() -> None:
    records = Records(100, SEGMENTS)
    with pytest.raises(MemoryError, match="100 records"):
        records.insert(rows_of(list(range(10, 5000))))


def test_reads_are_counted_up_to_3() -> None:
    records = Records(100, SEGMENTS)
    records.insert(rows_of([5, 6]))
    slots = records.find(np.array([5, 6, 7], np.uint64))
    for _ in range(5):
        records.note_reads(slots[[0, 2]])
    assert records.reads(slots[:2]).tolist() == [3, 0]


def test_a_counter_of_lives_that_comes_round_brings_nothing_back() -> None:
    records = Records(100, SEGMENTS)
    records.insert(rows_of([5], segment=1))
    for life in range(256):
        records.end_segment(1)
        records.sweep(life % SHARDS)
    assert found(records, [5]) == [None]


def test_fingerprints_depend_on_the_secret_and_never_look_like_a_free_slot() -> None:
    keys = [f"key/{number}" for number in range(1000)]
    one, other = fingerprints(keys, 1), fingerprints(keys, 2)
    assert not (one.low == other.low).any() and not (one.high == other.high).any()
    assert len(set(one.low.tolist())) == len(keys) and int(one.low.min()) >= 2


def test_another_key_with_the_same_lower_half_gets_a_checksum_that_fits_nothing() -> None:
    records, low, mine, other = Records(100, SEGMENTS), 99, 1234, 1235
    checksum = 0xABCDEF
    row = rows_of([low])._replace(seal=np.array([checksum ^ mine], np.uint64))
    records.insert(row)
    seal = int(records.rows(records.find(np.array([low], np.uint64))).seal[0])
    assert seal ^ mine == checksum and seal ^ other != checksum
