"""Calls to one server: taking a connection, carrying out a request, and trying again.

Written once for every driver. A call is a coroutine that awaits effects: bytes to move,
a connection to make, time to pass. When the driver drops it (a cancelled task, a
deadline), what it held is closed. How far it came stays in its `Attempt`, for the error
of a deadline.
"""

import enum
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Generic, TypeVar

import attrs

from infinistore.client.connection import routing
from infinistore.client.connection.circuit_breaker import FAILURES_TO_OPEN, CircuitBreaker
from infinistore.client.connection.effects import Call, ClientStream, Sleep
from infinistore.client.connection.pool import Connection, ConnectionPool
from infinistore.client.connection.routing import Route, Router
from infinistore.client.memory.buffers import Registration
from infinistore.client.movers.base import MoverSource, SourceFactory
from infinistore.client.movers.rdma import RdmaPause, RdmaSource, StoreRdma, register
from infinistore.client.movers.shm.mapped_pool import Machine, MappedPool
from infinistore.client.movers.shm.mover import ShmSource
from infinistore.client.operations.remote import RemoteOperations
from infinistore.client.options import Options, StoreUrl, tls_of_node
from infinistore.errors import (
    ConfigError,
    DeadlineExceeded,
    InfiniStoreException,
    ServerReplaced,
    StoreUnavailable,
    TransferFailed,
)
from infinistore.host import FORKED, let_go_in_child, no_linux
from infinistore.protocol.messages import StoreRequest
from infinistore.protocol.states import State
from infinistore.transports.cuda import DeviceMemory
from infinistore.transports.registry import BUILT_IN, load_transport, transport_names
from infinistore.transports.sockets.names import Dialer

_T = TypeVar("_T")
_Stream = TypeVar("_Stream", bound=ClientStream)
_Error = TypeVar("_Error", StoreUnavailable, DeadlineExceeded)
LOOKUP_CONNECTIONS = 2
"""How many connections a store has for look-ups, besides those for blocks."""
WAITING_CONNECTIONS = 8
"""How many connections it has for requests that wait, besides those."""
_OUTCOME_UNKNOWN = (
    "it is not known whether the request was carried out: ask the store, or do it again if that does no harm"
)


class _Stage(enum.Enum):
    WAITING = enum.auto()  # for other calls to finish
    CONNECTING = enum.auto()
    ASKING = enum.auto()  # from here on, the server may have heard of it


@attrs.frozen
class Terms:
    """What is different for a store that is one node of a cluster."""

    failures_to_open: int = FAILURES_TO_OPEN
    instance: str = ""
    """The run of the server that it must be; empty for any."""
    rdma: StoreRdma | None = None
    """The device and the registered memory that all nodes share, closed by their owner.
    """
    shard_ports: tuple[int, ...] | None = ()
    """The ports of the shards that its server is known to have: none if it is a server
    by itself. None: whatever it says, it is one node.
    """
    patience_s: float = math.inf
    """How long its server may take to accept a connection. One that is silent for
    longer is asked whether it is there."""


_TRANSPORTS = {"tcp": "inline", "unix": "inline", "infinistores": "infinistore"}
"""The transports of schemes that are not called like theirs."""
PLAIN = Terms()
"""A store that is all there is."""


@attrs.define
class Attempt(routing.Attempt):
    """One call: until when, whether it may be tried again, and how far it has come."""

    idempotent: bool = True
    within_s: float | None = None
    """How long it may take, if not as long as any call of the store."""
    stage: _Stage = _Stage.WAITING
    probe: int = 0


class Calls(Generic[_Stream]):
    """Makes calls to one server over a few connections, one call each at a time."""

    def __init__(
        self,
        address: StoreUrl,
        options: Options,
        clock: Callable[[], float],
        random: Random,
        machine: Machine | None = None,
        *,
        terms: Terms = PLAIN,
    ) -> None:
        self.address = address
        self.options = options
        self.clock = clock
        self.tls = tls_of_node(address, options.tls)
        """What connections over TCP are encrypted with, if they are."""
        self.over_tls: Callable[[Call[Any], Attempt], Call[Any]] | None = None
        """Has a call encrypt what it sends, if TLS is asked for."""
        if self.tls is not None:
            from infinistore.client.connection.tls import over_tls  # late: few need it

            self.over_tls = partial(over_tls, self.tls)
        self.is_node = terms is not PLAIN
        """Whether it is one of several, which know by themselves what they are."""
        self.patience_s = terms.patience_s
        self.breaker = CircuitBreaker(clock, random, terms.failures_to_open)
        self.pool: ConnectionPool[_Stream] = ConnectionPool()
        self.dialer = Dialer()
        transport = options.transport or _TRANSPORTS.get(address.scheme, address.scheme)
        _check_scheme(address.scheme, options.transport)
        self._allows_rdma = self.tls is None or options.unencrypted_rdma
        if not self._allows_rdma and (transport == "rdma" or options.device):
            raise ConfigError("RDMA does not encrypt blocks, and TLS is asked for; unencrypted_rdma=on allows it")
        self._owns_rdma = terms.rdma is None
        self.rdma = terms.rdma or StoreRdma(options, clock, forced=transport == "rdma")
        self.rdma_pause = RdmaPause(clock)
        """After a failure of RDMA to this server."""
        self._shm = ShmSource(
            options.inline_bytes,
            options.copy_threads,
            options.known_blocks,
            clock=clock,
            on_end=self.pool.close_lost,
            machine=machine,
        )
        routes = self._routes(transport)
        self._sources = dict.fromkeys([self._shm, *(route.source for route in routes)])
        self.router = Router(
            address,
            routes,
            self.pool,
            options,
            clock,
            over_tcp="tcp" if self.tls is None else "tls",
            instance=terms.instance,
            shard_ports=terms.shard_ports,
        )
        let_go_in_child(self)

    def _routes(self, transport: str) -> Sequence[Route]:
        """Return the ways that URL and options allow, best first, without inline."""
        if transport == "inline":
            return []
        if transport == "shm":
            return [Route(self._shm, forced=True)]
        rdma = RdmaSource(self.rdma, self.rdma_pause, self.options.inline_bytes, asked_for=self.rdma.asked_for)
        if transport == "rdma":
            return [Route(rdma, forced=True)]
        if transport == "infinistore" and not self.options.transport:
            if not self._allows_rdma:
                return [Route(self._shm)]
            return [Route(rdma), Route(self._shm)] if self.rdma.asked_for else [Route(self._shm), Route(rdma)]
        return [Route(_installed_source(transport, self.options, self.clock), forced=True)]

    def attempt(self, *, idempotent: bool = True, within_s: float | None = None) -> Attempt:
        """Begin a call: its time runs from now on."""
        limit_s = self.options.deadline_s if within_s is None else within_s
        return Attempt(self.clock() + limit_s, idempotent=idempotent, within_s=within_s)

    async def first(self, attempt: Attempt) -> None:
        """Connect, without retries: a wrong address or token is known at once."""
        attempt.stage = _Stage.CONNECTING
        self.pool.give_back(await self.router.connect(attempt))

    async def call(self, request: StoreRequest[_T], attempt: Attempt) -> _T:
        """Carry out a request; what is idempotent is tried again, until the deadline.

        What is not is tried again only if nothing of it was sent.
        """
        pool, breaker, kept = self.pool, self.breaker, request.kept
        bound = kept is not None and kept.link is not None  # to what is open on one connection
        while True:
            attempt.probe = 0 if breaker.open_until is None else await self._check(request)
            attempt.stage = _Stage.CONNECTING
            connection: Connection[_Stream] | None = None
            interrupted = False
            try:
                connection = await self._take(attempt, request)
                attempt.stage = _Stage.ASKING
                operations: Any = connection.operations
                result: _T = await RemoteOperations.handlers[type(request)](operations, request)
            except StoreUnavailable as error:
                delay_s = self._failed(error, attempt)
                replaced = isinstance(error, ServerReplaced)  # nothing was done
                if connection is not None and not attempt.idempotent and (bound or not replaced):
                    if replaced or isinstance(error, TransferFailed):  # nothing was stored, and the error says so
                        raise
                    raise unknown_outcome(StoreUnavailable(f"{error}; {_OUTCOME_UNKNOWN}")) from error
                if delay_s is None or self.clock() + delay_s >= attempt.deadline:
                    raise
            except InfiniStoreException:
                breaker.succeeded()  # an answer is an answer
                raise
            except BaseException as error:
                breaker.dropped(attempt.probe)
                interrupted = not isinstance(error, GeneratorExit)  # which is: cancelled, late, interrupted elsewhere
                raise
            else:
                if breaker.failures:
                    breaker.succeeded()
                return result
            finally:
                if connection is not None and kept is None and not interrupted:
                    pool.give_back(connection)
                elif connection is not None:
                    pool.leave(connection, kept, interrupted=interrupted)
            await Sleep(delay_s)
            pool.check_open()

    async def _check(self, request: StoreRequest[Any]) -> int:
        """As the circuit breaker does; a request that waits waits for that, too."""
        open_until = self.breaker.open_until
        if request.waits and open_until is not None:
            await Sleep(min(1.0, max(0.01, open_until - self.clock())))
        return self.breaker.check()

    async def _take(self, attempt: Attempt, request: StoreRequest[Any]) -> Connection[_Stream]:
        """Return a connection for a request: its own, an idle one, or a new one."""
        pool = self.pool
        kept = request.kept
        if kept is not None and kept.link is not None:
            connection = pool.take_kept(kept, attempt.turn)
            attempt.stream = connection.stream
            connection.channel.deadline = attempt.deadline
            return connection
        while (found := pool.take(request.pins, attempt.turn)) is not None:
            stream = attempt.stream = found.stream
            channel = found.channel
            channel.deadline = attempt.deadline
            if (
                found.protocol.state is State.READY  # else its pins were given back in the middle of something
                and (channel.late is None or await self._read_late_reply(found))
                and not stream.is_stale()
                and not (found.passed_over and any(source.retry_is_due for source in found.passed_over))
            ):
                return found
            pool.close_connection(found)
        return await self.router.connect(attempt)

    async def _read_late_reply(self, connection: Connection[_Stream]) -> bool:
        """Hear what the last call has left; False if the connection is lost."""
        try:
            await connection.channel.read_late_reply()
        except StoreUnavailable:
            return False
        except BaseException:
            self.pool.close_connection(connection)
            raise
        return True

    def register(self, memory: memoryview | DeviceMemory) -> Registration:
        """Register memory of the caller's; see the method of the stores."""
        self.pool.check_open()
        return register(self.rdma, memory)

    def deadline_exceeded(self, attempt: Attempt) -> DeadlineExceeded:
        """Note that a call did not finish in time, and return the error to raise."""
        within_s = self.options.deadline_s if attempt.within_s is None else attempt.within_s
        within = f"within {round(within_s, 3):g} s"
        if attempt.stage is _Stage.WAITING:  # which says nothing about the server
            return DeadlineExceeded(
                f"no connection of this store came free {within}; make fewer calls at a time, or raise max_connections"
            )
        if attempt.stage is _Stage.CONNECTING:
            error = DeadlineExceeded(f"no connection to {self.address} {within}")
        else:
            error = DeadlineExceeded(f"no answer from {self.address} {within}")
            if not attempt.idempotent:
                error = unknown_outcome(DeadlineExceeded(f"{error}; {_OUTCOME_UNKNOWN}"))
        self._failed(error, attempt)
        return error

    def _failed(self, error: Exception, attempt: Attempt) -> float | None:
        if attempt.deadline == routing.ENDED:  # another thread has ended the call, which says nothing about the server
            self.breaker.dropped(attempt.probe)
            return None
        # The other connections are to the same server: each that is as dead would cost
        # another call its deadline.
        self.pool.close_idle()
        if isinstance(error, ServerReplaced):  # another process listens where it did
            self.breaker.dropped(attempt.probe)
            return 0.0
        return self.breaker.failed(error, attempt.probe)

    @property
    def mapped_pool(self) -> MappedPool | None:
        """The server's pool as it is mapped into this process, if it is."""
        return self._shm.pool

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the mapped part of the server's pool; see `MappedPool.arenas`."""
        return self._shm.mapped_arenas()

    def close(self) -> None:
        """Close idle connections now, the others when their calls are done."""
        if self.pool.closed == FORKED:  # they are, and threads that are not here may have their locks
            return
        self.pool.close()
        self.dialer.close()
        for source in self._sources:
            source.close()
        if self._owns_rdma:
            self.rdma.close()

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors."""
        self.pool.let_go()
        self.dialer.let_go()
        for source in self._sources:
            source.let_go()
        if self._owns_rdma:
            self.rdma.let_go()


def unknown_outcome(error: _Error, is_unknown: bool = True) -> _Error:
    """Say of an error that the request may have been carried out."""
    error.outcome_is_unknown = is_unknown
    return error


def _check_scheme(scheme: str, transport: str) -> None:
    """Raise `ConfigError` if a URL with this scheme asks for another transport."""
    refused = {"tcp": ("shm", "rdma"), "unix": ("shm", "rdma")}.get(scheme, ())
    if transport in refused or (scheme in ("shm", "rdma") and transport not in ("", scheme)):
        raise ConfigError(f"transport={transport} contradicts {scheme}://; write infinistore://")
    if sys.platform != "linux" and (found := {"shm": "shared memory", "rdma": "RDMA"}.get(transport or scheme)):
        raise no_linux(found, "use TCP: infinistore://HOST:PORT")


def _installed_source(name: str, options: Options, clock: Callable[[], float]) -> MoverSource:
    """Make the source of a transport that another package brings."""
    if name not in transport_names():
        known = ", ".join([*BUILT_IN, *transport_names()])
        raise ConfigError(f"unknown transport {name!r}; known are {known}")
    make: SourceFactory | None = load_transport(name).client_mover
    if make is None:
        raise ConfigError(f"the transport {name!r} has no mover for clients")
    source = make(options, clock)
    if not isinstance(source, MoverSource):
        raise ConfigError(f"the client_mover of the transport {name!r} returned no MoverSource: {source!r}")
    return source
