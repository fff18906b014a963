"""One end of a TLS connection, without I/O: ciphertext goes in and out, whoever moves
it.

`client_context` and `server_context` make the settings of each end from files in PEM:
TLS 1.2 or newer, with the ciphers of Python and OpenSSL. There is no resumption: a
store keeps its connections. Renegotiation is off, so that reading never needs to write.
What goes wrong is said in one line that says what to do, for each of both ends.

`TlsSession` is OpenSSL between two buffers in memory. Sockets stay plain, so that each
kind of stream waits and spins as it does without TLS. Compared with `ssl.SSLSocket`, it
makes one more copy at each end, and two system calls less for each record received: as
much work in all, and more even between the ends (bench/tls.py).
"""

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from infinistore.errors import ConfigError, StoreUnavailable, TlsFailed
from infinistore.protocol.effects import Receive, Send, Span


def client_context(ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return the context of a client that trusts the authorities in `ca`, or those of
    the system, and shows the certificate `cert`. Without `key`, that has its key, too.

    Raises:
        ConfigError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ca: {_cannot_trust(ca, error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    if cert is not None:
        _load_pair(context, cert, key, ("cert", "key"))
    return context


def server_context(cert: Path, key: Path | None = None, client_ca: Path | None = None) -> ssl.SSLContext:
    """Return the context of a server. With `client_ca`, a client must show a
    certificate that one of these authorities has signed.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    _load_pair(context, cert, key, ("--tls-cert", "--tls-key"))
    if client_ca is not None:
        trust(context, client_ca, "--tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def trust(context: ssl.SSLContext, authorities: Path, name: str) -> None:
    """Trust these authorities, too. `name` is that of the setting.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        context.load_verify_locations(str(authorities))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {_cannot_trust(authorities, error)}") from None


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path | None, names: tuple[str, str]) -> None:
    cert_name, key_name = names
    for name, file in ((cert_name, cert), (key_name, key)):
        if file is not None:
            _check_readable(name, file)

    def refuse() -> str:
        raise ConfigError(f"{key_name}: the key in {key or cert} has a passphrase; store it without one")

    try:
        context.load_cert_chain(str(cert), None if key is None else str(key), password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{cert_name}: the certificate in {cert} does not fit the key in {key or cert}; give the pair"
        elif error.reason is None:  # no PEM, or another thing in PEM
            problem = f"{cert_name}: {cert} must hold a certificate, and {key or cert} its key, both in PEM"
        else:
            problem = f"{cert_name}: {cert} cannot be used: {error.reason.replace('_', ' ').lower()}"
        raise ConfigError(problem) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{cert_name}: {cert} cannot be used: {error}") from None


def _check_readable(name: str, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {file}: {error.strerror}") from None


def _cannot_trust(file: Path | None, error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return f"cannot read {file}: {error.strerror}"
    return f"{file} must hold the certificates of authorities in PEM"


_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_... of OpenSSL
_UNKNOWN_AUTHORITY: Final = (2, 18, 19, 20, 21)
_OTHER_NAME: Final = (62, 64)  # a host name, an address
_NOT_BY_RFC_5280: Final = range(80, 95)  # X509_V_FLAG_X509_STRICT, which Python sets since 3.13
NO_TLS_AT_CLIENT: Final = "this port speaks TLS, and the client does not; connect with infinistores://HOST:PORT?ca=FILE"

_REFUSED_BY_SERVER: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "wants a certificate of the client; give cert=FILE and key=FILE",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "refused; perhaps it wants a certificate of the client: cert=FILE and key=FILE",
    "TLSV1_ALERT_UNKNOWN_CA": "does not trust this client's certificate: no authority in --tls-client-ca has signed it",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "refused this client's certificate, which has expired; give a new one",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused this client's certificate as bad; issue another one",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "refused this client's certificate; issue one for client authentication",
    "TLSV1_ALERT_PROTOCOL_VERSION": "speaks other versions of TLS; both ends need 1.2 or 1.3",
}
"""What the alert of a server means, after its name."""

_REFUSED_BY_CLIENT: Final = {
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust the authority of --tls-cert; it needs that in ca=FILE",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client says that --tls-cert has expired; replace it and send SIGHUP",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client refused --tls-cert; perhaps it is not for the name that it used",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client refused --tls-cert; perhaps it is not for the name that it used",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client gave no certificate, and --tls-client-ca wants one: cert=FILE",
    "UNSUPPORTED_PROTOCOL": "the client speaks an older version than TLS 1.2",
}
"""What the alert of a client, or a check of it, means to the server."""


def client_failure(error: ssl.SSLError, peer: str) -> TlsFailed:
    """Return what an error means to the client of the server at `peer`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"the certificate of {peer} {_distrust(error)}")
    if (meaning := _REFUSED_BY_SERVER.get(error.reason or "")) is not None:
        return TlsFailed(f"{peer} {meaning}")
    return TlsFailed(f"TLS with {peer} failed: {_reason(error)}")


def server_failure(error: ssl.SSLError) -> TlsFailed:
    """Return what an error means to the server."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"the client's certificate was refused: {error.verify_message}; see --tls-client-ca")
    if (meaning := _REFUSED_BY_CLIENT.get(error.reason or "")) is not None:
        return TlsFailed(meaning)
    return TlsFailed(f"TLS with the client failed: {_reason(error)}")


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    code = error.verify_code
    if code == _EXPIRED:
        return "has expired; the server needs a new one in --tls-cert, and SIGHUP"
    if code == _NOT_YET_VALID:
        return "is not valid yet; compare the clocks of both hosts"
    if code in _UNKNOWN_AUTHORITY:
        return "is signed by no authority that this client trusts; give the file of its authority: ca=FILE"
    if code in _OTHER_NAME:
        return f"is for another name: {error.verify_message}; connect by a name that is in it, or issue one with this"
    if code in _NOT_BY_RFC_5280:
        return f"is not as RFC 5280 asks: {error.verify_message}; issue it again, as the page on security shows"
    return f"was refused: {error.verify_message}"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


_CHUNK_BYTES: Final = 128 * 1024
_RECORD_BYTES: Final = 16 * 1024
_LEAST_ROOM_BYTES: Final = 18 * 1024  # a record, and what a handshake sends at a time
_OVERHEAD_PER_RECORD: Final = 32
_HANDSHAKE: Final = 0x16
_RECORD_TYPES: Final = range(0x14, 0x18)


class TlsSession:
    """One end of a connection. `peer` names the other one in errors.

    `send` and `receive_into` are exchanges: what they send and receive is ciphertext.
    The handshake is part of the first of them; until then, one at a time runs. They
    raise `TlsFailed` if the ends do not agree.

    These call `handshake` until it is done, and send what `take` returns after each
    call. Then `encrypt` and `decrypt_into`. What the peer sends goes into `room`, and
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
        self.is_sending = False
        """Whether a record may have been sent in part."""
        self.established = False
        """Whether the handshake is done."""
        self.peer_is_plain = False
        """Whether what came first was not TLS."""

    async def send(self, views: Sequence[memoryview]) -> None:
        """Send all of these views, in order."""
        if not self.established:
            await self._shake_hands()
        span = Span(views)
        self.is_sending = True
        while span.remaining:
            await Send([self.encrypt(span)])
        self.is_sending = False

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """Wait for at least one byte; 0 is the end of the stream."""
        if not self.established:
            await self._shake_hands()
        while (count := self.decrypt_into(views)) is None:
            await self._receive(sum(map(len, views)))
        return count

    async def _receive(self, wanted_bytes: int) -> None:
        self.received(await Receive([self.room(wanted_bytes)]))

    async def _shake_hands(self) -> None:
        while True:
            try:
                done = self.handshake()
            except TlsFailed:
                with suppress(StoreUnavailable):  # the peer learns why, if it still listens
                    await Send([self.take()])
                raise
            if answer := self.take():
                await Send([answer])
            if done:
                return
            await self._receive(0)

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
        """Encrypt the next bytes of a span to be sent; call it until none remain."""
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
        """Whether nothing has come that a caller could read."""
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
        """Return the end of TLS (close_notify), to be sent. Receiving goes on."""
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


class StreamOverTls:
    """A stream, whatever drives it, and the session of TLS over it. It owns both."""

    def __init__(self, inner: Any, session: TlsSession) -> None:
        self.inner = inner
        self.session = session

    @property
    def socket(self) -> socket.socket:
        """The socket below; what goes through it is ciphertext."""
        found: socket.socket = self.inner.socket
        return found

    def close(self) -> None:
        """Close the stream at once, with the end of TLS if that can be sent."""
        if not self.session.is_sending:
            sock = getattr(self.inner, "socket", None)
            if isinstance(sock, socket.socket) and sock.fileno() != -1 and (goodbye := self.session.end()):
                with suppress(OSError):
                    sock.send(goodbye, socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
        self.inner.close()

    def is_stale(self) -> bool:
        """Whether the peer of an idle connection has closed it, or said something that
        nobody asked for. What TLS says for itself, such as a ticket, is taken in.
        """
        while self.session.is_quiet():
            if not self.inner.is_stale():
                return False
            try:
                count = self.socket.recv_into(self.session.room(0), 0, socket.MSG_DONTWAIT)
            except OSError:
                return True
            if not count:
                return True
            self.session.received(count)
        return True
