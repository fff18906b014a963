"""Copying a long batch with more than one thread.

One thread copies as fast as one core can, which is less than the memory gives, and a hash takes its time behind each
copy. So what is long enough to be worth waking somebody up is shared with threads that wait for that: whoever is free
takes the next block, copies it, and hashes it while it is in its cache. The interpreter's lock is not held meanwhile,
which takes numpy; without it the caller copies alone.

Promises: when `copy` is over, however it ends, no thread touches the caller's memory, or the pool for it.
"""

import importlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from xxhash import xxh3_64_intdigest

from infinistore.client.copying import copy_blocks
from infinistore.protocol.connection import Exchange, Pause

__all__ = ["LEAST_BATCH_BYTES", "CopyThreads"]

LEAST_BATCH_BYTES = 8 * 1024 * 1024
"""The shortest batch that is shared. It takes about a millisecond, and waking a thread up a twentieth of that."""
_LEAST_BLOCK_BYTES = 256 * 1024  # on average: to pass on the interpreter's lock takes as long as to copy a short one


class CopyThreads:
    """Up to `threads` threads for a batch, the caller's included; any number of callers at once. Made when needed."""

    def __init__(self, threads: int) -> None:
        self._helpers = min(threads, len(os.sched_getaffinity(0))) - 1
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._shares: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._numpy: Any = None  # until a thread has loaded it

    def copy(
        self, sources: Iterable[memoryview], targets: Iterable[memoryview], *, hash_targets: bool
    ) -> Exchange[list[int]]:
        """As `copy_blocks`."""
        if self._helpers < 1:
            return (yield from copy_blocks(sources, targets, hash_targets=hash_targets))
        blocks = list(zip(sources, targets, strict=True))
        total = sum([len(target) for _, target in blocks])
        if total < max(LEAST_BATCH_BYTES, len(blocks) * _LEAST_BLOCK_BYTES) or not self._ready():
            sources, targets = zip(*blocks, strict=True) if blocks else ((), ())
            return (yield from copy_blocks(sources, targets, hash_targets=hash_targets))
        checksums: list[int] = []
        for number, some in enumerate(_in_pieces(blocks)):
            if number:
                yield Pause()
            share = _Share(some, self._numpy, hash_targets)
            for _ in range(self._helpers):
                self._shares.put(share)
            checksums += share.finish()
        return checksums

    def close(self) -> None:
        """Let the threads end."""
        with self._lock:
            threads, self._threads, self._helpers = self._threads, [], 0
        for _ in threads:
            self._shares.put(None)
        for thread in threads:
            thread.join()

    def let_go(self) -> None:
        """In a forked child: the threads are not there."""
        self._lock = threading.Lock()
        self._threads, self._helpers = [], 0

    def _ready(self) -> bool:
        """Whether the threads are there; if not, have them made, and ready for another time."""
        if self._numpy is None and not self._threads:
            with self._lock:
                if not self._threads:
                    self._threads = [
                        threading.Thread(target=self._help, name="infinistore-copy", daemon=True)
                        for _ in range(self._helpers)
                    ]
                    for thread in self._threads:
                        thread.start()
        return self._numpy is not None

    def _help(self) -> None:
        with suppress(ImportError):
            self._numpy = importlib.import_module("numpy")
        while (share := self._shares.get()) is not None:
            share.help()


class _Share:
    """Blocks to be copied by whoever is there."""

    def __init__(self, blocks: Sequence[tuple[memoryview, memoryview]], numpy: Any, hash_targets: bool) -> None:
        self._left: Iterator[tuple[int, tuple[memoryview, memoryview]]] = enumerate(blocks)  # each is taken once
        self._numpy = numpy
        self._checksums = [0] * len(blocks) if hash_targets else []
        self._error: BaseException | None = None
        self._helping = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._helpers = 0
        self._over = False

    def help(self) -> None:
        """Take part, unless it is over."""
        with self._lock:
            if self._over:
                return
            self._helpers += 1
        self._work()
        self._helping.release()

    def finish(self) -> list[int]:
        """Take part, until the last block has been copied; return the hashes. An error of any thread is raised."""
        self._work()
        with self._lock:
            self._over = True
        for _ in range(self._helpers):
            self._wait()
        if self._error is not None:
            raise self._error
        return self._checksums

    def _wait(self) -> None:
        while True:
            try:
                self._helping.acquire()
            except BaseException as error:  # noqa: BLE001  # Ctrl-C has to wait: somebody writes to this memory
                self._error = error
            else:
                return

    def _work(self) -> None:
        copy, array, byte = self._numpy.copyto, self._numpy.frombuffer, self._numpy.uint8
        try:
            for number, (source, target) in self._left:
                copy(array(target, byte), array(source, byte))
                if self._checksums:
                    self._checksums[number] = xxh3_64_intdigest(target)
        except BaseException as error:  # noqa: BLE001  # it is raised when nobody is at work any more
            self._error = error
            for _ in self._left:
                pass


def _in_pieces(blocks: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the blocks in pieces of about `LEAST_BATCH_BYTES`, none much shorter."""
    ends = list(accumulate(len(target) for _, target in blocks))
    first = 0
    for number, end in enumerate(ends):
        done = ends[first - 1] if first else 0
        if end - done >= LEAST_BATCH_BYTES and ends[-1] - end >= LEAST_BATCH_BYTES:
            yield blocks[first : number + 1]
            first = number + 1
    yield blocks[first:]
