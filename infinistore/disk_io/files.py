"""The files of a disk: reading and writing them, in threads that may wait.

Files stay open between uses, up to a number. What fails raises OSError; nothing but a
short transfer is ever repeated, above all no flush. Calls of several threads do not
wait for each other.

A disk where O_DIRECT does not work is read and written by the page cache. There, bytes
are dropped from the cache once they were read or flushed, so that it does not hold
everything a second time.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from infinistore.disk.jobs import aligned
from infinistore.disk_io.direct_io import aligned_memory, copy, transfer
from infinistore.disk_io.folder import NEW, DiskFolder
from infinistore.disk_settings import MOST_OPEN_FILES
from infinistore.host import let_go_in_child
from infinistore.sizes import MIB

_CHUNK_BYTES: Final = MIB


class _OpenFile:
    __slots__ = ("fd", "unflushed", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.unflushed = False
        """Written since the last flush: it stays open, or errors might be forgotten."""


class DiskFiles:
    """The files in a folder, which it closes at the end. Thread-safe.

    `preallocate` (descriptor, offset, length) is `os.posix_fallocate`, except in tests.
    """

    def __init__(
        self,
        folder: DiskFolder,
        *,
        max_open: int = MOST_OPEN_FILES,
        preallocate: Callable[[int, int, int], None] = os.posix_fallocate,
    ) -> None:
        self.folder = folder
        self._max_open = max_open
        self._preallocate = preallocate
        self._flags = (
            (os.O_RDWR if folder.writable else os.O_RDONLY)
            | os.O_NOFOLLOW
            | os.O_CLOEXEC
            | (os.O_DIRECT if folder.direct else 0)
        )
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._closed = False
        let_go_in_child(self)

    def read(self, file: str, offset: int, vectors: Sequence[memoryview]) -> int:
        """Fill memory from a file; return the count, less at the end of the file."""
        with self._using(file) as opened:
            count = transfer(os.preadv, opened.fd, vectors, offset)
            if not self.folder.direct:
                os.posix_fadvise(opened.fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def write(self, file: str, offset: int, vectors: Sequence[memoryview]) -> int:
        """Write memory to a file, which exists, and return how many bytes that were."""
        with self._using(file) as opened:
            opened.unflushed = True
            return _write_all(opened.fd, vectors, offset)

    def flush(self, file: str) -> None:
        """Make what was written to a file durable."""
        with self._using(file) as opened:
            opened.unflushed = False  # before: what others write meanwhile may not be in it
            os.fdatasync(opened.fd)
            if not self.folder.direct:
                os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def allocate(self, file: str, length_bytes: int) -> None:
        """Give a file room for so many bytes, durably, and create it if it is missing.

        If there is no room, the file is as long as it was.
        """
        folder, _, name = file.rpartition("/")
        folder_fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.folder.fd)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
            try:
                self._give_room(fd, length_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)

    def replace(self, file: str, views: Sequence[memoryview]) -> None:
        """Write a small file anew, durably; if that fails, it is as it was."""
        new = file + NEW
        flags = self._flags | os.O_CREAT | os.O_TRUNC
        fd = os.open(new, flags, 0o600, dir_fd=self.folder.fd)
        try:
            try:
                _write_one_after_the_other(fd, views)
                os.fsync(fd)
                if not self.folder.direct:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            os.rename(new, file, src_dir_fd=self.folder.fd, dst_dir_fd=self.folder.fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(new, dir_fd=self.folder.fd)
            raise
        self._forget(file)
        os.fsync(self.folder.fd)

    def write_superblock(self, copy_number: int, data: bytes) -> None:
        """Write one copy of the superblock durably; the other stays as it is."""
        length = aligned(len(data))
        vectors = [memoryview(data.ljust(length, b"\0"))]
        _write_all(self.folder.superblock_fd, vectors, copy_number * length)
        os.fsync(self.folder.superblock_fd)

    def close(self) -> None:
        """Close the files, and the folder; idempotent. A file in use is left open."""
        with self._lock:
            self._closed = True
            unused = [opened for opened in self._open.values() if not opened.users]
            self._open.clear()
        for opened in unused:
            os.close(opened.fd)
        self.folder.close()

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors, without the lock."""
        for opened in self._open.values():
            os.close(opened.fd)
        self._open.clear()

    @contextmanager
    def _using(self, file: str) -> Iterator[_OpenFile]:
        opened = self._take(file)
        try:
            yield opened
        finally:
            with self._lock:
                opened.users -= 1
                last = not opened.users and self._open.get(file) is not opened
            if last:
                os.close(opened.fd)

    def _take(self, file: str) -> _OpenFile:
        with self._lock:
            opened = self._open.get(file)
            if opened is not None:
                opened.users += 1
                self._open.move_to_end(file)
                return opened
        fd = os.open(file, self._flags, dir_fd=self.folder.fd)  # outside of the lock: it may hang
        with self._lock:
            opened = _OpenFile(fd)
            opened.users = 1
            if self._closed or file in self._open:  # opened by two threads at a time: this one uses its own, once
                return opened
            self._open[file] = opened
            idle = self._idle() if len(self._open) > self._max_open else None
        if idle is not None:
            os.close(idle.fd)
        return opened

    def _idle(self) -> _OpenFile | None:
        """Remove the file that was not used for longest, if one may be closed."""
        for file, opened in self._open.items():
            if not opened.users and not opened.unflushed:
                del self._open[file]
                return opened
        return None

    def _forget(self, file: str) -> None:
        """Let a file that was replaced be opened anew."""
        with self._lock:
            opened = self._open.pop(file, None)
            unused = opened is not None and not opened.users
        if opened is not None and unused:
            os.close(opened.fd)

    def _give_room(self, fd: int, length_bytes: int) -> None:
        before_bytes = os.fstat(fd).st_size
        try:
            try:
                self._preallocate(fd, 0, length_bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                _write_zeros(fd, before_bytes, length_bytes)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, before_bytes)
            raise


def _write_all(fd: int, vectors: Sequence[memoryview], offset: int) -> int:
    count = transfer(os.pwritev, fd, vectors, offset)
    if count < sum(map(len, vectors)):
        raise OSError(errno.EIO, "the disk took only a part of it")
    return count


def _write_one_after_the_other(fd: int, views: Sequence[memoryview]) -> None:
    """Write views, without padding, from the beginning of a file on."""
    chunk = aligned_memory(_CHUNK_BYTES)
    filled = written = 0

    def write() -> None:
        nonlocal filled, written
        length = aligned(filled)
        _write_all(fd, [chunk[:length]], written)
        written += filled
        filled = 0

    for view in views:
        rest = view
        while rest:
            part = rest[: _CHUNK_BYTES - filled]
            copy(chunk[filled : filled + len(part)], part)
            filled += len(part)
            rest = rest[len(part) :]
            if filled == _CHUNK_BYTES:
                write()
    if filled:
        write()
    os.ftruncate(fd, written)


def _write_zeros(fd: int, start: int, end: int) -> None:
    """Take room where the file system has no other way."""
    zeros = memoryview(bytes(_CHUNK_BYTES))
    while start < end:
        start += os.pwrite(fd, zeros[: end - start], start)
