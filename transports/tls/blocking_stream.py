"""TLS over a stream for threads."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from ssl import SSLContext
from typing import Any

from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.protocol.effects import Span
from infinistore.transports.tls.session import Endpoint, StreamOverTls, TlsSession


class BlockingTlsStream(StreamOverTls):
    """A stream over a `BlockingSocketStream`, which it owns. The handshake is part of
    the first call that sends or receives.

    At `deadline`, on `time.monotonic`, calls raise `TimeoutError`. Besides what its
    methods raise there, they raise `TlsFailed`.
    """

    @property
    def deadline(self) -> float:
        """When calls raise `TimeoutError`."""
        return float(self.inner.deadline)

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self.inner.deadline = deadline

    def send_all(self, views: Sequence[memoryview]) -> None:
        """Send all of these views, in order."""
        if not self.session.established:
            self._shake_hands()
        span = Span(views)
        self._sending = True
        while span.remaining:
            self.inner.send_all([self.session.encrypt(span)])
        self._sending = False

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Wait for at least one byte; 0 is the end of the stream."""
        if not self.session.established:
            self._shake_hands()
        while (count := self.session.decrypt_into(views)) is None:
            self._receive(sum(map(len, views)))
        return count

    def _receive(self, wanted_bytes: int) -> None:
        self.session.received(self.inner.receive_into([self.session.room(wanted_bytes)]))

    def _shake_hands(self) -> None:
        session = self.session
        while True:
            try:
                done = session.handshake()
            except TlsFailed:
                with suppress(StoreUnavailable, TimeoutError):  # the peer learns why, if it still listens
                    self.inner.send_all([session.take()])
                raise
            if answer := session.take():
                self.inner.send_all([answer])
            if done:
                return
            self._receive(0)


def over_tls(connect: Callable[..., Any], context: SSLContext) -> Callable[..., Any]:
    """Return what connects as `connect` does, and over TLS to what is no Unix
    socket.
    """

    def connect_tls(address: Endpoint, deadline: float) -> Any:
        stream = connect(address, deadline)
        if address.path:
            return stream
        return BlockingTlsStream(stream, TlsSession(context, str(address), host_name=address.host))

    return connect_tls
