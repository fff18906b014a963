"""Routing: which movers a new connection has, and by which address it is made."""

import os
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import attrs

from infinistore.client.connection.effects import ClientStream, Connect
from infinistore.client.connection.pool import Connection, ConnectionPool, Turn
from infinistore.client.movers.base import CannotMove, MoverSource
from infinistore.client.options import Options, StoreUrl
from infinistore.errors import InfiniStoreException, StoreUnavailable
from infinistore.protocol.messages import Shard, shards_from_texts
from infinistore.transports.sockets.raw_sockets import peer_user

_Stream = TypeVar("_Stream", bound=ClientStream)


class ShardsFound(InfiniStoreException):
    """The server has other shards than the store knows of. Nothing was sent to it over
    this connection. The drivers go on with these shards, so that no caller sees it.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        super().__init__(f"the server has {len(shards)} shards")
        self.shards = shards


class Route(NamedTuple):
    """A way for blocks, and whether URL and options allow no other."""

    source: MoverSource
    forced: bool = False


ENDED: Final = -1e9
"""The deadline of a call that another thread has ended: long over by any clock, and a
number like any other, because the call may be calculating with it.
"""


@attrs.define
class Attempt:
    """Whose time a connection takes: what a driver and a call have in common."""

    deadline: float
    turn: Turn | None = None
    """Locked while it is under way, where Ctrl-C may strike anywhere; see `Turns`."""
    stream: ClientStream | None = None
    """The stream that bytes go through now."""


class Router(Generic[_Stream]):
    """Connects to one server by the first of its routes that works; inline if none
    does.

    Reasons why a better route was not taken end up in the statistics, as
    `transport_reason`.
    """

    def __init__(
        self,
        address: StoreUrl,
        routes: Sequence[Route],
        pool: ConnectionPool[_Stream],
        options: Options,
        clock: Callable[[], float],
        *,
        over_tcp: str = "tcp",
        instance: str = "",
        shard_ports: tuple[int, ...] | None = (),
    ) -> None:
        self._address = address
        self._over_tcp = over_tcp  # what statistics call the transport when blocks go inline over TCP
        self._shard_ports = shard_ports  # those that are known; None for whatever there are
        self._instance = instance  # the run of the server that it must be; empty for any
        self._routes = routes
        self._pool = pool
        self.options = options
        self._clock = clock
        self._elsewhere: tuple[StoreUrl, Route, str] | None = None
        """Where the server was found last, if not at its address, by which route; and
        the run of the server.
        """
        self._unreachable = ("", "")
        """The run of a server whose Unix socket leads nowhere from here, and why."""

    async def connect(self, attempt: Attempt) -> Connection[_Stream]:
        """Make a connection that is ready for requests."""
        if self._elsewhere is not None and not self._is_better_due(self._elsewhere[1]):
            address, route, instance = self._elsewhere
            try:
                return await self._connect_elsewhere(address, attempt, instance, route.source, [])
            except StoreUnavailable:  # perhaps it has moved: ask again
                self._elsewhere = None
            except CannotMove as error:
                self._elsewhere = None
                raise StoreUnavailable(str(error)) from error
        connection = await self._open(self._address, attempt)
        reasons: list[str] = []
        failed: list[MoverSource] = []
        try:
            for route in self._routes:
                attempt.stream = connection.stream
                try:
                    found = await self._try(route, connection, attempt, reasons)
                except CannotMove as error:
                    if route.forced:
                        raise StoreUnavailable(f"{self._address}: {error}") from error
                    if str(error):
                        reasons.append(str(error))
                        if not error.lasting:
                            failed.append(route.source)
                    continue
                if found is not connection:
                    self._pool.close_connection(connection)
                found.passed_over = failed
                return found
        except BaseException:
            self._pool.close_connection(connection)
            raise
        attempt.stream = connection.stream  # and not the one that was tried last
        scheme = "unix" if self._address.path else self._over_tcp
        asked = "the URL asks for a Unix socket" if self._address.path else f"the URL asks for {scheme.upper()}"
        if self.options.transport:
            asked = "the option transport asks for it"
        connection.open([], (scheme, "; ".join(reasons) or asked))
        connection.passed_over = failed
        return connection

    def _is_better_due(self, route: Route) -> bool:
        """Whether a route that comes before this one is worth trying now."""
        better = self._routes[: self._routes.index(route)]
        return any(other.source.due for other in better)

    async def _try(
        self, route: Route, connection: Connection[_Stream], attempt: Attempt, reasons: list[str]
    ) -> Connection[_Stream]:
        """Give a connection the mover of a route; or make another one, if it takes
        another address.

        Raises:
            CannotMove: it cannot be used.
        """
        source, channel = route.source, connection.channel
        if source.needs not in channel.connection.peer.capabilities:
            raise CannotMove(f"the server's release has no {source.name}", lasting=True)
        if not source.takes_unix_socket or self._address.path:
            mover = await source.open(channel, connection.stream)
            connection.open([mover], (mover.name, "; ".join([mover.place or _here(self._address), *reasons])))
            return connection
        hello = channel.hello
        if not hello.unix_socket:
            raise CannotMove("the server has no Unix socket")
        if hello.instance == self._unreachable[0]:
            raise CannotMove(self._unreachable[1])
        address = StoreUrl(source.name, "", 0, hello.unix_socket, {})
        try:
            found = await self._connect_elsewhere(address, attempt, hello.instance, source, reasons)
        except InfiniStoreException as error:
            why_not = f"no shared memory: {error}"
            if isinstance(error, StoreUnavailable):  # a server that has no room for one more may have some later
                self._unreachable = (hello.instance, why_not)
            raise CannotMove(why_not) from error
        self._elsewhere = (address, route, hello.instance)
        return found

    async def _connect_elsewhere(
        self, address: StoreUrl, attempt: Attempt, instance: str, source: MoverSource, reasons: list[str]
    ) -> Connection[_Stream]:
        """Connect to the Unix socket of a server, which must be this run of it."""
        connection = await self._open(address, attempt)
        try:
            if connection.channel.hello.instance != instance:
                raise StoreUnavailable(f"another server than the one at {self._address} listens on {address.path}")
            mover = await source.open(connection.channel, connection.stream)
        except BaseException:
            self._pool.close_connection(connection)
            raise
        connection.open([mover], (mover.name, "; ".join([mover.place or _here(address), *reasons])))
        return connection

    async def _open(self, address: StoreUrl, attempt: Attempt) -> Connection[_Stream]:
        """Connect to an address, and say hello."""
        stream: _Stream = await Connect(address)
        attempt.stream = stream
        connection: Connection[_Stream] = Connection(stream, self.options, self._clock)
        connection.channel.deadline = attempt.deadline
        connection.turn = attempt.turn
        self._pool.add(connection)
        try:
            if address.path and address is not self._address:
                _check_peer(stream, address)
            hello = await connection.greet()
            if self._instance and hello.instance != self._instance:
                raise StoreUnavailable(f"another server than the one that was named answers at {address}")
            if self._shard_ports is not None and (hello.shards or self._shard_ports):
                self._check_shards(shards_from_texts(hello.shards))
        except BaseException:
            self._pool.close_connection(connection)
            raise
        return connection

    def _check_shards(self, shards: tuple[Shard, ...]) -> None:
        if tuple(shard.port for shard in shards) != self._shard_ports:
            raise ShardsFound(shards)


def _here(address: StoreUrl) -> str:
    if not address.path:
        return "the option transport asks for it"
    return f"the server is on this host, at {address.path}"


def _check_peer(stream: ClientStream, address: StoreUrl) -> None:
    """Refuse a socket that the server named if a stranger would get the token."""
    user = peer_user(stream.socket)
    if user not in (0, os.geteuid()):
        raise StoreUnavailable(
            f"the server at {address.path} runs as another user ({user}); name its socket to trust it"
        )
