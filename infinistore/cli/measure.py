"""The measurements of `infinistore bench`: batches in threads, and the same bytes raw.

The reference is measured in the same run, on the same machine, between the same
buffers: blocking sockets to another process for a store over a socket, otherwise a
plain memory copy. `bench.py` prints the results.
"""

import mmap
import os
import secrets
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import attrs

from infinistore.cli.raw_peer import RawClient, raw_peer
from infinistore.errors import ChecksumMismatch, PermissionDenied
from infinistore.kept_errors import KeptError
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore

_WARM_UP_ROUNDS: Final = 3

Step = Callable[[], object]


@attrs.frozen
class Plan:
    """What to measure."""

    sizes_bytes: Sequence[int]
    batch: int
    clients: int
    seconds: float
    """For each figure."""

    @property
    def needs(self) -> str:
        """What memory it takes in this process, in words, with the remedy."""
        size_bytes = 2 * self.clients * self.batch * max(self.sizes_bytes)
        return f"the blocks to put and to get take {describe_size(size_bytes)}; lower --sizes, --batch or --clients"

    @property
    def steps(self) -> int:
        """Number of progress reports of `measure`."""
        return 2 * len(self.sizes_bytes)


@attrs.frozen
class Figure:
    """One line of the result. Rates count payload only; times are per batch."""

    operation: str
    size_bytes: int
    batch: int
    clients: int
    bytes_per_s: float
    batch_p50_us: float
    batch_p99_us: float
    compared_with: str
    compared_bytes_per_s: float
    ratio: float


class Client:
    """The store, buffers and keys of one thread."""

    def __init__(self, store: "BlockingStore", name: str, plan: Plan) -> None:
        self.store = store
        self.prefix = f"{name}/{secrets.token_hex(4)}"
        length = max(plan.sizes_bytes) * plan.batch
        self.source = memoryview(_pages(length, os.urandom(min(length, 1 << 20))))
        self.target = memoryview(_pages(length, b"\0"))

    def keys(self, plan: Plan) -> list[str]:
        """Return its keys."""
        return [f"{self.prefix}/{index}" for index in range(plan.batch)]

    def put(self, plan: Plan, size_bytes: int) -> Step:
        """Return a function that puts a batch."""
        keys = self.keys(plan)
        items = list(zip(keys, _pieces(self.source, size_bytes, plan.batch), strict=True))
        return lambda: self.store.put_many(items)

    def get(self, plan: Plan, size_bytes: int) -> Step:
        """Return a function that gets the batch; compare the first result."""
        keys = self.keys(plan)
        items = list(zip(keys, _pieces(self.target, size_bytes, plan.batch), strict=True))
        length = size_bytes * plan.batch
        self.store.get_many_into(items)
        if self.target[:length] != self.source[:length]:  # a fast but wrong answer does not count
            raise ChecksumMismatch("the benchmark read other bytes than it wrote; please report it")
        return lambda: self.store.get_many_into(items)


def measure(
    plan: Plan, open_store: Callable[[], AbstractContextManager["BlockingStore"]], report: Callable[[str], None]
) -> tuple[list[Figure], str, str]:
    """Measure `plan`. Returns the figures, the store's transport, and its reason.

    `report` is called with a few words before each of `plan.steps` steps. The keys are
    deleted at the end. A tenant without the role monitor does not learn the transport:
    it is "unknown", and compared with memory copies. Raises the store's errors.
    """
    name = f"infinistore-bench/{secrets.token_hex(8)}"
    figures: list[Figure] = []
    with ExitStack() as stack:
        stores = [stack.enter_context(open_store()) for _ in range(plan.clients)]
        try:
            clients = [Client(store, name, plan) for store in stores]
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {plan.needs}") from None
        try:
            stats = clients[0].store.stats()
            transport, reason = stats.transport, stats.transport_reason
        except PermissionDenied as error:
            transport, reason = "unknown", str(error)
        raw = stack.enter_context(_compared(transport, clients))
        try:
            for size_bytes in plan.sizes_bytes:
                for operation in ("put", "get"):
                    report(f"{operation} {size_bytes} B")
                    figures.append(_figure(plan, operation, size_bytes, clients, raw))
        finally:
            for client in clients:
                client.store.delete(client.keys(plan))
    return figures, transport, reason


def _figure(plan: Plan, operation: str, size_bytes: int, clients: list[Client], raw: list["_Raw"]) -> Figure:
    steps = [getattr(client, operation)(plan, size_bytes) for client in clients]
    raw_steps = [getattr(one, operation)(size_bytes * plan.batch) for one in raw]
    times, elapsed_s = run(steps, plan.seconds)
    raw_times, raw_elapsed_s = run(raw_steps, plan.seconds)
    rate = len(times) * size_bytes * plan.batch / elapsed_s
    raw_rate = len(raw_times) * size_bytes * plan.batch / raw_elapsed_s
    p50, p99 = percentiles(times)
    return Figure(
        operation=operation,
        size_bytes=size_bytes,
        batch=plan.batch,
        clients=plan.clients,
        bytes_per_s=rate,
        batch_p50_us=p50 * 1e6,
        batch_p99_us=p99 * 1e6,
        compared_with=raw[0].name,
        compared_bytes_per_s=raw_rate,
        ratio=rate / raw_rate,
    )


def run(steps: Sequence[Step], seconds: float) -> tuple[list[float], float]:
    """Repeat each step in a separate thread. Returns the times of calls and in
    total.
    """
    runner = _Runner(len(steps), seconds)
    threads = [threading.Thread(target=runner.run, args=(step,)) for step in steps]
    # Ctrl-C waits until all threads have started: a thread that is just starting could
    # not be joined, and would put after the end.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for thread in threads:
            thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: the threads end after the call they are in
        runner.stop()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if runner.failure is not None:
        raise runner.failure.again()
    return runner.times, runner.elapsed_s


class _Runner:
    def __init__(self, threads: int, seconds: float) -> None:
        self.times: list[float] = []
        self.failure: KeptError | None = None
        self.elapsed_s = 0.0
        self._seconds = seconds
        self._stopped = False
        self._start = threading.Barrier(threads)
        self._lock = threading.Lock()

    def stop(self) -> None:
        self._stopped = True
        self._start.abort()

    def run(self, step: Step) -> None:
        try:
            for _ in range(_WARM_UP_ROUNDS):
                step()
            self._start.wait()
            self._measure(step)
        except threading.BrokenBarrierError:  # another thread failed, and has said why; or Ctrl-C
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self.failure = self.failure or KeptError(error)
            self.stop()

    def _measure(self, step: Step) -> None:
        times: list[float] = []
        start = now = time.perf_counter()
        while not times or (now < start + self._seconds and not self._stopped):
            step()
            before, now = now, time.perf_counter()
            times.append(now - before)
        with self._lock:
            self.times += times
            self.elapsed_s = max(self.elapsed_s, now - start)


class _Raw:
    """The same bytes without a store, for one client."""

    name = ""

    def __init__(self, client: Client) -> None:
        self._source, self._target = client.source, client.target

    def put(self, length: int) -> Step:
        raise NotImplementedError

    def get(self, length: int) -> Step:
        raise NotImplementedError


class _Copy(_Raw):
    name = "memory copy"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._room = memoryview(_pages(len(self._source), b"\0"))

    def put(self, length: int) -> Step:
        return lambda: _copy(self._room, self._source, length)

    def get(self, length: int) -> Step:
        return lambda: _copy(self._target, self._room, length)


class _Sockets(_Raw):
    name = "raw sockets"

    def __init__(self, client: Client, raw_client: RawClient) -> None:
        super().__init__(client)
        self._client = raw_client

    def put(self, length: int) -> Step:
        return lambda: self._client.put(self._source[:length])

    def get(self, length: int) -> Step:
        return lambda: self._client.get(self._target[:length])


@contextmanager
def _compared(transport: str, clients: Sequence[Client]) -> Iterator[list[_Raw]]:
    if transport not in ("tcp", "unix"):
        yield [_Copy(client) for client in clients]
        return
    with raw_peer(unix=transport == "unix") as address, ExitStack() as stack:
        raw: list[_Raw] = []
        for client in clients:
            raw_client = RawClient(address)
            stack.callback(raw_client.close)
            raw.append(_Sockets(client, raw_client))
        yield raw


def _copy(target: memoryview, source: memoryview, length: int) -> None:
    target[:length] = source[:length]


def _pages(length: int, pattern: bytes) -> mmap.mmap:
    """Return page-aligned, touched memory: copies to other memory are much slower."""
    pages = mmap.mmap(-1, length)
    for start in range(0, length, len(pattern) if len(pattern) > 1 else mmap.PAGESIZE):
        end = min(length, start + len(pattern))
        pages[start:end] = pattern[: end - start]
    return pages


def _pieces(memory: memoryview, size_bytes: int, count: int) -> list[memoryview]:
    return [memory[index * size_bytes : (index + 1) * size_bytes] for index in range(count)]


def percentiles(times: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    if len(times) < 2:
        return times[0], times[0]
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return cuts[49], cuts[98]
