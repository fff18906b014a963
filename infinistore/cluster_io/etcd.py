"""Runs the flows of `infinistore.cluster.etcd` on Trio, over connections to the members
of etcd: one for calls to each, and a stream.
"""

import ssl
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

import trio

from infinistore.addresses import with_port
from infinistore.cluster.etcd.gateway import Answer, EtcdMisbehaved, HttpConversation
from infinistore.cluster.etcd.session import (
    Effect,
    EtcdUnavailable,
    Exchange,
    Flow,
    NextLine,
    OpenStream,
    Pause,
    Post,
    Probe,
)
from infinistore.cluster.locate import EtcdPlace
from infinistore.cluster.membership import Node
from infinistore.errors import ConfigError
from infinistore.transports.sockets.raw_sockets import reason

_RECEIVE_BYTES = 64 * 1024

Connect: TypeAlias = Callable[[str, int, ssl.SSLContext | None], Awaitable[trio.abc.Stream]]
"""Connects to host and port, with TLS or without. May raise OSError."""


async def connect(host: str, port: int, context: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect over the network."""
    stream = await trio.open_tcp_stream(host, port)
    return stream if context is None else trio.SSLStream(stream, context, server_hostname=host)


def tls_context(place: EtcdPlace) -> ssl.SSLContext | None:
    """Return what TLS to etcd takes; None without TLS.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not place.tls:
        return None
    file = place.ca_file
    try:
        context = ssl.create_default_context(cafile=None if file is None else str(file))
        file = place.cert_file
        if file is not None:
            context.load_cert_chain(str(file), None if place.key_file is None else str(place.key_file))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(f"cannot use {file} for TLS to etcd: {_reason(error)}") from None
    return context


class _Connection:
    def __init__(self, stream: trio.abc.Stream, name: str) -> None:
        self.stream = stream
        self.http = HttpConversation(name)

    async def send(self, post: Post) -> None:
        await self.stream.send_all(self.http.request(post.path, post.body, post.token))

    async def close(self) -> None:
        """Close it at once, also when cancelled."""
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self.stream)

    async def receive(self) -> None:
        data = await self.stream.receive_some(_RECEIVE_BYTES)
        if data:
            self.http.receive(bytes(data))
        elif not self.http.closed():
            raise trio.BrokenResourceError("it closed the connection")


class EtcdConnections:
    """Connections for one flow. `close` them when it is over."""

    def __init__(self, place: EtcdPlace, connect: Connect = connect) -> None:
        """Raises ConfigError if a file for TLS cannot be used."""
        self._endpoints = place.endpoints
        self._tls = tls_context(place)
        self._connect = connect
        self._idle: dict[int, _Connection] = {}
        self._stream: _Connection | None = None
        self._stream_name = ""

    def _name(self, endpoint: int) -> str:
        return with_port(*self._endpoints[endpoint])

    async def exchange(self, post: Exchange) -> Answer:
        """Send a request, and return the answer."""
        idle = self._idle.pop(post.endpoint, None)
        try:
            with trio.fail_after(post.timeout_s):
                if idle is not None:
                    try:
                        return await self._exchange(idle, post)
                    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                        pass  # closed while it was idle, most likely
                return await self._exchange(await self._new(post.endpoint), post)
        except trio.TooSlowError:
            raise EtcdUnavailable(f"{self._name(post.endpoint)} did not answer in {post.timeout_s:g} s") from None
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._unavailable(post.endpoint, error) from None

    async def _exchange(self, connection: _Connection, post: Post) -> Answer:
        try:
            await connection.send(post)
            while not connection.http.complete:
                await connection.receive()
        except BaseException:
            await connection.close()
            raise
        if connection.http.reusable:
            self._idle[post.endpoint] = connection
        else:
            await connection.close()
        return connection.http.answer

    async def open_stream(self, post: OpenStream) -> None:
        """Send a request whose answer `next_line` returns line by line."""
        await self.close_stream()
        self._stream_name = self._name(post.endpoint)
        try:
            with trio.fail_after(post.timeout_s):
                self._stream = await self._new(post.endpoint)
                await self._stream.send(post)
        except trio.TooSlowError:
            raise EtcdUnavailable(f"{self._stream_name} could not be reached in {post.timeout_s:g} s") from None
        except (OSError, trio.BrokenResourceError) as error:
            raise self._unavailable(post.endpoint, error) from None

    async def next_line(self, timeout_s: float) -> bytes | None:
        """Return the next line of the stream, or None if none comes in time."""
        connection = self._stream
        if connection is None:
            raise EtcdUnavailable("there is no stream")
        with trio.move_on_after(timeout_s):
            while True:
                line = connection.http.take_line()
                if line is not None:
                    return line
                if connection.http.complete:
                    raise EtcdUnavailable(f"{self._stream_name} ended the watch")
                try:
                    await connection.receive()
                except (OSError, trio.BrokenResourceError) as error:
                    raise EtcdUnavailable(f"{self._stream_name} broke the watch off: {_reason(error)}") from None
        return None

    async def close_stream(self) -> None:
        """Close the stream, if one is open."""
        connection, self._stream = self._stream, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        """Close all connections, also when cancelled."""
        while self._idle:
            _, connection = self._idle.popitem()
            await connection.close()
        await self.close_stream()

    async def _new(self, endpoint: int) -> _Connection:
        return _Connection(await self._connect(*self._endpoints[endpoint], self._tls), self._name(endpoint))

    def _unavailable(self, endpoint: int, error: Exception) -> EtcdUnavailable:
        return EtcdUnavailable(f"{self._name(endpoint)} cannot be reached: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """What is behind an error of Trio's, which may have tried several addresses."""
    if isinstance(error, BaseExceptionGroup):
        return _reason(error.exceptions[-1])
    if error.__cause__ is not None:
        return _reason(error.__cause__)
    return (reason(error) if isinstance(error, OSError) else str(error)) or type(error).__name__


_T = TypeVar("_T")
_ASK_AGAIN_S: Final = 0.2
"""After that, a node is asked by another connection, too: if the first packet of one is
lost, it is sent again only after a second."""

AskInstance: TypeAlias = Callable[[Node], Awaitable[str]]
"""Returns the instance of the server at a node's address; empty if none answers."""


class FlowRunner:
    """Runs one flow at a time over its own connections."""

    def __init__(self, connections: EtcdConnections, *, ask_instance: AskInstance) -> None:
        self._connections = connections
        self._ask_instance = ask_instance
        self._wake = trio.Event()

    def wake(self) -> None:
        """End the flow's pause, or its next one."""
        self._wake.set()

    async def run(self, flow: Flow[_T]) -> _T:
        """Run a flow to its end, and return its result."""
        try:
            effect = flow.send(None)
            while True:
                try:
                    result = await self._carry_out(effect)
                except (EtcdUnavailable, EtcdMisbehaved) as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as stop:
            done: _T = stop.value
            return done
        finally:
            flow.close()
            await self._connections.close()

    async def _carry_out(self, effect: Effect) -> object:
        match effect:
            case Exchange():
                return await self._connections.exchange(effect)
            case OpenStream():
                await self._connections.open_stream(effect)
            case NextLine():
                return await self._connections.next_line(effect.timeout_s)
            case Probe():
                return await self._probe(effect)
            case Pause():
                with trio.move_on_after(effect.seconds):
                    await self._wake.wait()
                    self._wake = trio.Event()
        return None

    async def _probe(self, effect: Probe) -> frozenset[str]:
        answered: set[str] = set()

        async def ask(node: Node) -> None:
            async def once() -> None:
                if await self._ask_instance(node) == node.instance:
                    answered.add(node.id)
                nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(once)
                await trio.sleep(_ASK_AGAIN_S)
                nursery.start_soon(once)

        with trio.move_on_after(effect.timeout_s):
            async with trio.open_nursery() as nursery:
                for node in effect.nodes:
                    nursery.start_soon(ask, node)
        return frozenset(answered)
