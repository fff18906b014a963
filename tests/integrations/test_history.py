"""Long conversations are cut rarely, and always in the same place."""

from contextlib import nullcontext, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.integrations.history import cut

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@given(LENGTHS, st.integers(1, 200), st.floats(0.01, 1), st.sets(st.integers(0, 45)), st.integers(0, 5))
def test_a_conversation_is_cut_when_it_is_full_and_then_left_alone(
    lengths: list[int], limit: int, keep: float, always: set[int], stub: int
) -> None:
    def total(kept: list[int], count: int) -> int:
        return sum(lengths[number] if number in kept else stub for number in range(count))

    def kept(count: int) -> list[int] | None:
        fits = total([*always, count - 1], count) <= limit
        with nullcontext() if fits else suppress(ValueError):  # what is shorter than a stub may fit
            return cut(lengths[:count], limit, keep=keep, always=always, stub=stub)
        return None

    kept_at = [kept(count) for count in range(len(lengths) + 1)]
    for count, (before, after) in enumerate(pairwise(kept_at)):
        if before is None or after is None:
            continue
        assert after == sorted(after)
        assert always & set(range(count + 1)) <= set(after)
        assert count in after, "the newest is kept"
        assert total(after, count + 1) <= limit
        with suppress(ValueError):
            grown = [*lengths[:count], lengths[count] + 20]
            longer = cut(grown, limit, keep=keep, always=always, stub=stub)
            assert set(longer) <= set(after), "nor does it when the newest has grown"
        if after == [*before, count]:
            continue
        assert set(after) < {*before, count}, "what was dropped does not come back"
        assert total([*before, count], count + 1) > limit, "nothing is dropped while there is room"
        gone = set(before) - set(after)
        stayed = {number for number in after if number < count and lengths[number] > stub} - always
        assert max(gone) < min(stayed, default=count), "the oldest go"
        assert total(after, count + 1) <= keep * limit or not stayed, "and enough of them"
        last = max(gone)
        assert total(sorted({*after, last}), count + 1) > keep * limit, "and no more than that"


def test_a_tool_result_that_is_dropped_leaves_a_line() -> None:
    lengths = [10, 5, 40, 5, 40, 5, 40]  # calls and their results in turns
    calls = [0, 1, 3, 5]
    assert cut(lengths, 120, always=calls, stub=3) == [0, 1, 3, 5, 6]
    assert cut(lengths[:5], 120, always=calls, stub=3) == [0, 1, 2, 3, 4]


def test_a_result_shorter_than_what_it_would_leave_is_kept() -> None:
    assert cut([10, 2, 50, 50], 100, always=[0], stub=3) == [0, 1, 3]


@pytest.mark.parametrize(
    ("lengths", "options", "problem"),
    [
        ([1], {"limit": 0}, "limit=0 must be positive"),
        ([1], {"limit": 9, "keep": 0}, r"keep=0 in \(0, 1\]"),
        ([1], {"limit": 9, "keep": 1.5}, r"keep=1.5 in \(0, 1\]"),
        ([1], {"limit": 9, "keep": float("nan")}, "keep=nan"),
        ([1], {"limit": 9, "stub": -1}, "stub=-1 at least 0"),
        ([1, -1], {"limit": 9}, "fewer than 0 tokens"),
        ([1], {"limit": 9, "always": [-1]}, "indices from 0"),
        ([5, 1, 5], {"limit": 9}, "have 10 tokens, and the limit is 9: shorten them"),
    ],
)
def test_what_cannot_be_cut_is_refused(lengths: list[int], options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        cut(lengths, **options)  # type: ignore[arg-type]


def test_a_conversation_without_messages_has_none() -> None:
    assert cut([], 1) == []
