"""Arenas: shared memory that is page-aligned, sealed, not inherited, and alive as long
as somebody looks at it.
"""

import ctypes
import fcntl
import gc
import mmap
import os
import resource
from collections.abc import Callable

import numpy as np
import pytest

from infinistore.core import Arena, create_arena
from infinistore.core import arena as arena_module
from infinistore.core.arena import Mapping, check_memory
from infinistore.errors import OutOfMemory
from infinistore.host import MemoryLimit, free_huge_pages
from tests.descriptors import is_still

HUGE_BYTES = 64 << 20  # of the shortest arena in huge pages


@pytest.mark.parametrize("prefault_threads", [0, 1, 3])
def test_an_arena_is_zeroed_page_aligned_and_of_whole_pages(prefault_threads: int) -> None:
    arena = create_arena(0, 10 * mmap.PAGESIZE + 1, prefault_threads=prefault_threads)
    assert arena.length == len(arena.memory) == 11 * mmap.PAGESIZE
    assert arena.address % mmap.PAGESIZE == 0
    assert ctypes.addressof(ctypes.c_char.from_buffer(arena.memory)) == arena.address
    assert bytes(arena.memory) == bytes(arena.length)
    assert (arena.memory.format, arena.memory.readonly, arena.read_only.readonly) == ("B", False, True)
    arena.close()


def test_the_descriptor_shows_the_same_bytes_and_is_not_inherited() -> None:
    arena = create_arena(0, mmap.PAGESIZE)
    with mmap.mmap(arena.fd, arena.length) as other:
        arena.memory[5:8] = b"abc"
        assert other[5:8] == b"abc"
    assert not os.get_inheritable(arena.fd)
    arena.close()


def test_an_arena_can_neither_shrink_nor_grow() -> None:
    arena = create_arena(0, mmap.PAGESIZE)
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for length in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, length)
    arena.close()


def test_its_memory_is_taken_when_it_is_made() -> None:
    arena = create_arena(0, 1 << 20)
    assert os.fstat(arena.fd).st_blocks * 512 >= 1 << 20
    arena.close()


def test_a_prefaulted_arena_is_mapped_in_full() -> None:
    arena = create_arena(0, 1 << 20, prefault_threads=2)
    assert _mapping_field(arena.address, "Rss") == 1 << 20
    arena.close()


def test_an_old_kernel_is_served_by_touching_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL
    arena = create_arena(0, 1 << 20, prefault_threads=1)
    assert _mapping_field(arena.address, "Rss") == 1 << 20
    arena.close()


def test_the_memory_of_a_long_arena_is_in_huge_pages_as_far_as_those_go_and_is_mapped_so_by_others() -> None:
    arena = create_arena(0, HUGE_BYTES + 1, prefault_threads=2)
    huge_bytes = _mapping_field(arena.address, "ShmemPmdMapped")
    if not huge_bytes:
        pytest.skip("this kernel makes no huge pages of shared memory: that takes Linux 6.1, and memory in one piece")
    arena.memory[-1] = 7
    for writable in (True, False):
        mapping = Mapping(arena.fd, arena.length, writable=writable)
        mapping.populate(0, arena.length)
        address = np.frombuffer(mapping.memory, dtype=np.uint8).ctypes.data
        assert _mapping_field(address, "ShmemPmdMapped") == huge_bytes
        assert mapping.memory[-1] == 7
    arena.close()


def test_a_kernel_that_makes_no_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MADV_COLLAPSE", 9999)  # EINVAL
    arena = create_arena(0, HUGE_BYTES, prefault_threads=1)
    assert _mapping_field(arena.address, "ShmemPmdMapped") == 0
    assert _mapping_field(arena.address, "Rss") == HUGE_BYTES
    arena.close()


def test_memory_that_runs_out_before_there_are_huge_pages_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def refuse(fd: int, offset: int, length: int) -> None:
        taken.append((offset, length))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena_module, "_transparent_page_bytes", lambda: 2 << 20)
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)  # refused
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OutOfMemory, match="smaller pool"):
        create_arena(0, HUGE_BYTES, prefault_threads=1)
    assert taken == [(0, HUGE_BYTES)]


@pytest.mark.process
@pytest.mark.parametrize("length", [1, mmap.PAGESIZE, HUGE_BYTES, HUGE_BYTES + 1, HUGE_BYTES + (3 << 20)])
def test_what_is_mapped_takes_no_more_addresses_than_its_pages(length: int) -> None:
    """In a child, where no other thread maps and unmaps something meanwhile."""

    def is_exact() -> bool:
        before = _reserved_addresses()
        arena = create_arena(0, length)
        return _mapping_field(arena.address, "Size") == arena.length and _reserved_addresses() == before

    assert _holds_in_a_child(is_exact)


@pytest.mark.process
def test_a_forked_child_does_not_see_the_mapping() -> None:
    arena = create_arena(0, 1 << 20)

    def is_without() -> bool:
        exists = _mapping_exists(arena)
        arena.abandon()
        return not exists

    assert _holds_in_a_child(is_without)
    assert _mapping_exists(arena)
    arena.close()


def test_closing_twice_is_fine_and_unmaps_at_once_when_nobody_looks() -> None:
    arena = create_arena(0, 1 << 20)
    fd, file = arena.fd, os.fstat(arena.fd)
    arena.close()
    arena.close()
    gc.collect()
    assert not _mapping_exists(arena)
    assert not is_still(file, fd)


def test_views_stay_valid_after_close_until_the_last_is_gone() -> None:
    arena = create_arena(0, 1 << 20)
    view = arena.memory[100:200]
    view[:] = bytes(range(100))
    reader = view.toreadonly()
    arena.close()
    del view
    gc.collect()
    assert bytes(reader) == bytes(range(100))
    del reader
    gc.collect()
    assert not _mapping_exists(arena)


def test_an_abandoned_arena_is_never_unmapped() -> None:
    arena = create_arena(0, mmap.PAGESIZE)
    arena.abandon()
    gc.collect()
    assert _mapping_exists(arena)
    ctypes.CDLL(None).munmap(ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.length))


@pytest.mark.parametrize("length", [0, -1])
def test_an_arena_without_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="positive length"):
        create_arena(0, length)


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="prefault_threads"):
        create_arena(0, 4096, prefault_threads=-1)


def test_what_the_machine_cannot_hold_is_refused_before_any_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "available_memory", lambda: MemoryLimit(100 << 20, "memory.max of a test"))
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("took memory"))
    with pytest.raises(
        OutOfMemory,
        match=r"99 MiB does not fit beside the 64 MiB.*100 MiB are available \(memory.max of a test\).*smaller pool",
    ):
        create_arena(0, 99 << 20)


def test_shards_need_memory_each_beside_their_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "available_memory", lambda: MemoryLimit(400 << 20, "memory.max of a test"))
    check_memory(300 << 20, huge_pages=False)
    check_memory(100 << 20, huge_pages=False, shards=4)
    with pytest.raises(OutOfMemory, match=r"300 MiB does not fit beside the 224 MiB that 4 shards need.*fewer shards"):
        check_memory(300 << 20, huge_pages=False, shards=4)


def test_what_the_kernel_refuses_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfMemory, match="smaller pool"):
        create_arena(0, 4096)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_huge_pages_that_are_not_there_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "free_huge_pages", lambda: (1, 2 << 20))
    with pytest.raises(OutOfMemory, match=r"2 free huge pages of 2 MiB, and there are 1.*vm.nr_hugepages"):
        create_arena(0, 3 << 20, huge_pages=True)


def test_huge_pages_that_were_set_aside_hold_all_of_it() -> None:
    pages, page_bytes = free_huge_pages()
    if pages * page_bytes < HUGE_BYTES:
        pytest.skip(f"there are {pages} free huge pages here; sysctl vm.nr_hugepages sets some aside")
    arena = create_arena(0, HUGE_BYTES + 1, huge_pages=True, prefault_threads=2)
    assert arena.length % page_bytes == arena.address % page_bytes == 0
    assert _mapping_field(arena.address, "KernelPageSize") == page_bytes
    mapping = Mapping(arena.fd, arena.length, writable=True)
    mapping.memory[-1] = 7
    assert arena.memory[-1] == 7
    arena.close()


def _mapping_exists(arena: Arena) -> bool:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        return any(line.startswith(f"{arena.address:08x}-") for line in maps)


def _holds_in_a_child(check: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        holds = False
        try:
            holds = check()
        finally:
            os._exit(0 if holds else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _reserved_addresses() -> set[str]:
    """What of the address space is taken for nothing."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        return {line for line in maps if line.split()[1] == "---p"}


def _mapping_field(address: int, name: str) -> int:
    """Return a field of /proc/self/smaps for the mapping at an address, in bytes."""
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
        inside = False
        for line in smaps:
            first = line.split(maxsplit=1)[0]
            if "-" in first:
                inside = first.startswith(f"{address:08x}-")
            elif inside and first == f"{name}:":
                return int(line.split()[1]) * 1024
    raise AssertionError("the arena is not mapped")


def test_an_arena_above_the_limit_on_files_is_refused_with_the_remedy() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OutOfMemory, match=r"ulimit -f.*smaller pool"):
            create_arena(0, 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
