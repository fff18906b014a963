"""Cutting transfers into pieces, and putting their results together."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from infinistore.disk.jobs import ALIGNMENT_BYTES, ReadInto, Write, aligned, file_bytes
from infinistore.disk_io.runner import Transfer

PIECE_BYTES = 4 * ALIGNMENT_BYTES

lengths = st.lists(st.integers(0, 10 * ALIGNMENT_BYTES), max_size=20)


def read_job(sizes: Sequence[int]) -> ReadInto:
    views = [memoryview(bytearray(b"%c" % (number + 1) * size)) for number, size in enumerate(sizes)]
    return ReadInto(0, "segments/0", 5 * ALIGNMENT_BYTES, views, [size // 2 for size in sizes])


@given(lengths)
def test_pieces_follow_each_other_and_hold_all_of_the_views(sizes: list[int]) -> None:
    job = read_job(sizes)
    pieces = Transfer(job, PIECE_BYTES).pieces

    assert pieces
    place = job.offset
    for piece in pieces:
        assert piece.offset == place
        assert piece.length_bytes == file_bytes(piece.views) <= PIECE_BYTES
        place += piece.length_bytes
    assert place == job.offset + file_bytes(job.views)
    assert b"".join(bytes(view) for piece in pieces for view in piece.views) == b"".join(job.views)


@given(lengths)
def test_no_piece_could_have_taken_its_neighbours_first_block_too(sizes: list[int]) -> None:
    pieces = Transfer(read_job(sizes), PIECE_BYTES).pieces

    for piece, following in pairwise(pieces):
        if piece.first is not None and following.first is not None:
            assert piece.length_bytes + aligned(len(following.views[0])) > PIECE_BYTES


def test_a_piece_has_no_more_views_than_the_kernel_takes() -> None:
    job = Write(0, "segments/0", 0, [memoryview(b"x")] * 2000)

    counts = [len(piece.views) for piece in Transfer(job, 1 << 30).pieces]

    assert sum(counts) == 2000
    assert max(counts) <= 512


@given(lengths, st.randoms(use_true_random=False), st.integers(0, 60 * ALIGNMENT_BYTES))
def test_the_hashes_are_those_of_blocks_that_were_read_in_full(sizes: list[int], order: object, end: int) -> None:
    """The file ends at `end`, after the beginning of the job; pieces end in any
    order.
    """
    job = read_job(sizes)
    transfer = Transfer(job, PIECE_BYTES)
    pieces = list(transfer.pieces)
    order.shuffle(pieces)  # type: ignore[attr-defined]
    last = []
    for piece in pieces:
        count = max(0, min(piece.length_bytes, end - (piece.offset - job.offset)))
        piece.hash_blocks(count)
        last.append(transfer.finish(0, count))
    result = transfer.result()

    assert last == [False] * (len(pieces) - 1) + [True]
    assert result.errno == 0
    assert result.transferred_bytes == min(end, file_bytes(job.views))
    place = 0
    for view, length, checksum in zip(job.views, job.hash_lengths, result.checksums, strict=True):
        whole = xxh3_64_intdigest(view[:length])
        if view or place <= end:
            assert checksum == (whole if place + len(view) <= end else 0)
        else:  # there is nothing to be read of it
            assert checksum in (0, whole)
        place += aligned(len(view))


def test_the_first_error_is_the_transfers() -> None:
    transfer = Transfer(Write(0, "segments/0", 0, [memoryview(bytes(PIECE_BYTES))] * 3), PIECE_BYTES)

    assert [transfer.finish(code, count) for code, count in ((0, PIECE_BYTES), (5, 0), (28, 0))] == [False, False, True]
    assert (transfer.result().errno, transfer.result().transferred_bytes) == (5, PIECE_BYTES)
