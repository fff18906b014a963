"""What runs the jobs of the tier: given jobs, it answers with results. `DiskRunner` is
the interface; `ThreadRunner` runs them in threads, which hand in their results in one
list.

Whoever drives a tier submits its jobs, waits until `fd` is readable, and takes the
results. That works in an event loop and with poll(2) alike. `run_steps` does it for a
caller that waits until the end.

The threads are a disk's own, so that a slow disk holds up no other one. Readers read.
Writers do everything else: write, flush, allocate, hash, compress. So reads never wait
behind writes. How much is written beside reads, the tier decides. Whoever waits for
results is woken once for all that have come since. Measured on two virtual cores: 2.0
GB/s of reads beside a Trio server, where Trio's own threads give 1.6 to 1.8 GB/s and
io_uring, called in the loop, no more than these. One writer is often in a flush, so two
are too few: below a store, four wrote 2.3 GB/s in pieces of 2 MiB, two wrote 1.8, where
fio gave 2.5.

A disk needs several requests at a time to give what it can, and large ones, because
each costs some Python. So transfers are cut into pieces of up to `PIECE_BYTES`: whole
neighbouring blocks as a rule, which one call of the kernel gathers. A block that is
larger is cut.
"""

import errno
import logging
import math
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import attrs
from xxhash import xxh3_64_intdigest

from infinistore.disk.compression import checksum, compress
from infinistore.disk.jobs import (
    WAIT,
    Allocate,
    Compress,
    Flush,
    HashBlocks,
    Job,
    ReadInto,
    Replace,
    Result,
    Steps,
    Write,
    WriteSuperblock,
    aligned,
)
from infinistore.disk_io.direct_io import BounceBuffer
from infinistore.disk_io.files import DiskFiles
from infinistore.disk_io.folder import DiskFolder
from infinistore.errors import StoreUnavailable
from infinistore.host import FORKED, ONE, let_go_in_child, make_eventfd, start_thread
from infinistore.sizes import MIB


@attrs.frozen(kw_only=True)
class RunnerStatistics:
    """What a runner has to do for one disk."""

    direct: bool
    """Whether files are read and written past the page cache."""
    queued_reads: int
    """Reads that have not begun, in pieces."""
    queued_writes: int
    """The same of everything else."""
    running: int
    """What threads are at, hung ones included."""
    oldest_s: float
    """For how long the oldest of these has been running; 0 without any."""


class DiskRunner(ABC):
    """Runs jobs on disks, and answers each with one `Result`. Thread-safe."""

    fd: int
    """A descriptor that is readable while there are results to take."""

    @abstractmethod
    def add(self, volume: int, folder: DiskFolder) -> None:
        """Serve a disk from now on. The runner closes the folder at the end.

        Raises:
            StoreUnavailable: this process gets no more threads; the caller keeps the
                folder.
        """

    @abstractmethod
    def submit(self, jobs: Iterable[Job]) -> None:
        """Begin jobs. It neither blocks nor fails: what goes wrong is in their results.

        Jobs for a disk that is not served end in ENODEV.

        Raises:
            StoreUnavailable: the runner was closed, or the process is a forked child.
        """

    @abstractmethod
    def take(self) -> list[Result]:
        """Return the results since the last call; never blocks."""

    @abstractmethod
    def statistics(self) -> dict[int, RunnerStatistics]:
        """Return what there is to do now, by volume."""

    @abstractmethod
    def close(self, *, timeout_s: float) -> bool:
        """Serve no disk any longer: forget jobs that have not begun, wait for the
        others for `timeout_s`, and close the folders and `fd`. Idempotent.

        Returns False if some jobs hang. These still own the memory that they read or
        write, until the kernel returns, if it does.
        """


_Returned = TypeVar("_Returned")


def run_steps(steps: Steps[_Returned], runner: DiskRunner) -> _Returned:
    """Run steps that need only the results of their jobs; return what they return."""
    try:
        wanted = next(steps)
        while True:
            if wanted == WAIT:
                raise RuntimeError("these steps wait for something that nobody else does")
            assert not isinstance(wanted, str)
            wanted = steps.send(_run(wanted, runner))
    except StopIteration as end:
        returned: _Returned = end.value
        return returned


def _run(jobs: Sequence[Job], runner: DiskRunner) -> list[Result]:
    runner.submit(jobs)
    results: dict[Job, Result] = {}
    while len(results) < len(jobs):
        select.select([runner.fd], [], [])
        results.update((result.job, result) for result in runner.take())
    return [results[job] for job in jobs]


PIECE_BYTES: Final = 2 * MIB
_MAX_VIEWS: Final = 512
"""In a piece: half of IOV_MAX (1,024), because a view may take two vectors."""


class Transfer:
    """A read or write under way: what its pieces have done so far.

    Who calls `finish` sees to it that one thread does at a time.
    """

    def __init__(self, job: ReadInto | Write, piece_bytes: int) -> None:
        self.job = job
        self.checksums = [0] * len(job.hash_lengths) if isinstance(job, ReadInto) else []
        self.pieces = list(_cut(self, job, piece_bytes))
        self._left = len(self.pieces)
        self._errno = 0
        self._transferred_bytes = 0
        self._piece_bytes = piece_bytes

    def finish(self, errno: int, transferred_bytes: int) -> bool:
        """Count a piece as done; return whether it was the last one."""
        self._errno = self._errno or errno
        self._transferred_bytes += transferred_bytes
        self._left -= 1
        return not self._left

    def result(self) -> Result:
        """Return the result, after the last piece. It hashes blocks that were cut."""
        if self.checksums and not self._errno:
            self._hash_cut_blocks()
        return Result(self.job, self._errno, self._transferred_bytes, self.checksums)

    def _hash_cut_blocks(self) -> None:
        assert isinstance(self.job, ReadInto)
        start = 0
        for number, view in enumerate(self.job.views):
            if len(view) > self._piece_bytes and start + len(view) <= self._transferred_bytes:
                self.checksums[number] = checksum(self.job, number)
            start += aligned(len(view))


@attrs.frozen(eq=False)
class Piece:
    """A part of a transfer: neighbouring views from `offset` of the file on.

    `first` is the number of its first view in the job, or None for a part of a view.
    """

    transfer: Transfer
    offset: int
    views: Sequence[memoryview]
    length_bytes: int
    first: int | None

    def hash_blocks(self, transferred_bytes: int) -> None:
        """After a read: hash the whole views that were read in full, if wanted."""
        job = self.transfer.job
        if self.first is None or not self.transfer.checksums:
            return
        assert isinstance(job, ReadInto)
        start = 0
        for number, view in enumerate(self.views, self.first):
            if start + len(view) <= transferred_bytes:
                self.transfer.checksums[number] = checksum(job, number)
            start += aligned(len(view))


def _cut(transfer: Transfer, job: ReadInto | Write, piece_bytes: int) -> Iterator[Piece]:
    """Yield the pieces of a job, at least one, in the order of the file."""
    offset, gathered_bytes, first = job.offset, 0, 0
    for number, view in enumerate(job.views):
        length = aligned(len(view))
        if number > first and (gathered_bytes + length > piece_bytes or number - first == _MAX_VIEWS):
            yield Piece(transfer, offset, job.views[first:number], gathered_bytes, first)
            offset, gathered_bytes, first = offset + gathered_bytes, 0, number
        if len(view) > piece_bytes:
            for start in range(0, len(view), piece_bytes):
                part = view[start : start + piece_bytes]
                yield Piece(transfer, offset + start, [part], aligned(len(part)), None)
            offset, first = offset + length, number + 1
        else:
            gathered_bytes += length
    if first < len(job.views) or not job.views:
        yield Piece(transfer, offset, job.views[first:], gathered_bytes, first)


_log: Final = logging.getLogger("infinistore.disk")
_LOG_EVERY_S: Final = 10.0
"""How often a disk says at most that jobs fail."""

_Work: TypeAlias = Piece | HashBlocks | Compress | Flush | Allocate | Replace | WriteSuperblock


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
        """After `stop`: wait for the threads; False if one of them hangs."""
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

    def _carry_out(self, work: _Work, buffer: BounceBuffer) -> tuple[int, int, list[Any]]:
        """Return the error, the bytes that were transferred, and what was made: hashes,
        or compressed blocks."""
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

    def _do(self, work: _Work, buffer: BounceBuffer) -> tuple[int, int, list[Any]]:
        files = self._disk_files
        transferred_bytes = 0
        made: list[Any] = []
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
                made = [xxh3_64_intdigest(view) for view in views]
            case Compress(views=views):
                made = [compress(view) for view in views]
            case Flush(file=file):
                files.flush(file)
            case Allocate(file=file, length_bytes=length_bytes):
                files.allocate(file, length_bytes)
            case Replace(file=file, views=views):
                files.replace(file, views)
            case WriteSuperblock(copy=copy, data=data):
                files.write_superblock(copy, data)
        return 0, transferred_bytes, made

    def _finish(self, work: _Work, code: int, transferred_bytes: int, made: list[Any]) -> None:
        with self._lock:
            del self._running[threading.get_ident()]
        self._complete(work, code, transferred_bytes, made)

    def _complete(self, work: _Work, code: int, transferred_bytes: int, made: list[Any]) -> None:
        """Answer a job, if this was all of it, or the last piece."""
        if not isinstance(work, Piece):
            is_compressed = isinstance(work, Compress)
            self._answer(Result(work, code, compressed=made) if is_compressed else Result(work, code, checksums=made))
            return
        with self._lock:
            last = work.transfer.finish(code, transferred_bytes)
        if last:
            self._answer(work.transfer.result())


def _describe(work: _Work) -> str:
    job = work.transfer.job if isinstance(work, Piece) else work
    return f"{type(job).__name__} {getattr(job, 'file', '')}".rstrip()


_READERS: Final = 4
_WRITERS: Final = 4


class ThreadRunner(DiskRunner):
    """Runs jobs in `readers` and `writers` threads per disk.

    Transfers are cut into pieces of about `piece_bytes`.
    """

    def __init__(
        self,
        *,
        readers: int = _READERS,
        writers: int = _WRITERS,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.fd = make_eventfd()
        self._readers = readers
        self._writers = writers
        self._piece_bytes = piece_bytes
        self._disks: dict[int, DiskThreads] = {}
        self._lock = threading.Lock()
        self._results: list[Result] = []
        self._gone = ""
        """Why it takes no more jobs."""
        let_go_in_child(self)

    def add(self, volume: int, folder: DiskFolder) -> None:
        """Serve a disk from now on, see `DiskRunner`; start its threads."""
        self._check()
        self._disks[volume] = DiskThreads(
            f"infinistore-disk-{volume}",
            DiskFiles(folder),
            self._answer,
            readers=self._readers,
            writers=self._writers,
            piece_bytes=self._piece_bytes,
        )

    def submit(self, jobs: Iterable[Job]) -> None:
        """Begin jobs, see `DiskRunner`."""
        self._check()
        for job in jobs:
            disk = self._disks.get(job.volume)
            if disk is None:
                self._answer(Result(job, errno.ENODEV))
            else:
                disk.submit(job)

    def take(self) -> list[Result]:
        """Return the results since the last call."""
        self._check()
        with self._lock:
            if self._results:
                os.read(self.fd, len(ONE))
            results, self._results = self._results, []
        return results

    def statistics(self) -> dict[int, RunnerStatistics]:
        """Return what there is to do now, by volume."""
        self._check()
        return {volume: disk.statistics() for volume, disk in self._disks.items()}

    def close(self, *, timeout_s: float) -> bool:
        """Serve no disk any longer, see `DiskRunner`."""
        disks, self._disks = list(self._disks.values()), {}
        with self._lock:
            if self._gone:
                return True
            self._gone = "the disks of this store are closed"
            self._results = []
            os.close(self.fd)
        deadline = time.monotonic() + timeout_s
        for disk in disks:
            disk.stop()
        ended = [disk.join(timeout_s=max(0.0, deadline - time.monotonic())) for disk in disks]
        return all(ended)

    def let_go(self) -> None:
        """In a forked child, which lacks the threads: close the descriptor."""
        if not self._gone:
            self._gone = FORKED
            os.close(self.fd)

    def _check(self) -> None:
        if self._gone:
            raise StoreUnavailable(self._gone)

    def _answer(self, result: Result) -> None:
        with self._lock:
            if self._gone:
                return  # `fd` may be another file by now
            if not self._results:
                os.write(self.fd, ONE)
            self._results.append(result)
