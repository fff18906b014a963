"""TLS over a stream of Trio."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from ssl import SSLContext
from typing import Any

import trio

from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.protocol.effects import Span
from infinistore.transports.tls.session import Endpoint, StreamOverTls, TlsSession


class TlsStream(StreamOverTls):
    """A stream over another one, which it owns. The handshake is part of the first call
    that sends or receives; until then, one task at a time uses it.

    `infinistore.transports.base.Stream` specifies the methods. Besides what they raise
    there, they raise `TlsFailed`.
    """

    passes_descriptors = False

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send all of these views, in order."""
        deadline = trio.current_time() + within_s
        if not self.session.established:
            await self._shake_hands(deadline)
        span = Span(views)
        self._sending = True
        while span.remaining:
            await self.inner.send_all([self.session.encrypt(span)], deadline - trio.current_time())
        self._sending = False

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Wait for at least one byte; 0 is the end of the stream."""
        if not self.session.established:
            await self._shake_hands(deadline)
        while (count := self.session.decrypt_into(views)) is None:
            await self._receive(sum(map(len, views)), deadline)
        return count

    async def _receive(self, wanted_bytes: int, deadline: float) -> None:
        self.session.received(await self.inner.receive_into([self.session.room(wanted_bytes)], deadline))

    async def _shake_hands(self, deadline: float) -> None:
        session = self.session
        while True:
            try:
                done = session.handshake()
            except TlsFailed:
                with suppress(StoreUnavailable, TimeoutError):  # the peer learns why, if it still listens
                    await self.inner.send_all([session.take()], deadline - trio.current_time())
                raise
            if answer := session.take():
                await self.inner.send_all([answer], deadline - trio.current_time())
            if done:
                return
            await self._receive(0, deadline)

    async def send_eof(self) -> None:
        """Send the end of TLS, and shut the sending side down."""
        if goodbye := self.session.end():
            await self.inner.send_all([goodbye])
        await self.inner.send_eof()


def over_tls(connect: Callable[..., Any], context: SSLContext) -> Callable[..., Any]:
    """Return what connects as `connect` does, and over TLS to what is no Unix
    socket.
    """

    async def connect_tls(address: Endpoint) -> Any:
        stream = await connect(address)
        if address.path:
            return stream
        return TlsStream(stream, TlsSession(context, str(address), host_name=address.host))

    return connect_tls
