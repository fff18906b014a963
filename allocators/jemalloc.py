"""jemalloc, asked for places and never for memory.

libjemalloc is loaded by ctypes and given an arena of its own, whose extent hooks hand
out address ranges that are only reserved (`PROT_NONE`): one page of addresses stands
for one unit of the pool. jemalloc keeps its bookkeeping elsewhere and does not touch
what it hands out; if it did, the process would die at once. Its pages are coalesced on
every free, and a block goes to the lowest place that fits.

What differs from the other strategies:

- jemalloc rounds sizes to its classes, four to each doubling: a footprint can be a
  quarter larger than its block.
- From four units on, a block also has one unit of padding: jemalloc varies the start of
  large allocations ("cache oblivious"), and 5.3.0 can be told not to only when it is
  built. Choose a unit that is small against the blocks.
- The library needs more static TLS than glibc keeps free for libraries that are loaded
  late, so the process starts itself again with a tunable set: call
  `infinistore.allocators.prepare_process("jemalloc")` first in `main`.

See jemalloc(3): `mallocx`, `experimental.arenas_create_ext`, `extent_hooks`; and "GNU C
Library Tunables".
"""

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

from infinistore.allocators.base import Allocator, AllocatorStatistics, Extent
from infinistore.allocators.runs import UnitMap
from infinistore.errors import ConfigError, OutOfMemory
from infinistore.sizes import in_units

_LIBRARY = "libjemalloc.so.2"
_TUNABLE = "glibc.rtld.optional_static_tls"
_STATIC_TLS_BYTES = 16384

_PAGE_BYTES = mmap.PAGESIZE

_LARGEST_UNITS = 1 << 40

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value

_Alloc = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint,
)


class _ExtentHooks(ctypes.Structure):
    """`extent_hooks_t`. NULL refuses: room is never unmapped, purged or decommitted."""

    _fields_ = [
        ("alloc", _Alloc),
        ("dalloc", ctypes.c_void_p),
        ("destroy", ctypes.c_void_p),
        ("commit", ctypes.c_void_p),
        ("decommit", ctypes.c_void_p),
        ("purge_lazy", ctypes.c_void_p),
        ("purge_forced", ctypes.c_void_p),
        ("split", ctypes.c_void_p),
        ("merge", ctypes.c_void_p),
    ]


class _ArenaConfig(ctypes.Structure):
    """`arena_config_t`."""

    _fields_ = [("extent_hooks", ctypes.POINTER(_ExtentHooks)), ("metadata_use_hooks", ctypes.c_bool)]


def _load() -> Any:
    """Return the library, loaded with the options that matter. Raises OSError."""
    with contextlib.suppress(OSError):
        # jemalloc brings its own `operator new`. A C++ runtime that is loaded as its
        # dependency takes that one, but the process's `free`: any C++ library that is
        # imported later could crash. Loaded first, it takes its own.
        ctypes.CDLL("libstdc++.so.6")
    before = os.environ.get("MALLOC_CONF")
    # without `retain`, spans that touch are merged into one; jemalloc reads this once,
    # while it is being loaded
    os.environ["MALLOC_CONF"] = f"{before},retain:false" if before else "retain:false"
    try:
        # PyDLL keeps the GIL: the calls take a microsecond, and waiting for the GIL
        # after each would take milliseconds
        library: Any = ctypes.PyDLL(_LIBRARY)
    finally:
        if before is None:
            del os.environ["MALLOC_CONF"]
        else:
            os.environ["MALLOC_CONF"] = before
    library.mallocx.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.mallocx.restype = ctypes.c_void_p
    library.dallocx.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.dallocx.restype = None
    library.nallocx.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.nallocx.restype = ctypes.c_size_t
    library.mallctl.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]
    return library


def _lacks_static_tls(error: OSError) -> bool:
    return "static TLS" in str(error)


def _load_or_explain() -> Any:
    try:
        return _load()
    except OSError as error:
        if _lacks_static_tls(error):
            raise ConfigError(
                f"{_LIBRARY} needs more static TLS than this process has: call "
                f"infinistore.allocators.prepare_process('jemalloc') first in main, or start the program with "
                f"GLIBC_TUNABLES={_TUNABLE}={_STATIC_TLS_BYTES}"
            ) from error
        raise ConfigError(
            f"the jemalloc allocator needs {_LIBRARY}: install the package libjemalloc2 (Debian, Ubuntu: "
            f"apt-get install libjemalloc2), or choose --allocator bitmap ({error})"
        ) from error


_library = cache(_load_or_explain)


def _control(library: Any, name: str, value: Any = None, new: Any = None) -> None:
    """Read a setting of jemalloc into `value`, set it to `new`, or do what it names."""
    length = None if value is None else ctypes.byref(ctypes.c_size_t(ctypes.sizeof(value)))
    code = library.mallctl(
        name.encode(),
        None if value is None else ctypes.addressof(value),
        length,
        None if new is None else ctypes.addressof(new),
        0 if new is None else ctypes.sizeof(new),
    )
    if code:
        raise ConfigError(f"{_LIBRARY} refused {name!r}: {os.strerror(code)}; jemalloc 5.3 or later is needed")


def _reserve_addresses(length: int) -> int:
    """Return the start of `length` bytes of addresses that hold no memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int = _libc.mmap(None, length, 0, flags, -1, 0)
    if address == _MAP_FAILED:
        raise OutOfMemory(
            f"cannot reserve {in_units(length)} of addresses: {os.strerror(ctypes.get_errno())}; see ulimit -v"
        )
    return address


class _Sizes:
    """The units that jemalloc takes for a block of so many units, with padding."""

    def __init__(self, library: Any) -> None:
        self._library = library
        classes = ctypes.c_uint()
        _control(library, "arenas.nbins", classes)
        largest_small = ctypes.c_size_t()
        _control(library, f"arenas.bin.{classes.value - 1}.size", largest_small)
        padded = ctypes.c_bool()
        _control(library, "opt.cache_oblivious", padded)
        self._padded_from = largest_small.value // _PAGE_BYTES + 1 if padded.value else sys.maxsize
        self._of_units: dict[int, int] = {}
        self.ascending = self._every_class()

    def of_units(self, units: int) -> int:
        """Return how many units a block of `units` units takes."""
        if units > _LARGEST_UNITS:  # no pool has so many, and their addresses would overflow
            return units
        taken = self._of_units.get(units)
        if taken is None:
            taken = self._library.nallocx(units * _PAGE_BYTES, 0) // _PAGE_BYTES
            taken += units >= self._padded_from
            if len(self._of_units) < 10_000:
                self._of_units[units] = taken
        return taken

    def _every_class(self) -> list[tuple[int, int]]:
        """Return (units taken, units asked for) of every class, smallest first."""
        found = []
        units = 0
        while units < _LARGEST_UNITS:
            units = self._library.nallocx((units + 1) * _PAGE_BYTES, 0) // _PAGE_BYTES
            found.append((self.of_units(units), units))
        return found

    def largest_within(self, units: int) -> tuple[int, int]:
        """Return (units taken, units asked for) of the largest class within `units`."""
        place = bisect_right(self.ascending, (units, sys.maxsize))
        return self.ascending[place - 1] if place else (0, 0)


class _Addresses:
    """The address ranges that stand for the arenas, with an arena of jemalloc's."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._reserved: list[tuple[int, int]] = []
        """(address, length) of every range."""
        self._next = self._end = 0
        # jemalloc asks these after each split and before each merge whether it may;
        # glibc's function does nothing with its argument and returns 0, which means
        # yes, and saves two calls into Python per block
        yes = ctypes.cast(_libc.pthread_condattr_destroy, ctypes.c_void_p)
        self._hooks = _ExtentHooks(alloc=_Alloc(self._next_span), split=yes, merge=yes)
        index = ctypes.c_uint()
        config = _ArenaConfig(ctypes.pointer(self._hooks), False)  # its own bookkeeping lies in memory of its own
        _control(library, "experimental.arenas_create_ext", index, config)
        self._arena = index.value
        for kind in ("dirty", "muzzy"):  # free room is coalesced at once
            _control(library, f"arena.{self._arena}.{kind}_decay_ms", new=ctypes.c_ssize_t(0))
        page_aligned = _PAGE_BYTES.bit_length() - 1
        without_thread_cache = 1 << 8
        self.flags = page_aligned | without_thread_cache | (self._arena + 1) << 20

    def _next_span(  # noqa: PLR0917  (jemalloc's `extent_alloc_t`)
        self, hooks: int, new_address: int | None, size: int, alignment: int, zero: int, commit: int, arena: int
    ) -> int | None:
        start = -(-self._next // alignment) * alignment
        if new_address or not self._next or start + size > self._end:
            return None
        self._next = start + size
        ctypes.c_bool.from_address(zero).value = False
        ctypes.c_bool.from_address(commit).value = True
        return start

    def reserve(self, units: int, sizes: _Sizes) -> int:
        """Reserve addresses for `units` units for jemalloc; return the first."""
        # a page on either side stays unused, so that jemalloc never merges two arenas
        first = _reserve_addresses((units + 2) * _PAGE_BYTES)
        self._reserved.append((first, (units + 2) * _PAGE_BYTES))
        first += _PAGE_BYTES
        self._next, self._end = first, first + units * _PAGE_BYTES
        # take it all once in pieces as large as can be, or jemalloc would come for it
        # in small ones later
        held = []
        while self._next < self._end:
            _, asked = sizes.largest_within((self._end - self._next) // _PAGE_BYTES)
            held.append(self._library.mallocx(asked * _PAGE_BYTES, self.flags))
        for address in held:
            self._library.dallocx(address, self.flags)
        return first

    def destroy(self) -> None:
        """Give jemalloc's arena up, with all that is allocated in it."""
        _control(self._library, f"arena.{self._arena}.destroy")
        for address, length in self._reserved:
            _libc.munmap(address, length)


class JemallocAllocator(Allocator):
    """Places chosen by libjemalloc 5.3 or later.

    A footprint is jemalloc's size class, and one unit more for blocks of four units and
    up. `largest_free_extent_bytes` is the largest class that fits, padded, in the
    longest run of free units. Raises `ConfigError` when the library cannot be loaded.
    """

    name: ClassVar[str] = "jemalloc"

    def __init__(self, unit_bytes: int) -> None:
        super().__init__(unit_bytes)
        library = _library()
        self._sizes = _Sizes(library)
        self._addresses = _Addresses(library)
        self._malloc = library.mallocx
        self._dalloc = library.dallocx
        self._flags = self._addresses.flags
        self._map = UnitMap()
        self._bases: list[int] = []
        """The address that stands for the first unit of each arena."""
        self._by_address: list[tuple[int, int]] = []
        """(base, arena), sorted."""
        self._live: dict[int, int] = {}
        """First unit and units taken of every extent."""
        weakref.finalize(self, self._addresses.destroy).atexit = False

    @classmethod
    def prepare_process(cls) -> None:
        """Start this process again, once, if the library lacks static TLS."""
        try:
            _load()
        except OSError as error:
            tunables = os.environ.get("GLIBC_TUNABLES", "")
            if _lacks_static_tls(error) and _TUNABLE not in tunables:
                setting = f"{_TUNABLE}={_STATIC_TLS_BYTES}"
                environment = {**os.environ, "GLIBC_TUNABLES": f"{tunables}:{setting}" if tunables else setting}
                sys.stdout.flush()
                sys.stderr.flush()
                os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
            _library()  # raises what explains it

    def add_arena(self, index: int, length: int) -> None:
        """Add an arena of whole units; only addresses are reserved for it."""
        self.record_arena(index, length)
        units = length // self.unit_bytes
        base = self._addresses.reserve(units, self._sizes)
        self._bases.append(base)
        self._by_address = sorted([*self._by_address, (base, index)])
        self._map.add_arena(units)

    def footprint(self, size: int) -> int:
        """Return the size of jemalloc's class for `size`, padding included."""
        return self._sizes.of_units(-(-size // self.unit_bytes)) * self.unit_bytes

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Place a batch, block by block, at the lowest places that fit."""
        if not sizes:
            return []
        if min(sizes) <= 0:
            raise ValueError(f"a block must have at least one byte, got {min(sizes)}")
        unit_bytes = self.unit_bytes
        units = [-(-size // unit_bytes) for size in sizes]
        taken = [self._sizes.of_units(count) for count in units]
        if sum(taken) > self._map.free_units:
            return None
        if taken[0] > 1 and taken.count(taken[0]) == len(taken) and not self._map.has_room(taken[0], len(taken)):
            return None
        starts: list[int] = []
        for wanted, length in zip(units, taken, strict=True):
            address = self._malloc(wanted * _PAGE_BYTES, self._flags)
            if address is None:
                self._release(starts)
                return None
            start = self._unit_at(address)
            self._map.take_run(start, length)
            self._live[start] = length
            starts.append(start)
        return [self._extent(start, size) for start, size in zip(starts, sizes, strict=True)]

    def _unit_at(self, address: int) -> int:
        base, arena = self._by_address[bisect_right(self._by_address, (address, sys.maxsize)) - 1]
        return self._map.firsts[arena] + (address - base) // _PAGE_BYTES

    def _extent(self, start: int, size: int) -> Extent:
        arena = self._map.arena_of(start)
        return arena, (start - self._map.firsts[arena]) * self.unit_bytes, size

    def free(self, extents: Iterable[Extent]) -> None:
        """Give back extents; all are checked before the first is freed."""
        starts = [self._start_of(extent) for extent in extents]
        if len(set(starts)) != len(starts):
            raise ValueError("an extent is freed twice in one call")
        self._release(starts)

    def _start_of(self, extent: Extent) -> int:
        arena, offset, length = extent
        units = self._map
        if 0 <= arena < len(units.firsts) and offset >= 0 and offset % self.unit_bytes == 0 and length > 0:
            start = units.firsts[arena] + offset // self.unit_bytes
            taken = self._live.get(start)
            if start < units.ends[arena] and taken == self._sizes.of_units(-(-length // self.unit_bytes)):
                return start
        raise ValueError(f"{extent} is not an allocated extent: it was freed before, or never given out")

    def _release(self, starts: list[int]) -> None:
        for start in starts:
            arena = self._map.arena_of(start)
            self._dalloc(self._bases[arena] + (start - self._map.firsts[arena]) * _PAGE_BYTES, self._flags)
            self._map.give_back_run(start, self._live.pop(start))

    def statistics(self) -> AllocatorStatistics:
        """Return what is held now."""
        units = self._map
        return AllocatorStatistics(
            name=self.name,
            unit_bytes=self.unit_bytes,
            arenas=len(units.firsts),
            capacity_bytes=units.units * self.unit_bytes,
            used_bytes=(units.units - units.free_units) * self.unit_bytes,
            extents=len(self._live),
            largest_free_extent_bytes=self._sizes.largest_within(units.largest_hole())[1] * self.unit_bytes,
        )

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        """Return the bytes taken in each of `parts` equal parts of an arena."""
        return [units * self.unit_bytes for units in self._map.taken_in(index, parts)]
