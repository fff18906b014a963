"""Several requests to several stores at the same time: under Trio, asyncio and threads.

This is what `Together` asks for. An outcome is what a part returned, or a `KeptError`
of an error of this package; any other error ends the others, and is raised. Whoever is
cancelled or interrupted leaves no part behind.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from infinistore.client.connection.effects import Outcome, Part
from infinistore.client.drivers.races.asyncio_race import asyncio_race
from infinistore.client.drivers.races.blocking_races import BlockingRaces
from infinistore.client.drivers.races.trio_race import trio_race
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.host import start_thread
from infinistore.kept_errors import KeptError

__all__ = ["PartThreads", "asyncio_at_once", "trio_at_once"]

_MOST_THREADS: Final = 32
_IDLE_S: Final = 10.0
"""How long a thread waits for another part before it ends."""


async def _outcome(part: Part) -> Outcome:
    try:
        return await part.store._call(part.request, part.within_s)
    except InfiniStoreException as error:
        return KeptError(error)


async def _trio_outcome(part: Part) -> Outcome:
    return await (_outcome(part) if part.hedge is None else trio_race(part, _outcome, trio_at_once))


async def _asyncio_outcome(part: Part) -> Outcome:
    return await (_outcome(part) if part.hedge is None else asyncio_race(part, _outcome, asyncio_at_once))


async def trio_at_once(parts: Sequence[Part]) -> list[Outcome]:
    """Carry out parts at the same time, under Trio; return their outcomes in order."""
    if len(parts) == 1:
        return [await _trio_outcome(parts[0])]
    if not parts:
        await trio.lowlevel.checkpoint()
    outcomes: list[Outcome] = [None] * len(parts)

    async def carry_out(place: int, part: Part) -> None:
        outcomes[place] = await _trio_outcome(part)

    async with trio.open_nursery() as nursery:
        for place, part in enumerate(parts):
            nursery.start_soon(carry_out, place, part)
    return outcomes


async def asyncio_at_once(parts: Sequence[Part]) -> list[Outcome]:
    """Carry out parts at the same time, under asyncio; return their outcomes in
    order.
    """
    if len(parts) == 1:
        return [await _asyncio_outcome(parts[0])]
    if not parts:
        await asyncio.sleep(0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_asyncio_outcome(part)) for part in parts]
    return [task.result() for task in tasks]


class _Job:
    """Something that whoever takes it first carries out: a thread of the pool, or the
    caller.
    """

    __slots__ = ("_done", "_taken", "_work", "error", "outcome")

    def __init__(self, work: Callable[[], Outcome]) -> None:
        self._work = work
        self.outcome: Outcome = None
        self.error: KeptError | None = None
        """What is no error of this package."""
        self._taken = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def take(self) -> bool:
        """Whether it is the caller's to carry out, now or never."""
        return self._taken.acquire(blocking=False)

    def carry_out(self) -> None:
        """Carry it out, having taken it."""
        try:
            self.outcome = self._work()
        except BaseException as error:
            self.error = KeptError(error)
            if threading.current_thread() is threading.main_thread():  # Ctrl-C
                raise
        finally:
            self._done.release()

    def wait(self) -> None:
        """Wait until whoever took it has carried it out."""
        with self._done:
            pass


class PartThreads:
    """Carries out parts at the same time: one in the caller's thread, the others in
    threads that wait for more a while.

    The caller carries out what no thread has begun, so that a call needs no thread that
    the system refuses.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._wanted = 0  # how many threads the calls under way could use
        self._closed = False
        self._races = BlockingRaces(self._begin, self.carry_out)

    def carry_out(self, parts: Sequence[Part]) -> list[Outcome]:
        """Carry out parts; return their outcomes in order."""
        if len(parts) == 1:
            return [self._outcome(parts[0])]
        begun = time.monotonic()
        jobs = [_Job(partial(self._outcome, part, begun)) for part in parts]
        try:
            self._offer(jobs[1:])
            for job in jobs:
                if job.take():
                    job.carry_out()
        finally:
            for job in jobs:
                if not job.take():  # what is taken here is not begun any more
                    job.wait()
            with self._lock:
                self._wanted -= len(jobs[1:])
        for job in jobs:
            if job.error is not None:
                raise job.error.again()
        return [job.outcome for job in jobs]

    def _outcome(self, part: Part, begun: float | None = None) -> Outcome:
        store, request, within_s, hedge = part
        if begun is not None and within_s is not None:
            within_s -= time.monotonic() - begun  # it may have waited for a thread
            if within_s <= 0:
                return KeptError(DeadlineExceeded("no thread came free in time"))
        if hedge is not None:
            return self._races.run(part._replace(within_s=within_s))
        try:
            return store._call(request, within_s)
        except InfiniStoreException as error:
            return KeptError(error)

    def _begin(self, work: Callable[[], None]) -> bool:
        """Have a thread do this, and do not wait for it; False if there is none."""

        def count_and_work() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._wanted -= 1

        self._offer([_Job(count_and_work)])
        if self._threads:
            return True
        with self._lock:
            self._wanted -= 1
        return False

    def _offer(self, jobs: Sequence[_Job]) -> None:
        """Let threads take jobs, and start those that are missing."""
        with self._lock:
            self._wanted += len(jobs)
            if self._closed:
                return
            for job in jobs:
                self._jobs.put(job)
            while len(self._threads) < min(max(self._wanted, len(jobs)), _MOST_THREADS):
                thread = threading.Thread(target=self._work, name="infinistore-part", daemon=True)
                try:
                    start_thread(thread)
                except StoreUnavailable:
                    return
                self._threads.add(thread)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.take():
                job.carry_out()
            del job  # or what it returned would be kept until there is another

    def _next(self) -> _Job | None:
        """Wait for a job; None if there is none for a while, or at the end."""
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = None
            with self._lock:
                if job is not None or (not self._closed and not self._jobs.empty()):
                    if job is not None:
                        return job
                    continue
                self._threads.discard(threading.current_thread())
                return None

    def close(self) -> None:
        """End the threads, when they have carried out what they began."""
        self._races.close()
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
