"""Connections to the members of etcd, on Trio: one for calls to each, and a stream."""

import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from infinistore.addresses import with_port
from infinistore.cluster.etcd.gateway import Answer, HttpConversation
from infinistore.cluster.etcd.session import EtcdUnavailable, Exchange, OpenStream, Post
from infinistore.cluster.locate import EtcdPlace
from infinistore.errors import ConfigError
from infinistore.transports.sockets.raw_sockets import reason

__all__ = ["Connect", "EtcdConnections", "connect", "tls_context"]

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
