"""An arena: one span of shared memory, where the bytes of blocks are.

An arena is an anonymous file in memory (memfd_create(2)), page-aligned and mapped once.
Where there is no Linux, it is memory without a file, which no other process can map.
Other processes can map the same bytes by its descriptor. It is created in one step: its
memory is allocated and, if asked for, touched, so that no put pays for the first touch
of a page. Its size never changes. The file is sealed against shrinking and growing, so
that a reader in another process is never killed for reading past its end.

A long arena that is touched on creation uses huge pages (2 MiB on x86-64), as far as
the kernel has them available, whatever its settings are (MADV_COLLAPSE, Linux 6.1).
Another process then maps all of it at once instead of page by page, and copies need
fewer address translations.

Promises: `memory` stays valid as long as a view of it exists, also after `close`. A
forked child does not see the mapping (MADV_DONTFORK), so a fork neither doubles the
memory nor copies a page on write.

Leaves to others: where blocks are inside it (the allocator); the last seals and the
file's mode before the descriptor is handed out; and not to touch a view in a forked
child, where the memory does not exist.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

from infinistore.errors import OutOfMemory
from infinistore.host import available_memory, bind_memory, free_huge_pages, no_linux
from infinistore.sizes import in_units

# As in Linux; the modules fcntl and mmap name few of them, and none elsewhere.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_WRITE = 0x1, 0x2, 0x4, 0x8
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1
_MADV_DONTFORK = 10
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_FROM_BYTES = 64 << 20  # a short arena gains little
_STRETCH_BYTES = 32 * 1024 * 1024
_STEP_BYTES = 64 << 20  # so that threads share the work evenly
MEMORY_MARGIN_BYTES = 64 << 20
"""What making an arena leaves of the memory for everything else."""
_SHARD_BYTES = 40 << 20  # what a shard takes as it starts, beside its part of the pool

# The C library's own calls, because mmap.madvise holds the interpreter's lock and
# mmap.mmap keeps a second descriptor.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE = 0  # the mmap module names neither this nor the next
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class Arena:
    """A span of `length` bytes of shared memory, number `index` of its pool.

    `fd` is the memfd's descriptor (closed on exec; -1 without Linux), `address` where
    it is mapped in this process, `memory` a writable view of all of it (format "B") and
    `read_only` one that cannot be written. Make one with `create_arena`.
    """

    def __init__(self, index: int, fd: int, address: int, length: int, huge_pages: bool) -> None:
        self.index = index
        self.fd = fd
        self.address = address
        self.length = length
        self.huge_pages = huge_pages
        mapping = (ctypes.c_ubyte * length).from_address(address)
        # Every view, slice and array made from `memory` keeps `mapping` alive; with the
        # last of them it is unmapped.
        self._unmap = weakref.finalize(mapping, _unmap, address, length, os.getpid())
        self._unmap.atexit = False  # at exit views may still be alive, and the kernel unmaps anyway
        self.memory = memoryview(mapping).cast("B")
        self.read_only = self.memory.toreadonly()

    def __repr__(self) -> str:
        return f"<Arena {self.index}: {self.length} bytes, {'closed' if self.fd < 0 else f'fd {self.fd}'}>"

    def share(self, *, writable: bool) -> int:
        """Return the descriptor for another process; the arena still closes it.

        From now on the file can be neither resized nor sealed, and another user cannot
        open it through /proc. Without `writable`, nobody can make a writable mapping
        any more; this process keeps its own.
        """
        seals = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
        wanted = seals if writable else seals | _F_SEAL_FUTURE_WRITE
        if fcntl.fcntl(self.fd, _F_GET_SEALS) & wanted != wanted:
            os.fchmod(self.fd, 0o400)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, wanted)
        return self.fd

    def close(self) -> None:
        """Close the descriptor and let go of the memory; idempotent.

        Views that still exist stay valid. The memory is unmapped, and given back to
        the machine, with the last of them.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.memory = self.read_only = memoryview(b"")

    def abandon(self) -> None:
        """Close the descriptor and never unmap: for a forked child.

        The mapping does not exist there. Unmapping would hit whatever the child has
        mapped at the same address since.
        """
        self._unmap.detach()
        self.close()


def create_arena(
    index: int,
    length_bytes: int,
    *,
    huge_pages: bool = False,
    prefault_threads: int = 0,
    numa_node: int | None = None,
    name: str = "arena",
) -> Arena:
    """Make an arena of `length_bytes`, rounded up to whole pages (see `Arena.length`).

    The system calls it infinistore-`name`-`index`, in /proc/PID/maps for example.
    `huge_pages` takes them from the kernel's pool of huge pages (hugetlbfs), which an
    administrator fills beforehand. `prefault_threads` > 0 touches every page now, with
    so many threads, of which 1 is the caller's; with 0 the first writers do it, several
    times slower. `numa_node` is where its pages come from, as far as that node has any.

    It blocks, up to a second per GiB, without the interpreter's lock: call it in a
    thread. ValueError: the length is not positive. OutOfMemory: the machine or the
    control group has less memory, and none was allocated; or the kernel refused it.
    ConfigError: memory cannot be had from that node, or no huge pages on this system.
    """
    if length_bytes <= 0:
        raise ValueError(f"an arena needs a positive length, not {in_units(length_bytes)}")
    if prefault_threads < 0:
        raise ValueError(f"prefault_threads must be 0 or more, not {prefault_threads}")
    if sys.platform != "linux":
        return _private_arena(index, length_bytes, huge_pages, prefault_threads, numa_node)
    page_bytes = free_huge_pages()[1] if huge_pages else mmap.PAGESIZE
    length = -(-length_bytes // page_bytes) * page_bytes
    check_memory(length, huge_pages)
    fd = os.memfd_create(
        f"infinistore-{name}-{index}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
    )
    try:
        _set_length(fd, length)
        address = _map(fd, length)
    except BaseException:
        os.close(fd)
        raise
    arena = Arena(index, fd, address, length, huge_pages)
    try:
        # A forked child must neither see nor copy the pages of the store.
        _check("madvise(MADV_DONTFORK)", _libc.madvise(address, length, _MADV_DONTFORK))
        if numa_node is not None:
            bind_memory(address, length, numa_node)  # before there is a page
        if prefault_threads and not huge_pages:
            _take_huge_pages(arena, prefault_threads)
        _take_memory(fd, length)
        if prefault_threads:
            _in_steps(arena.length, prefault_threads, partial(_populate, arena))
    except BaseException:
        arena.close()
        raise
    return arena


def _private_arena(
    index: int, length_bytes: int, huge_pages: bool, prefault_threads: int, numa_node: int | None
) -> Arena:
    """Make an arena without a file, as `create_arena` does where there is no Linux."""
    if huge_pages:
        raise no_linux("huge_pages", "leave it out")
    length = -(-length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # Shared with forked children, which leave it alone, so that nothing is copied.
    address = _mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1)
    arena = Arena(index, -1, address, length, huge_pages=False)
    try:
        if numa_node is not None:
            bind_memory(address, length, numa_node)
        if prefault_threads:
            _in_steps(length, prefault_threads, partial(_populate, arena))
    except BaseException:
        arena.close()
        raise
    return arena


def adopt_arena(index: int, fd: int, length: int, *, prefault_threads: int = 0) -> Arena:
    """Make an arena of the memory of another process: of a memfd of `length` bytes,
    whose descriptor belongs to the arena from now on.

    It takes no memory, and blocks as `create_arena` does. ValueError, and the
    descriptor is closed: the file is not what `create_arena` makes, or may not be
    written any more.
    """
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        found = os.fstat(fd)
        if found.st_size != length or length <= 0 or ~seals & (_F_SEAL_SHRINK | _F_SEAL_GROW):
            raise ValueError(f"the file of arena {index} is not one of {in_units(length)} that keeps its length")
        if seals & (_F_SEAL_FUTURE_WRITE | _F_SEAL_WRITE):
            raise ValueError(f"nobody may map arena {index} to write any more (--shm-writes off)")
        address = _map(fd, length)
    except OSError as error:
        os.close(fd)
        raise ValueError(f"the file of arena {index} cannot be mapped: {error.strerror}") from None
    except BaseException:
        os.close(fd)
        raise
    arena = Arena(index, fd, address, length, found.st_blksize > mmap.PAGESIZE)
    try:
        _check("madvise(MADV_DONTFORK)", _libc.madvise(address, length, _MADV_DONTFORK))
        if prefault_threads:
            _in_steps(length, prefault_threads, lambda start, count: _advise_present(address + start, count))
    except BaseException:
        arena.close()
        raise
    return arena


def check_memory(length: int, huge_pages: bool, *, shards: int = 0) -> None:
    """Raise `OutOfMemory` if the machine does not have so many bytes for arenas now,
    beside the processes of so many shards.
    """
    if huge_pages:
        pages, page_bytes = free_huge_pages()
        if pages * page_bytes < length:
            raise OutOfMemory(
                f"an arena of {in_units(length)} needs {length // page_bytes} free huge pages of"
                f" {in_units(page_bytes)}, and there are {pages}; raise vm.nr_hugepages, use a smaller pool, or turn"
                " huge pages off"
            )
        return
    limit = available_memory()
    margin_bytes = MEMORY_MARGIN_BYTES + shards * _SHARD_BYTES
    if limit.available_bytes < length + margin_bytes:
        who, remedy = (f"{shards} shards need", "fewer shards, a") if shards else ("the process needs", "a")
        raise OutOfMemory(
            f"an arena of {in_units(length)} does not fit beside the {in_units(margin_bytes)} that {who}:"
            f" {in_units(limit.available_bytes)} are available ({limit.source}); use {remedy} smaller pool, or free"
            " or add memory"
        )


def _set_length(fd: int, length: int) -> None:
    """Give the file its length, for good."""
    try:
        os.ftruncate(fd, length)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise OutOfMemory(
            f"an arena of {in_units(length)} is above the limit on the size of files, and an arena is one;"
            " raise it (ulimit -f), or use a smaller pool"
        ) from error
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)


def _take_huge_pages(arena: Arena, threads: int) -> None:
    """Take as much of the memory as the kernel has in huge pages at hand; what is left
    is for `_take_memory`."""
    page_bytes = _huge_page_bytes(arena.length)
    if page_bytes:
        _in_steps(arena.length - arena.length % page_bytes, threads, partial(_collapse, arena, page_bytes))


def _advise_present(address: int, length: int) -> None:
    _libc.madvise(address, length, _MADV_POPULATE_WRITE)  # an older kernel maps them one by one, later


def _collapse(arena: Arena, page_bytes: int, start: int, length: int) -> None:
    # Where no page is mapped, there is nothing to make huge: so one small page in each.
    for address in range(arena.address + start, arena.address + start + length, page_bytes):
        if _libc.madvise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE) != 0:
            return  # what there is to say of it, `_take_memory` says
    _libc.madvise(arena.address + start, length, _MADV_COLLAPSE)


def _huge_page_bytes(length: int) -> int:
    """The length of the huge pages of an arena of this length; 0 if it has none."""
    return _transparent_page_bytes() if length >= _HUGE_FROM_BYTES else 0


@cache
def _transparent_page_bytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _take_memory(fd: int, length: int) -> None:
    """Give the file all its pages."""
    if sys.platform != "linux":
        raise no_linux("shared memory", "use TCP")
    try:
        os.posix_fallocate(fd, 0, length)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise OutOfMemory(
            f"the kernel refused {in_units(length)} of shared memory ({error.strerror}); use a smaller pool, or free"
            " or add memory"
        ) from error


class Mapping:
    """Another process's arena, mapped from a descriptor, which may then be closed.

    `memory` is its bytes (format "B"). The mapping lives as long as anybody holds a
    view of it; a forked child does not have it. OutOfMemory when there is no address
    space; PermissionError when the arena may not be written.
    """

    def __init__(self, fd: int, length: int, *, writable: bool) -> None:
        self.length = length
        self.writable = writable
        self.present_bytes = 0
        """How much of it is known to be present, from the beginning. Who populates it
        says so."""
        self._address = _map(fd, length, writable=writable)
        self._bytes = (ctypes.c_ubyte * length).from_address(self._address)
        weakref.finalize(self._bytes, _unmap, self._address, length, os.getpid()).atexit = False
        _check("madvise(MADV_DONTFORK)", _libc.madvise(self._address, length, _MADV_DONTFORK))
        view = memoryview(self._bytes).cast("B")
        self.memory = view if writable else view.toreadonly()

    def make_present(self, start: int, end: int) -> None:
        """Make the pages of a short stretch present, if that is not known of them."""
        if self.present_bytes < end <= start + _STRETCH_BYTES:
            first = start - start % mmap.PAGESIZE
            self.populate(first, min(end, self.length) - first)

    def populate(self, start: int, length: int) -> None:
        """Make pages present before they are used; 0.5 s per GiB of small ones. Does
        nothing before Linux 5.14."""
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        _libc.madvise(self._address + start, length, advice)


def _map(fd: int, length: int, *, writable: bool = True) -> int:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    page_bytes = _huge_page_bytes(length)
    if not page_bytes or os.fstat(fd).st_blksize > mmap.PAGESIZE:  # of hugetlbfs, the kernel finds the right place
        return _mmap(None, length, access, mmap.MAP_SHARED, fd)
    # A huge page is mapped as one only where its address is a multiple of its length,
    # which not every kernel sees to.
    room_bytes = length + page_bytes
    room = _mmap(None, room_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-room // page_bytes) * page_bytes
    end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        _mmap(address, length, access, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except BaseException:
        _libc.munmap(room, room_bytes)
        raise
    if room < address:
        _libc.munmap(room, address - room)
    if end < room + room_bytes:
        _libc.munmap(end, room + room_bytes - end)
    return address


def _mmap(address: int | None, length: int, access: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, length, access, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        if code in (errno.EPERM, errno.EACCES):
            raise PermissionError(code, f"mapping {in_units(length)}: {os.strerror(code)}")
        raise OutOfMemory(
            f"mapping {in_units(length)} failed: {os.strerror(code)}; use a smaller pool, or raise the limit on"
            " address space (ulimit -v)"
        )
    return int(found)


def _unmap(address: int, length: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child something else may be mapped there
        _libc.munmap(address, length)


def _check(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _in_steps(length: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Do `work(start, length)` for all of a span, in steps that `threads` share."""
    starts = range(0, length, _STEP_BYTES)
    lengths = [min(_STEP_BYTES, length - start) for start in starts]
    if threads == 1:
        for start, count in zip(starts, lengths, strict=True):
            work(start, count)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="infinistore-prefault") as executor:  # makes no idle ones
        for _ in executor.map(work, starts, lengths):
            pass


def _populate(arena: Arena, start: int, length: int) -> None:
    if _libc.madvise(arena.address + start, length, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EFAULT):
        raise OutOfMemory(f"the kernel has no page for byte {start} of arena {arena.index}: {os.strerror(code)}")
    # A kernel before 5.14 says EINVAL: write one byte per page instead. The arena is
    # new, so every byte is zero.
    page_bytes = mmap.PAGESIZE
    pages = length // page_bytes
    arena.memory[start : start + length : page_bytes] = bytes(pages)
