"""When to try a server again, and when to leave it alone.

After a failure the next try waits, twice as long each time. After several failures in a
row the circuit opens: calls fail at once, without a packet, until a pause is over. Then
one call is let through as a probe. Its success closes the circuit; its failure opens it
again for twice as long. So a dead server costs its callers little, and a restarted one
is found.
"""

import random
import threading
from collections.abc import Callable

from infinistore.errors import StoreUnavailable

FIRST_DELAY_S = 0.02
"""The pause before the first retry of a call."""
FAILURES_TO_OPEN = 5
"""After how many failures in a row the circuit opens."""
FIRST_PAUSE_S = 1.0
"""How long the circuit stays open at first; twice as long after each failed probe."""
LONGEST_PAUSE_S = 15.0
"""The longest pause between two probes."""


class CircuitBreaker:
    """The known health of one store's server. Any thread may use it."""

    def __init__(
        self, clock: Callable[[], float], random: random.Random, failures_to_open: int = FAILURES_TO_OPEN
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._random = random
        self._failures_to_open = failures_to_open
        self.failures = 0
        """In a row, until now."""
        self._pause_s = FIRST_PAUSE_S
        self.open_until: float | None = None
        """When the next probe may go, on the clock; None while the circuit is closed.
        """
        self._probe = 0
        self._last_error = ""

    def check(self) -> int:
        """Let a call go to the server.

        Returns the argument for `failed` and `dropped`: the number of a probe, else 0.

        Raises:
            StoreUnavailable: the circuit is open.
        """
        with self._lock:
            if self.open_until is None:
                return 0
            wait_s = self.open_until - self._clock()
            if wait_s > 0:
                raise StoreUnavailable(f"{self._last_error} (not tried again for another {wait_s:.1f} s)")
            # This call is the probe. Others stay out until it ends, or has taken as
            # long as the last pause.
            self.open_until = self._clock() + self._pause_s
            self._probe += 1
            return self._probe

    def succeeded(self) -> None:
        """The server has answered."""
        if self.failures:
            with self._lock:
                self.failures = 0
                self._pause_s = FIRST_PAUSE_S
                self.open_until = None

    def failed(self, error: Exception, probe: int = 0) -> float | None:
        """Note that the server has not answered.

        Returns how long to wait before the next try; None: do not try now.
        """
        with self._lock:
            self._last_error = str(error)
            self.failures += 1
            if self.open_until is None:
                if self.failures < self._failures_to_open:
                    delay_s: float = FIRST_DELAY_S * 2 ** (self.failures - 1)
                    return delay_s * self._random.uniform(0.5, 1.0)
            elif probe and probe == self._probe:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            else:
                # it was running when the circuit opened, and says nothing new
                return None
            self._probe += 1  # none is out any more
            # Spread out, so that a restarted server is not met by all its clients at
            # once.
            self.open_until = self._clock() + self._pause_s * self._random.uniform(0.75, 1.0)
            return None

    def dropped(self, probe: int) -> None:
        """Note that the caller gave a call up, which says nothing about the server.

        If it was the probe, the next call is one.
        """
        with self._lock:
            if probe and probe == self._probe and self.open_until is not None:
                self.open_until = self._clock()
