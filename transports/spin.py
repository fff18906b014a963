"""Waiting for a moment without going to sleep.

Waking a sleeping process costs 50 us and more on a virtual machine, several times what a look-up takes. So a stream
whose peer answered quickly before tries again for a few microseconds before it sleeps. It is bounded, it stops where
it does not help, it stops where others wait for the same thread, and what it burns is counted.
"""

import socket
import time
from collections.abc import Callable, Sequence

import attrs

__all__ = ["DEFAULT_SPIN_S", "SpinStatistics", "Spinner"]

DEFAULT_SPIN_S = 400e-6
_LONGEST_BYTES = 64 * 1024
_RECENT_S = 2e-3
_ALONE_S = 2e-3
_MOST_SKIPPED = 8
_NOW = socket.MSG_DONTWAIT


@attrs.frozen
class SpinStatistics:
    """How often waiting awake was tried, how often something came meanwhile, and how long it took in all."""

    spins: int
    hits: int
    burned_s: float


class Spinner:
    """Decides when to wait awake, and does it. One for all streams of a thread.

    It spins only for the stream that was the last to move bytes, only soon after that (or before a time by which it is
    known to move some), and only if no other stream has moved any lately. A miss makes it skip the next chance, and
    each further one twice as many, up to eight: a burst of calls costs one miss, at its end.
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
        """Whether to wait awake for a stream: one that is alone, and moved bytes lately or will until this time."""
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
        """Try to receive from the socket of a stream for a moment; `None` if that was in vain, or not worth it.

        A long payload is left alone: taking each packet as it comes is slower than sleeping until there are many, for
        both ends. `until` is when the stream is known to move bytes: before that, a miss says nothing.
        """
        view = views[0]
        if len(views) != 1 or len(view) > _LONGEST_BYTES or not self.may_spin(stream, until):
            return None
        receive, clock = sock.recv_into, self.clock
        now = start = clock()
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
            self._skip, self._skip_next = 0, 1
            self._burned_s += now - start
            return count
        self._burned_s += now - start
        if now >= until:
            self._skip = self._skip_next
            self._skip_next = min(2 * self._skip_next, _MOST_SKIPPED)
        return None

    def statistics(self) -> SpinStatistics:
        """What it did so far."""
        return SpinStatistics(self._spins, self._hits, self._burned_s)
