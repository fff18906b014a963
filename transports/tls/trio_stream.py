"""TLS over a stream of Trio."""

import math
from collections.abc import Sequence

import trio

from infinistore.transports.base import drive
from infinistore.transports.tls.session import StreamOverTls


class TlsStream(StreamOverTls):
    """A stream over another one, which it owns. Until the handshake is done, one task
    at a time uses it.

    `infinistore.transports.base.Stream` specifies the methods. Besides what they raise
    there, they raise `TlsFailed`.
    """

    passes_descriptors = False

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send all of these views, in order."""
        await drive(self.session.send(views), self.inner, within_s=within_s)

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Wait for at least one byte; 0 is the end of the stream."""
        within_s = deadline - trio.current_time()
        return await drive(self.session.receive_into(views), self.inner, within_s=within_s)

    async def send_eof(self) -> None:
        """Send the end of TLS, and shut the sending side down."""
        if goodbye := self.session.end():
            await self.inner.send_all([goodbye])
        await self.inner.send_eof()
