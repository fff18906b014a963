"""Input and output past the page cache (O_DIRECT): whether it works, and memory for it.

Address, offset and length have to be multiples of `ALIGNMENT_BYTES`. The kernel often
asks for less (statx(2) says 512 bytes of most disks), but not everywhere. The pages of
the pool are aligned. Other memory goes through a `BounceBuffer`.

The kernel may accept the flag when a file is opened and refuse the first write, or not
know it at all, as some file systems over networks do. Only a write tells.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from infinistore.disk.jobs import ALIGNMENT_BYTES, aligned

PROBE: Final = "probe"
"""The name of the file that `direct_io_works` writes and removes."""
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_FREES_LOCK_FROM_BYTES: Final = 32 << 10  # numpy's overhead is a few us
_address_of: Final = ctypes.addressof
_first_byte: Final = ctypes.c_char.from_buffer


def aligned_memory(length_bytes: int) -> memoryview:
    """Return zeros, at least one, from the beginning of a page on."""
    return memoryview(mmap.mmap(-1, length_bytes))


def direct_io_works(folder_fd: int) -> bool:
    """Whether files in a folder can be written and read with O_DIRECT.

    Writes a page to a temporary file and reads it back.

    Raises:
        OSError: a file cannot be created, written or read at all.
    """
    page = aligned_memory(ALIGNMENT_BYTES)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT
    try:
        fd = os.open(PROBE, flags, 0o600, dir_fd=folder_fd)
        try:
            return os.pwritev(fd, [page], 0) == os.preadv(fd, [page], 0) == ALIGNMENT_BYTES
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(PROBE, dir_fd=folder_fd)


class _Stand(NamedTuple):
    """Aligned memory that stands in for a view, from `start` of the transfer on."""

    view: memoryview
    memory: memoryview
    start: int


class BounceBuffer:
    """Aligned memory that stands in for memory that is not, in one transfer at a time.

    In the file each view begins at a multiple of `ALIGNMENT_BYTES`, with padding
    before the next. An aligned view stands for itself, up to the last page that it does
    not fill. It grows to what the largest transfer needed. Long copies free the
    interpreter's lock.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._stands: list[_Stand] = []

    def vectors(self, views: Sequence[memoryview]) -> list[memoryview]:
        """Return aligned memory to read into or write from instead of `views`."""
        wholes = [len(view) - len(view) % ALIGNMENT_BYTES if _begins_aligned(view) else 0 for view in views]
        needed_bytes = sum(aligned(len(view) - whole) for view, whole in zip(views, wholes, strict=True))
        if needed_bytes > len(self._memory):
            self._memory = aligned_memory(needed_bytes)
        vectors: list[memoryview] = []
        self._stands = []
        start = following = 0
        for view, whole in zip(views, wholes, strict=True):
            place, following = following, following + aligned(len(view))
            if whole == len(view):
                vectors.append(view)
                continue
            if whole:
                vectors.append(view[:whole])
            rest = view[whole:]
            memory = self._memory[start : start + aligned(len(rest))]
            vectors.append(memory)
            self._stands.append(_Stand(rest, memory, place + whole))
            start += len(memory)
        return vectors

    def fill(self) -> None:
        """Before a write: copy the views in, and zeros for their padding."""
        for view, memory, _ in self._stands:
            copy(memory[: len(view)], view)
            memory[len(view) :] = bytes(len(memory) - len(view))

    def empty(self, transferred_bytes: int) -> None:
        """After a read: copy out what was read."""
        for view, memory, start in self._stands:
            count = min(len(view), transferred_bytes - start)
            if count > 0:
                copy(view[:count], memory[:count])

    def let_go(self) -> None:
        """After a transfer: keep no view of the memory that it was for."""
        self._stands = []


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, vectors: Sequence[memoryview], offset: int
) -> int:
    """Read or write all of `vectors` by `call`; return the bytes, fewer at the end."""
    total_bytes = sum(map(len, vectors))
    done_bytes = call(fd, vectors, offset)
    while 0 < done_bytes < total_bytes and not done_bytes % ALIGNMENT_BYTES:  # else the file ends there
        count = call(fd, _after(vectors, done_bytes), offset + done_bytes)
        if not count:
            break
        done_bytes += count
    return done_bytes


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between views of the same length."""
    if len(source) < _FREES_LOCK_FROM_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _after(vectors: Sequence[memoryview], skipped_bytes: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for vector in vectors:
        if skipped_bytes < len(vector):
            rest.append(vector[skipped_bytes:])
        skipped_bytes = max(0, skipped_bytes - len(vector))
    return rest


def _begins_aligned(view: memoryview) -> bool:
    if view.readonly or not view:  # which ctypes does not take
        return not np.frombuffer(view, np.uint8).__array_interface__["data"][0] % ALIGNMENT_BYTES
    return not _address_of(_first_byte(view)) % ALIGNMENT_BYTES
