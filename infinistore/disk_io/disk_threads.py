"""The threads of one disk, and what is queued for them.

Readers read. Writers do everything else: write, flush, allocate, hash. So reads never
wait behind writes. How much is written beside reads, the tier decides.
"""

import errno
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from xxhash import xxh3_64_intdigest

from infinistore.disk.jobs import Allocate, Flush, HashBlocks, Job, ReadInto, Replace, Result, Write, WriteSuperblock
from infinistore.disk_io.direct_io import BounceBuffer
from infinistore.disk_io.files import DiskFiles
from infinistore.disk_io.pieces import Piece, Transfer
from infinistore.disk_io.runner import RunnerStatistics
from infinistore.errors import StoreUnavailable
from infinistore.host import start_thread

__all__ = ["DiskThreads"]

_log: Final = logging.getLogger("infinistore.disk")
_LOG_EVERY_S: Final = 10.0
"""How often a disk says at most that jobs fail."""

_Work: TypeAlias = Piece | HashBlocks | Flush | Allocate | Replace | WriteSuperblock


class DiskThreads:
    """Runs the jobs of one disk, and gives each one's result to `answer`, in whichever
    thread has it.

    It starts `readers` and `writers`, which live until `stop`.

    Raises:
        StoreUnavailable: this process gets no more threads. The files are closed.
    """

    def __init__(
        self,
        name: str,
        files: DiskFiles,
        answer: Callable[[Result], None],
        *,
        readers: int,
        writers: int,
        piece_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk_files = files
        self._answer = answer
        self._piece_bytes = piece_bytes
        self._clock = clock
        lock = threading.Lock()
        self._readable = threading.Condition(lock)
        self._writable = threading.Condition(lock)
        self._lock = lock
        self._reads: deque[_Work] = deque()
        self._writes: deque[_Work] = deque()
        self._running: dict[int, tuple[float, _Work]] = {}
        """By thread: since when it is at what."""
        self._failures = 0
        """How many jobs have failed since the last line in the log."""
        self._silent_until = -math.inf
        self._closing = False
        self._alive = readers + writers
        self._threads: list[threading.Thread] = []
        kinds = [("read", self._reads, self._readable)] * readers + [("write", self._writes, self._writable)] * writers
        for number, (what, *source) in enumerate(kinds):
            thread = threading.Thread(target=self._run, args=source, name=f"{name}-{what}-{number}", daemon=True)
            try:
                start_thread(thread)
            except StoreUnavailable:
                self.stop()
                for started in self._threads:
                    started.join()
                files.close()
                raise
            self._threads.append(thread)

    def submit(self, job: Job) -> None:
        """Queue a job; after `stop`, it ends in ENODEV."""
        if isinstance(job, ReadInto):
            self._queue(self._reads, self._readable, Transfer(job, self._piece_bytes).pieces)
        elif isinstance(job, Write):
            self._queue(self._writes, self._writable, Transfer(job, self._piece_bytes).pieces)
        else:
            self._queue(self._writes, self._writable, [job])

    def statistics(self) -> RunnerStatistics:
        """Return what there is to do."""
        with self._lock:
            since = min((since for since, _ in self._running.values()), default=None)
            return RunnerStatistics(
                direct=self._disk_files.folder.direct,
                queued_reads=len(self._reads),
                queued_writes=len(self._writes),
                running=len(self._running),
                oldest_s=0.0 if since is None else self._clock() - since,
            )

    def stop(self) -> None:
        """Begin to close: what has not begun ends in ENODEV."""
        with self._lock:
            self._closing = True
            dropped = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._readable.notify_all()
            self._writable.notify_all()
        for work in dropped:
            self._complete(work, errno.ENODEV, 0, [])

    def join(self, *, timeout_s: float) -> bool:
        """After `stop`: wait for the threads. The last one closes the files. Returns
        False if one of them hangs.
        """
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        with self._lock:
            hanging = [_describe(work) for _, work in self._running.values()]
        for what in hanging:
            _log.warning(
                "a disk does not answer: a thread is left behind, and the folder stays locked",
                extra={"disk": str(self._disk_files.folder.path), "waits_for": what, "waited_s": timeout_s},
            )
        return not hanging

    def _queue(self, queue: deque[_Work], filled: threading.Condition, work: Sequence[_Work]) -> None:
        with self._lock:
            closing = self._closing
            if not closing:
                queue.extend(work)
                filled.notify(len(work))
        if closing:
            for one in work:
                self._complete(one, errno.ENODEV, 0, [])

    def _run(self, queue: deque[_Work], filled: threading.Condition) -> None:
        buffer = BounceBuffer()
        while (work := self._next(queue, filled)) is not None:
            self._finish(work, *self._carry_out(work, buffer))
            buffer.let_go()
            del work  # and with it the memory that it read or wrote
        with self._lock:
            self._alive -= 1
            last = not self._alive
        if last:
            self._disk_files.close()

    def _next(self, queue: deque[_Work], filled: threading.Condition) -> _Work | None:
        """Wait for work; None when closing."""
        with self._lock:
            while not queue and not self._closing:
                filled.wait()
            if not queue:
                return None
            work = queue.popleft()
            self._running[threading.get_ident()] = (self._clock(), work)
            return work

    def _carry_out(self, work: _Work, buffer: BounceBuffer) -> tuple[int, int, list[int]]:
        """Return the error, the bytes that were transferred, and hashes."""
        try:
            return self._do(work, buffer)
        except OSError as error:
            self._log_failure(work, error.strerror or str(error))
            return error.errno or errno.EIO, 0, []
        except MemoryError:
            self._log_failure(work, os.strerror(errno.ENOMEM))
            return errno.ENOMEM, 0, []
        except Exception:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            _log.exception("a job of a disk failed", extra={"disk": str(self._disk_files.folder.path)})
            return errno.EIO, 0, []

    def _log_failure(self, work: _Work, problem: str) -> None:
        """Log the first failure, and once in a while how many there were since."""
        with self._lock:
            self._failures += 1
            now = self._clock()
            if now < self._silent_until:
                return
            self._silent_until = now + _LOG_EVERY_S
            failures, self._failures = self._failures, 0
        fields = {"disk": str(self._disk_files.folder.path), "job": _describe(work), "problem": problem}
        _log.warning("a job of a disk failed", extra=fields | ({"left_out": failures - 1} if failures > 1 else {}))

    def _do(self, work: _Work, buffer: BounceBuffer) -> tuple[int, int, list[int]]:
        files = self._disk_files
        transferred_bytes = 0
        checksums: list[int] = []
        match work:
            case Piece(transfer=Transfer(job=ReadInto(file=file))):
                transferred_bytes = files.read(file, work.offset, buffer.vectors(work.views))
                buffer.empty(transferred_bytes)
                work.hash_blocks(transferred_bytes)
            case Piece(transfer=Transfer(job=Write(file=file))):
                vectors = buffer.vectors(work.views)
                buffer.fill()
                transferred_bytes = files.write(file, work.offset, vectors)
            case HashBlocks(views=views):
                checksums = [xxh3_64_intdigest(view) for view in views]
            case Flush(file=file):
                files.flush(file)
            case Allocate(file=file, length_bytes=length_bytes):
                files.allocate(file, length_bytes)
            case Replace(file=file, views=views):
                files.replace(file, views)
            case WriteSuperblock(copy=copy, data=data):
                files.write_superblock(copy, data)
        return 0, transferred_bytes, checksums

    def _finish(self, work: _Work, code: int, transferred_bytes: int, checksums: list[int]) -> None:
        with self._lock:
            del self._running[threading.get_ident()]
        self._complete(work, code, transferred_bytes, checksums)

    def _complete(self, work: _Work, code: int, transferred_bytes: int, checksums: list[int]) -> None:
        """Answer a job, if this was all of it, or the last piece."""
        if not isinstance(work, Piece):
            self._answer(Result(work, code, 0, checksums))
            return
        with self._lock:
            last = work.transfer.finish(code, transferred_bytes)
        if last:
            self._answer(work.transfer.result())


def _describe(work: _Work) -> str:
    job = work.transfer.job if isinstance(work, Piece) else work
    return f"{type(job).__name__} {getattr(job, 'file', '')}".rstrip()
