"""Lossless compression of blocks: a pure function, and its inverse.

A block of bfloat16 or float16 numbers is split into its even and its odd bytes, and
each half is compressed in a zstd frame of its own. The bytes with the exponents hardly
differ, those with the lower digits are almost random; one frame over both is larger.

It needs zstandard, the extra `compression` of this package, and imports it late.
"""

import functools
import threading
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from infinistore.disk.jobs import ALIGNMENT_BYTES, ReadInto, aligned
from infinistore.disk.records import MOST_SAVED_PAGES
from infinistore.errors import ConfigError

_LEVEL: Final = 1
_MOST_WINDOW_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 4


def check_zstandard(name: str) -> None:
    """Raise `ConfigError` if zstandard is missing, which a disk of this name needs."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{name} has compressed blocks, which need zstandard, and that is not installed here: pip install zstandard"
            " (the extra `compression`)"
        ) from None


def compress(block: memoryview) -> bytes | None:
    """Return a block compressed, or None if that would not save a page on disk."""
    data = np.frombuffer(block, np.uint8)
    compressor = _tools().compressor
    low, high = (compressor.compress(np.ascontiguousarray(data[half::2]).data) for half in (0, 1))
    saved = aligned(len(block)) - aligned(_HEAD_BYTES + len(low) + len(high))
    if saved <= 0:
        return None
    packed = len(low).to_bytes(_HEAD_BYTES, "little") + low + high
    return packed.ljust(aligned(len(block)) - MOST_SAVED_PAGES * ALIGNMENT_BYTES, b"\0")


def decompress(data: memoryview, into: memoryview) -> bool:
    """Fill a buffer with the block that `compress` gave `data` for. Padding may follow.

    Returns False if `data` is no block of this length. Whatever `data` says, it takes
    no more memory than a half of the buffer's, and a constant.
    """
    split = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "little")
    block = np.frombuffer(into, np.uint8)
    for half, frame in enumerate((data[_HEAD_BYTES:split], data[split:])):
        wanted = block[half::2]
        plain = _plain(frame, wanted.size)
        if plain is None:
            return False
        wanted[:] = np.frombuffer(plain, np.uint8)
    return True


def checksum(job: ReadInto, number: int) -> int:
    """Return the xxh3-64 of a block, one of whose views was read in full; decompress it
    first, if it is compressed. 0: that cannot be.
    """
    view, block = job.views[number], job.blocks[number] if job.blocks else None
    if block is None:
        return xxh3_64_intdigest(view[: job.hash_lengths[number]])
    return xxh3_64_intdigest(block) if decompress(view, block) else 0


def _plain(frame: memoryview, length: int) -> bytes | None:
    import zstandard

    try:
        # It allocates as much as the frame says that it has.
        if zstandard.get_frame_parameters(frame).content_size != length:
            return None
        plain = _tools().decompressor.decompress(frame)
    except (zstandard.ZstdError, MemoryError):
        return None
    return plain if len(plain) == length else None


class _Tools(threading.local):
    """What one thread needs: neither is for two threads at a time."""

    def __init__(self) -> None:
        import zstandard

        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES)


@functools.cache
def _tools() -> _Tools:
    return _Tools()
