"""What a server takes from its machine, when a simulation buggifies it: at times there
are no descriptors, no memory and no threads, and streams are slow, or move little at
a time.
"""

import errno
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from infinistore.buggify import Buggify, Point
from infinistore.core.arena import Arena
from infinistore.core.store import StoreCore
from infinistore.errors import OutOfMemory
from infinistore.protocol.effects import LongBody, Span
from infinistore.server.budgets import BodyBudget, BodyGrant
from infinistore.server.environment import Environment
from infinistore.transports.base import React, Stream, can_react

_MOST_PAUSE_S = 0.05
_FEW_BYTES = 100
_LITTLE_AHEAD_BYTES = 64


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


def buggified(environment: Environment) -> Environment:
    """Return an environment that fails at times; the same one without a `Buggify`."""
    buggify = environment.buggify
    if buggify is None:
        return environment
    ahead = _LITTLE_AHEAD_BYTES if buggify(Point.SHORT_READ_AHEAD) else environment.read_ahead_bytes
    return attrs.evolve(
        environment,
        accept=_accept(environment, buggify),
        create_arena=_create_arena(environment, buggify),
        run_in_thread=_run_in_thread(environment, buggify),
        read_ahead_bytes=ahead,
    )


def make_body_budget(environment: Environment) -> BodyBudget:
    """Return the budget for long bodies."""
    if environment.buggify is None:
        return BodyBudget(environment.body_budget_bytes)
    return _BodyBudget(environment.body_budget_bytes, environment.buggify)


def collide(core: StoreCore, environment: Environment) -> None:
    """Have removals also name places where nothing is removed, if that is buggified:
    blocks there share an entry of the removal table with one that goes.
    """
    buggify, announce = environment.buggify, core.on_removal
    if buggify is None or announce is None:
        return

    def announce_more(entries: Sequence[Any]) -> None:
        if buggify(Point.REMOVAL_COLLISION):
            unit_bytes = core.pool.footprint(1)
            units = max(1, core.pool.arenas[0].length // unit_bytes)
            entries = [*entries, (0, buggify.random.randrange(units) * unit_bytes, 1, 0)]
        announce(entries)

    core.on_removal = announce_more


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
    def __init__(self, budget_bytes: int, buggify: Buggify) -> None:
        super().__init__(budget_bytes)
        self._buggify = buggify

    async def acquire(self, body: LongBody, end: Callable[[], None], tenant: str = "") -> BodyGrant:
        if self._buggify(Point.FULL_BODY_BUDGET):
            await trio.sleep(_MOST_PAUSE_S * self._buggify.random.random())
        return await super().acquire(body, end, tenant)
