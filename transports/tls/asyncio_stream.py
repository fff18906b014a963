"""TLS over a stream of asyncio."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from ssl import SSLContext
from typing import Any

from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.protocol.effects import Span
from infinistore.transports.tls.session import Endpoint, StreamOverTls, TlsSession


class AsyncioTlsStream(StreamOverTls):
    """A stream over an `AsyncioSocketStream`, which it owns. The handshake is part of
    the first call that sends or receives. One task at a time uses it.

    Besides what its methods raise there, they raise `TlsFailed`.
    """

    @property
    def waited(self) -> bool:
        """Whether other tasks ran since this was set to False."""
        return bool(self.inner.waited)

    @waited.setter
    def waited(self, waited: bool) -> None:
        self.inner.waited = waited

    async def send_all(self, views: Sequence[memoryview]) -> None:
        """Send all of these views, in order."""
        if not self.session.established:
            await self._shake_hands()
        span = Span(views)
        self._sending = True
        while span.remaining:
            await self.inner.send_all([self.session.encrypt(span)])
        self._sending = False

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """Wait for at least one byte; 0 is the end of the stream."""
        if not self.session.established:
            await self._shake_hands()
        while (count := self.session.decrypt_into(views)) is None:
            await self._receive(sum(map(len, views)))
        return count

    async def _receive(self, wanted_bytes: int) -> None:
        self.session.received(await self.inner.receive_into([self.session.room(wanted_bytes)]))

    async def _shake_hands(self) -> None:
        session = self.session
        while True:
            try:
                done = session.handshake()
            except TlsFailed:
                with suppress(StoreUnavailable):  # the peer learns why, if it still listens
                    await self.inner.send_all([session.take()])
                raise
            if answer := session.take():
                await self.inner.send_all([answer])
            if done:
                return
            await self._receive(0)


def over_tls(connect: Callable[..., Any], context: SSLContext) -> Callable[..., Any]:
    """Return what connects as `connect` does, and over TLS to what is no Unix
    socket.
    """

    async def connect_tls(address: Endpoint) -> Any:
        stream = await connect(address)
        if address.path:
            return stream
        return AsyncioTlsStream(stream, TlsSession(context, str(address), host_name=address.host))

    return connect_tls
