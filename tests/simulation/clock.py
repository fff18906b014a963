"""Virtual time: it passes only when all tasks wait, and then jumps to what comes next.

Timers call a function at a time, without a task or a cancel scope of their own. What is
due at the same moment happens in the order in which it was asked for.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from trio.abc import Clock

__all__ = ["Timer", "VirtualClock"]

_MOST_LOOKS = 2_000_000
_LOOKS_A_TICK = 10_000
_TICK_S = 1e-9
"""The least that passes when all tasks wait, and after so many looks at the clock: else
whoever waits for a time of another clock could come so close to it that the rest is
lost in rounding, and wait for ever."""


class Timer:
    """A call that is due at a time, unless it is cancelled before."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Forget the call. Idempotent."""
        self.call = None


class VirtualClock(Clock):
    """The clock of one run, which starts at 0.

    Raises:
        RuntimeError: the run is stuck: nothing is due any more, or tasks keep running
            while no time passes.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._looks = 0

    def at(self, time: float, call: Callable[[], object]) -> Timer:
        """Call a function at a time, or as soon as all tasks wait if that is past."""
        timer = Timer(call)
        heappush(self._heap, (max(time, self.now), next(self._numbers), timer))
        return timer

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call a function when so many seconds have passed."""
        return self.at(self.now + seconds, call)

    def start_clock(self) -> None:
        """Begin at 0."""

    def current_time(self) -> float:
        """Return the seconds since the beginning."""
        self._looks += 1
        if self._looks % _LOOKS_A_TICK == 0:
            self.now += _TICK_S
        if self._looks > _MOST_LOOKS:
            raise RuntimeError(f"tasks keep running, and it is still {self.now:.6f} s")
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to what comes next. Trio asks when all tasks wait."""
        heap = self._heap
        while heap and heap[0][2].call is None:
            heappop(heap)
        due = heap[0][0] if heap else math.inf
        following = min(due, deadline)
        if following == math.inf:
            raise RuntimeError("every task waits, and nothing will ever wake one")
        if following > self.now + _TICK_S:
            self._looks = 0
        self.now = max(following, self.now + _TICK_S)
        while heap and heap[0][0] <= self.now:
            call = heappop(heap)[2].call
            if call is not None:
                call()
        return 0.0
