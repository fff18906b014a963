"""`open_store` for threads, with plain blocking sockets and no event loop: the store of
a server, of a cluster, and the embedded one.

`PartThreads` carries out the parts of a `Together`, with the outcomes of
`trio_gather`; whoever is interrupted leaves no part behind. Where a part races against
the other copies of its blocks, the caller's thread carries the part out, so that
nothing else writes to the caller's memory. One thread looks at the clock for all calls
of a store; those that carry out parts ask the other copies. If these win, the call in
the caller's thread is ended.
"""

import heapq
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Final, TypeVar, Unpack, assert_never, cast

from infinistore.client.api.blocking_store import BlockingOpening, BlockingStore
from infinistore.client.cluster.calls import LOST
from infinistore.client.cluster.nodes import PING
from infinistore.client.cluster.opening import SILENT_AFTER, ClusterStore, RemoteStore, check_not_silent
from infinistore.client.connection.calls import Attempt
from infinistore.client.connection.effects import (
    Background,
    Call,
    CallEffect,
    ClusterCall,
    ClusterEffect,
    Connect,
    InThread,
    Outcome,
    Part,
    Sleep,
    Together,
)
from infinistore.client.connection.pool import ConnectionPool, Turn, Turns, new_turn
from infinistore.client.connection.routing import ENDED, ShardsFound
from infinistore.client.environment import Environment
from infinistore.client.memory.views import Leased
from infinistore.client.operations.embedded import AwaitDisk, EmbeddedOperations, EmbeddedStore
from infinistore.client.options import Options, StoreUrl, explained, make_options
from infinistore.client.store_options import StoreOptions
from infinistore.cluster.locate import ClusterUrl
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.host import FORKED, start_thread
from infinistore.kept_errors import KeptError
from infinistore.protocol.effects import CHUNK_BYTES, Fill, Pause, Receive, ReceiveDescriptors, Send
from infinistore.protocol.messages import StoreRequest
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream, connect_tcp, connect_unix

_T = TypeVar("_T")
_MOST_THREADS: Final = 32
_IDLE_S: Final = 10.0
"""How long a thread waits for another part before it ends."""
_CLOCK_IDLE_S: Final = 10.0
"""How long the thread that looks at the clock stays when there is nothing to do."""


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
        """End the call, from any thread, if it has not ended."""
        self.ended = True
        if self._at_work is not None:
            attempt, turns, pool = self._at_work
            attempt.deadline = ENDED
            turns.wake()
            pool.shut_down(attempt.turn)


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
        """Say that the part has ended. Wait for the others if wanted, else end them."""
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
    """The races of one store. `begin` calls in a thread, or refuses."""

    def __init__(
        self, begin: Callable[[Callable[[], None]], bool], gather: Callable[[Sequence[Part]], list[Outcome]]
    ) -> None:
        self._begin = begin
        self._gather = gather
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
        """Wait for the next late part; None if none is for a while, or at the end."""
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
            outcomes = self._gather(late) if late else None
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


class _Job:
    """Work for whoever takes it first: a thread of the pool, or the caller."""

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


class ClusterBlockingStore(ClusterStore, BlockingStore):
    """Calls to the nodes of a cluster, from any thread. `make` makes the store of one
    node.

    What goes on after a call does so in one thread, which runs as long as there is such
    work. Whoever makes a store calls `close`, from any thread.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, *arguments: Any, **shared: Any) -> None:
        self._threads = PartThreads()
        self._background = _BackgroundThread(self._threads)
        super().__init__(*arguments, **shared)

    def connect(self) -> None:
        """Ask all nodes whether they are there; one of them must be."""
        self.drive(self.calls.check())

    def close(self) -> None:
        """Close the stores of the nodes; their connections when their calls end."""
        super().close()
        if self.calls.nodes.closed == FORKED:  # threads that are not here may have the locks
            return
        self._background.close()
        self._threads.close()

    def _call(self, request: StoreRequest[_T]) -> _T:
        return self.drive(self.calls.call(request))

    def drive(self, call: ClusterCall[_T]) -> _T:
        """Run a call."""
        result: Any = None
        try:
            effect: ClusterEffect = call.send(None)
            while True:
                if isinstance(effect, Together):
                    result = self._threads.carry_out(effect.parts)
                elif isinstance(effect, Background):
                    result = self._background.begin(effect.work)
                elif isinstance(effect, InThread):
                    effect.work()
                elif isinstance(effect, Sleep):
                    time.sleep(effect.seconds)
                else:
                    assert_never(effect)
                effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            call.close()


class _BackgroundThread:
    """One thread for all the work of a store that goes on after its calls.

    It starts with the first work, and ends with the last.
    """

    def __init__(self, threads: PartThreads) -> None:
        self._threads = threads
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, ClusterCall[None]]] = []
        self._number = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, work: ClusterCall[None]) -> bool:
        """Begin a work; False if the system refuses a thread, or if it was closed."""
        with self._changed:
            if self._closed:
                work.close()
                return False
            heapq.heappush(self._due, (0.0, next(self._number), work))
            if self._thread is not None:
                self._changed.notify()
                return True
            thread = threading.Thread(target=self._run, name="infinistore-cluster", daemon=True)
            try:
                start_thread(thread)
            except StoreUnavailable:
                self._due.clear()
                work.close()
                return False
            self._thread = thread
            return True

    def _run(self) -> None:
        while (work := self._next()) is not None:
            due = self._go_on(work)
            if due is not None:
                with self._changed:
                    heapq.heappush(self._due, (due, next(self._number), work))

    def _next(self) -> ClusterCall[None] | None:
        """Wait for work that is due; None at the end."""
        with self._changed:
            while self._due and not self._closed:
                wait_s = self._due[0][0] - time.monotonic()
                if wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
            for _, _, work in self._due:
                work.close()
            self._due.clear()
            self._thread = None
            return None

    def _go_on(self, work: ClusterCall[None]) -> float | None:
        """Run a work until it sleeps; return until when, None at its end."""
        result: Any = None
        try:
            while True:
                effect = work.send(result)
                result = None
                if isinstance(effect, Sleep):
                    return time.monotonic() + effect.seconds
                if isinstance(effect, Together):
                    result = self._threads.carry_out(effect.parts)
        except StopIteration:
            return None

    def close(self) -> None:
        """End all work, and wait for the thread."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


@explained
def open_store(
    url: str | None = None, *, environment: Environment | None = None, **given: Unpack[StoreOptions]
) -> BlockingOpening:
    """Open a store, for threads: `with open_store(...) as store`.

    Any number of threads may share it. Without a URL the store is embedded: the engine
    runs in this process, and the store ends with the block. `StoreOptions` explains the
    arguments. Without Linux, as on macOS, there are embedded stores without disks, and
    TCP; anything else raises ConfigError.

    Raises:
        ConfigError: an option or the URL cannot be used.
        StoreUnavailable: no server answers there. Not with `lazy`.
        AuthenticationFailed: the token is missing or wrong. Not with `lazy`.
        OutOfMemory: no memory for an embedded store.
    """
    return BlockingOpening(partial(connect, url, environment=environment, **given))


def connect(
    url: str | None = None, *, environment: Environment | None = None, **given: Unpack[StoreOptions]
) -> BlockingStore:
    """Open a store as `open_store` does, and return it: `store.close()` closes it."""
    address, options = make_options(url, given)
    if address is None:
        return _EmbeddedBlockingStore(EmbeddedStore(options), options)
    store: ClusterBlockingStore | RemoteBlockingStore
    if isinstance(address, ClusterUrl):
        store = ClusterBlockingStore(address, options, environment or Environment(), RemoteBlockingStore)
    else:
        store = RemoteBlockingStore(address, options, environment)
    try:
        if not options.lazy:
            store.connect()
    except BaseException:
        store.close()
        raise
    return store


class _EmbeddedBlockingStore(BlockingStore):
    def __init__(self, store: EmbeddedStore, options: Options) -> None:
        self.embedded = store
        """The engine."""
        self.verifies = options.verify == "always"

    def close(self) -> None:
        self.embedded.close()

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        return self.embedded.mapped_arenas()

    def _call(self, request: StoreRequest[_T]) -> _T:
        operations = EmbeddedOperations(self.embedded, verify=self.verifies)
        exchange = operations.handlers[type(request)](operations, request)
        try:
            while True:
                effect = exchange.send(None)
                if isinstance(effect, AwaitDisk):
                    wait([effect.done], effect.within_s)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            exchange.close()
            operations.close()


class RemoteBlockingStore(RemoteStore[ClusterBlockingStore], BlockingStore):
    """Calls to a server. Whoever makes one calls `close`, from any thread."""

    clock = staticmethod(time.monotonic)
    _make_cluster = ClusterBlockingStore
    _make_turns = Turns

    def connect(self) -> None:
        """Connect, without retries: a wrong address or token is known at once."""
        attempt = self.calls.attempt()
        attempt.turn = turn = new_turn()
        try:
            with turn:
                self._drive(self.calls.first(attempt), attempt)
        except ShardsFound as found:
            sharded = self._go_on(found.shards, None)
        else:
            return
        if sharded is not None:
            sharded.connect()

    def close(self) -> None:
        """Close the connections, those of calls under way when they end."""
        super().close()
        self.calls.pool.close_interrupted()

    def _call(self, request: StoreRequest[_T], within_s: float | None = None, ending: Ending | None = None) -> _T:
        if self._sharded is not None:
            return self._call_shards(request)
        calls = self.calls
        pool = calls.pool
        if pool.closed:
            pool.check_open()
        turn = new_turn()
        limit_s = calls.options.deadline_s if within_s is None else within_s
        attempt = Attempt(calls.clock() + limit_s, turn, None, request.idempotent, within_s)
        turns = self.payload_turns if request.moves_blocks else self.lookup_turns
        if request.waits:
            turns = self.waiting_turns
        if ending is not None:
            ending.begun(attempt, turns, pool)
        with turn:
            turns.under_way[turn] = None
            if len(turns.under_way) > 1 or pool.kept:  # else it is alone, and need not queue
                turns.end(turn)
                self._queue(turns, turn, attempt)
            try:
                result = self._drive(calls.call(request, attempt), attempt)
            except InfiniStoreException as error:
                turns.end(turn)
                if not isinstance(error, ShardsFound) or calls.is_node:
                    raise
                self._go_on(error.shards, None)
            else:
                del turns.under_way[turn]  # as `end` does
                if turns.waiting:
                    turns.tell()
                return result
        return self._call_shards(request)

    def _call_shards(self, request: StoreRequest[_T]) -> _T:
        while (sharded := self._sharded) is not None:
            try:
                return sharded._call(request)
            except ShardsFound as found:
                self._go_on(found.shards, sharded)
        return self._call(request)

    def _queue(self, turns: Turns, turn: Turn, attempt: Attempt) -> None:
        """Wait until a call may begin, and close what interrupted ones have left."""
        try:
            if turns.begin(turn, attempt) or self.calls.pool.kept:
                self.calls.pool.close_interrupted()
        except TimeoutError:
            raise self.calls.deadline_exceeded(attempt) from None

    def _drive(self, call: Call[_T], attempt: Attempt) -> _T:  # noqa: C901, PLR0912  # one dispatch
        """Run a call. A broken stream is raised inside it, so that it can try again."""
        result: Any = None
        if self.calls.over_tls is not None:
            call = self.calls.over_tls(call, attempt)
        try:
            effect: CallEffect = call.send(None)
            while True:
                stream: Any = attempt.stream
                try:
                    if isinstance(effect, Receive):
                        stream.deadline = attempt.deadline
                        result = stream.receive_into(effect.views)
                    elif isinstance(effect, Send):
                        stream.deadline = attempt.deadline
                        stream.send_all(effect.views)
                    elif isinstance(effect, Fill):
                        _fill(effect, stream, attempt)
                    elif isinstance(effect, ReceiveDescriptors):
                        stream.deadline = attempt.deadline
                        result = stream.receive_descriptors(effect.views, effect.descriptors)
                    elif isinstance(effect, Connect):
                        result = self._connect(effect.address, attempt.deadline)
                    elif isinstance(effect, Sleep):
                        time.sleep(effect.seconds)
                    elif not isinstance(effect, Pause):  # other threads run as it is
                        assert_never(effect)
                except StoreUnavailable as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            done: _T = stop.value
            return done
        except TimeoutError:
            raise self.calls.deadline_exceeded(attempt) from None
        finally:
            call.close()

    def _connect_sockets(self, address: StoreUrl, deadline: float) -> BlockingSocketStream:
        spin_us, patience_s = self.calls.options.spin_us, self.calls.patience_s
        soon = min(deadline, time.monotonic() + patience_s)
        try:
            if address.path:
                stream = connect_unix(address.path, soon, spin_us=spin_us)
            else:
                stream = connect_tcp(address.host, address.port, soon, spin_us=spin_us, dialer=self.calls.dialer)
        except TimeoutError:
            if patience_s == math.inf:
                raise
            raise StoreUnavailable(f"{address} accepts no connection within {patience_s:g} s") from None
        if patience_s < math.inf:
            stream.silence_s, stream.ask = SILENT_AFTER * patience_s, self._ask_if_there
        return stream

    def _ask_if_there(self) -> None:
        try:
            self._call(PING, self.calls.patience_s)
        except LOST as error:
            check_not_silent(self, error)


def _fill(effect: Fill, stream: Any, attempt: Attempt) -> None:
    while effect.span.remaining:
        stream.deadline = attempt.deadline
        if not effect.arrived(stream.receive_into(effect.span.next_views(CHUNK_BYTES))):
            return
