"""`LayerLoader` and `LayerWriter`: load and store a prompt's KV cache layer by layer,
during computation.

Each has one background thread that carries out jobs in order, several in one batch.
Pending jobs are limited in bytes. The thread runs at a low priority, so that the
computation comes first on a busy machine. It lives from `start` to `close`, which joins
it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.host import start_thread
from infinistore.kept_errors import KeptError
from infinistore.sizes import in_units
from infinistore.tensors.blocking_transfers import get_blocks, put_blocks
from infinistore.tensors.devices import Staging, Transfer, make_transfer
from infinistore.tensors.tensor_blocks import Blocks, blocks_to_read, blocks_to_write

if TYPE_CHECKING:
    import torch


class Job:
    """A unit of work of `total_bytes`.

    Once it is `done`, `failure` says why it failed, or is None.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.done = False
        self.failure: KeptError | None = None


_Job = TypeVar("_Job", bound=Job)


class JobQueue(Generic[_Job]):
    """Carries out jobs in the order in which they were submitted. Thread-safe.

    `work` gets the jobs of one batch, and may set the failure of a job. If it raises,
    each job is tried alone, unless the store is away. `failed` gets the jobs that one
    error has failed. A batch has at most `max_batch_bytes`, or one job. `belongs` may
    keep a job out of the batch of others.

    With `linger_s`, jobs wait up to that many seconds for others, until a quarter of a
    batch is there or somebody waits for them. Each batch takes the interpreter's lock
    and wakes the store, whatever its size, so a few are better than many.
    """

    def __init__(
        self,
        store: BlockingStore,
        work: Callable[[list[_Job]], None],
        *,
        name: str,
        max_pending_bytes: int,
        max_batch_bytes: int,
        deadline_s: float,
        nice: int,
        linger_s: float = 0.0,
        belongs: Callable[[list[_Job], _Job], bool] = lambda batch, job: True,
        failed: Callable[[list[_Job], KeptError], None] = lambda batch, failure: None,
    ) -> None:
        if not isinstance(store, BlockingStore):
            raise TypeError(f"a {name} needs a store of infinistore.blocking.open_store, not {type(store).__name__}")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s must be a number of seconds above 0, not {deadline_s!r}")
        if not isinstance(max_pending_bytes, int) or max_pending_bytes < 1:
            raise ValueError(f"max_pending_bytes must be a whole number above 0, not {max_pending_bytes!r}")
        if not isinstance(nice, int) or not 0 <= nice <= 19:
            raise ValueError(f"nice must be a whole number from 0 to 19, not {nice!r}")
        if not 0 <= linger_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"linger_s must be a number of seconds, 0 or more, not {linger_s!r}")
        self.max_pending_bytes = max_pending_bytes
        self.staging = Staging(store)
        self.pending_bytes = 0
        self.submitted = 0
        self.completed = 0
        self._work = work
        self._name = name
        self._max_batch_bytes = max_batch_bytes
        self._nice = nice
        self._linger_s = linger_s
        self._belongs = belongs
        self._failed = failed
        self._deadline_s = deadline_s
        self._queue: deque[_Job] = deque()
        self._queued_bytes = 0
        self._hurry = False
        self._lock = threading.Lock()
        self._work_to_do = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = True
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread, once.

        Raises:
            StoreUnavailable: this process gets no more threads.
        """
        if self._thread is not None:
            raise RuntimeError(f"the {self._name} was entered twice; make another one")
        # A daemon: who forgets to leave the block must not find that the process does
        # not end.
        thread = threading.Thread(target=self._run, name=f"infinistore-{self._name}", daemon=True)
        self._closed = False
        try:
            start_thread(thread)
        except StoreUnavailable:
            self._closed = True
            raise
        self._thread = thread

    def submit(self, job: _Job, *, wait: bool) -> bool:
        """Queue a job. If that exceeds the limit, wait for space, or return False.

        Raises:
            ValueError: the job alone exceeds the limit.
            DeadlineExceeded: there was no space in time. The job was not queued.
            StoreUnavailable: the process was forked, and the thread is in the parent.
        """
        if job.total_bytes > self.max_pending_bytes:
            raise ValueError(
                f"{in_units(job.total_bytes)} at a time are more than max_pending_bytes"
                f" ({in_units(self.max_pending_bytes)}): raise it, or give fewer blocks at a time"
            )
        self._check_fork()
        with self._lock:
            may_wait_s = self._deadline_s if wait else 0.0
            if not self._has_room(job) and not self._wait(lambda: self._closed or self._has_room(job), may_wait_s):
                if not wait:
                    return False
                raise DeadlineExceeded(
                    f"no room for {in_units(job.total_bytes)} within {may_wait_s:g} s:"
                    f" {in_units(self.pending_bytes)} of {in_units(self.max_pending_bytes)} are pending;"
                    " is the store slower than the computation?"
                )
            self._check_open()
            self.pending_bytes += job.total_bytes
            self.submitted += 1
            self._queue.append(job)
            self._queued_bytes += job.total_bytes
            if len(self._queue) == 1 or self._is_worth_a_batch():  # else the thread has been told, and lingers
                self._work_to_do.notify()
        return True

    def wait(self, job: _Job, timeout_s: float | None) -> None:
        """Wait until a job is done, or raise `DeadlineExceeded`."""
        if job.done:
            return
        self._check_fork()
        with self._lock:
            if not self._wait(lambda: job.done, timeout_s):
                raise DeadlineExceeded(f"not done within {timeout_s:g} s; its tensor is still in use")

    def flush(self, timeout_s: float | None) -> None:
        """Wait until everything submitted before is done.

        Raises:
            DeadlineExceeded: it is not done in time.
        """
        self._check_fork()
        with self._lock:
            last = self.submitted
            if not self._wait(lambda: self.completed >= last, timeout_s):
                raise DeadlineExceeded(
                    f"{last - self.completed} of {last} are not done within {timeout_s:g} s; their tensors are still in"
                    " use"
                )

    def close(self, *, drain: bool) -> None:
        """End the thread and wait for it. Idempotent.

        Without `drain`, jobs that have not begun fail.
        """
        if self._thread is not None and os.getpid() == self._pid:
            with self._lock:
                self._closed = True
                if not drain:
                    while self._queue:
                        job = self._take()
                        job.failure = KeptError(StoreUnavailable(f"the {self._name} was left before this was done"))
                        self._finish([job])
                self._work_to_do.notify()
                self._progress.notify_all()
            self._thread.join()
        self.staging.close()

    def _run(self) -> None:
        me = threading.get_native_id()  # Linux has a priority for each thread
        with suppress(OSError):  # where it may not be changed, this thread runs as others do
            os.setpriority(os.PRIO_PROCESS, me, max(self._nice, os.getpriority(os.PRIO_PROCESS, me)))
        while batch := self._next_batch():
            self._carry_out(batch)
            with self._lock:
                self._finish(batch)
                self._progress.notify_all()

    def _carry_out(self, batch: list[_Job]) -> None:
        """Do the jobs in one batch or, if that fails, one by one."""
        try:
            self._work(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the job's owner looks
            if len(batch) > 1 and not isinstance(error, StoreUnavailable | DeadlineExceeded):
                for job in batch:
                    self._carry_out([job])
                return
            failure = KeptError(error)
            for job in batch:
                job.failure = failure
            self._failed(batch, failure)

    def _next_batch(self) -> list[_Job]:
        with self._lock:
            while not self._queue and not self._closed:
                self._hurry = False
                self._work_to_do.wait()
            if self._linger_s:
                until = time.monotonic() + self._linger_s
                while not self._is_worth_a_batch() and (left_s := until - time.monotonic()) > 0:
                    self._work_to_do.wait(left_s)
            batch: list[_Job] = []
            batch_bytes = 0
            while self._queue:
                job = self._queue[0]
                if batch and (batch_bytes + job.total_bytes > self._max_batch_bytes or not self._belongs(batch, job)):
                    break
                batch.append(self._take())
                batch_bytes += job.total_bytes
            return batch

    def _take(self) -> _Job:
        job = self._queue.popleft()
        self._queued_bytes -= job.total_bytes
        return job

    def _is_worth_a_batch(self) -> bool:
        return self._closed or self._hurry or 4 * self._queued_bytes >= self._max_batch_bytes

    def _finish(self, batch: list[_Job]) -> None:
        for job in batch:
            job.done = True
            self.pending_bytes -= job.total_bytes
            self.completed += 1

    def _has_room(self, job: _Job) -> bool:
        return self.pending_bytes + job.total_bytes <= self.max_pending_bytes

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for progress, in haste."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            if not self._hurry:
                self._hurry = True
                self._work_to_do.notify()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self._progress.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))
        return True

    def _check_open(self) -> None:
        if self._closed:
            reason = "was left already" if self._thread is not None else "was not entered yet: use `with`"
            raise RuntimeError(f"the {self._name} {reason}")

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:  # and the lock may be held by a thread that is not here
            raise StoreUnavailable(f"this {self._name} was made before a fork and lives on in the parent")


_LOADED_AT_ONCE_BYTES = 4 * 1024 * 1024


class _Load(Job):
    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer.blocks.total_bytes)
        self.transfer = transfer


class LayerLoader:
    """Loads blocks in a background thread: `with LayerLoader(store) as loader`.

    `load` returns at once. `wait(layer)` returns when all loads of the layer are in
    their tensors, or raises their error. Layers are loaded in the order of `load`. The
    end of the `with` statement discards the loads that have not started, and waits for
    the others. Any thread may load and wait.

    Args:
        store: a blocking store, which must stay open longer than the loader.
        max_pending_bytes: limit of bytes that are requested and not yet loaded; at the
            limit, `load` waits.
        deadline_s: how long `load` waits for that, in seconds.
        nice: nice value of the thread, 0 to 19, as in nice(1).
    """

    def __init__(
        self,
        store: BlockingStore,
        *,
        max_pending_bytes: int = 1024 * 1024 * 1024,
        deadline_s: float = 30.0,
        nice: int = 0,
    ) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._layers: dict[Hashable, list[_Load]] = {}
        self._queue = JobQueue(
            store,
            self._load_batch,
            name="LayerLoader",
            max_pending_bytes=max_pending_bytes,
            max_batch_bytes=_LOADED_AT_ONCE_BYTES,
            deadline_s=deadline_s,
            nice=nice,
        )

    def __enter__(self) -> Self:
        self._queue.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Discard the loads that have not started, and end the thread. Idempotent.

        No tensor is written afterwards. For callers that cannot use `with`.
        """
        self._queue.close(drain=False)

    def load(self, layer: Hashable, tensor: "torch.Tensor", blocks: Blocks, block_size_bytes: int) -> None:
        """Load blocks into a tensor in the background. Returns at once.

        `layer` is any name; call `load` several times if a layer has several tensors.
        The other arguments are those of `read_blocks`. Do not use the blocks' part of
        the tensor before `wait(layer)`. The loader keeps the tensor alive.

        Raises:
            DeadlineExceeded: the loader was full for `deadline_s`. Nothing is read.
            ValueError, TypeError: as in `read_blocks`, or more bytes than
                `max_pending_bytes`. Nothing is read.
        """
        job = _Load(make_transfer(self._store, blocks_to_read(tensor, blocks, block_size_bytes)))
        self._queue.submit(job, wait=True)
        with self._lock:
            self._layers.setdefault(layer, []).append(job)

    def wait(self, layer: Hashable, timeout_s: float | None = None) -> None:
        """Wait until all blocks of a layer are in their tensors. Then its name is free.

        Raises:
            BlocksMissing: some blocks do not exist: those of its `keys`. Their part of
                the tensor is undefined.
            BlockSizeMismatch, ChecksumMismatch, StoreUnavailable and others: as in
                `read_blocks`.
            DeadlineExceeded: not within `timeout_s` seconds; the load goes on, and
                `wait` can be called again.
            KeyError: nothing was loaded for this layer.
        """
        with self._lock:
            if layer not in self._layers:
                raise KeyError(f"nothing was loaded for layer {layer!r}, or it has been waited for")
            jobs = list(self._layers[layer])
        for job in jobs:
            self._queue.wait(job, timeout_s)
        with self._lock:
            self._layers.pop(layer, None)
        for job in jobs:
            if job.failure is not None:
                raise job.failure.again()

    def _load_batch(self, jobs: list[_Load]) -> None:
        problems = get_blocks(self._store, [job.transfer for job in jobs], self._queue.staging)
        for job, problem in zip(jobs, problems, strict=True):
            job.failure = problem


_WRITTEN_AT_ONCE_BYTES = 16 * 1024 * 1024


@attrs.frozen(kw_only=True)
class LayerWriterStatistics:
    """The counts of a writer so far."""

    pending_writes: int
    pending_bytes: int
    stored_writes: int
    stored_bytes: int
    failed_writes: int
    dropped_writes: int
    dropped_bytes: int
    puts: int
    """The number of batches; fewer than the writes if writes were combined."""


class Ticket(Job):
    """The state of one write.

    The blocks' part of the tensor must not change until the ticket is `done`.
    """

    def __init__(self, writer: "LayerWriter", transfer: Transfer, ttl_s: float | None) -> None:
        super().__init__(transfer.blocks.total_bytes)
        self.ttl_s = ttl_s
        self.dropped = False
        self.transfer: Transfer | None = transfer
        self._writer = writer

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the blocks are stored. False if a full writer dropped the write.

        Raises:
            DeadlineExceeded: not stored within `timeout_s` seconds; the write goes on.
            OutOfMemory, ValueTooLarge, LimitExceeded: the blocks were not stored.
            StoreUnavailable, DeadlineExceeded: the blocks may have been stored.
        """
        self._writer._queue.wait(self, timeout_s)
        if self.failure is not None:
            self._writer._told(self.failure)
            raise self.failure.again()
        return not self.dropped


class LayerWriter:
    """Stores blocks in a background thread: `with LayerWriter(store) as writer`.

    `write` returns a ticket at once; `flush` waits for all writes. Writes are stored in
    order; waiting writes are combined into one batch. The ticket's `wait` raises the
    error of a write. If nothing waits for the ticket, the next `write` or `flush`
    raises the error once. The writer continues with later writes. The end of the `with`
    statement waits for all writes and raises what `flush` would raise; an exception
    discards the writes that have not started. Any thread may write.

    Args:
        store: a blocking store, which must stay open longer than the writer.
        max_pending_bytes: limit of waiting bytes. The tensors are not copied, so up to
            this much of them must not change.
        when_full: at that limit, "block" waits in `write`, "drop" drops the write and
            counts it.
        deadline_s: how long `write` waits for space, in seconds.
        nice: nice value of the thread, 0 to 19, as in nice(1).
        linger_s: how long less than 4 MiB wait for further writes to share a put, in
            seconds. The cost of a put to the computation hardly depends on its size.
            Waiting for a write ends the delay.
        ttl_s: the blocks end after so many seconds, as of `put`, unless `write` says
            otherwise; None: not at all.
    """

    def __init__(
        self,
        store: BlockingStore,
        *,
        max_pending_bytes: int = 256 * 1024 * 1024,
        when_full: Literal["block", "drop"] = "block",
        deadline_s: float = 30.0,
        nice: int = 10,
        linger_s: float = 0.05,
        ttl_s: float | None = None,
    ) -> None:
        if when_full not in ("block", "drop"):
            raise ValueError(f"when_full must be 'block' or 'drop', not {when_full!r}")
        self._store = store
        self._block = when_full == "block"
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._unreported: KeptError | None = None
        self._stored_writes = self._stored_bytes = self._failed_writes = self._puts = 0
        self._dropped_writes = self._dropped_bytes = 0
        self._queue = JobQueue(
            store,
            self._store_batch,
            name="LayerWriter",
            max_pending_bytes=max_pending_bytes,
            max_batch_bytes=_WRITTEN_AT_ONCE_BYTES,
            deadline_s=deadline_s,
            nice=nice,
            linger_s=linger_s,
            belongs=_fits,
            failed=self._failed,
        )

    def __enter__(self) -> Self:
        self._queue.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._queue.close(drain=kind is None)
        if kind is None:
            self._report()

    def close(self) -> None:
        """Wait for all writes and end the thread. Idempotent; raises as `flush`.

        For callers that cannot use `with`.
        """
        self._queue.close(drain=True)
        self._report()

    def write(
        self, tensor: "torch.Tensor", blocks: Blocks, block_size_bytes: int, *, ttl_s: float | None = None
    ) -> Ticket:
        """Store blocks of a tensor in the background. Returns at once.

        The arguments are those of `write_blocks`; `ttl_s` takes precedence over that of
        the writer. The blocks' part of the tensor must not change until the ticket is
        done. The writer keeps the tensor alive.

        Raises:
            DeadlineExceeded: the writer was full for `deadline_s`. Nothing of this
                write is stored.
            ValueError, TypeError: as in `write_blocks`, or more bytes than
                `max_pending_bytes`. Nothing is stored.
            OutOfMemory, StoreUnavailable and others: an earlier write failed, and its
                error was not raised yet. Nothing of this write is stored; call again to
                continue.
        """
        self._report()
        transfer = make_transfer(self._store, blocks_to_write(tensor, blocks, block_size_bytes))
        ticket = Ticket(self, transfer, self._ttl_s if ttl_s is None else ttl_s)
        if not self._queue.submit(ticket, wait=self._block):
            ticket.dropped = ticket.done = True
            ticket.transfer = None
            with self._lock:
                self._dropped_writes += 1
                self._dropped_bytes += ticket.total_bytes
        return ticket

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all earlier writes are stored.

        Raises:
            DeadlineExceeded: not within `timeout_s` seconds; the writes go on.
            OutOfMemory, StoreUnavailable and others: a write failed, and its error was
                not raised yet.
        """
        self._queue.flush(timeout_s)
        self._report()

    def statistics(self) -> LayerWriterStatistics:
        """Return the counts so far."""
        queue = self._queue
        return LayerWriterStatistics(
            pending_writes=queue.submitted - queue.completed,
            pending_bytes=queue.pending_bytes,
            stored_writes=self._stored_writes,
            stored_bytes=self._stored_bytes,
            failed_writes=self._failed_writes,
            dropped_writes=self._dropped_writes,
            dropped_bytes=self._dropped_bytes,
            puts=self._puts,
        )

    def _report(self) -> None:
        """Raise an error that was not raised yet."""
        with self._lock:
            failure, self._unreported = self._unreported, None
        if failure is not None:
            raise failure.again()

    def _told(self, failure: KeptError) -> None:
        with self._lock:
            if self._unreported is failure:
                self._unreported = None

    def _store_batch(self, tickets: list[Ticket]) -> None:
        transfers = [ticket.transfer for ticket in tickets if ticket.transfer is not None]
        put_blocks(self._store, transfers, self._queue.staging, tickets[0].ttl_s)
        self._puts += 1
        for ticket in tickets:
            ticket.transfer = None  # the tensor may go
            self._stored_writes += 1
            self._stored_bytes += ticket.total_bytes

    def _failed(self, tickets: list[Ticket], failure: KeptError) -> None:
        self._failed_writes += len(tickets)
        for ticket in tickets:
            ticket.transfer = None
        with self._lock:
            self._unreported = self._unreported or failure


def _fits(batch: list[Ticket], ticket: Ticket) -> bool:
    """A put has one time, and each key once. A later write of the same key is put
    later, and wins."""
    assert ticket.transfer is not None
    keys = set(ticket.transfer.blocks.keys)
    return all(
        other.ttl_s == ticket.ttl_s and (other.transfer is None or keys.isdisjoint(other.transfer.blocks.keys))
        for other in batch
    )
