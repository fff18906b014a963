"""The store made of stores, for threads."""

import heapq
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, assert_never, cast

from infinistore.client.api.blocking_store import BlockingStore
from infinistore.client.cluster.calls import LOST
from infinistore.client.cluster.nodes import PING
from infinistore.client.cluster.opening import SILENT_AFTER, ClusterStore, check_not_silent
from infinistore.client.connection.effects import Background, ClusterCall, ClusterEffect, InThread, Sleep, Together
from infinistore.client.drivers.at_once import PartThreads
from infinistore.client.environment import Environment
from infinistore.client.movers.rdma import StoreRdma
from infinistore.client.options import Options, StoreUrl
from infinistore.client.requests import Request
from infinistore.cluster.locate import ClusterUrl
from infinistore.errors import StoreUnavailable
from infinistore.host import FORKED, start_thread
from infinistore.settings import Spin
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream, connect_tcp, connect_unix

__all__ = ["ClusterBlockingStore", "PatientStream"]

_T = TypeVar("_T")


class ClusterBlockingStore(ClusterStore, BlockingStore):
    """Calls to the nodes of a cluster, from any thread. `make` makes the store of one
    node.

    What goes on after a call does so in one thread, which runs as long as there is such
    work. Whoever makes a store calls `close`, from any thread.
    """

    def __init__(
        self,
        url: ClusterUrl,
        options: Options,
        environment: Environment,
        make: Callable[..., Any],
        *,
        rdma: StoreRdma | None = None,
        shard_ports: tuple[int, ...] | None = None,
    ) -> None:
        self._threads = PartThreads()
        self._background = _BackgroundThread(self._threads)
        super().__init__(
            url, options, environment, make, connect=_connect, clock=time.monotonic, rdma=rdma, shard_ports=shard_ports
        )

    def connect(self) -> None:
        """Ask all nodes whether they are there; one of them must be."""
        self.drive(self.calls.check())

    def close(self) -> None:
        """Close the stores of the nodes; their connections when the calls under way
        end. Any number of times.
        """
        self._close_nodes()
        if self.calls.nodes.closed == FORKED:  # threads that are not here may have the locks
            return
        self._background.close()
        self._threads.close()

    def _call(self, request: Request[_T]) -> _T:
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

    def _next(self) -> "ClusterCall[None] | None":
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


def _connect(options: Options, store: Callable[[], Any], url: StoreUrl, deadline: float) -> BlockingSocketStream:
    patience_s = options.lookup_deadline_s
    soon = min(deadline, time.monotonic() + patience_s)
    try:
        if url.path:
            found = connect_unix(url.path, soon)
        else:
            found = connect_tcp(url.host, url.port, soon, dialer=store().calls.dialer)
    except TimeoutError:
        raise StoreUnavailable(f"{url} accepts no connection within {patience_s:g} s") from None
    return PatientStream(found.socket, options.spin_us, store, patience_s)


class PatientStream(BlockingSocketStream):
    """A stream that makes sure from time to time that the other end is there, while it
    waits for it.

    What is there when the time is over counts: this process may have waited for a core
    since it came, and a node that answers would be taken for a silent one. It counts
    once for each deadline, so that a node that sends bit by bit puts it off no further.
    """

    def __init__(self, sock: socket.socket, spin_us: Spin, store: Callable[[], Any], patience_s: float) -> None:
        super().__init__(sock, spin_us)
        self._store = store
        self._ping_s = patience_s
        self._patience_s = SILENT_AFTER * patience_s
        self._overdue = -1.0
        """The last deadline after which something was still there to be received."""

    def _wait(self, until_ready: select.poll) -> None:
        while self.deadline - time.monotonic() > self._patience_s:
            if until_ready.poll(self._patience_s * 1000):
                return
            self._check_there()
        try:
            super()._wait(until_ready)
        except TimeoutError:
            if until_ready is self._writable or self._overdue == self.deadline or not until_ready.poll(0):
                raise
            self._overdue = self.deadline

    def _check_there(self) -> None:
        store = self._store()
        try:
            store._call(PING, self._ping_s)
        except LOST as error:
            check_not_silent(store, error)
