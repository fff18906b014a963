"""The connector's background thread: one in the scheduler's process, one in each
worker's.

A task is a generator. It does its work in steps, and yields how many seconds to wait
before the next one. Between the steps of one task the thread does those of others, so
no task may sleep. Each step is a call or two to the store, which has its deadline.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from infinistore.errors import StoreUnavailable
from infinistore.host import start_thread
from infinistore.integrations.internal.record import Record

_T = TypeVar("_T")


class Background:
    """Runs tasks in one thread, which starts with the first. Thread-safe."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._wake = threading.Condition()
        self._due: list[tuple[float, int, Iterator[float]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, task: Iterator[float], after_s: float = 0.0) -> None:
        """Begin a task, or go on with it, after so many seconds."""
        with self._wake:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._numbers), task))
            self._wake.notify()
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="infinistore-background", daemon=True)
                try:
                    start_thread(thread)
                except StoreUnavailable as error:  # the next task tries again
                    self._record.failed("background", error)
                else:
                    self._thread = thread

    def submit(self, work: Callable[[], _T], otherwise: _T) -> "Future[_T]":
        """Call a function once. The result is `otherwise` if it fails."""
        result: Future[_T] = Future()

        def task() -> Iterator[float]:
            value = otherwise
            try:
                value = work()
            except Exception as error:  # noqa: BLE001 - the engine goes on without
                self._record.failed("background", error)
            result.set_result(value)
            yield from ()

        self.start(task())
        return result

    def close(self) -> None:
        """Wait for the step that is under way, and drop all others."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                pause_s = next(task, None)
            except Exception as error:  # noqa: BLE001 - this task ends, and the others go on
                self._record.failed("background", error)
            else:
                if pause_s is not None:
                    self.start(task, pause_s)

    def _next(self) -> Iterator[float] | None:
        """Wait for the next task that is due. None after `close`."""
        with self._wake:
            while not self._closed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._wake.wait(wait_s)
        return None
