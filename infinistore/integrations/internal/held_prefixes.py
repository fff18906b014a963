"""Holds that wait for a load: from the lookup to the load of the same request."""

import threading
import time
from collections.abc import Callable, Hashable, Iterable


class HeldPrefixes:
    """The hold of each request, by the engine's name of the request. Thread-safe.

    A hold that is never asked for again expires, and is forgotten.
    """

    def __init__(self, hold_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._hold_s = hold_s
        self._clock = clock
        self._lock = threading.Lock()
        self._holds: dict[Hashable, tuple[str, float]] = {}  # and when they end, in that order

    def add(self, request: Hashable, hold: str) -> None:
        """Remember the hold of a match. An empty one means no hold."""
        now = self._clock()
        with self._lock:
            while self._holds and next(iter(self._holds.values()))[1] <= now:
                del self._holds[next(iter(self._holds))]
            self._holds.pop(request, None)  # a second look-up of the same: the first hold ends by itself
            if hold:
                self._holds[request] = (hold, now + self._hold_s)

    def pop(self, request: Hashable) -> str:
        """Return the hold of a request, to be released; empty if it has none."""
        with self._lock:
            return self._holds.pop(request, ("", 0.0))[0]

    def pop_each(self, requests: Iterable[Hashable]) -> list[str]:
        """Return the holds of these requests, to be released."""
        with self._lock:
            return [self._holds.pop(request)[0] for request in requests if request in self._holds]

    def pop_all(self) -> list[str]:
        """Return all holds, to be released."""
        with self._lock:
            holds = [hold for hold, _ in self._holds.values()]
            self._holds.clear()
        return holds
