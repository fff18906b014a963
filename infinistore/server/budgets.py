"""Bounds on the memory, descriptors, requests and log lines that clients and strangers
can use, for all connections together.

Strangers, the management API and the process have file descriptors of their own, and
clients get the rest. A tenant's connections share token buckets: what a request takes
beyond them is owed, and who took it reads nothing until it is paid, so nothing is
dropped and nothing polls. A body that does not fit a connection's own buffer needs a
grant before it is read; while somebody waits for one, bodies that arrive too slowly for
their length are given up, and the tenant that has least comes first.
"""

import logging
import math
import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import Final

import attrs
import trio
import trio.lowlevel

from infinistore.errors import ConfigError
from infinistore.host import raise_descriptor_limit
from infinistore.protocol.effects import LongBody
from infinistore.tenant_limits import TenantLimits

_log = logging.getLogger("infinistore.server")


class Departures:
    """Watches any number of sockets with one descriptor, while `run` runs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._on_departure: dict[int, Callable[[], object]] = {}

    async def run(self) -> None:
        """Tell of departures until cancelled."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for descriptor, _ in self._epoll.poll(0):
                    self._on_departure[descriptor]()
        finally:
            self._epoll.close()

    @contextmanager
    def watched(self, sock: socket.socket | None, on_departure: Callable[[], object]) -> Iterator[None]:
        """Call `on_departure` once if the peer leaves; without a socket, never."""
        descriptor = -1 if sock is None else sock.fileno()
        if descriptor < 0 or self._epoll.closed:
            yield
            return
        self._on_departure[descriptor] = on_departure
        try:
            self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)
            yield
        finally:
            del self._on_departure[descriptor]
            with suppress(OSError, ValueError):  # one of them was closed meanwhile
                self._epoll.unregister(descriptor)


_SPARE: Final = 16  # for the process: a look at /proc, a module that is loaded late, a self-test
_LEAST: Final = 4


def _open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd")) - 1  # one is that of the folder


class DescriptorBudget:
    """The number of descriptors for each purpose. The soft limit is raised for them, as
    far as the hard limit allows.

    `clients`, `strangers` and `management` are the wanted numbers of connections,
    `arenas` is the number of arenas that may be added. `open_now` returns how many
    descriptors are open.

    Raises:
        ConfigError: the process may open too few to serve anybody.
    """

    def __init__(
        self,
        *,
        clients: int,
        strangers: int,
        management: int,
        arenas: int,
        open_now: Callable[[], int] = _open_descriptors,
    ) -> None:
        self._open_now = open_now
        self._most_clients = clients
        self._for_clients: int | None = None
        self._open_before = open_now()
        self._spare = _SPARE + arenas
        self._limit = raise_descriptor_limit(self._open_before + 2 * clients + strangers + management + self._spare)
        eighth = max(_LEAST, (self._limit - self._open_before - self._spare) // 8)
        self.strangers = min(strangers, eighth)
        self.management = min(management, eighth)
        self._places(each=2)

    def reserve(self, count: int) -> None:
        """Set so many more aside, for the files of disks; if negative, so many less.

        Raises:
            ConfigError: clients may have what is left already. Nothing has changed.
        """
        for_clients = 2 * self._most_clients if self._for_clients is None else self._for_clients
        wanted = self._open_before + for_clients + self.strangers + self.management + self._spare + count
        limit = raise_descriptor_limit(wanted)
        if count > 0 and self._for_clients is not None and limit < wanted:
            raise ConfigError(
                f"this process may open {limit} descriptors, too few for more disks; raise the limit: ulimit -n"
            )
        self._limit, self._spare = limit, self._spare + count

    def clients(self, each: int) -> int:
        """Decide how many clients of `each` descriptors there may be."""
        most = self._places(each)
        self._for_clients = most * each
        return most

    def _places(self, each: int) -> int:
        self._open_before = self._open_now()
        left = self._limit - self._open_before - self._spare - self.strangers - self.management
        if left < each:
            raise ConfigError(
                f"this process may open {self._limit} descriptors, too few to serve anybody; raise the limit: ulimit -n"
            )
        return min(self._most_clients, left // each)

    def __str__(self) -> str:
        return f"this process may open {self._limit} descriptors (ulimit -n)"


_BURST = 20


@attrs.define
class _Bucket:
    counted_at: float
    credit: float = _BURST
    left_out: int = 0


class LogBudget:
    """A token bucket for each tenant, and one for strangers: a burst of lines, then one
    line per second. A line says how many were dropped before it.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def log(self, level: int, message: str, *, tenant: str = "", **fields: object) -> None:
        """Write a line that a tenant or a stranger caused, or count it as dropped."""
        now = trio.current_time()
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = _Bucket(now)
        bucket.credit = min(_BURST, bucket.credit + now - bucket.counted_at)
        bucket.counted_at = now
        if bucket.credit < 1:
            bucket.left_out += 1
            return
        bucket.credit -= 1
        if tenant:
            fields["tenant"] = tenant
        _log.log(level, message, extra=fields | ({"left_out": bucket.left_out} if bucket.left_out else {}))
        bucket.left_out = 0


class TokenBucket:
    """Tokens that come at `rate` a second; at most one second's worth is kept."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._at = clock()
        self._tokens = math.inf  # `_refill` leaves as many as are kept

    def set_rate(self, rate: float) -> None:
        """Let tokens come at another rate from now on. What is owed stays owed."""
        self._refill()
        self._rate = rate

    def take(self, count: float) -> float:
        """Take tokens, even in advance; return in how many seconds they have come."""
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
        """Use other limits from now on, also for connections that pause."""
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
        """Count a request; return for how many seconds its connection has to pause."""
        wait_s = 0.0 if self._requests is None else self._requests.take(1)
        return wait_s if self._bytes is None else max(wait_s, self._bytes.take(payload_bytes))

    async def rest_first(self, sock: socket.socket | None) -> bool:
        """Make a new connection wait, so that nothing is read from it; return whether
        its client is still there. `sock` is its socket, if it has one."""
        return await self._pause(self.wait_s(), sock)

    async def rest(self, payload_bytes: int, sock: socket.socket | None) -> bool:
        """Count a request, and make its connection wait, as `rest_first` does."""
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


BODY_BUDGET_BYTES: Final = 128 * 1024 * 1024
_PATIENCE_S: Final = 1.0
_LONGEST_S: Final = 8.0
_LEAST_BYTES_PER_S: Final = 64 * 1024


@attrs.define(eq=False)
class BodyGrant:
    """The memory for one body. `end` is called once if the server gives the body up."""

    body: LongBody
    end: Callable[[], None]
    tenant: str
    granted: trio.Event = attrs.field(factory=trio.Event)
    ended: bool = False
    arrived_before: int = 0
    """How much had arrived at the last check, at `looked_at`."""
    looked_at: float = 0.0


class BodyBudget:
    """The memory that all connections share. Each has one body at a time."""

    def __init__(self, budget_bytes: int = BODY_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._waiting: dict[BodyGrant, None] = {}  # sets, in the order in which they came
        self._grants: dict[BodyGrant, None] = {}
        self._of_tenants: Counter[str] = Counter()
        self.taken_bytes = 0

    async def acquire(self, body: LongBody, end: Callable[[], None], tenant: str) -> BodyGrant:
        """Wait until an announced body of a tenant may be received."""
        grant = BodyGrant(body, end, tenant)
        self._waiting[grant] = None
        self._grant()
        try:
            while not grant.granted.is_set():
                with trio.move_on_after(_PATIENCE_S) as scope:
                    await grant.granted.wait()
                if scope.cancelled_caught:
                    self._end_slow_ones()
        except BaseException:
            self._waiting.pop(grant, None)
            self.release(grant)
            raise
        return grant

    def release(self, grant: BodyGrant) -> None:
        """Give the memory back. Idempotent."""
        if grant in self._grants:
            del self._grants[grant]
            self._of_tenants[grant.tenant] -= grant.body.length
            if not self._of_tenants[grant.tenant]:
                del self._of_tenants[grant.tenant]
            self.taken_bytes -= grant.body.length
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            grant = min(self._waiting, key=lambda grant: (self._of_tenants[grant.tenant], grant.body.length))
            length = grant.body.length
            if self._grants and self.taken_bytes + length > self._budget_bytes:
                return
            del self._waiting[grant]
            self._grants[grant] = None
            self._of_tenants[grant.tenant] += length
            self.taken_bytes += length
            grant.looked_at = trio.current_time()
            grant.granted.set()

    def _end_slow_ones(self) -> None:
        """Give up slow bodies, of the largest tenant first, until there is room."""
        now = trio.current_time()
        slow: list[tuple[int, float, BodyGrant]] = []
        for grant in self._grants:
            elapsed_s = now - grant.looked_at
            if elapsed_s < _PATIENCE_S or grant.ended:
                continue
            due = elapsed_s * max(_LEAST_BYTES_PER_S, grant.body.length / _LONGEST_S)
            done = (grant.body.arrived - grant.arrived_before) / due
            if done < 1:
                slow.append((-self._of_tenants[grant.tenant], done, grant))
            grant.arrived_before, grant.looked_at = grant.body.arrived, now
        if not slow:
            return
        wanted_bytes = sum(grant.body.length for grant in self._waiting) + self.taken_bytes - self._budget_bytes
        wanted_bytes -= sum(grant.body.length for grant in self._grants if grant.ended)
        for *_, grant in sorted(slow, key=itemgetter(0, 1)):
            if wanted_bytes <= 0:
                break
            wanted_bytes -= grant.body.length
            grant.ended = True
            grant.end()
