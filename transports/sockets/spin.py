"""Polling for a moment before a receive sleeps (spinning).

Waking a sleeping process costs 50 us and more on a virtual machine, several times what
a lookup takes. So a stream whose peer answered quickly before polls for a few
microseconds before it sleeps. Spinning is bounded, stops where it does not help, stops
where other tasks wait for the same thread, and is counted.
"""

import socket
import time
from collections.abc import Callable, Sequence

from infinistore.statistics import SpinStatistics

__all__ = ["DEFAULT_SPIN_S", "Spinner"]

DEFAULT_SPIN_S = 400e-6
_LONGEST_BYTES = 64 * 1024
_RECENT_S = 2e-3
_ALONE_S = 2e-3
_MOST_SKIPPED = 8
_NOW = socket.MSG_DONTWAIT


class Spinner:
    """Decides when to spin, and does it. One for all streams of a thread.

    It spins only for the stream that last moved bytes, only soon after that (or before
    a time by which the stream is known to move some), and only if no other stream has
    moved any lately. A miss makes it skip the next chance, and each further miss twice
    as many, up to eight. So a burst of calls costs one miss, at its end.
    """

    def __init__(self, spin_s: float = DEFAULT_SPIN_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._spin_s = spin_s
        self.clock = clock
        self._last: object = None
        self._last_at = 0.0
        self._alone_since = 0.0
        self._skip = 0
        self._skip_next = 1
        self._spins = 0
        self._hits = 0
        self._burned_s = 0.0

    def moved(self, stream: object) -> None:
        """Note that bytes have moved on a stream."""
        self._last_at = now = self.clock()
        if stream is not self._last:
            self._last = stream
            self._alone_since = now

    def may_spin(self, stream: object, until: float = 0.0) -> bool:
        """Whether to spin for a stream: it is alone, and moved bytes lately or will do
        so until this time.
        """
        now = self.clock()
        return (
            stream is self._last
            and (now - self._last_at <= _RECENT_S or now < until)
            and now - self._alone_since >= _ALONE_S
            and self._spin_s > 0
        )

    def spin(
        self, stream: object, sock: socket.socket, views: Sequence[memoryview], *, until: float = 0.0
    ) -> int | None:
        """Try to receive from the socket of a stream for a moment. Return None if
        nothing came, or if it is not worth trying.

        It does not spin for a long payload: taking each packet as it comes is slower
        than sleeping until there are many, for both ends. `until` is when the stream is
        known to move bytes; a miss before that does not count.
        """
        view = views[0]
        if stream is not self._last or len(views) != 1 or len(view) > _LONGEST_BYTES or not self._spin_s:
            return None
        receive, clock = sock.recv_into, self.clock
        now = start = clock()
        if (now - self._last_at > _RECENT_S and now >= until) or now - self._alone_since < _ALONE_S:
            return None
        if self._skip and start >= until:
            self._skip -= 1
            return None
        end = start + self._spin_s
        self._spins += 1
        while now < end:
            try:
                count = receive(view, 0, _NOW)
            except BlockingIOError:
                now = clock()
                continue
            self._hits += 1
            self._last_at = now
            self._skip, self._skip_next = 0, 1
            self._burned_s += now - start
            return count
        self._burned_s += now - start
        if now >= until:
            self._skip = self._skip_next
            self._skip_next = min(2 * self._skip_next, _MOST_SKIPPED)
        return None

    def statistics(self) -> SpinStatistics:
        """Return the counts so far."""
        return SpinStatistics(self._spins, self._hits, self._burned_s)
