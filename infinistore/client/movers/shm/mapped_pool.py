"""The server's pool, mapped into this process.

The server hands out the descriptors of its arenas over its Unix socket. They are mapped
on first use: one read-only mapping, and one for writing. Making a page present costs
ten times a copy, so a low-priority thread makes all pages present in the background. If
a batch is written before its pages are present, they are made present in one step,
which takes half as long as one fault per page.

The machine gets the memory back only when every process has unmapped it, so a pool
closes when its server has ended. With its arenas the server hands out one end of a pipe
that nobody writes to; it keeps the other end. A thread sleeps until the pipe hangs up.
That serves every kind of client, in or out of an event loop, takes no connection, and
looks at no clock. Memory that is still in use stays mapped, together with its whole
arena.
"""

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import add

import attrs

from infinistore.client.memory.copying import CopyThreads
from infinistore.client.memory.views import Watch
from infinistore.client.movers.shm.known_blocks import KnownBlocks, KnownReads
from infinistore.core.arena import Mapping
from infinistore.errors import ProtocolError, StoreUnavailable
from infinistore.host import ONE, make_eventfd, start_thread
from infinistore.protocol.packed_offsets import arena_of, offset_of, pack_offset
from infinistore.sizes import in_units


class ServerWatch:
    """Calls `ended` in its own thread when the server has ended, unless closed before.

    It takes over `lifeline`.

    Raises:
        OSError, StoreUnavailable: no descriptor or no thread is left; the caller keeps
            `lifeline`.
    """

    def __init__(self, lifeline: int, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._lifeline = lifeline
        self._closing = make_eventfd()
        self._thread = threading.Thread(target=self._wait, name="infinistore-watch", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            os.close(self._closing)
            raise

    def close(self) -> None:
        """Stop watching; wait for the thread to end unless this is it. Call it once."""
        os.write(self._closing, ONE)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.let_go()

    def let_go(self) -> None:
        """In a forked child, which lacks the thread: only close the descriptors."""
        os.close(self._lifeline)
        os.close(self._closing)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline, 0)  # which is told of hanging up, whatever it asks for
        poll.register(self._closing, select.POLLIN)
        if self._closing not in dict(poll.poll()):
            self._ended()


_POPULATE_BYTES = 16 * 1024 * 1024
# not more: the thread must finish even while other processes keep every core busy
_NICE = 5


@attrs.frozen
class Machine:
    """How a pool reaches the memory and the threads of its machine."""

    map_memory: Callable[..., Mapping] = Mapping
    watch_server: Callable[[int, Callable[[], None]], ServerWatch] = ServerWatch
    make_copier: Callable[[int], CopyThreads] = CopyThreads
    start_thread: Callable[[threading.Thread], None] = start_thread
    """Starts the threads that make pages present; StoreUnavailable: it does not."""
    spare_bytes: range = range(1024 * 1024, 16 * 1024 * 1024 + 1)
    """The sizes of batches, in bytes, for which a put asks for the space of the next
    one. The space is kept until then, so not for larger ones; small ones seldom
    repeat."""
    known_blocks: Callable[[int], KnownBlocks] = KnownBlocks
    known_reads: Callable[..., KnownReads] = KnownReads
    """What simulations replace by their own."""


class MappedPool:
    """The arenas of one run of a server, for all connections of a store. Any thread may
    use it.

    `on_end` is called, in a thread of the pool's own, when the server has ended and the
    pool is closed.
    """

    def __init__(
        self,
        instance: str,
        copy_threads: int = 1,
        known_blocks: int = 0,
        on_end: Callable[[], None] = lambda: None,
        machine: Machine | None = None,
    ) -> None:
        self.instance = instance
        self.machine = machine or Machine()
        self.closed = False
        self.known = self.machine.known_blocks(known_blocks)
        """The known locations of blocks in this pool."""
        self.copier = self.machine.make_copier(copy_threads)
        """Copies blocks from and to the pool."""
        self._lock = threading.Lock()
        self.descriptors: list[int] = []
        """The descriptors of the arenas; empty once the pool is closed."""
        self._lengths: list[int] = []
        self.mappings: dict[tuple[int, bool], Mapping] = {}
        """The mapped arenas, by number and whether they are writable."""
        self._on_end = on_end
        self._watch: ServerWatch | None = None
        self._populating: list[threading.Thread] = []
        self.writable = False
        self.arena_count = 0
        """How many arenas are known."""
        self.known_end = 0
        """The first packed offset in an arena that is not known."""
        self._end_of_first = pack_offset(1, 0)

    def knows(self, places: Sequence[int]) -> bool:
        """Whether the arenas of all these places are known."""
        return not places or max(places) < self.known_end

    def add(self, first: int, lengths: Sequence[int], descriptors: Sequence[int], *, writable: bool) -> None:
        """Take over the descriptors of the arenas from number `first` on.

        Those of arenas that are known already are closed.
        """
        with self._lock:
            complete = len(lengths) == len(descriptors)
            for index, (length, descriptor) in enumerate(zip(lengths, descriptors, strict=False), first):
                if complete and not self.closed and index == len(self._lengths):
                    self._lengths.append(length)
                    self.descriptors.append(descriptor)
                    self.arena_count = len(self._lengths)
                    self.known_end = pack_offset(self.arena_count, 0)
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
        """Return the bytes of blocks at these places, as memory that is watched if
        there is a `watch`.

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
        if first == last:  # the usual case; 64 calls of `offset_of` would take half of the time
            base, of_arena = pack_offset(first, 0), memory[first]
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
        """Return the same as `views`, one by one, for a copy.

        Fetching the memory of 64 views that are alive at the same time takes longer
        than making them. Errors are those of `views`, raised at once.
        """
        if not places:
            return iter(())
        first, last = min(places), max(places)
        arena = base = 0
        if first >= self._end_of_first:  # an arena behind the first one
            arena = arena_of(first)
            base = pack_offset(arena, 0)
            if last >= pack_offset(arena + 1, 0):
                return iter(self.views(places, sizes, writable=writable))
        elif last >= self._end_of_first:
            return iter(self.views(places, sizes, writable=writable))
        mapping = self.mappings.get((arena, writable)) or self._map(arena, writable)
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
        """Return the bytes of each known arena, to read and, if allowed, to write.

        Errors are those of `views`.
        """
        return [
            (self._memory(index, writable=False), self._memory(index, writable=True) if self.writable else None)
            for index in range(self.arena_count)
        ]

    def close(self) -> None:
        """Give up descriptors and mappings; views that are still held stay good."""
        with self._lock:
            self.closed = True
            watch, self._watch = self._watch, None
            for descriptor in self.descriptors:
                os.close(descriptor)
            self.descriptors.clear()
            self.mappings.clear()
            self.known.close()
        if watch is not None:
            watch.close()
        self.copier.close()
        for thread in self._populating:
            thread.join()

    def watch(self, lifeline: int) -> None:
        """Take over the descriptor that shows the server's end, and then close."""
        with self._lock:
            if self._watch is None and not self.closed:
                with suppress(OSError, StoreUnavailable):  # no descriptors or threads left: the next call finds out
                    self._watch = self.machine.watch_server(lifeline, self._end)
                    return
            os.close(lifeline)

    def _end(self) -> None:
        self.close()
        self._on_end()

    def let_go(self) -> None:
        """In a forked child: close the descriptors; the mappings are missing."""
        self._lock = threading.Lock()
        self._populating.clear()
        self.copier.let_go()
        self.closed = True
        if self._watch is not None:
            self._watch.let_go()
            self._watch = None
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def _memory(self, arena: int, writable: bool) -> memoryview:
        mapping = self.mappings.get((arena, writable))
        if mapping is None:
            mapping = self._map(arena, writable)
        return mapping.memory

    def _map(self, arena: int, writable: bool) -> Mapping:
        with self._lock:
            mapping = self.mappings.get((arena, writable))
            if mapping is None:
                if self.closed:
                    raise StoreUnavailable("the store was closed, or its server restarted")
                if arena >= len(self.descriptors):
                    raise ProtocolError(f"the server names arena {arena}, and has told of {len(self.descriptors)}")
                length = self._lengths[arena]
                if not 0 < length <= os.fstat(self.descriptors[arena]).st_size:  # touching more would kill us
                    raise ProtocolError(f"arena {arena} is not as long as the server says: {in_units(length)}")
                mapping = self.machine.map_memory(self.descriptors[arena], length, writable=writable)
                self.mappings[arena, writable] = mapping
                thread = threading.Thread(
                    target=self._populate, args=(mapping,), name="infinistore-populate", daemon=True
                )
                # no threads left: the copying thread makes the pages present
                with suppress(StoreUnavailable):
                    self.machine.start_thread(thread)
                    self._populating.append(thread)
            return mapping

    def _populate(self, mapping: Mapping) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for start in range(0, mapping.length, _POPULATE_BYTES):
            if self.closed:
                return
            mapping.populate(start, min(_POPULATE_BYTES, mapping.length - start))
            mapping.present_bytes = start + _POPULATE_BYTES
