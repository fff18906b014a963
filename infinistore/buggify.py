"""Rare behaviour made frequent: points at which a simulation has the product do what it
may do, and seldom does.

An allocator may refuse a batch, a connection may take one byte at a time, the pool may
not grow. Programs that use the store have to cope, and so has the rest of the store,
but tests hardly ever get there. So a simulation passes a `Buggify` to what it composes,
which then uses subclasses that ask it at each point (`buggified` in
`infinistore/core/`, `infinistore/server/` and `infinistore/client/`). Without one, none
of that is in use, and nothing asks.
"""

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from random import Random


class Point(Enum):
    """What may happen, and seldom does. Each is legal."""

    ALLOCATION_REFUSED = "the allocator refuses a batch that would fit"
    SCATTERED_BATCH = "the allocator places the blocks of a batch apart"
    EARLY_EVICTION = "blocks are evicted although there is space"
    SPARE_REFUSED = "a client gets no space for its next put"
    LONGER_WAIT = "replaced and deleted blocks wait although they could be freed"
    EARLY_RECLAIM = "hazards are scanned, and waiting blocks freed, before it is due"
    SHORT_SLICE = "a long operation stops after a few blocks, and goes on later"
    SHORT_ANSWER = "a get is answered for its first blocks only"
    PREPARE_REFUSED = "a client may not name blocks before it writes them"
    REMOVAL_COLLISION = "a block shares its entry of the removal table with one that goes"
    ACCEPT_REFUSED = "the process has no descriptor for a new connection"
    SHORT_SEND = "a message is sent in two pieces"
    SLOW_SEND = "a sender waits before it sends"
    SHORT_RECEIVE = "a few bytes are received at a time"
    SLOW_SESSION = "a session waits before it receives"
    SHORT_READ_AHEAD = "a server reads little ahead, so that most bodies are long ones"
    FULL_BODY_BUDGET = "a long body waits for memory"
    GROWTH_REFUSED = "there is no memory for another arena"
    TABLES_REFUSED = "there is no memory for the tables of a client"
    SLOW_THREAD = "a thread takes a while to begin"
    BLOCK_FORGOTTEN = "a client no longer knows where a block is"
    HAZARDS_FULL = "a client has no entries left in its hazard table"
    TOUCH_LOG_FULL = "a client cannot leave a note of what it has read"
    COMMIT_BY_MESSAGE = "a client may not commit by a number in shared memory"


class Buggify:
    """Decides at each point whether it happens, with the chance that the point has
    here: 0 if it has none.
    """

    def __init__(self, random: Random, chances: Mapping[Point, float]) -> None:
        self.random = random
        """What decides, and what chooses how much of something happens."""
        self.chances = chances
        self.fired: Counter[Point] = Counter()
        """How often each point has happened."""

    def __call__(self, point: Point) -> bool:
        """Return whether it happens now."""
        happens = self.random.random() < self.chances.get(point, 0.0)
        if happens:
            self.fired[point] += 1
        return happens
