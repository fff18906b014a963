"""Views of memory in place, and detecting when they are no longer in use.

A released memoryview proves little: arrays and tensors made from it keep reading. So
each lease and each reservation exports its memory through an object of its own.
Everything made from its views keeps that object alive, and when it dies, the memory can
be given back. That can happen in any thread, at any moment and in the middle of any
code: see `Returns`.
"""

import ctypes
import mmap
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from infinistore.errors import LeaseStillInUse
from infinistore.protocol.messages import MISSING
from infinistore.sizes import in_units

_T = TypeVar("_T")
# of blocks in private memory: arrays of any element type can be made from them
_ALIGNMENT_BYTES = 64


class Returns(ABC, Generic[_T]):
    """A lock, and the things that finalizers have left to be given back under it.

    A finalizer must not wait for a lock, because its own thread may hold it. So the
    finalizer leaves the thing here, and it is given back later: by the finalizer itself
    if the lock is free, else by the holder of the lock, or by the next call. Leaving it
    runs no Python code, which Ctrl-C could interrupt: an exception raised in a
    finalizer is lost.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Taken only with `with`, which Ctrl-C cannot interrupt between acquire and
        enter; call `flush` afterwards. Finalizers hold it only briefly."""
        self.watching: set[_Gone] = set()
        """What is being watched, or was left."""
        self.left: deque[_Gone] = deque()

    @abstractmethod
    def give_back(self, things: Sequence[_T]) -> int:
        """Give things back, with the lock held, without waiting or raising.

        Returns how many were given back; the others are passed again later.
        """

    def flush(self) -> None:
        """Give back what was left; if the lock is taken, its holder does it later."""
        # Another thread may take the lock between the check and `with`. It never waits
        # for us: for that it would have had to find one of our locks free before we
        # took it, and our lock free after that.
        while self.left and not self.lock.locked():
            with self.lock:
                while self.left:
                    left = list(self.left)
                    # without those that were given back before a Ctrl-C
                    things = [gone for gone in left if gone in self.watching]
                    taken = self.give_back([gone.thing for gone in things])
                    self.watching.difference_update(things[:taken])
                    if taken < len(things):
                        return
                    for _ in left:
                        self.left.popleft()


class _Gone(weakref.ref[Any]):
    """Appends itself to `left`, with the thing to give back, when its object dies."""

    __slots__ = ("thing",)
    thing: Any
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Flusher:
    """Gives back what was left when it dies."""

    __slots__ = ("_pid", "_returns")

    def __init__(self, returns: Returns[Any]) -> None:
        self._returns = returns
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid and not sys.is_finalizing():
            self._returns.flush()


class Watch:
    """Has `returns` give `thing` back, once, when all memory from `over` is dead.

    This includes everything made from that memory. It may happen in any thread, in the
    middle of any code, but not in a forked child and not at exit.
    """

    def __init__(self, returns: Returns[_T] | None, thing: _T | None = None) -> None:
        # An object that holds an export of the memory keeps the token alive, the token
        # the whole, and the whole the flusher. They die in this order: when the whole
        # dies, the thing to give back is appended to `left`; then the flusher processes
        # `left`.
        flusher = None if returns is None else _Flusher(returns)
        self._whole: Any = frozenset((flusher,))
        self._token: Any = frozenset((self._whole,))
        self._exported = weakref.ref(self._token)
        if returns is not None:
            gone = _Gone(self._whole, returns.left.append)
            gone.thing = thing
            returns.watching.add(gone)

    def over(self, memory: memoryview, *, writable: bool) -> memoryview:
        """Return the bytes of `memory` through an exporter that is watched.

        `memory` must be all the bytes of its own exporter.
        """
        exporter = (ctypes.c_ubyte * len(memory)).from_buffer(memory.obj)
        exporter.token = self._token  # type: ignore[attr-defined]
        view = memoryview(exporter).cast("B")
        return view if writable else view.toreadonly()

    def done(self) -> None:
        """Declare that no more memory will be watched."""
        self._token = self._whole = None

    def release(self, views: Sequence[memoryview], handed: list[Any]) -> None:
        """Release the views in the list `handed`: using them is a ValueError.

        PyTorch's `frombuffer` keeps a memoryview without an export, and continues to
        read after its release. This cannot be told from a variable. So where PyTorch is
        loaded, a view with any other reference counts as in use.
        """
        if "torch" in sys.modules:
            listed = Counter(map(id, handed))
            for view, count in zip(views, _references(views), strict=True):
                if count > _ALONE + listed[id(view)]:
                    weakref.finalize(view, _forget, self._whole).atexit = False
                    handed[:] = [_RELEASED if item is view else item for item in handed]
        _release(views)

    def withdraw(self, views: Sequence[memoryview]) -> None:
        """Release views that were not handed out, and stop watching.

        For errors, whose traceback keeps the frames that made the views.
        """
        _release(views)
        self.done()

    @property
    def alive(self) -> bool:
        """Whether something is alive other than variables that hold released views."""
        return self._exported() is not None


def _release(views: Sequence[memoryview]) -> None:
    for view in views:
        try:  # noqa: SIM105  # 64 context managers would cost as much as all the rest
            view.release()
        # an export of it exists: the memory is in use
        except BufferError:
            pass


def _forget(_: object) -> None:
    """Drop the argument."""


def _references(things: Sequence[object]) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


_RELEASED = memoryview(b"")
_RELEASED.release()
_ALONE = _references([object()])[0]
"""How many references `_references` counts for an object that only one list holds."""


def views_at(
    watch: Watch, memory: Callable[[int], memoryview], extents: Sequence[tuple[int, int, int]], *, writable: bool
) -> list[memoryview]:
    """Return the bytes of each extent (arena, offset, length), watched.

    `memory` returns all the bytes of an arena.
    """
    arenas = {arena: watch.over(memory(arena), writable=writable) for arena in {arena for arena, _, _ in extents}}
    return [arenas[arena][offset : offset + length] for arena, offset, length in extents]


class Leased:
    """The state of a `lease` block: a read-only view for each key, None if missing."""

    def __init__(self, views: list[memoryview | None], watch: Watch) -> None:
        self.handed = views[:]
        """For the caller, who may change the list."""
        self._watched = [([view for view in views if view is not None], watch)]

    @classmethod
    def merged(cls, count: int, parts: Iterable[tuple[Sequence[int], "Leased"]]) -> "Leased":
        """Make one lease of several, each with the positions of its views among
        `count`.

        It takes their place: the parts are not left any more.
        """
        merged = cls([None] * count, Watch(None))
        merged._watched.clear()
        for positions, part in parts:
            for position, view in zip(positions, part.handed, strict=True):
                if view is not None:
                    merged.handed[position] = view
            part.handed.clear()  # each reference to a view counts when it is released
            merged._watched += part._watched
        return merged

    def leave(self, *, quietly: bool, stacklevel: int) -> None:
        """Release the views, and warn if anything made from them is alive.

        The memory is given back when that dies.

        Args:
            quietly: an exception left the block; its traceback keeps the block's
                variables alive.
            stacklevel: as for `warnings.warn`.
        """
        in_use_bytes = 0
        for views, watch in self._watched:
            total_bytes = 0 if quietly else sum(map(len, views))
            watch.release(views, self.handed)
            watch.done()
            if watch.alive:
                in_use_bytes += total_bytes
        if in_use_bytes and not quietly:
            warnings.warn(
                f"a lease was left while arrays, tensors or views of its {in_units(in_use_bytes)} were alive;"
                " they stay in memory until the last of those is gone: delete them before the end of the block",
                LeaseStillInUse,
                stacklevel=stacklevel + 1,
            )


class ReservedRoom:
    """The state of a `reserve` block: memory for a block of each key, not visible yet.

    `reservation` is the store's name for it; None for private memory. `owed` is what
    will be sent for it when none of its memory is alive any more; a commit clears it.
    """

    def __init__(
        self, keys: list[str], memory: list[memoryview], watch: Watch, reservation: Any = None, owed: Any = None
    ) -> None:
        self.keys = keys
        self.memory = memory
        self.reservation = reservation
        self.owed = owed
        self.handed = [view[:] for view in memory]
        """For the caller: the same bytes, as separate views."""
        self._views = list(self.handed)
        self._watch = watch

    def take_back(self) -> None:
        """Release the views handed out: writing to them is a ValueError from now on."""
        self._watch.release(self._views, self.handed)

    def leave(self, *, quietly: bool, stacklevel: int) -> None:
        """Drop the memory, and warn if anything made from it is still alive."""
        self._views.clear()
        self.memory.clear()
        self._watch.done()
        if self._watch.alive and not quietly:
            warnings.warn(
                "a reservation was committed while arrays, tensors or views of its memory were alive; do not write to"
                " them any more: readers would find a wrong checksum, in these blocks or in others that come there",
                LeaseStillInUse,
                stacklevel=stacklevel + 1,
            )


class ReservationLink:
    """The connection of an open reservation, kept until its block is left.

    The reservation can be committed only there. Empty for embedded stores and for
    private memory.
    """

    def __init__(self) -> None:
        self.link: Any = None
        self.place: Any = None
        """In a cluster, the node that has the reservation."""
        self._give_back: Callable[[Any], None] | None = None

    def keep(self, link: Any, give_back: Callable[[Any], None]) -> None:
        """Take a connection out of use."""
        self.link = link
        self._give_back = give_back

    def let_go(self) -> None:
        """Give the connection back, if any; finalizers give unused space back."""
        if self.link is not None and self._give_back is not None:
            link, self.link = self.link, None
            self._give_back(link)


class PrivateBlocks:
    """Blocks in private memory, for paths that cannot reach the pool.

    They are viewed as if in place.
    """

    def __init__(self, *, writable: bool = False) -> None:
        self.watch = Watch(None)
        self.views: list[memoryview | None] = []
        """One view for each block, None for what is missing."""
        self._writable = writable

    def room(self, sizes: Sequence[int], first: int) -> list[memoryview]:
        """Make memory and views for blocks of these sizes, from number `first` on.

        Returns the writable memory of the blocks that are present. A part that is read
        again over another route replaces what was there.
        """
        present = [size for size in sizes if size != MISSING]
        room = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in present]
        starts = list(accumulate(room, initial=0))
        if not present:
            self.views[first:] = [None] * len(sizes)
            return []
        memory = memoryview(mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        whole = self.watch.over(memory, writable=self._writable)
        slices = [slice(start, start + size) for start, size in zip(starts, present, strict=False)]
        views = map(whole.__getitem__, slices)
        self.views[first:] = [None if size == MISSING else next(views) for size in sizes]
        return [memory[place] for place in slices]


def private_room(keys: list[str], sizes: Sequence[int]) -> ReservedRoom:
    """Return private memory for blocks; `put` stores it once it has been written."""
    blocks = PrivateBlocks(writable=True)
    blocks.room(sizes, 0)
    return ReservedRoom(keys, [view for view in blocks.views if view is not None], blocks.watch)
