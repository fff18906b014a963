"""When to try a server again, and when to leave it alone.

After a failure the next try waits, twice as long each time. After several failures in a row the circuit opens: calls
fail at once, without a packet, until a pause is over; then one call is let through as a probe. Its success closes the
circuit, its failure opens it again for twice as long. So a dead server costs its callers little, and a restarted one
is found.
"""

import random
import threading
from collections.abc import Callable

from infinistore.errors import StoreUnavailable

__all__ = ["Health"]

_FIRST_DELAY_S = 0.02
_FAILURES_TO_OPEN = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0


class Health:
    """What one store knows of its server's health. Any thread may use it."""

    def __init__(self, clock: Callable[[], float], random: random.Random) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._random = random
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until: float | None = None
        self._probe = 0
        self._last_error = ""

    def check(self) -> int:
        """Let a call go to the server. Returns what `failed` and `dropped` want: the number of a probe, else 0.

        Raises:
            StoreUnavailable: the circuit is open.
        """
        if self._open_until is None:  # the circuit is closed, nearly always
            return 0
        with self._lock:
            if self._open_until is None:
                return 0
            wait_s = self._open_until - self._clock()
            if wait_s > 0:
                raise StoreUnavailable(f"{self._last_error} (not tried again for another {wait_s:.1f} s)")
            # This call is the probe; the others keep out until it is back, or has had as long as the last pause.
            self._open_until = self._clock() + self._pause_s
            self._probe += 1
            return self._probe

    def succeeded(self) -> None:
        """The server has answered."""
        if self._failures:
            with self._lock:
                self._failures = 0
                self._pause_s = _FIRST_PAUSE_S
                self._open_until = None

    def failed(self, error: Exception, probe: int = 0) -> float | None:
        """The server has not answered. Returns how long to wait before the next try; None: do not try now."""
        with self._lock:
            self._last_error = str(error)
            self._failures += 1
            if self._open_until is None:
                if self._failures < _FAILURES_TO_OPEN:
                    delay_s: float = _FIRST_DELAY_S * 2 ** (self._failures - 1)
                    return delay_s * self._random.uniform(0.5, 1.0)
            elif probe and probe == self._probe:
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self._probe += 1  # it is back
            else:
                return None  # it was under way when the circuit opened, and says nothing new
            # Spread out, so that a restarted server is not met by all its clients at once.
            self._open_until = self._clock() + self._pause_s * self._random.uniform(0.75, 1.0)
            return None

    def dropped(self, probe: int) -> None:
        """A call was given up by its caller, which says nothing about the server: if it was the probe, the next is."""
        with self._lock:
            if probe and probe == self._probe and self._open_until is not None:
                self._open_until = self._clock()
