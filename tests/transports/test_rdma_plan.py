"""How a transfer becomes work requests: every byte once, to where it belongs, within
the device's limits.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.transports.rdma.plan import Piece, Placement, Window, plan_transfer

BASE = 1 << 40


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Placement, Placement, list[int]]:
    """Blocks on both sides, some of which touch, in one or two memories on each
    side.
    """
    lengths = draw(st.lists(st.integers(1, 50), max_size=30))

    def side() -> Placement:
        addresses = []
        end = BASE
        for length in lengths:
            end += draw(st.sampled_from([0, 0, 0, 7]))
            addresses.append(end)
            end += length
        keys = draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=len(lengths), max_size=len(lengths)))
        return Placement(addresses, keys)

    return side(), side(), lengths


def moved_bytes(pieces: list[Piece]) -> list[tuple[int, int, int, int]]:
    return [(here + i, key, there + i, other) for here, key, there, other, length in pieces for i in range(length)]


@given(transfers(), st.integers(1, 200))
def test_every_byte_is_moved_once_and_in_order_to_where_it_belongs(
    transfer: tuple[Placement, Placement, list[int]], longest: int
) -> None:
    local, remote, lengths = transfer
    pieces = plan_transfer(local, remote, lengths, longest_bytes=longest)
    whole = [
        (here, key, there, other, length)
        for here, key, there, other, length in zip(
            local.addresses, local.keys, remote.addresses, remote.keys, lengths, strict=True
        )
    ]
    assert moved_bytes(pieces) == moved_bytes(whole)
    assert all(0 < piece[4] <= longest for piece in pieces)


@given(transfers())
def test_no_two_pieces_could_have_been_one(transfer: tuple[Placement, Placement, list[int]]) -> None:
    local, remote, lengths = transfer
    pieces = plan_transfer(local, remote, lengths, longest_bytes=1 << 30)
    for (here, key, there, other, length), following in itertools.pairwise(pieces):
        assert (here + length, key, there + length, other) != following[:4]


def test_blocks_that_touch_on_one_side_only_stay_apart() -> None:
    pieces = plan_transfer(Placement([0, 10], [1, 1]), Placement([100, 200], [2, 2]), [10, 10], longest_bytes=99)
    assert pieces == [(0, 1, 100, 2, 10), (10, 1, 200, 2, 10)]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="every block needs"):
        plan_transfer(Placement([0], [1]), Placement([0, 1], [1, 1]), [1], longest_bytes=9)


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_window_posts_everything_once_and_never_more_than_the_queue_holds(
    count: int, depth: int, batch: int, data: st.DataObject
) -> None:
    pieces: list[Piece] = [(i, 0, i, 0, 1) for i in range(count)]
    batch = min(batch, depth)
    window = Window(pieces, depth=depth, batch=batch)
    posted: list[Piece] = []
    flying = 0
    while not window.done:
        while some := window.next_batch():
            assert len(some) <= batch
            posted += some
            flying += 1
            if data.draw(st.booleans()):
                break
        assert window.in_flight <= depth
        assert flying, "work is left, nothing is in flight, and nothing is posted"
        window.complete()
        flying -= 1
    assert posted == pieces
    assert window.in_flight == 0


def test_a_batch_longer_than_the_queue_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Window([], depth=4, batch=5)
