"""A span against a naive model: the concatenation of its views, and a position."""

from hypothesis import given
from hypothesis import strategies as st

from infinistore.protocol.effects import MAX_VIEWS, Span

lengths = st.lists(st.integers(0, 9), max_size=12)


def make_views(lengths: list[int]) -> tuple[bytearray, list[memoryview]]:
    """Memory, and views of all of it that touch."""
    memory = bytearray(range(sum(lengths)))
    whole = memoryview(memory)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return memory, [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def complete(lengths: list[int], position: int) -> int:
    """How many views end at or before a position."""
    return sum(1 for index in range(len(lengths)) if sum(lengths[: index + 1]) <= position)


@given(lengths, st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=30))
def test_next_views_are_what_follows_the_position_and_advance_moves_it(
    lengths: list[int], steps: list[tuple[int, int]]
) -> None:
    memory, views = make_views(lengths)
    span = Span(views)
    position = 0
    for most, count in [*steps, (len(memory) or 1, len(memory))]:
        ahead = b"".join(span.next_views(most))
        assert ahead or not span.remaining
        assert ahead == bytes(memory[position : position + most])
        moved = min(count, len(ahead))
        span.advance(moved)
        position += moved
        assert span.remaining == len(memory) - position
        assert span.complete == complete(lengths, position)
    assert span.remaining == 0
    assert span.complete == len(lengths)
    assert span.next_views(1) == []


@given(lengths, st.lists(st.integers(0, 30), max_size=30))
def test_copy_in_fills_the_front_and_moves_on(lengths: list[int], counts: list[int]) -> None:
    memory, views = make_views(lengths)
    span = Span(views)
    expected = bytearray(memory)
    position = 0
    for wanted in [*counts, len(memory)]:
        count = min(wanted, span.remaining)
        new = bytes([255 - position % 100]) * count
        span.copy_in(memoryview(new))
        expected[position : position + count] = new
        position += count
        assert memory == expected
        assert (span.remaining, span.complete) == (len(memory) - position, complete(lengths, position))
    assert span.remaining == 0


def test_an_empty_view_in_front_is_passed_over() -> None:
    memory = bytearray(1)
    span = Span([memoryview(b""), memoryview(memory)])
    assert span.complete == 1
    assert list(map(len, span.next_views(10))) == [1]


def test_many_empty_views_do_not_hide_the_bytes_behind_them() -> None:
    span = Span([memoryview(b"")] * (2 * MAX_VIEWS) + [memoryview(b"x")])
    assert b"".join(span.next_views(10)) == b"x"


def test_no_more_views_come_at_once_than_a_system_call_takes() -> None:
    memory = bytearray(3 * MAX_VIEWS)
    span = Span([memoryview(memory)[index : index + 1] for index in range(len(memory))])
    assert len(span.next_views(2**30)) == MAX_VIEWS
    span.advance(10)
    assert len(span.next_views(2**30)) == MAX_VIEWS


def test_copy_in_goes_on_past_the_views_of_one_call() -> None:
    memory = bytearray(3 * MAX_VIEWS + 5)
    new = bytes(index % 251 for index in range(len(memory)))
    span = Span([memoryview(memory)[index : index + 1] for index in range(len(memory))])
    span.copy_in(memoryview(new)[:7])
    span.copy_in(memoryview(new)[7:])
    assert memory == new
    assert span.remaining == 0
