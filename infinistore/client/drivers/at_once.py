"""Several requests to several stores at the same time: under Trio, asyncio and threads.

This is what `Together` asks for. An outcome is what a part returned, or a `KeptError`
of an error of this package; any other error ends the others, and is raised. Whoever is
cancelled or interrupted leaves no part behind.

A part that has a hedge races against the other copies of its blocks. In threads, the
caller's thread carries the part out, so that nothing else writes to the caller's
memory. One thread looks at the clock for all calls of a store; those that carry out
parts ask the other copies. If these win, the call in the caller's thread is ended.
"""

import asyncio
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import trio

from infinistore.client.connection.effects import Outcome, Part
from infinistore.client.connection.pool import ConnectionPool, Turns
from infinistore.client.connection.routing import ENDED, Attempt
from infinistore.client.memory.views import Leased
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.host import start_thread
from infinistore.kept_errors import KeptError


class Ending:
    """Of one call. It ends with an error of this package, soon: whatever it waits for
    is cut short, except for the moment in which it connects.
    """

    __slots__ = ("_at_work", "ended")

    def __init__(self) -> None:
        self.ended = False
        """Whether `end` was called."""
        self._at_work: tuple[Attempt, Turns, ConnectionPool[Any]] | None = None

    def begun(self, attempt: Attempt, turns: Turns, pool: ConnectionPool[Any]) -> None:
        """Say that the call begins, and what it may wait for."""
        self._at_work = attempt, turns, pool
        if self.ended:
            attempt.deadline = ENDED

    def end(self) -> None:
        """End the call, from any thread. After its end, this changes nothing that
        matters.
        """
        self.ended = True
        if self._at_work is not None:
            attempt, turns, pool = self._at_work
            attempt.deadline = ENDED
            turns.wake()
            pool.shut_down(attempt.turn)


async def trio_race(
    part: Part,
    carry_out: Callable[[Part], Awaitable[Outcome]],
    at_once: Callable[[Sequence[Part]], Awaitable[list[Outcome]]],
) -> Outcome:
    """Carry out a part that has a hedge. Nothing of it runs on afterwards."""
    hedge = part.hedge
    assert hedge is not None
    first: Outcome | None = None
    others: list[Outcome] | None = None
    unexpected: KeptError | None = None
    asks = False

    async def ask_others() -> None:
        nonlocal asks, others
        await trio.sleep(hedge.after_s)
        if late := hedge.begin():
            asks = True
            others = await at_once(late)
            asks = False
            if hedge.is_full(others):
                waiting.cancel()

    async with trio.open_nursery() as nursery:
        waiting = trio.CancelScope()
        nursery.start_soon(ask_others)
        with waiting:
            try:
                first = await carry_out(part)
            except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it in a group
                unexpected = KeptError(error)
        if not (asks and isinstance(first, KeptError)):
            nursery.cancel_scope.cancel()
    if unexpected is not None:
        raise unexpected.again()
    return hedge.settle(first, others)


async def asyncio_race(
    part: Part,
    carry_out: Callable[[Part], Awaitable[Outcome]],
    at_once: Callable[[Sequence[Part]], Awaitable[list[Outcome]]],
) -> Outcome:
    """Carry out a part that has a hedge. Nothing of it runs on afterwards."""
    hedge = part.hedge
    assert hedge is not None
    loop = asyncio.get_running_loop()
    waiting = asyncio.timeout(None)
    asking: list[asyncio.Task[list[Outcome]]] = []

    async def ask(late: Sequence[Part]) -> list[Outcome]:
        found = await at_once(late)
        if hedge.is_full(found) and not over:
            waiting.reschedule(loop.time())
        return found

    def begin() -> None:
        if late := hedge.begin():
            asking.append(loop.create_task(ask(late)))

    over = False
    first: Outcome | None = None
    timer = loop.call_later(hedge.after_s, begin)
    try:
        try:
            async with waiting:
                try:
                    first = await carry_out(part)
                finally:
                    over = True
        except TimeoutError:
            if not waiting.expired():
                raise
        timer.cancel()
        late = asking[0] if asking else None
        others = None
        if late is not None and (late.done() or isinstance(first, KeptError)):
            others = await late
    finally:
        timer.cancel()
        for task in asking:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # which is raised where its answer is wanted
    return hedge.settle(first, others)


_CLOCK_IDLE_S: Final = 10.0
"""How long the thread that looks at the clock stays when there is nothing to do."""


class _Endable:
    """A store whose calls can be ended by another thread, all by one `Ending`."""

    def __init__(self, store: Any, ending: Ending) -> None:
        self._store = store
        self._ending = ending

    def _call(self, request: Any, within_s: float | None) -> Any:
        return self._store._call(request, within_s, self._ending)


class _Race:
    """One part, and what was asked because it was late."""

    def __init__(self, part: Part) -> None:
        self.part: Part | None = part
        """None when it is over."""
        self.first = Ending()
        self.others: list[Ending] = []
        self.answers: list[Outcome] | None = None
        self.asked = threading.Event()
        """Set when the other copies have answered."""
        self._lock = threading.Lock()
        self._asks = False

    def begin(self) -> list[Part]:
        """Return what to ask; nothing if the part is over."""
        part = self.part
        late = part.hedge.begin() if part is not None and part.hedge is not None else []
        asked = []
        for one in late:
            ending = Ending()
            asked.append(one._replace(store=_Endable(one.store, ending)))
            self.others.append(ending)
        with self._lock:
            if self.part is None:
                return []
            self._asks = bool(asked)
        return asked

    def answered(self, outcomes: list[Outcome] | None) -> None:
        """Take what the other copies said; None if nobody could ask them. What comes
        when the part is over holds nothing any more.
        """
        with self._lock:
            part = self.part
            if part is not None and part.hedge is not None and outcomes is not None:
                self.answers = outcomes
                if part.hedge.is_full(outcomes):
                    self.first.end()
        self.asked.set()
        for outcome in outcomes or () if part is None else ():
            if isinstance(outcome, Leased):
                outcome.leave(quietly=True, stacklevel=1)

    def leave(self, *, wants_others: bool) -> None:
        """Say that the part has ended. The other copies are waited for if they were
        asked and are wanted, else they are ended.
        """
        with self._lock:
            waits = wants_others and self._asks
            if not waits:
                self.part = None
        if waits:
            self.asked.wait()
            self.part = None
        else:
            for ending in self.others:
                ending.end()


class BlockingRaces:
    """The races of one store. `begin` has a thread carry out a function, or refuses;
    `at_once` carries out parts.
    """

    def __init__(
        self,
        begin: Callable[[Callable[[], None]], bool],
        at_once: Callable[[Sequence[Part]], list[Outcome]],
    ) -> None:
        self._begin = begin
        self._at_once = at_once
        self._due: list[tuple[float, int, _Race]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waits_until = 0.0
        self._closed = False

    def run(self, part: Part) -> Outcome:
        """Carry out a part that has a hedge. Only requests to other copies may run on
        afterwards, for a moment: they are ended, and hold nothing of the caller's.
        """
        hedge = part.hedge
        assert hedge is not None
        race = _Race(part)
        if not self._watch(race, hedge.after_s):
            return _carry_out(part, None)
        outcome: Outcome | None = None
        try:
            outcome = _carry_out(part, race.first)
        finally:
            race.leave(wants_others=isinstance(outcome, KeptError))
        if race.first.ended and isinstance(outcome, KeptError):
            outcome = None
        return hedge.settle(outcome, race.answers)

    def _watch(self, race: _Race, after_s: float) -> bool:
        """Have the clock looked at; False if there is no thread for that."""
        due = time.monotonic() + after_s
        with self._changed:
            if self._closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="infinistore-hedges", daemon=True)
                try:
                    start_thread(thread)
                except StoreUnavailable:
                    return False
                self._thread = thread
            heapq.heappush(self._due, (due, next(self._number), race))
            if due < self._waits_until:
                self._changed.notify()
        return True

    def _run(self) -> None:
        while (race := self._next()) is not None:
            if race.part is not None and not self._begin(partial(self._ask, race)):
                race.answered(None)

    def _next(self) -> _Race | None:
        """Wait for the next part that is late; None if there is none for a while, or at
        the end.
        """
        with self._changed:
            while not self._closed:
                while self._due and self._due[0][2].part is None:
                    heapq.heappop(self._due)
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    return heapq.heappop(self._due)[2]
                idle = not self._due
                self._waits_until = now + _CLOCK_IDLE_S if idle else self._due[0][0]
                self._changed.wait(self._waits_until - now)
                if idle and not self._due and time.monotonic() >= self._waits_until:
                    break
            self._due.clear()
            self._thread = None
            return None

    def _ask(self, race: _Race) -> None:
        outcomes = None
        try:
            late = race.begin()
            outcomes = self._at_once(late) if late else None
        finally:
            race.answered(outcomes)

    def close(self) -> None:
        """End the thread that looks at the clock."""
        with self._changed:
            self._closed = True
            self._changed.notify()


def _carry_out(part: Part, ending: Ending | None) -> Outcome:
    store, request, within_s, _ = part
    try:
        return store._call(request, within_s, ending)
    except InfiniStoreException as error:
        return KeptError(error)


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
