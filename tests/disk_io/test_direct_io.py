"""Memory that O_DIRECT takes: what stands in for what is not aligned."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.disk.jobs import ALIGNMENT_BYTES, aligned, file_bytes
from infinistore.disk_io.direct_io import BounceBuffer, aligned_memory, direct_io_works, transfer

PAGES = 16

spans = st.lists(
    st.tuples(st.integers(0, 3 * ALIGNMENT_BYTES), st.sampled_from([0, 1, 100, 2048])), min_size=1, max_size=8
)
"""Lengths of views, and how far from the beginning of a page each begins."""


def views_of(lengths: list[tuple[int, int]]) -> list[memoryview]:
    """Views of the given lengths, each in pages of its own, with bytes of its own."""
    views = []
    for number, (length, shift) in enumerate(lengths):
        memory = aligned_memory(4 * ALIGNMENT_BYTES)
        view = memory[shift : shift + length]
        view[:] = bytes([number + 1]) * length
        views.append(view)
    return views


def is_aligned(view: memoryview) -> bool:
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0] if view else 0
    return address % ALIGNMENT_BYTES == 0 and len(view) % ALIGNMENT_BYTES == 0


@given(spans)
def test_what_is_written_is_aligned_and_holds_the_views_with_zeros_between(lengths: list[tuple[int, int]]) -> None:
    views = views_of(lengths)
    buffer = BounceBuffer()
    for _ in range(2):  # the second time, the buffer is full of what was there before
        vectors = buffer.vectors(views)
        buffer.fill()

        assert all(map(is_aligned, vectors))
        expected = b"".join(bytes(view).ljust(aligned(len(view)), b"\0") for view in views)
        assert b"".join(vectors) == expected


@given(spans, st.integers(0, 30))
def test_what_was_read_is_copied_to_the_views_and_nothing_else(lengths: list[tuple[int, int]], pages: int) -> None:
    views = views_of(lengths)
    before = [bytes(view) for view in views]
    buffer = BounceBuffer()
    vectors = buffer.vectors(views)
    read_bytes = min(pages * ALIGNMENT_BYTES // 2, file_bytes(views))  # a file may end anywhere
    rest = read_bytes
    for vector in vectors:
        count = min(rest, len(vector))
        vector[:count] = b"\xff" * count
        rest -= count
    buffer.empty(read_bytes)

    end = 0
    for view, was in zip(views, before, strict=True):
        start, end = end, end + aligned(len(view))
        count = min(len(view), max(0, read_bytes - start))
        assert bytes(view[:count]) == b"\xff" * count
        assert bytes(view[count:]) == was[count:]


def test_an_aligned_view_stands_for_itself() -> None:
    memory = aligned_memory(PAGES * ALIGNMENT_BYTES)
    [whole] = BounceBuffer().vectors([memory])
    assert whole is memory
    first, last = BounceBuffer().vectors([memory[:-1]])
    assert len(first) == (PAGES - 1) * ALIGNMENT_BYTES
    assert len(last) == ALIGNMENT_BYTES
    first[:1] = b"x"
    assert memory[0] == ord("x")


def test_read_only_memory_can_be_written_to_a_file() -> None:
    buffer = BounceBuffer()
    [vector] = buffer.vectors([memoryview(b"superblock")])
    buffer.fill()
    assert bytes(vector) == b"superblock".ljust(ALIGNMENT_BYTES, b"\0")


@given(spans, st.integers(0, 60), st.lists(st.integers(1, 5), min_size=1))
def test_a_transfer_goes_on_until_the_end_however_short_its_calls_are(
    lengths: list[tuple[int, int]], file_pages: int, pages_per_call: list[int]
) -> None:
    """A file of so many pages, and a kernel that transfers a few of them per call."""
    calls = itertools.cycle(pages_per_call)
    vectors = BounceBuffer().vectors(views_of(lengths))
    contents = [bytes([page]) * ALIGNMENT_BYTES for page in range(file_pages)]

    def call(fd: int, into: Sequence[memoryview], offset: int) -> int:
        data = b"".join(contents[offset // ALIGNMENT_BYTES :][: next(calls)])
        count = 0
        for vector in into:
            part = data[count : count + len(vector)]
            vector[: len(part)] = part
            count += len(part)
        return count

    total_bytes = sum(map(len, vectors))
    done_bytes = transfer(call, -1, vectors, 0)

    assert done_bytes == min(total_bytes, file_pages * ALIGNMENT_BYTES)
    assert b"".join(vectors)[:done_bytes] == b"".join(contents)[:done_bytes]


def test_probing_leaves_nothing_behind(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    works = direct_io_works(fd)
    os.close(fd)

    assert isinstance(works, bool)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_not_taken_for_one_without_direct_io() -> None:
    fd = os.open("/proc/self", os.O_RDONLY)
    try:
        with pytest.raises(FileNotFoundError):
            direct_io_works(fd)
    finally:
        os.close(fd)
