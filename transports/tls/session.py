"""One end of a TLS connection, without I/O: ciphertext goes in and out, whoever moves
it.

This is OpenSSL between two buffers in memory. Sockets stay plain, so that each kind of
stream waits and spins as it does without TLS. Compared with `ssl.SSLSocket`, it makes
one more copy at each end, and two system calls less for each record received: as much
work in all, and more even between the ends (bench/tls.py).
"""

import ssl
from collections.abc import Sequence
from typing import Any, Final, cast

from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.protocol.effects import Span
from infinistore.transports.tls.failures import NO_TLS_AT_CLIENT, client_failure, server_failure

__all__ = ["TlsSession"]

_CHUNK_BYTES: Final = 128 * 1024
_RECORD_BYTES: Final = 16 * 1024
_LEAST_ROOM_BYTES: Final = 18 * 1024  # a record, and what a handshake sends at a time
_OVERHEAD_PER_RECORD: Final = 32
_HANDSHAKE: Final = 0x16
_RECORD_TYPES: Final = range(0x14, 0x18)


class TlsSession:
    """One end of a connection. `peer` names the other one in errors.

    Call `handshake` until it is done, and send what `take` returns after each call.
    Then `encrypt` and `decrypt_into`. What the peer sends goes into `room`, and
    `received` says how much.
    """

    def __init__(self, context: ssl.SSLContext, peer: str, *, host_name: str | None = None) -> None:
        """With a `host_name`, this is the client's end."""
        self._other = peer
        self._is_server = host_name is None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=self._is_server, server_hostname=host_name
        )
        self._room = memoryview(bytearray(_LEAST_ROOM_BYTES))
        self._ahead = b""  # decrypted before it was asked for
        self._ended = False
        self._heard = False
        self.established = False
        """Whether the handshake is done."""
        self.peer_is_plain = False
        """Whether what came first was not TLS."""

    def handshake(self) -> bool:
        """Go on with the handshake; return whether it is done.

        Raises:
            TlsFailed: it cannot be. Send what `take` returns, which tells the peer.
            StoreUnavailable: the peer has gone.
        """
        if self.peer_is_plain:
            raise TlsFailed(
                NO_TLS_AT_CLIENT
                if self._is_server
                else f"{self._other} does not speak TLS; use infinistore://, or start the server with --tls-cert"
            )
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if self._ended:
                raise StoreUnavailable(f"{self._other} closed the connection during the handshake of TLS") from None
            return False
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise StoreUnavailable(f"{self._other} closed the connection during the handshake of TLS") from None
            raise self._failure(error) from error
        self.established = True
        return True

    def peer_certificate(self) -> dict[str, Any] | None:
        """Return what the peer's certificate says of it, if it was asked for one and it
        was verified: see `ssl.SSLSocket.getpeercert`.
        """
        return self._tls.getpeercert()

    def take(self) -> memoryview:
        """Return ciphertext for the peer; it may be empty."""
        return memoryview(self._outgoing.read())

    def encrypt(self, span: Span) -> memoryview:
        """Encrypt the next bytes of a span, and return what to send; call it until none
        remain.
        """
        views = span.next_views(_CHUNK_BYTES)
        total = sum(map(len, views))
        if len(views) > 1 and total < len(views) * _RECORD_BYTES:  # each record costs a call
            views = [memoryview(b"".join(views))]
        write = self._tls.write
        try:
            for view in views:
                done = 0
                while done < len(view):
                    done += write(view[done:])
        except ssl.SSLError as error:
            raise self._failure(error) from error
        span.advance(total)
        return self.take()

    def room(self, wanted_bytes: int) -> memoryview:
        """Return where ciphertext may go for so many bytes: less, if it is much."""
        records = -(-wanted_bytes // _RECORD_BYTES)
        length = min(wanted_bytes + records * _OVERHEAD_PER_RECORD, _CHUNK_BYTES)
        if length > len(self._room):
            self._room = memoryview(bytearray(_CHUNK_BYTES))
        return self._room[: max(length, _LEAST_ROOM_BYTES)]

    def received(self, count: int) -> None:
        """Note that so many bytes are in `room`; 0 is the end of the stream."""
        if not count:
            self._ended = True
            self._incoming.write_eof()
            return
        if not self._heard:
            self._heard = True
            first = self._room[0]
            self.peer_is_plain = first != _HANDSHAKE if self._is_server else first not in _RECORD_TYPES
        self._incoming.write(self._room[:count])

    def decrypt_into(self, views: Sequence[memoryview]) -> int | None:
        """Fill the views from the front with what has come, and return how much; 0 is
        the end, None is nothing yet.

        The end of the stream without that of TLS counts as the end: the lengths of
        frames tell what is missing.

        Raises:
            TlsFailed: the peer refused this end, or the bytes are not what it sent.
        """
        total = 0
        for view in views:
            room = view
            while room:
                count = self._read_into(room)
                if not count:
                    return total or count
                total += count
                room = room[count:]
        return total

    def _read_into(self, view: memoryview) -> int | None:
        if self._ahead:
            count = min(len(view), len(self._ahead))
            view[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            return count
        try:
            return cast("int", self._tls.read(len(view), view))  # with a buffer, it returns a count
        except ssl.SSLWantReadError:
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        except ssl.SSLError as error:
            raise self._failure(error) from error

    def is_quiet(self) -> bool:
        """Whether nothing has come that a caller could read: what TLS says for itself
        does not count.
        """
        if not self._ahead:
            first = bytearray(1)
            try:
                count = self._read_into(memoryview(first))
            except TlsFailed:
                return False
            if count is None:
                return True
            self._ahead = bytes(first[:count])
        return False

    def end(self) -> memoryview:
        """Return what tells the peer that nothing more will be sent (close_notify).
        Receiving goes on.
        """
        if not self.established:
            return memoryview(b"")
        # OpenSSL looks for the peer's end at once, and takes anything else for a fault.
        ahead = bytearray(self._ahead)
        piece = memoryview(bytearray(_RECORD_BYTES))
        self._ahead = b""
        try:
            while count := self._read_into(piece):
                ahead += piece[:count]
            self._tls.unwrap()
        except (ssl.SSLError, TlsFailed):  # SSLWantReadError: the peer has not ended
            pass
        self._ahead = bytes(ahead)
        return self.take()

    def _failure(self, error: ssl.SSLError) -> TlsFailed:
        return server_failure(error) if self._is_server else client_failure(error, self._other)
