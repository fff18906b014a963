"""The sample of an index is of keys that are there, each once, and each with the same
chance.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.core.index import MAX_NOTED, Entry, Index

LIMIT = 64


def insert(index: Index, *keys: str) -> None:
    entries: list[Entry] = [(0, number, 1, 0) for number in range(len(keys))]
    index.remove(keys)
    index.insert(keys, entries)


batches = st.lists(st.integers(0, 3 * LIMIT).map(str), min_size=1, max_size=LIMIT, unique=True)


@given(st.lists(st.tuples(st.booleans(), batches), max_size=60))
def test_what_is_sampled_is_there_and_counts_once(steps: list[tuple[bool, list[str]]]) -> None:
    index = Index()
    for removes, keys in steps:
        if removes:
            index.remove(keys)
        else:
            insert(index, *keys)
    for limit in (len(index), LIMIT, 1):
        sampled = index.sample(limit)
        assert len(set(sampled)) == len(sampled) <= limit
        assert index.contains_many(sampled) == b"\1" * len(sampled)
    assert sorted(index.sample(len(index))) == sorted(index)


@pytest.mark.parametrize("batch", [1, 64])
def test_each_key_has_the_same_chance_however_old_and_however_often_it_was_put(batch: int) -> None:
    index = Index()
    kinds = ["first", "often", "gone", "last"]
    count = 20_000
    for kind in kinds:
        keys = [f"{kind}/{number}" for number in range(count)]
        for first in range(0, count, batch):
            for _ in range(3 if kind == "often" else 1):
                insert(index, *keys[first : first + batch])
    index.remove([f"gone/{number}" for number in range(count)])
    for number in range(0, count, 2):
        index.touch([f"first/{number}"])

    sampled = index.sample(MAX_NOTED)
    shares = Counter(key.partition("/")[0] for key in sampled)

    assert 1000 < len(sampled) <= MAX_NOTED
    error = 4 * (len(sampled) * 2 / 9) ** 0.5  # four standard deviations of the number in each of three
    assert all(abs(shares[kind] - len(sampled) / 3) < error for kind in ("first", "often", "last"))
    assert shares["gone"] == 0


class Unwalkable(OrderedDict[str, Entry]):
    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a million keys are too many to walk over while a server waits")


def test_a_large_store_is_not_walked_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinistore.core.index.OrderedDict", Unwalkable)
    index = Index()
    for first in range(0, 100_000, 1000):
        insert(index, *map(str, range(first, first + 1000)))

    assert 1000 < len(index.sample(MAX_NOTED)) <= MAX_NOTED
    assert len(index.sample(10)) == 10
