"""Memory that is looked at where it lies: views of the pool, and how it is known that nobody looks at them any more.

A released memoryview says little: arrays and tensors made from it go on reading. So each lease and each reservation
exports its memory by an object of its own, whatever is made from its views keeps that alive, and when it dies, the
room can go back. That may be in any thread and at any moment, in the middle of anything: see `Returns`.
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
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from infinistore.errors import LeaseStillInUse
from infinistore.protocol.messages import MISSING

__all__ = ["Kept", "Leased", "PrivateBlocks", "ReservedRoom", "Returns", "Watch", "private_room", "views_at"]

_T = TypeVar("_T")
_ALIGNMENT_BYTES = 64  # of blocks in private memory: arrays of any element type can be made from them


class Returns(ABC, Generic[_T]):
    """A lock, and what finalizers have left to be given back under it.

    A finalizer must not wait for a lock, which its own thread may hold. It leaves the thing here. Whoever holds the
    lock gives it back when they are done; if nobody does, it is given back at once.
    """

    def __init__(self) -> None:
        self._left: deque[_T] = deque()
        self._lock = threading.Lock()

    @abstractmethod
    def give_back(self, things: Sequence[_T]) -> int:
        """Give things back, with the lock held, without waiting or raising.

        Returns how many were; the others come again, some time later.
        """

    def acquire(self) -> None:
        """Take the lock. Finalizers hold it for moments only."""
        self._lock.acquire()

    def release(self) -> None:
        """Give the lock back, and what was left meanwhile."""
        self._lock.release()
        self.flush()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def leave(self, thing: _T) -> None:
        """Have something given back, soon. For finalizers: it waits for nobody."""
        self._left.append(thing)
        self.flush()

    def flush(self) -> None:
        """Give back what was left, unless somebody has the lock, who does it later."""
        # Looked at again after the lock was given back: what is left by somebody who cannot have it now is seen here.
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    things = [self._left.popleft() for _ in range(len(self._left))]
                    taken = self.give_back(things)
                    if taken < len(things):
                        self._left.extendleft(reversed(things[taken:]))
                        return
            finally:
                self._lock.release()


class _Whole:
    """Something to be kept alive; when it dies, it calls `gone(*arguments)`."""

    __slots__ = ("_arguments", "_gone", "_pid")

    def __init__(self, gone: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._gone = gone
        self._arguments = arguments
        self._pid = os.getpid()

    def __del__(self) -> None:  # a third of what weakref.finalize takes
        if os.getpid() == self._pid and not sys.is_finalizing():
            self._gone(*self._arguments)


class _Token:
    """What has the memory by an export keeps this alive, and this keeps the whole."""

    __slots__ = ("__weakref__", "_whole")

    def __init__(self, whole: _Whole) -> None:
        self._whole = whole


class Watch:
    """Calls `gone(*arguments)`, once, when nothing is alive any more that was made from what `over` returned.

    Not in a forked child, and not at exit. `gone` may run in any thread, in the middle of anything.
    """

    def __init__(self, gone: Callable[..., None], *arguments: Any) -> None:
        self._whole: _Whole | None = _Whole(gone, arguments)
        self._token: _Token | None = _Token(self._whole)
        self._exported = weakref.ref(self._token)

    def over(self, memory: memoryview, *, writable: bool) -> memoryview:
        """Return the bytes of `memory`, which is all of what exports it, as those of an object that is watched."""
        exporter = (ctypes.c_ubyte * len(memory)).from_buffer(memory.obj)
        exporter.token = self._token  # type: ignore[attr-defined]
        view = memoryview(exporter).cast("B")
        return view if writable else view.toreadonly()

    def done(self) -> None:
        """Say that no more memory is to be watched."""
        self._token = self._whole = None

    def release(self, views: Sequence[memoryview], handed: list[Any]) -> None:
        """Release views that were handed out in the list `handed`: who goes on using them gets ValueError.

        PyTorch's `frombuffer` keeps a memoryview without an export, and reads on when that is released. It cannot be
        told from a variable. So where PyTorch is loaded, a view that somebody else still holds counts as in use.
        """
        if "torch" in sys.modules:
            listed = Counter(map(id, handed))
            for view, count in zip(views, _references(views), strict=True):
                if count > _ALONE + listed[id(view)]:
                    weakref.finalize(view, _forget, self._whole).atexit = False
                    handed[:] = [_RELEASED if item is view else item for item in handed]
        _release(views)

    def withdraw(self, views: Sequence[memoryview]) -> None:
        """Release views that nobody was given, and watch no more: when an error keeps the frames that made them."""
        _release(views)
        self.done()

    @property
    def alive(self) -> bool:
        """Whether anything is that cannot be a mere variable with a view that was released."""
        return self._exported() is not None


def _release(views: Sequence[memoryview]) -> None:
    for view in views:
        try:  # noqa: SIM105  # 64 context managers would cost as much as all the rest
            view.release()
        except BufferError:  # somebody has an export of it: that is in use
            pass


def _forget(_: object) -> None:
    """Let go of what came as an argument."""


def _references(things: Sequence[object]) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


_RELEASED = memoryview(b"")
_RELEASED.release()
_ALONE = _references([object()])[0]
"""How many references there are to what only one list holds, counted as they are counted here."""


def views_at(
    watch: Watch, memory: Callable[[int], memoryview], extents: Sequence[tuple[int, int, int]], *, writable: bool
) -> list[memoryview]:
    """Return the bytes of each extent (arena, offset, length), watched. `memory` has all the bytes of an arena."""
    arenas = {arena: watch.over(memory(arena), writable=writable) for arena in {arena for arena, _, _ in extents}}
    return [arenas[arena][offset : offset + length] for arena, offset, length in extents]


class Leased:
    """What a `lease` block has: one read-only view for each key, None for what is missing."""

    def __init__(self, views: list[memoryview | None], watch: Watch) -> None:
        self.handed = views[:]
        """For the caller, who may do with the list what they like."""
        self._views = [view for view in views if view is not None]
        self._watch = watch
        self._total_bytes = sum(map(len, self._views))

    def leave(self, *, quietly: bool, stacklevel: int) -> None:
        """Release the views, and warn if anything made from them is alive. Its death gives the room back.

        `quietly`: the block was left by an exception, whose traceback keeps the variables of the block alive.
        """
        self._watch.release(self._views, self.handed)
        self._watch.done()
        if self._watch.alive and not quietly:
            warnings.warn(
                f"a lease was left while arrays, tensors or views of its {self._total_bytes} bytes were alive; they"
                " stay in memory until the last of those is gone: delete them before the end of the block",
                LeaseStillInUse,
                stacklevel=stacklevel + 1,
            )


class ReservedRoom:
    """What a `reserve` block has: memory for one block of each key, which nobody else sees yet.

    `reservation` is what the store calls it; None for private memory. `owed` is what will be sent for it when nothing
    of its memory is alive any more; who commits it clears that.
    """

    def __init__(
        self, keys: list[str], memory: list[memoryview], watch: Watch, reservation: Any = None, owed: Any = None
    ) -> None:
        self.keys = keys
        self.memory = memory
        self.reservation = reservation
        self.owed = owed
        self.handed = [view[:] for view in memory]
        """For the caller: the same bytes, as views of their own."""
        self._views = list(self.handed)
        self._watch = watch

    def take_back(self) -> None:
        """Release the views that were handed out, so that writing to them is a ValueError from now on."""
        self._watch.release(self._views, self.handed)

    def leave(self, *, quietly: bool, stacklevel: int) -> None:
        """Let go of the memory, and warn if anything made from it is alive all the same."""
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


class Kept:
    """The connection on which a reservation is open, until its block is left: only there it can be committed.

    Empty where there is none: embedded, and for private memory.
    """

    def __init__(self) -> None:
        self.link: Any = None
        self._give_back: Callable[[Any], None] | None = None

    def keep(self, link: Any, give_back: Callable[[Any], None]) -> None:
        """Take a connection out of use."""
        self.link = link
        self._give_back = give_back

    def let_go(self) -> None:
        """Give it back, if there is one; what is still reserved goes back by itself."""
        if self.link is not None and self._give_back is not None:
            link, self.link = self.link, None
            self._give_back(link)


class PrivateBlocks:
    """Blocks in this process's own memory, for paths on which the pool is out of reach: looked at as if in place."""

    def __init__(self, *, writable: bool = False) -> None:
        self.watch = Watch(_nothing)
        self.views: list[memoryview | None] = []
        """One for each block, None for what is missing."""
        self._writable = writable

    def room(self, sizes: Sequence[int], first: int) -> list[memoryview]:
        """Make room for blocks of these sizes, and views of it, from number `first` on; return the room of those that
        are there, writable. A part that is read again, by another way, takes the place of what was there."""
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
    """Return room in this process's own memory, to be put when it has been written."""
    blocks = PrivateBlocks(writable=True)
    blocks.room(sizes, 0)
    return ReservedRoom(keys, [view for view in blocks.views if view is not None], blocks.watch)


def _nothing() -> None:
    """What there is to do for private memory that nobody looks at any more."""
