"""Copying a long batch with more than one thread.

One thread copies as fast as one core can, which is less than the memory gives, and a hash takes its time behind each
copy. So what is long enough to be worth waking somebody up is shared with threads that wait for that: whoever is free
takes the next block, copies it, and hashes it while it is in its cache. The interpreter's lock is not held meanwhile,
which takes numpy; without it the caller copies alone. The first long batch has the threads made, which load numpy for
the next one.

Promises: when `copy` is over, however it ends, no thread touches the caller's memory, or the pool for it, and none
keeps a view of them.
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

from infinistore.client.copying import copy_blocks
from infinistore.protocol.effects import Exchange, Pause

__all__ = ["LEAST_BATCH_BYTES", "CopyThreads"]

LEAST_BATCH_BYTES = 8 * 1024 * 1024
"""The shortest batch that is shared. It takes about a millisecond, and waking a thread up a twentieth of that."""
_LEAST_BLOCK_BYTES = 256 * 1024  # on average: to pass on the interpreter's lock takes as long as to copy a short one

_Block: TypeAlias = tuple[int, memoryview, memoryview]  # number, source, target
_Work: TypeAlias = Callable[[], None]


class CopyThreads:
    """Up to `threads` threads for a batch, the caller's included; any number of callers at once. Made when needed."""

    def __init__(
        self, threads: int, *, least_batch_bytes: int = LEAST_BATCH_BYTES, least_block_bytes: int = _LEAST_BLOCK_BYTES
    ) -> None:
        self._most_helpers = min(threads, len(os.sched_getaffinity(0))) - 1
        self._least_batch_bytes = least_batch_bytes
        self._least_block_bytes = least_block_bytes
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._numpy: Any = None  # until a thread has loaded it

    def copy(
        self,
        sources: Iterable[memoryview],
        targets: Iterable[memoryview],
        sizes: Sequence[int],
        total_bytes: int,
        *,
        hash_targets: bool,
    ) -> Exchange[list[int]]:
        """As `copy_blocks`, of blocks of these sizes, `total_bytes` together."""
        if total_bytes < self._least_batch_bytes or not self._is_shared(len(sizes), total_bytes):
            return copy_blocks(sources, targets, hash_targets=hash_targets)
        blocks = list(zip(range(len(sizes)), sources, targets, strict=True))
        return self._copy_together(blocks, sizes, [0] * len(sizes) if hash_targets else [])

    def close(self) -> None:
        """Let the threads end, and wait for that; whoever copies from now on does it alone."""
        with self._lock:
            threads, self._threads, self._most_helpers = self._threads, [], 0
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            thread.join()

    def let_go(self) -> None:
        """In a forked child: the threads are not there."""
        self._lock = threading.Lock()
        self._threads, self._most_helpers = [], 0

    def _is_shared(self, count: int, total_bytes: int) -> bool:
        """Whether a batch is worth it, and the threads are there; if not, have them made, for another time."""
        if self._most_helpers < 1 or count < 2 or total_bytes < count * self._least_block_bytes:
            return False
        if not self._threads:
            with self._lock:
                if not self._threads:
                    self._start()
        return self._numpy is not None

    def _start(self) -> None:
        for _ in range(self._most_helpers):
            thread = threading.Thread(target=self._help, name="infinistore-copy", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process gets no more: it makes do with those that there are
                self._most_helpers = len(self._threads)
                return
            self._threads.append(thread)

    def _help(self) -> None:
        try:
            self._numpy = importlib.import_module("numpy")
        except ImportError:
            return
        while (work := self._work.get()) is not None:
            work()

    def _copy_together(
        self, blocks: Sequence[_Block], sizes: Sequence[int], checksums: list[int]
    ) -> Exchange[list[int]]:
        helpers = len(self._threads)
        for number, part in enumerate(_in_parts(blocks, sizes, self._least_batch_bytes, helpers + 1)):
            if number:
                yield Pause()  # nobody is at work here: the caller may give up
            _Share(part, self._numpy, checksums).copy(self._work, min(helpers, len(part) - 1))
        return checksums


class _Share:
    """Blocks to be copied by whoever is there: each thread takes the next one."""

    def __init__(self, blocks: Iterable[_Block], numpy: Any, checksums: list[int]) -> None:
        self._left = deque(blocks)  # a deque: no two threads pop the same
        self._numpy = numpy
        self._checksums = checksums  # of the whole batch; empty if none are wanted
        self._at_work: list[threading.Lock] = []  # one for each helper, which takes blocks only while it has it
        self._error: BaseException | None = None

    def copy(self, work: "queue.SimpleQueue[_Work | None]", helpers: int) -> None:
        """Have help called, copy, and wait for those who came in time. An error of any thread is raised after that."""
        try:
            try:
                self._at_work = [threading.Lock() for _ in range(helpers)]
                for lock in self._at_work:
                    work.put(partial(self._help, lock))
                self._copy_what_is_left()
            finally:
                self._end()
        finally:  # once more: Ctrl-C may have come just before that began
            self._end()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # whose traceback has this frame

    def _end(self) -> None:
        """Leave nothing to be taken, and wait for who has taken something, whatever is raised meanwhile.

        Who comes later finds nothing.
        """
        try:
            self._left.clear()
            for lock in self._at_work:
                with lock:
                    pass
        except BaseException:  # Ctrl-C has to wait: somebody writes to this memory
            self._end()
            raise

    def _help(self, lock: threading.Lock) -> None:
        with lock:
            try:
                self._copy_what_is_left()
            except BaseException as error:  # noqa: BLE001  # it is the caller's to raise
                self._left.clear()
                self._error = error

    def _copy_what_is_left(self) -> None:
        copy, array, byte = self._numpy.copyto, self._numpy.frombuffer, self._numpy.uint8
        while self._left:
            try:
                number, source, target = self._left.popleft()
            except IndexError:  # another thread had it
                return
            if len(source) != len(target):  # numpy might repeat the source
                raise ValueError(f"{len(source)} bytes cannot be copied to memory of {len(target)}")
            copy(array(target, byte), array(source, byte))
            if self._checksums:
                self._checksums[number] = xxh3_64_intdigest(target)


def _in_parts(
    blocks: Sequence[_Block], sizes: Sequence[int], least_bytes: int, least_count: int
) -> Iterator[Sequence[_Block]]:
    """Yield the blocks in parts that are as short as this allows, so that others have their turn between them."""
    first = part_bytes = 0
    for end, size in enumerate(sizes, 1):
        part_bytes += size
        if part_bytes >= least_bytes and end - first >= least_count <= len(blocks) - end:
            yield blocks[first:end]
            first, part_bytes = end, 0
    yield blocks[first:]
