"""What the connector measures of itself, for the engine's own metrics."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COUNTERS = {
    "looked_up_tokens": "Tokens of prompts that were looked up in the store.",
    "hit_tokens": "Tokens that were found, and that the engine did not have itself.",
    "read_bytes": "Bytes read from the store into the KV cache.",
    "written_bytes": "Bytes written to the store.",
    "dropped_bytes": "Bytes not written, because too many were waiting.",
    "failed_reads": "Requests of which not everything found could be read.",
    "skipped_loads": "Requests that computed what was found, because that is faster.",
    "skipped_tokens": "Tokens that they found, and that the engine did not have itself.",
    "tried_loads": "Requests that loaded all the same, to measure the link again.",
    "failed_writes": "Writes of a layer's blocks that failed.",
}
"""The counters, and what they count."""
TIMES = {
    "look_up": "Seconds of a lookup, for which the scheduler waits.",
    "read": "Seconds of the read of one request's blocks, in the background.",
}
"""What is timed."""
_MOST_TIMES = 1000
"""How many times of one kind are kept until they are taken."""


class Observations:
    """Counts and times since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._times: dict[str, list[float]] = {}

    def count(self, **amounts: int) -> None:
        """Add to counters, whose names are in `COUNTERS`."""
        with self._lock:
            self._counters.update(amounts)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time something, whose name is in `TIMES`; also what fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            with self._lock:
                times = self._times.setdefault(name, [])
                if len(times) < _MOST_TIMES:
                    times.append(seconds)

    def take(self) -> dict[str, Any]:
        """Return `counters`, and `times` in seconds, since the last call, if any."""
        with self._lock:
            counters, times = +self._counters, self._times
            self._counters, self._times = Counter(), {}
        return {"counters": dict(counters), "times": times} if counters or times else {}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of what two have taken."""
    if not one or not other:
        return one or other
    names = {**one["times"], **other["times"]}
    return {
        "counters": dict(Counter(one["counters"]) + Counter(other["counters"])),
        "times": {name: one["times"].get(name, []) + other["times"].get(name, []) for name in names},
    }
