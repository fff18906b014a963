"""Streams of a server that are slow, or move little at a time."""

import math
from collections.abc import Sequence
from typing import Any

import trio

from infinistore.buggify import Buggify, Point
from infinistore.protocol.effects import Span
from infinistore.transports.base import React, Stream, can_react

_MOST_PAUSE_S = 0.05
_FEW_BYTES = 100


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
