"""The measurements of `infinistore bench` and of `infinistore doctor --to`.

`bench` moves batches in threads, and the same bytes raw. The reference is measured in
the same run, on the same machine, between the same buffers: blocking sockets to another
process for a store over a socket, otherwise a plain memory copy.

`doctor --to` tries each transport to a server. It never evicts other blocks: it writes
at most some MiB, and nothing to a server that is so full that it might evict. Its time
is bounded by the seconds per figure and the deadline of each call. The keys are deleted
at the end, also after a failure.
"""

import mmap
import os
import secrets
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import attrs

from infinistore.addresses import is_loopback
from infinistore.cli.options import Target
from infinistore.cli.raw_peer import RawClient, raw_peer
from infinistore.doctor import Finding, Level
from infinistore.errors import (
    AuthenticationFailed,
    ChecksumMismatch,
    InfiniStoreException,
    PermissionDenied,
    VersionMismatch,
)
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
    """Repeat each step in a thread. Returns the times of calls and in total.

    At Ctrl-C each thread ends its call first, so that none puts after the end.
    """
    runner = _Runner(len(steps), seconds)
    threads = [threading.Thread(target=runner.run, args=(step,)) for step in steps]
    with runner.ended_by_ctrl_c(), ExitStack() as started:
        try:
            for thread in threads:
                thread.start()
                started.callback(thread.join)
        except BaseException:  # no room for so many: those that have started wait for it
            runner.abort()
            raise
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

    @contextmanager
    def ended_by_ctrl_c(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the end only: Python before 3.13 takes a thread in
        whose `join` that comes up for ended.
        """
        if threading.current_thread() is not threading.main_thread():  # where no signal comes
            yield
            return
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self._stopped:
            raise KeyboardInterrupt

    def abort(self) -> None:
        """Let no thread wait for the others."""
        self._start.abort()

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def run(self, step: Step) -> None:
        try:
            for _ in range(_WARM_UP_ROUNDS):
                if not self._stopped:
                    step()
            self._start.wait()
            self._measure(step)
        except threading.BrokenBarrierError:  # another thread failed, and has said why
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self.failure = self.failure or KeptError(error)
            self.abort()

    def _measure(self, step: Step) -> None:
        times: list[float] = []
        start = now = time.perf_counter()
        while not times or (now < start + self._seconds and not self._stopped and self.failure is None):
            step()
            before, now = now, time.perf_counter()
            times.append(now - before)
        with self._lock:
            self.times += times
            self.elapsed_s = max(self.elapsed_s, now - start)


@attrs.frozen
class _Raw:
    """The same bytes without a store, for one client: `put` and `get` move so many."""

    name: str
    put: Callable[[int], Step]
    get: Callable[[int], Step]


def _copies(client: Client) -> _Raw:
    source, target, room = client.source, client.target, memoryview(_pages(len(client.source), b"\0"))
    return _Raw(
        "memory copy",
        put=lambda length: partial(_copy, room, source, length),
        get=lambda length: partial(_copy, target, room, length),
    )


def _sockets(client: Client, peer: RawClient) -> _Raw:
    source, target = client.source, client.target
    return _Raw(
        "raw sockets",
        put=lambda length: partial(peer.put, source[:length]),
        get=lambda length: partial(peer.get, target[:length]),
    )


@contextmanager
def _compared(transport: str, clients: Sequence[Client]) -> Iterator[list[_Raw]]:
    if transport not in ("tcp", "unix"):
        yield [_copies(client) for client in clients]
        return
    with raw_peer(unix=transport == "unix") as address, ExitStack() as stack:
        yield [_sockets(client, stack.enter_context(closing(RawClient(address)))) for client in clients]


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


_TOPIC: Final = "server"
_BLOCK_BYTES: Final = 65536
_BATCHES: Final = (64, 16, 4)
_FULL: Final = 0.8
"""The pool usage above which a server evicts by default."""


@attrs.frozen
class MeasuredPath:
    """The result of one transport.

    Rates are bytes of payload per second; None was not measured.
    """

    path: str
    finding: Finding
    transport: str = ""
    reason: str = ""
    batch: int | None = None
    """Blocks of 64 KiB per call."""
    put_bytes_per_s: float | None = None
    get_bytes_per_s: float | None = None
    lookup_p50_us: float | None = None
    """`exists` of one key: the round trip time."""
    lookup_p99_us: float | None = None
    get_p50_us: float | None = None
    """Get of one block of 4 KiB."""


def steps_of_paths(target: Target) -> int:
    """Maximum number of progress reports of `measure_paths`."""
    return len(_paths(target))


def measure_paths(target: Target, seconds: float, report: Callable[[str], None]) -> list[MeasuredPath]:
    """Try each transport to the server of `target`, and measure those that work.

    Failures of the server or the network are part of the result.

    Raises:
        ConfigError: the URL or the token file is invalid; `Target.check` detects that.
    """
    measured: list[MeasuredPath] = []
    for path in _paths(target):
        report(path)
        measured.append(_measure_path(path, target, seconds))
        if measured[0].finding.level is Level.BAD:  # the other transports lead to the same server
            break
    return measured


def _paths(target: Target) -> list[str]:
    """The transports; every server must answer on the first one."""
    return ["unix", "shm"] if _by_socket(target) else ["tcp", "shm", "rdma"]


def _by_socket(target: Target) -> bool:
    """Whether the URL names a Unix socket."""
    parts = urlsplit(target.url)
    return parts.scheme == "unix" or (parts.scheme == "shm" and not parts.netloc)


def _over(target: Target, path: str) -> Target:
    if _by_socket(target):
        return attrs.evolve(target, url=f"{path}://{target.url.partition('://')[2]}")
    return target.over(path)


def _measure_path(path: str, target: Target, seconds: float) -> MeasuredPath:
    try:
        with _over(target, path).open() as store:
            figures = _figures(store, seconds)
    except InfiniStoreException as error:
        return MeasuredPath(path, _failed(path, error, target))
    if not figures["transport"]:
        figures["transport"] = "unknown"
        text = "what room the pool has is not for this tenant to know: only lookups were measured"
        return MeasuredPath(
            path, Finding(_TOPIC, path, Level.WARNING, text, "a token with the role monitor"), **figures
        )
    if figures["put_bytes_per_s"] is None:
        text = "the pool is so full that a put might evict what is there: only lookups were measured"
        return MeasuredPath(path, Finding(_TOPIC, path, Level.WARNING, text, "a larger pool, or later"), **figures)
    return MeasuredPath(path, Finding(_TOPIC, path, Level.GOOD, "works"), **figures)


def _figures(store: "BlockingStore", seconds: float) -> dict[str, Any]:
    try:
        stats = store.stats()
    except PermissionDenied:
        stats = None
    name = f"infinistore-doctor/{secrets.token_hex(8)}"
    lookups = _p50_and_p99_us(lambda: store.exists(name), seconds)
    figures: dict[str, Any] = {
        "transport": "" if stats is None else stats.transport,
        "reason": "" if stats is None else stats.transport_reason,
        "batch": None,
        "put_bytes_per_s": None,
        "get_bytes_per_s": None,
        "lookup_p50_us": lookups[0],
        "lookup_p99_us": lookups[1],
        "get_p50_us": None,
    }
    if stats is None:
        return figures
    room_bytes = int(_FULL * stats.store.capacity_bytes) - stats.store.used_bytes
    # Twice: a put of a key that is there takes new room before it gives back the old.
    batch = next((batch for batch in _BATCHES if 2 * batch * _BLOCK_BYTES <= room_bytes), None)
    if batch is not None:
        figures["batch"] = batch
        large, small = Plan((_BLOCK_BYTES,), batch, 1, seconds), Plan((4096,), 1, 1, seconds)
        figures |= _rates(Client(store, name, large), large)
        figures["get_p50_us"] = _latency(Client(store, name, small), small)
    return figures


def _rates(client: Client, plan: Plan) -> dict[str, float]:
    length = plan.batch * plan.sizes_bytes[0]
    found = {}
    try:
        for name, make in (("put_bytes_per_s", client.put), ("get_bytes_per_s", client.get)):
            times, elapsed_s = run([make(plan, plan.sizes_bytes[0])], plan.seconds)
            found[name] = len(times) * length / elapsed_s
    finally:
        _delete(client, plan)
    return found


def _latency(client: Client, plan: Plan) -> float:
    try:
        client.put(plan, plan.sizes_bytes[0])()
        return _p50_and_p99_us(client.get(plan, plan.sizes_bytes[0]), plan.seconds)[0]
    finally:
        _delete(client, plan)


def _delete(client: Client, plan: Plan) -> None:
    """Delete keys; ignore errors, which would hide the first failure."""
    with suppress(InfiniStoreException):
        client.store.delete(client.keys(plan))


def _p50_and_p99_us(step: Step, seconds: float) -> tuple[float, float]:
    times, _ = run([step], seconds)
    p50, p99 = percentiles(times)
    return p50 * 1e6, p99 * 1e6


def _failed(path: str, error: InfiniStoreException, target: Target) -> Finding:
    if path not in {"unix", "tcp"}:
        return _without(path, str(error), target)
    if isinstance(error, AuthenticationFailed):
        remedy = "give the server's token with --token-file FILE"
    elif isinstance(error, VersionMismatch):
        remedy = "install the same version here and there"
    else:
        remedy = (
            "look on its host: `infinistore stat`, its log, whether it listens beyond 127.0.0.1 (--host), a firewall; "
            "or take a longer --deadline"
        )
    return Finding(_TOPIC, path, Level.BAD, str(error) or type(error).__name__, remedy)


def _without(path: str, text: str, target: Target) -> Finding:
    """The result for an unusable transport if another one works."""
    if path == "shm" and not _by_socket(target) and not is_loopback(urlsplit(target.url).hostname or ""):
        return Finding(
            _TOPIC, path, Level.GOOD, "only for clients on the server's own host" + (f": {text}" if text else "")
        )
    remedy = "see the lines on RDMA above, and the server's log: it says why it serves without"
    if path == "shm":
        remedy = "run the client as the server's user, with the same XDG_RUNTIME_DIR; containers: share that folder"
    return Finding(_TOPIC, path, Level.WARNING, text or "cannot be used", remedy)
