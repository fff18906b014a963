"""Polling for a moment before a receive sleeps (spinning).

Waking a sleeping process costs 50 us and more on a virtual machine, several times what
a lookup takes. So a stream whose peer answered quickly before polls for a few
microseconds before it sleeps. Spinning is bounded, stops where it does not help, stops
where it takes the processor from others, and is counted.
"""

import math
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.settings import ADAPTIVE, Spin
from infinistore.statistics import SpinStatistics

LONGEST_SPIN_S: Final = 400e-6
"""How long an adaptive spin lasts at most."""
STALLED_S: Final = 30e-6
"""A look at the socket and the clock takes 1 or 2 us. If it takes so long, somebody
else has had the processor, or this process's interpreter.
"""
_COPY_S_PER_BYTE = 1e-9
"""What a look that brings bytes may take longer: it copies them."""
_RECENT_S = 2e-3
_ALONE_S = 2e-3
_MOST_SKIPPED, _MOST_SKIPPED_ADAPTIVE = 8, 1024
_SAVED_S = 50e-6
"""What a spin saves that ends with a message: being woken up."""
_WORST_S = 5e-3
_NOW = socket.MSG_DONTWAIT


class Spinner:
    """Decides when to spin, and does it. One for all streams of a thread.

    It spins only for the stream that last moved bytes, only soon after that (or before
    a time by which the stream is known to move some), and only if no other stream has
    moved any lately.

    With a fixed time, a miss makes it skip the next chance, and each further miss twice
    as many, up to eight. So a burst of calls costs one miss, at its end.

    An adaptive one, as which None counts, also takes it for a miss if it lost the
    processor while it spun, whatever came of it: then more want to run than there are
    cores, and what it waits for may be what it keeps from running. What a miss has cost
    is a debt, of which each spin that ends with a message pays what being woken up
    would have taken. As long as there is a debt, each further miss makes it skip twice
    as many chances, up to 1,024.
    Nothing but its own clock tells it so: what the kernel counts (`/proc/loadavg`,
    schedstat) costs as much as the system calls of a request, includes who would give
    way, and is not for every container to see.
    """

    def __init__(self, spin_us: Spin | None = ADAPTIVE, clock: Callable[[], float] = time.perf_counter) -> None:
        self._adaptive = adaptive = spin_us in (None, ADAPTIVE)
        self._spin_s = LONGEST_SPIN_S if adaptive else spin_us * 1e-6 if isinstance(spin_us, int) else 0.0
        self._stalled_s = STALLED_S if self._adaptive else math.inf
        self._most_skipped = _MOST_SKIPPED_ADAPTIVE if self._adaptive else _MOST_SKIPPED
        self.clock = clock
        self._last: object = None
        self._last_at = 0.0
        self._alone_since = 0.0
        self._skip = 0
        self._skip_next = 1
        self._debt_s = 0.0
        self._spins = 0
        self._hits = 0
        self._burned_s = 0.0

    @property
    def spins(self) -> bool:
        """Whether it ever spins."""
        return self._spin_s > 0

    def moved(self, stream: object) -> None:
        """Note that bytes have moved on a stream."""
        self._last_at = now = self.clock()
        if stream is not self._last:
            self._last = stream
            self._alone_since = now

    def may_spin(self, stream: object, until: float = 0.0) -> bool:
        """Whether to spin: the stream is alone, and moves bytes now or by `until`."""
        now = self.clock()
        return (
            stream is self._last
            and (now - self._last_at <= _RECENT_S or now < until)
            and now - self._alone_since >= _ALONE_S
            and self._spin_s > 0
            and not (self._skip and self._adaptive)
        )

    def chance(self, stream: object) -> bool:
        """Whether the next `spin` would spin; if it would be skipped, it has been."""
        return stream is self._last and self._spin_s > 0 and self._takes_chance(self.clock(), 0.0)

    def spin(
        self, stream: object, sock: socket.socket, views: Sequence[memoryview], *, until: float = 0.0
    ) -> int | None:
        """Try to receive from the socket of a stream for a moment. Return None if
        nothing came, or if it is not worth trying.

        It does not spin for a payload that is longer than what is read ahead with a
        head: taking each packet as it comes is slower than sleeping until there are
        many, for both ends. `until` is when the stream is
        known to move bytes; a miss before that does not count.
        """
        view = views[0]
        if stream is not self._last or len(views) != 1 or len(view) > READ_AHEAD_BYTES or not self._spin_s:
            return None
        receive, clock, stalled_s = sock.recv_into, self.clock, self._stalled_s
        now = start = clock()
        end = self.begin(now, until)
        if not end:
            return None
        count = None
        lost_s = 0.0
        while count is None and now < end:
            before = now
            try:  # noqa: SIM105  # it is run every microsecond
                count = receive(view, 0, _NOW)
            except BlockingIOError:
                pass
            now = clock()
            if now - before > stalled_s + (count or 0) * _COPY_S_PER_BYTE:
                lost_s += now - before
        if count is None:
            self.missed(now - start, counts=now >= until or lost_s > 0)
        else:
            self._last_at = now
            self.hit(now - start, lost_s)
        return count

    def begin(self, now: float, until: float = 0.0) -> float:
        """Take a chance to spin. Return until when; 0.0 to sleep at once."""
        if not self._takes_chance(now, until):
            return 0.0
        self._spins += 1
        return now + self._spin_s

    def _takes_chance(self, now: float, until: float) -> bool:
        """Whether this is a chance, and none to skip. One that is skipped counts."""
        if (now - self._last_at > _RECENT_S and now >= until) or now - self._alone_since < _ALONE_S:
            return False
        if self._skip and (self._adaptive or now >= until):
            self._skip -= now >= until
            return False
        return True

    def hit(self, spun_s: float, lost_s: float = 0.0) -> None:
        """Note that something came, and for how long others had the processor."""
        self._hits += 1
        self._burned_s += spun_s
        if lost_s:
            self._skip_more(lost_s)
            return
        self._debt_s -= _SAVED_S
        if self._debt_s <= 0.0 or not self._adaptive:
            self._debt_s = 0.0
            self._skip, self._skip_next = 0, 1

    def missed(self, spun_s: float, *, counts: bool = True) -> None:
        """Note that nothing came."""
        self._burned_s += spun_s
        if counts:
            self._skip_more(spun_s)

    def _skip_more(self, cost_s: float) -> None:
        self._skip = self._skip_next
        self._skip_next = min(2 * self._skip_next, self._most_skipped)
        self._debt_s = min(self._debt_s + cost_s, _WORST_S)

    def statistics(self) -> SpinStatistics:
        """Return the counts so far."""
        return SpinStatistics(self._spins, self._hits, self._burned_s)
