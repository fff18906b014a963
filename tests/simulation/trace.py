"""What happened in a run: a hash of every event, and the last of them."""

import hashlib
from collections import Counter, deque
from typing import Any, NamedTuple

from tests.simulation.clock import VirtualClock

__all__ = ["Event", "Trace"]

_KEPT = 400


class Event(NamedTuple):
    """Something that happened at a virtual time in seconds."""

    time: float
    where: str
    what: str
    details: tuple[Any, ...]


class Trace:
    """The events of a run. Equal hashes mean equal runs."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._hash = hashlib.blake2b(digest_size=16)
        self.last: deque[Event] = deque(maxlen=_KEPT)
        self.counts: Counter[str] = Counter()
        """How many events there were of each kind."""
        self.events = 0
        """How many events there were."""

    def add(self, where: str, what: str, *details: Any) -> None:
        """Note an event. Details must not depend on the process: no addresses."""
        event = Event(self._clock.now, where, what, details)
        self._hash.update(repr((event.time, where, what, details)).encode())
        self.last.append(event)
        self.counts[what] += 1
        self.events += 1

    @property
    def hash(self) -> str:
        """The hash of all events until now."""
        return self._hash.hexdigest()
