"""Compressed blocks: the function, and its inverse for any bytes on a disk."""

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from infinistore.disk.compression import checksum, compress, decompress
from infinistore.disk.jobs import ALIGNMENT_BYTES, ReadInto, aligned
from infinistore.disk.records import MOST_SAVED_PAGES

# Short patterns that are repeated, so that some blocks get shorter, and some do not.
blocks = st.builds(
    lambda pattern, length: (pattern * (length // len(pattern) + 1))[:length],
    st.binary(min_size=1, max_size=600),
    st.integers(1, 5 * ALIGNMENT_BYTES),
)


def restored(data: bytes, length: int) -> bytes | None:
    """What `decompress` makes of data; None if it refuses them."""
    block = bytearray(length)
    return bytes(block) if decompress(memoryview(data), memoryview(block)) else None


def numbers(length: int) -> bytes:
    """A block as a model makes it: every other byte hardly differs."""
    block = bytearray(random.Random(length).randbytes(length))
    block[1::2] = bytes(60 + one % 3 for one in block[1::2])
    return bytes(block)


@given(block=blocks, padding=st.integers(0, ALIGNMENT_BYTES))
def test_a_block_is_what_it_was_and_takes_fewer_pages(block: bytes, padding: int) -> None:
    packed = compress(memoryview(block))
    if packed is not None:
        assert aligned(len(packed)) < aligned(len(block))
        assert restored(packed + bytes(padding), len(block)) == block


def test_what_saves_no_page_stays_as_it_is() -> None:
    assert compress(memoryview(random.Random(1).randbytes(1 << 20))) is None
    assert compress(memoryview(bytes(ALIGNMENT_BYTES))) is None
    assert compress(memoryview(bytes(ALIGNMENT_BYTES + 1))) is not None


@pytest.mark.parametrize("length", [3 * ALIGNMENT_BYTES, 100_001, 1 << 20])
def test_numbers_of_16_bits_get_shorter_by_their_upper_halves(length: int) -> None:
    packed = compress(memoryview(numbers(length)))
    assert packed is not None
    assert restored(packed, length) == numbers(length)


def test_no_block_saves_more_than_a_record_can_say() -> None:
    block = bytes((MOST_SAVED_PAGES + 10) * ALIGNMENT_BYTES)
    packed = compress(memoryview(block))
    assert packed is not None
    assert aligned(len(packed)) == aligned(len(block)) - MOST_SAVED_PAGES * ALIGNMENT_BYTES
    assert restored(packed, len(block)) == block


@given(block=blocks, data=st.data())
def test_damaged_bytes_are_refused_or_make_another_block(block: bytes, data: st.DataObject) -> None:
    packed = bytearray(compress(memoryview(block)) or b"\0" * 100)
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.integers(0, len(packed)))
    assert len(restored(bytes(packed[:end]), len(block)) or block) == len(block)


@given(data=st.binary(max_size=300), length=st.integers(1, 100))
def test_any_bytes_are_refused_or_make_a_block(data: bytes, length: int) -> None:
    restored(data, length)
    restored(b"\x09\0\0\0" + zstandard.compress(b"") + data, length)


@pytest.mark.parametrize("claimed", [0, 1, 1 << 13, 1 << 40])
def test_a_frame_of_another_length_is_refused_before_there_is_memory_for_it(claimed: int) -> None:
    block = bytes(2 * ALIGNMENT_BYTES)
    # A frame of one segment, whose length has 8 bytes, and one block of zeros.
    frame = (0xFD2FB528).to_bytes(4, "little") + bytes([0xE0]) + claimed.to_bytes(8, "little")
    frame += (1 | 1 << 1 | ALIGNMENT_BYTES << 3).to_bytes(3, "little") + b"\0"
    packed = len(frame).to_bytes(4, "little") + frame + frame
    assert restored(packed, len(block)) is None
    right = frame[:5] + ALIGNMENT_BYTES.to_bytes(8, "little") + frame[13:]
    assert restored(len(right).to_bytes(4, "little") + right + right, len(block)) == block
    assert restored(len(right).to_bytes(4, "little") + right + frame, len(block)) is None


def test_the_hash_of_what_was_read_is_that_of_the_block() -> None:
    block = numbers(3 * ALIGNMENT_BYTES)
    packed = compress(memoryview(block))
    assert packed is not None
    into = memoryview(bytearray(len(block)))
    job = ReadInto(
        0, "segments/0", 0, [memoryview(bytearray(packed)), memoryview(bytearray(block))], [1, 5], [into, None]
    )
    assert checksum(job, 0) == xxh3_64_intdigest(block)
    assert checksum(job, 1) == xxh3_64_intdigest(block[:5])
    job.views[0][:] = bytes(len(packed))
    assert checksum(job, 0) == 0
