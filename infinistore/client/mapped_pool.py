"""The server's pool, mapped into this process.

The server hands out the descriptors of its arenas over its Unix socket. They are mapped when they are first needed: one
mapping for reading, which cannot be written, and one for writing. Making a page present costs ten times a copy, so a
thread of low priority makes all of them present in the background. A batch that is written before its pages are there
has them made present as one: that takes half as long as a fault for each.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import add

from infinistore.client.copy_threads import CopyThreads
from infinistore.client.in_place import Watch
from infinistore.client.known_blocks import KnownBlocks
from infinistore.core.arena import Mapping
from infinistore.errors import ProtocolError, StoreUnavailable
from infinistore.protocol.places import arena_of, offset_of, place_of

__all__ = ["MappedPool"]

_POPULATE_BYTES = 16 * 1024 * 1024
_NICE = 5  # not more: while others keep every core busy it must still come to an end


class MappedPool:
    """The arenas of one run of a server, for all connections of a store. Any thread may use it."""

    def __init__(self, instance: str, copy_threads: int = 1, known_blocks: int = 0) -> None:
        self.instance = instance
        self.known = KnownBlocks(known_blocks)
        """Where blocks lie that were read or written by way of it."""
        self.copier = CopyThreads(copy_threads)
        """What copies blocks from and to it."""
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._lengths: list[int] = []
        self._mappings: dict[tuple[int, bool], Mapping] = {}
        self._closed = False
        self._populating: list[threading.Thread] = []
        self.writable = False

    def __len__(self) -> int:
        """How many arenas are known."""
        return len(self._lengths)

    def add(self, first: int, lengths: Sequence[int], descriptors: Sequence[int], *, writable: bool) -> None:
        """Take over the descriptors of the arenas from number `first` on; those that are known already are closed."""
        with self._lock:
            complete = len(lengths) == len(descriptors)
            for index, (length, descriptor) in enumerate(zip(lengths, descriptors, strict=False), first):
                if complete and not self._closed and index == len(self._lengths):
                    self._lengths.append(length)
                    self._descriptors.append(descriptor)
                else:
                    os.close(descriptor)
            for descriptor in descriptors[len(lengths) :]:
                os.close(descriptor)
            self.writable = writable
        if not complete:
            raise ProtocolError(f"{len(lengths)} arenas came with {len(descriptors)} descriptors")

    def views(
        self, places: Sequence[int], sizes: Sequence[int], *, writable: bool, watch: Watch | None = None
    ) -> list[memoryview]:
        """Return the bytes of blocks at these places, as memory that is watched if there is a `watch`.

        Raises:
            ProtocolError: a place that is in no arena.
            StoreUnavailable: the pool was closed meanwhile.
            OutOfMemory: an arena cannot be mapped.
        """
        if not places:
            return []
        first, last = arena_of(min(places)), arena_of(max(places))
        memory: dict[int, memoryview] = {}
        for arena in range(first, last + 1):
            whole = self._memory(arena, writable)
            memory[arena] = whole if watch is None else watch.over(whole, writable=writable)
        if first == last:  # nearly always; 64 calls of `offset_of` would take half of the time
            base, of_arena = place_of(first, 0), memory[first]
            if base:
                places = [place - base for place in places]
            views = [of_arena[place : place + size] for place, size in zip(places, sizes, strict=True)]
        else:
            views = [
                memory[arena_of(place)][offset_of(place) : offset_of(place) + size]
                for place, size in zip(places, sizes, strict=True)
            ]
        if list(map(len, views)) != list(sizes):
            raise ProtocolError("the server says that a block is in an arena that ends before it does")
        return views

    def blocks(self, places: Sequence[int], sizes: Sequence[int], *, writable: bool) -> Iterator[memoryview]:
        """As `views`, but one after the other, for a copy: fetching the memory of 64 views that live at the same time
        takes longer than making them. Errors are those of `views`, at once.
        """
        if not places:
            return iter(())
        first, last = min(places), max(places)
        arena = arena_of(first)
        base = place_of(arena, 0)
        if last >= place_of(arena + 1, 0):
            return iter(self.views(places, sizes, writable=writable))
        mapping = self._mappings.get((arena, writable)) or self._map(arena, writable)
        memory = mapping.memory
        end = last + max(sizes) - base
        if end > len(memory) and max(map(add, places, sizes)) - base > len(memory):
            raise ProtocolError("the server says that a block is in an arena that ends before it does")
        if writable and end > mapping.present_bytes:
            mapping.make_present(first - base, end)  # which goes no further than the arena
        if base:
            places = [place - base for place in places]
        return (memory[place : place + size] for place, size in zip(places, sizes, strict=True))

    def arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return all the bytes of each arena that is known, to be read and, if that is allowed, to be written. Errors
        are those of `views`."""
        return [
            (self._memory(index, writable=False), self._memory(index, writable=True) if self.writable else None)
            for index in range(len(self))
        ]

    def close(self) -> None:
        """Give up the descriptors and the mappings; views that are still held stay good."""
        with self._lock:
            self._closed = True
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()
            self._mappings.clear()
            self.known.close()
        self.copier.close()
        for thread in self._populating:
            thread.join()

    def let_go(self) -> None:
        """In a forked child: the mappings are not there, and are left alone; the descriptors are closed."""
        self._lock = threading.Lock()
        self._populating.clear()
        self.copier.let_go()
        self._closed = True
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _memory(self, arena: int, writable: bool) -> memoryview:
        mapping = self._mappings.get((arena, writable))
        if mapping is None:
            mapping = self._map(arena, writable)
        return mapping.memory

    def _map(self, arena: int, writable: bool) -> Mapping:
        with self._lock:
            mapping = self._mappings.get((arena, writable))
            if mapping is None:
                if self._closed:
                    raise StoreUnavailable("the store was closed, or its server restarted")
                if arena >= len(self._descriptors):
                    raise ProtocolError(f"the server names arena {arena}, and has told of {len(self._descriptors)}")
                length = self._lengths[arena]
                if not 0 < length <= os.fstat(self._descriptors[arena]).st_size:  # touching more would kill us
                    raise ProtocolError(f"arena {arena} is not as long as the server says: {length} bytes")
                mapping = Mapping(self._descriptors[arena], length, writable=writable)
                self._mappings[arena, writable] = mapping
                thread = threading.Thread(
                    target=self._populate, args=(mapping,), name="infinistore-populate", daemon=True
                )
                self._populating.append(thread)
                thread.start()
            return mapping

    def _populate(self, mapping: Mapping) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for start in range(0, mapping.length, _POPULATE_BYTES):
            if self._closed:
                return
            mapping.populate(start, min(_POPULATE_BYTES, mapping.length - start))
            mapping.present_bytes = start + _POPULATE_BYTES
