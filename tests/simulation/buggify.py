"""Rare behaviour made frequent: points at which a simulation makes the product do what
it may do, and seldom does.

An allocator may refuse a batch, a connection may take one byte at a time, the pool may
not grow. Programs that use the store have to cope, and so has the rest of the store,
but tests hardly ever get there. A `Buggify` decides at each point. The parts of the
product that ask it are the subclasses here. `BuggifiedStore`, `buggified` and
`buggified_machine` pass them to a store, a server and a client in the place of the
usual ones; the product knows nothing of it.
"""

import errno
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from random import Random
from typing import Any

import attrs
import trio

from infinistore.allocators.base import Extent
from infinistore.client.movers.shm.known_blocks import KnownBlocks, KnownReads, PinnedBlocks, Places
from infinistore.client.movers.shm.mapped_pool import Machine
from infinistore.core.arena import Arena
from infinistore.core.clients import Client, Lease, Reservation
from infinistore.core.index import Entry, Index
from infinistore.core.pins import MOST_WAITING_RATIO, Retired
from infinistore.core.removals import Removals
from infinistore.core.sharing import TenantSpace
from infinistore.core.space import EvictionCause, Space
from infinistore.core.store import StoreCore, Written
from infinistore.core.tenants import TenantStore
from infinistore.errors import OutOfMemory
from infinistore.protocol.effects import LongBody, Span
from infinistore.server.budgets import BodyBudget, BodyGrant
from infinistore.server.environment import Environment
from infinistore.transports.base import React, Stream, can_react

__all__ = [
    "BuggifiedStore",
    "BuggifiedStream",
    "BuggifiedTenantStore",
    "Buggify",
    "Point",
    "buggified",
    "buggified_machine",
]

_FEW = 3
_FEW_BYTES = 100
_LITTLE_AHEAD_BYTES = 64
_MOST_PAUSE_S = 0.05


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


class _Retired(Retired):
    def __init__(self, buggify: Buggify, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buggify = buggify

    def scan_for(self, entries: Sequence[Any]) -> bool:
        may_wait = self.stored is not None and self.waiting_bytes <= MOST_WAITING_RATIO * self._pool.capacity_bytes
        if may_wait and self._buggify(Point.LONGER_WAIT):
            return False
        return super().scan_for(entries)

    def tidy(self) -> None:
        if self._buggify(Point.EARLY_RECLAIM):
            self.reclaim()
        super().tidy()


class _Removals(Removals):
    def __init__(self, buggify: Buggify, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buggify = buggify

    def purge(self, index: Index, max_keys: int | None) -> int:
        if max_keys is not None and max_keys > 1 and self._buggify(Point.SHORT_SLICE):
            max_keys = 1 + self._buggify.random.randrange(min(_FEW, max_keys - 1))
        return super().purge(index, max_keys)

    def slice_keys(self) -> int:
        if self._buggify(Point.SHORT_SLICE):
            return 1 + self._buggify.random.randrange(_FEW)
        return super().slice_keys()

    def announce(self, entries: list[Entry]) -> None:
        """At times, announce one more place, where nothing is removed: a block there
        shares its entry of the removal table with one that goes.
        """
        if entries and self.on_removal is not None and self._buggify(Point.REMOVAL_COLLISION):
            unit_bytes = self._pool.footprint(1)
            units = max(1, self._pool.arenas[0].length // unit_bytes)
            entries = [*entries, (0, self._buggify.random.randrange(units) * unit_bytes, 1, 0)]
        super().announce(entries)


class _Space(Space):
    def __init__(self, buggify: Buggify, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buggify = buggify
        self._allocate = self._allocate_badly

    def _allocate_badly(self, sizes: Sequence[int]) -> list[Extent] | None:
        if sizes and self._buggify(Point.ALLOCATION_REFUSED):
            return None
        if len(sizes) > 1 and self._buggify(Point.SCATTERED_BATCH):
            return self._allocate_apart(sizes)
        return self._pool.allocate(sizes)

    def _allocate_apart(self, sizes: Sequence[int]) -> list[Extent] | None:
        places: dict[int, Extent] = {}
        for position in self._buggify.random.sample(range(len(sizes)), len(sizes)):
            placed = self._pool.allocate([sizes[position]])
            if placed is None:
                self._pool.free(list(places.values()))
                return None
            places[position] = placed[0]
        return [places[position] for position in range(len(sizes))]

    def make_space(self, index: Index, wanted_bytes: int) -> None:
        if self._buggify(Point.EARLY_EVICTION):
            self.evict(index, wanted_bytes, "on_demand", 1 + self._buggify.random.randrange(_FEW))
        super().make_space(index, wanted_bytes)

    def evict(self, index: Index, wanted_bytes: float, cause: EvictionCause, max_steps: int | None = None) -> int:
        if max_steps is not None and max_steps > 1 and self._buggify(Point.SHORT_SLICE):
            max_steps = 1 + self._buggify.random.randrange(min(_FEW, max_steps - 1))
        return super().evict(index, wanted_bytes, cause, max_steps)

    def reserve_spare(self, sizes: Sequence[int], footprint_bytes: int) -> list[Extent] | None:
        if self._buggify(Point.SPARE_REFUSED):
            return None
        return super().reserve_spare(sizes, footprint_bytes)


class _TenantSpace(_Space, TenantSpace):
    pass


class _BuggifiedStore(StoreCore):
    buggify: Buggify

    def make_retired(self) -> Retired:
        return _Retired(self.buggify, self.pool, self.pins)

    def make_removals(self) -> Removals:
        log, deletions, journal = self.removal_log, self.deletions, self.journal
        parts = self.pool, self.retired, self.retention
        return _Removals(self.buggify, *parts, log=log, deletions=deletions, journal=journal)

    def prepare(self, reservation: Reservation, keys: Sequence[str], written: Written) -> bool:
        if self.buggify(Point.PREPARE_REFUSED):
            return False
        return super().prepare(reservation, keys, written)

    def lease(self, client: Client, keys: Sequence[str], *, max_bytes: int | None = None, touch: bool = True) -> Lease:
        if max_bytes is not None and len(keys) > 1 and self.buggify(Point.SHORT_ANSWER):
            max_bytes = 1
        return super().lease(client, keys, max_bytes=max_bytes, touch=touch)


class BuggifiedStore(_BuggifiedStore):
    """A store that does what stores seldom do."""

    def __init__(self, buggify: Buggify, *arguments: Any, **options: Any) -> None:
        self.buggify = buggify
        super().__init__(*arguments, **options)

    def make_space(self) -> Space:
        """Make a part."""
        parts = self.pool, self.pins, self.retired, self.removals, self.retention
        return _Space(self.buggify, *parts, watermarks=self.watermarks, growth=self.growth)


class BuggifiedTenantStore(_BuggifiedStore, TenantStore):
    """The same of a tenant."""

    def __init__(self, buggify: Buggify, *arguments: Any, **options: Any) -> None:
        self.buggify = buggify
        super().__init__(*arguments, **options)

    def make_space(self) -> TenantSpace:
        """Make a part."""
        parts = self.pool, self.pins, self.retired, self.removals, self.retention
        options = {"watermarks": self.watermarks, "growth": self.growth}
        return _TenantSpace(self.buggify, self.sharing, self.tenant_limits, *parts, **options)


class BuggifiedStream:
    """A stream of a server that is slow, or moves little. What is not about moving
    bytes is the other stream's.
    """

    def __init__(self, stream: Stream, buggify: Buggify) -> None:
        self._stream = stream
        self._buggify = buggify

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send as the other stream does, perhaps later and in pieces."""
        buggify, deadline = self._buggify, trio.current_time() + within_s
        if buggify(Point.SLOW_SEND):
            await self._pause(deadline)
        span = Span(views)
        if span.remaining > 1 and buggify(Point.SHORT_SEND):
            count = 1 + buggify.random.randrange(span.remaining - 1)
            await self._send(span, count, deadline)
            await self._pause(deadline)
        await self._send(span, span.remaining, deadline)

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Receive as the other stream does, perhaps later and less."""
        buggify = self._buggify
        if buggify(Point.SLOW_SESSION):
            await self._pause(deadline)
        span = Span(views)
        if buggify(Point.SHORT_RECEIVE):
            views = span.next_views(min(span.remaining, 1 + buggify.random.randrange(_FEW_BYTES)))
        return await self._stream.receive_into(views, deadline)

    async def receive_or_react(self, views: Sequence[memoryview], react: React) -> int:
        """As the other stream does, if it can, perhaps later and less."""
        if not can_react(self._stream) or self._buggify(Point.SLOW_SESSION):
            return await self.receive_into(views)
        return await self._stream.receive_or_react(views, react)

    def send_now(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Send as the other stream does, if it can, perhaps less."""
        span = Span(views)
        if not can_react(self._stream):
            return views
        if span.remaining > 1 and self._buggify(Point.SHORT_SEND):
            count = 1 + self._buggify.random.randrange(span.remaining - 1)
            left = self._stream.send_now(span.next_views(count))
            span.advance(count - sum(map(len, left)))
            return span.next_views(span.remaining)
        return self._stream.send_now(views)

    async def _send(self, span: Span, count: int, deadline: float) -> None:
        while count:
            views = span.next_views(count)
            moved = sum(map(len, views))
            await self._stream.send_all(views, deadline - trio.current_time())
            span.advance(moved)
            count -= moved

    async def _pause(self, deadline: float) -> None:
        until = trio.current_time() + _MOST_PAUSE_S * self._buggify.random.random()
        await trio.sleep_until(min(until, deadline))
        if until >= deadline:
            raise TimeoutError


def buggified(environment: Environment, buggify: Buggify) -> Environment:
    """Return an environment in which a server does what it seldom does: at times it has
    no descriptors, memory or threads, and its streams are slow or move little at a
    time.
    """
    ahead = _LITTLE_AHEAD_BYTES if buggify(Point.SHORT_READ_AHEAD) else environment.read_ahead_bytes
    return attrs.evolve(
        environment,
        accept=_accept(environment, buggify),
        create_arena=_create_arena(environment, buggify),
        run_in_thread=_run_in_thread(environment, buggify),
        read_ahead_bytes=ahead,
        make_body_budget=partial(_BodyBudget, buggify),
        make_store=partial(BuggifiedStore, buggify),
        make_tenant_store=partial(BuggifiedTenantStore, buggify),
    )


def _accept(environment: Environment, buggify: Buggify) -> Callable[..., Any]:
    async def accept(*arguments: Any) -> Any:
        if buggify(Point.ACCEPT_REFUSED):
            await trio.lowlevel.checkpoint()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return BuggifiedStream(await environment.accept(*arguments), buggify)

    return accept


def _create_arena(environment: Environment, buggify: Buggify) -> Callable[..., Arena]:
    def create_arena(index: int, length: int, **options: Any) -> Arena:
        if index and buggify(Point.GROWTH_REFUSED):
            raise OutOfMemory("there is no memory for another arena")
        if options.get("name") == "reader" and buggify(Point.TABLES_REFUSED):
            raise OutOfMemory("there is no memory for the tables of a client")
        return environment.create_arena(index, length, **options)

    return create_arena


def _run_in_thread(environment: Environment, buggify: Buggify) -> Callable[..., Any]:
    async def run_in_thread(*arguments: Any) -> Any:
        if buggify(Point.SLOW_THREAD):
            await trio.sleep(_MOST_PAUSE_S * buggify.random.random())
        return await environment.run_in_thread(*arguments)

    return run_in_thread


class _BodyBudget(BodyBudget):
    def __init__(self, buggify: Buggify, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._buggify = buggify

    async def acquire(self, body: LongBody, end: Callable[[], None], tenant: str = "") -> BodyGrant:
        if self._buggify(Point.FULL_BODY_BUDGET):
            await trio.sleep(_MOST_PAUSE_S * self._buggify.random.random())
        return await super().acquire(body, end, tenant)


def buggified_machine(machine: Machine, buggify: Buggify) -> Machine:
    """Return a machine on which a client of shared memory does what it seldom does."""
    return attrs.evolve(
        machine,
        known_blocks=partial(_KnownBlocks, buggify),
        known_reads=partial(_KnownReads, buggify),
    )


class _KnownBlocks(KnownBlocks):
    def __init__(self, buggify: Buggify, most: int) -> None:
        super().__init__(most)
        self._buggify = buggify

    def find(self, keys: Sequence[str]) -> Places | None:
        if self._buggify(Point.BLOCK_FORGOTTEN):
            return None
        return super().find(keys)


class _KnownReads(KnownReads):
    def __init__(self, buggify: Buggify, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buggify = buggify

    def pin(self, keys: Sequence[str], known: Places) -> PinnedBlocks | None:
        if self._buggify(Point.HAZARDS_FULL):
            return None
        return super().pin(keys, known)

    def log(self, touch: bytes) -> bool:
        if self._buggify(Point.TOUCH_LOG_FULL):
            return False
        return super().log(touch)

    def can_commit(self, blocks: int) -> bool:
        if self._buggify(Point.COMMIT_BY_MESSAGE):
            return False
        return super().can_commit(blocks)
