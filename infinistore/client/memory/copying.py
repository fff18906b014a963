"""Copies blocks inside one host, for the embedded store and the shared-memory client; a
long batch with more than one thread.

One thread copies as fast as one core can, which is less than the memory bandwidth, and
hashing takes extra time after each copy. So a batch that is long enough to justify
waking threads is shared with waiting helper threads. Each free thread takes the next
block, copies it, and hashes it while it is in the thread's cache. The copy releases the
interpreter lock, which requires numpy; without numpy, the caller copies alone. The
first long batch starts the threads, which load numpy for the next one.

Guarantee: when `copy` ends, for whatever reason, no thread accesses the caller's
memory, or the pool on its behalf, and no thread keeps a view of them.
"""

import importlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest

from infinistore.errors import StoreUnavailable
from infinistore.host import start_thread
from infinistore.protocol.effects import Exchange, Pause
from infinistore.sizes import in_units

PAUSE_BYTES = 4 * 1024 * 1024
"""How many bytes are copied before other tasks get their turn."""


async def copy_blocks(sources: Iterable[memoryview], targets: Iterable[memoryview], *, hash_targets: bool) -> list[int]:
    """Copy block by block; return the hashes of the copies if they are wanted.

    Each copy is hashed while it is in the cache.
    """
    checksums: list[int] = []
    copied = 0
    for source, target in zip(sources, targets, strict=True):
        if copied >= PAUSE_BYTES:
            copied = 0
            await Pause()
        target[:] = source
        if hash_targets:
            checksums.append(xxh3_64_intdigest(target))
        copied += len(source)
    return checksums


async def hash_blocks(views: Sequence[memoryview]) -> list[int]:
    """Return the hash of each block, computed in place."""
    checksums: list[int] = []
    hashed = 0
    for view in views:
        checksums.append(xxh3_64_intdigest(view))
        hashed += len(view)
        if hashed >= PAUSE_BYTES:
            hashed = 0
            await Pause()
    return checksums


LEAST_BATCH_BYTES = 8 * 1024 * 1024
"""The shortest batch that is shared. Copying it takes about a millisecond; waking a
thread takes a twentieth of that."""
# on average: passing on the interpreter lock takes as long as copying a short block
_LEAST_BLOCK_BYTES = 256 * 1024

_Block: TypeAlias = tuple[int, memoryview, memoryview]  # number, source, target
_Work: TypeAlias = Callable[[], None]


class CopyThreads:
    """Up to `threads` threads for a batch, including the caller's; started on demand.

    Any number of callers may copy at once.
    """

    def __init__(
        self, threads: int, *, least_batch_bytes: int = LEAST_BATCH_BYTES, least_block_bytes: int = _LEAST_BLOCK_BYTES
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most_helpers = min(threads, cores) - 1
        self._least_batch_bytes = least_batch_bytes
        self._least_block_bytes = least_block_bytes
        self._lock = threading.Lock()
        self.helpers: list[threading.Thread] = []
        """The helper threads that are running; callers are not included."""
        self.work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        """What free helpers do next; None ends one helper."""
        self.numpy: Any = None
        """The module that copies, once a helper has loaded it; None before."""

    def copy(
        self,
        sources: Iterable[memoryview],
        targets: Iterable[memoryview],
        sizes: Sequence[int],
        total_bytes: int,
        *,
        hash_targets: bool,
    ) -> Exchange[list[int]]:
        """Do as `copy_blocks` does, for blocks of these sizes, `total_bytes` in all."""
        if total_bytes < self._least_batch_bytes or not self._is_shared(len(sizes), total_bytes):
            return copy_blocks(sources, targets, hash_targets=hash_targets)
        blocks = list(zip(range(len(sizes)), sources, targets, strict=True))
        return self.copy_together(blocks, sizes, [0] * len(sizes) if hash_targets else [])

    def close(self) -> None:
        """End the threads and wait for them; later callers copy alone."""
        with self._lock:
            threads, self.helpers, self._most_helpers = self.helpers, [], 0
        for _ in threads:
            self.work.put(None)
        for thread in threads:
            thread.join()

    def let_go(self) -> None:
        """Forget the threads in a forked child, where they do not exist."""
        self._lock = threading.Lock()
        self.helpers, self._most_helpers = [], 0

    def _is_shared(self, count: int, total_bytes: int) -> bool:
        """Return whether the batch is long enough and the threads are ready.

        Starts the threads for later batches if they are not running.
        """
        if self._most_helpers < 1 or count < 2 or total_bytes < count * self._least_block_bytes:
            return False
        if not self.helpers:
            with self._lock:
                if not self.helpers:
                    self._start()
        return self.numpy is not None

    def _start(self) -> None:
        for _ in range(self._most_helpers):
            thread = threading.Thread(target=self._help, name="infinistore-copy", daemon=True)
            try:
                start_thread(thread)
            # the process cannot start more threads; it uses those it has
            except StoreUnavailable:
                self._most_helpers = len(self.helpers)
                return
            self.helpers.append(thread)

    def _help(self) -> None:
        try:
            self.numpy = importlib.import_module("numpy")
        except ImportError:
            return
        while (work := self.work.get()) is not None:
            work()

    async def copy_together(self, blocks: Sequence[_Block], sizes: Sequence[int], checksums: list[int]) -> list[int]:
        """Copy blocks with the helpers; return `checksums`, filled in."""
        helpers = len(self.helpers)
        for number, part in enumerate(_in_parts(blocks, sizes, self._least_batch_bytes, helpers + 1)):
            if number:
                # no thread is copying at this point, so the caller may be cancelled
                await Pause()
            _Share(part, self.numpy, checksums).copy(self.work, min(helpers, len(part) - 1))
        return checksums


class _Share:
    """Blocks to be copied by several threads: each thread takes the next one."""

    def __init__(self, blocks: Iterable[_Block], numpy: Any, checksums: list[int]) -> None:
        # a deque, so that no two threads pop the same block
        self._left = deque(blocks)
        self._numpy = numpy
        self._checksums = checksums  # of the whole batch; empty if none are wanted
        # one for each helper, which takes blocks only while it holds its lock
        self._at_work: list[threading.Lock] = []
        self._error: BaseException | None = None

    def copy(self, work: "queue.SimpleQueue[_Work | None]", helpers: int) -> None:
        """Call helpers, copy, and wait for the helpers that started in time.

        An error of any thread is raised after that.
        """
        try:
            try:
                self._at_work = [threading.Lock() for _ in range(helpers)]
                for lock in self._at_work:
                    work.put(partial(self._help, lock))
                self._copy_what_is_left()
            finally:
                self._end()
        # again, because Ctrl-C may arrive just before the inner `finally` begins
        finally:
            self._end()
        if self._error is not None:
            try:
                raise self._error
            finally:
                # its traceback refers to this frame
                self._error = None

    def _end(self) -> None:
        """Remove all remaining blocks, and wait for threads that are copying one.

        This completes whatever is raised meanwhile. Helpers that start later find no
        blocks.
        """
        try:
            self._left.clear()
            for lock in self._at_work:
                with lock:
                    pass
        # Ctrl-C has to wait: a thread is writing to this memory
        except BaseException:
            self._end()
            raise

    def _help(self, lock: threading.Lock) -> None:
        with lock:
            try:
                self._copy_what_is_left()
            except BaseException as error:  # noqa: BLE001  # the caller raises it
                self._left.clear()
                self._error = error

    def _copy_what_is_left(self) -> None:
        copy, array, byte = self._numpy.copyto, self._numpy.frombuffer, self._numpy.uint8
        while self._left:
            try:
                number, source, target = self._left.popleft()
            except IndexError:  # another thread took it
                return
            # numpy might repeat the source
            if len(source) != len(target):
                raise ValueError(f"{in_units(len(source))} cannot be copied to memory of {in_units(len(target))}")
            copy(array(target, byte), array(source, byte))
            if self._checksums:
                self._checksums[number] = xxh3_64_intdigest(target)


def _in_parts(
    blocks: Sequence[_Block], sizes: Sequence[int], least_bytes: int, least_count: int
) -> Iterator[Sequence[_Block]]:
    """Yield the blocks in parts that are as short as possible.

    Between two parts, other tasks get their turn.
    """
    first = part_bytes = 0
    for end, size in enumerate(sizes, 1):
        part_bytes += size
        if part_bytes >= least_bytes and end - first >= least_count <= len(blocks) - end:
            yield blocks[first:end]
            first, part_bytes = end, 0
    yield blocks[first:]
