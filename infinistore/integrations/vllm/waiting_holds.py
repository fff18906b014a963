"""Holds of what waits to be read: a worker reads few requests at a time.

A thread places them, so that neither the engine nor a read waits for that. A load that
begins at once needs none.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.record import Record

__all__ = ["WaitingHold", "WaitingHolds"]


@attrs.define
class WaitingHold:
    """What one load has in the store."""

    token: str = ""
    """Empty until it is placed, and where nothing could be held."""
    is_over: bool = False


class WaitingHolds:
    """Places holds in a thread of its own, for at most `hold_s` each. Thread-safe."""

    def __init__(self, store: BlockingStore, record: Record, hold_s: float) -> None:
        self._store = store
        self._record = record
        self._hold_s = hold_s
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="infinistore-hold")

    def begin(self, keys: Callable[[], list[str]]) -> WaitingHold:
        """Hold the leading keys that are there, soon."""
        hold = WaitingHold()
        self._thread.submit(self._place, hold, keys)
        return hold

    def end(self, hold: WaitingHold) -> None:
        """Release a hold, or do not place it if that has not been done yet."""
        with self._lock:
            hold.is_over = True
            token, hold.token = hold.token, ""
        self._release(token)

    def close(self) -> None:
        """Place no more; what is held ends by itself."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _place(self, hold: WaitingHold, keys: Callable[[], list[str]]) -> None:
        if hold.is_over:
            return
        try:
            token = self._store.match_prefix(keys(), hold_s=self._hold_s).hold
        except InfiniStoreException as error:
            self._record.failed("hold", error)
            return
        self._record.succeeded("hold")
        with self._lock:
            if not hold.is_over:
                hold.token = token
                return
        self._release(token)

    def _release(self, token: str) -> None:
        if token:
            try:
                self._store.release_hold(token)
            except InfiniStoreException as error:
                self._record.failed("release of a hold", error)
