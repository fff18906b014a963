"""One background thread that carries out jobs in order, several in one batch.

Pending jobs are limited in bytes. The thread runs at a low priority, so that the
computation comes first on a busy machine. It lives from `start` to `close`, which joins
it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.host import start_thread
from infinistore.kept_errors import KeptError
from infinistore.sizes import in_units

__all__ = ["Background", "Job"]


class Job:
    """A unit of work of `total_bytes`.

    Once it is `done`, `failure` says why it failed, or is None.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.done = False
        self.failure: KeptError | None = None


_Job = TypeVar("_Job", bound=Job)


class Background(Generic[_Job]):
    """Carries out jobs in the order in which they were submitted. Thread-safe.

    `work` gets the jobs of one batch and sets the failure of each job that failed. If
    it raises, all of them have failed. A batch has at most `max_batch_bytes`, or one
    job. `belongs` may keep a job out of the batch of others.

    With `linger_s`, jobs wait up to that many seconds for others, until a quarter of a
    batch is there or somebody waits for them. Each batch takes the interpreter's lock
    and wakes the store, whatever its size, so a few are better than many.
    """

    def __init__(
        self,
        work: Callable[[list[_Job]], None],
        *,
        name: str,
        max_pending_bytes: int,
        max_batch_bytes: int,
        nice: int,
        linger_s: float = 0.0,
        belongs: Callable[[list[_Job], _Job], bool] = lambda batch, job: True,
    ) -> None:
        if not isinstance(max_pending_bytes, int) or max_pending_bytes < 1:
            raise ValueError(f"max_pending_bytes must be a whole number above 0, not {max_pending_bytes!r}")
        if not isinstance(nice, int) or not 0 <= nice <= 19:
            raise ValueError(f"nice must be a whole number from 0 to 19, not {nice!r}")
        if not 0 <= linger_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"linger_s must be a number of seconds, 0 or more, not {linger_s!r}")
        self.max_pending_bytes = max_pending_bytes
        self.pending_bytes = 0
        self.submitted = 0
        self.completed = 0
        self._work = work
        self._name = name
        self._max_batch_bytes = max_batch_bytes
        self._nice = nice
        self._linger_s = linger_s
        self._belongs = belongs
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

    def submit(self, job: _Job, *, wait: bool, timeout_s: float | None) -> bool:
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
            may_wait_s = timeout_s if wait else 0
            if not self._has_room(job) and not self._wait(lambda: self._closed or self._has_room(job), may_wait_s):
                if not wait:
                    return False
                raise DeadlineExceeded(
                    f"no room for {in_units(job.total_bytes)} within {timeout_s:g} s:"
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
        if self._thread is None or os.getpid() != self._pid:
            return
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

    def _run(self) -> None:
        me = threading.get_native_id()  # Linux has a priority for each thread
        with suppress(OSError):  # where it may not be changed, this thread runs as others do
            os.setpriority(os.PRIO_PROCESS, me, max(self._nice, os.getpriority(os.PRIO_PROCESS, me)))
        while batch := self._next_batch():
            try:
                self._work(batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to whoever submitted the jobs
                failure = KeptError(error)
                for job in batch:
                    job.failure = failure
            with self._lock:
                self._finish(batch)
                self._progress.notify_all()

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
