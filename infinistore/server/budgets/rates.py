"""The rates of a tenant: how soon its next request is read.

A token bucket holds what a second brings. What a request takes beyond that is owed, and
the connection that took it reads nothing from its socket until it is paid. So nothing
is dropped, nothing polls, and the client's own sending waits when the socket is full.
All connections of a tenant share its buckets, and each that takes waits behind those
before it. A pause ends early when the client leaves, or the rates change.
"""

import socket
from collections.abc import Callable

import trio

from infinistore.server.budgets.departures import Departures
from infinistore.tenant_limits import TenantLimits

__all__ = ["Rates", "TokenBucket"]


class TokenBucket:
    """Tokens that come at `rate` a second, at most one second's worth, and at least one
    token."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._at = clock()
        self._tokens = max(1.0, rate)

    def set_rate(self, rate: float) -> None:
        """Let tokens come at another rate from now on. What is owed stays owed."""
        self._refill()
        self._rate = rate
        self._tokens = min(self._tokens, max(1.0, rate))

    def take(self, count: float) -> float:
        """Take tokens, also such as are not there yet; return in how many seconds they
        will all have come."""
        self._refill()
        self._tokens -= count
        return max(0.0, -self._tokens / self._rate)

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._at) * self._rate, max(1.0, self._rate))
        self._at = now


class Rates:
    """The rates of one tenant. `departures` tells when clients leave."""

    def __init__(
        self, limits: TenantLimits, departures: Departures, clock: Callable[[], float] = trio.current_time
    ) -> None:
        self._departures = departures
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._bytes: TokenBucket | None = None
        self._changed_limits = trio.Event()
        self.pauses = 0
        """How often a connection was made to wait."""
        self.set_limits(limits)

    @property
    def idle(self) -> bool:
        """Whether it limits nothing, and has limited nothing."""
        return self._requests is None and self._bytes is None and not self.pauses

    def set_limits(self, limits: TenantLimits) -> None:
        """Use other limits from now on. Connections that pause wait for what is owed by
        these."""
        self._changed_limits.set()
        self._changed_limits = trio.Event()
        self._requests = self._changed(self._requests, limits.requests_per_s)
        self._bytes = self._changed(self._bytes, limits.bytes_per_s)

    def wait_s(self) -> float:
        """Return for how many seconds a new connection is to read nothing: until what
        the others took is paid. Else who connects for each request would pay nothing.
        """
        return max((bucket.take(0) for bucket in (self._requests, self._bytes) if bucket is not None), default=0.0)

    def take(self, payload_bytes: int) -> float:
        """Count a request that has moved so many bytes; return for how many seconds its
        connection is to read nothing."""
        wait_s = 0.0 if self._requests is None else self._requests.take(1)
        return wait_s if self._bytes is None else max(wait_s, self._bytes.take(payload_bytes))

    async def rest_first(self, sock: socket.socket | None) -> bool:
        """Make a new connection wait, so that nothing is read from it; return whether
        its client is still there. `sock` is its socket, if it has one."""
        return await self._pause(self.wait_s(), sock)

    async def rest(self, payload_bytes: int, sock: socket.socket | None) -> bool:
        """Count a request that has moved so many bytes, and make its connection wait,
        as `rest_first` does."""
        return await self._pause(self.take(payload_bytes), sock)

    async def _pause(self, pause_s: float, sock: socket.socket | None) -> bool:
        if pause_s <= 0:
            return True
        self.pauses += 1
        with trio.CancelScope() as scope, self._departures.watched(sock, scope.cancel):
            while pause_s > 0:
                changed = self._changed_limits
                with trio.move_on_after(pause_s):
                    await changed.wait()
                pause_s = self.wait_s() if changed.is_set() else 0.0
        return not scope.cancelled_caught

    def _changed(self, bucket: TokenBucket | None, rate: float | None) -> TokenBucket | None:
        if rate is None:
            return None
        if bucket is None:
            return TokenBucket(rate, self._clock)
        bucket.set_rate(rate)
        return bucket
