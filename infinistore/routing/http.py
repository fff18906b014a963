"""HTTP/1.1 for the router, as a server of clients and as a client of engines.

h11 implements the protocol. A request is read completely before anything is sent, so
that it can be sent again to another engine; an answer is passed on as its bytes come.
Heads and bodies are bounded, and so is every wait.
"""

import functools
import json
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import attrs
import h11
import trio

from infinistore.addresses import with_port
from infinistore.errors import ConfigError, StoreUnavailable
from infinistore.integrations.vllm.settings import is_engine_url
from infinistore.sizes import describe_size
from infinistore.transports.sockets.trio_streams import listen_tcp
from infinistore.transports.tls.session import server_context

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
_PIECE_BYTES: Final = 64 * 1024
_LINGER_S: Final = 1.0
_BETWEEN: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
"""Headers that are about one connection, and are not passed on."""
_NOT_SENT_ON: Final = _BETWEEN | {b"host", b"content-length", b"expect"}
BROKEN: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError)
"""What a stream raises whose other end has gone, or speaks something else."""


@attrs.frozen(kw_only=True)
class HttpLimits:
    """What a client may send, and how long everybody may take, in bytes and seconds."""

    head_bytes: int = 32 * 1024
    body_bytes: int = 64 * 1024 * 1024
    short_body_bytes: int = 1024 * 1024
    """Of longer bodies, few are kept at a time; the others wait."""
    idle_s: float = 60.0
    """From the end of an answer to the head of the next request."""
    body_s: float = 60.0
    send_s: float = 60.0
    """To take a piece of an answer."""
    connect_s: float = 5.0
    first_byte_s: float = 600.0
    """From a request to an engine to the first byte of its answer."""
    answer_s: float = 3600.0
    """A whole answer: a stream that never ends is ended."""


class Refused(Exception):
    """A request that the router answers itself, with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def body(self) -> bytes:
        """Return the error as clients of OpenAI read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return json.dumps({"error": {"message": str(self), "type": kind, "code": self.status}}).encode()


class EngineFailed(StoreUnavailable):
    """An engine did not answer, or not to the end. Says why."""


class ClientGone(Exception):
    """The client has left, or takes nothing of its answer."""


@attrs.frozen
class Asked:
    """A request, complete."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes = b""

    @property
    def path(self) -> str:
        """The path, without the query."""
        return self.target.partition(b"?")[0].decode("latin-1")

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, named in small letters; empty without it."""
        return next((value for header, value in self.headers if header == name), b"")


class ClientConnection:
    """The connection of one client. `long_bodies` limits how many are kept."""

    def __init__(
        self, stream: trio.abc.Stream, limits: HttpLimits, long_bodies: trio.CapacityLimiter | None = None
    ) -> None:
        self._stream = stream
        self._limits = limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._long_bodies = long_bodies or trio.CapacityLimiter(1)
        self._is_long = False
        self._waiting: trio.CancelScope | None = None
        self.is_last = False
        """Whether the connection ends with the request that is answered now."""

    async def next_request(self) -> Asked | None:
        """Return the next request, or None if no other comes.

        Raises:
            Refused: it is none, or not allowed. No other may follow.
            ClientGone: the connection is broken.
        """
        self.release()
        if self.is_last:
            return None
        if self._h11.our_state is h11.DONE:
            if self._h11.their_state is not h11.DONE:
                return None
            self._h11.start_next_cycle()
        elif self._h11.our_state is not h11.IDLE:
            return None
        try:
            event: Any = None
            with trio.move_on_after(self._limits.idle_s) as self._waiting:
                event = await self._event()
            self._waiting = None
            if not isinstance(event, h11.Request):
                return None
            with trio.move_on_after(self._limits.body_s):
                return await self._complete(event)
        except h11.RemoteProtocolError as error:
            raise Refused(error.error_status_hint, f"this is no HTTP/1.1: {error}") from None
        except BROKEN:
            raise ClientGone from None
        raise Refused(408, f"the request's body had not come within {self._limits.body_s:g} s")

    def release(self) -> None:
        """Forget that the last request was long: nothing keeps its body any more."""
        if self._is_long:
            self._is_long = False
            self._long_bodies.release_on_behalf_of(self)

    def finish(self) -> None:
        """Close the connection after the answer that is under way, or now."""
        self.is_last = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _complete(self, request: h11.Request) -> Asked:
        most = self._limits.body_bytes
        too_large = f"a body may have {describe_size(most)}; start the router with a larger --max-body-size"
        headers = tuple(request.headers)
        asked = Asked(request.method, request.target, headers)
        length = asked.header(b"content-length")
        if length and int(length) > most:
            raise Refused(413, too_large)
        body = bytearray()
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            body += event.data
            if len(body) > most:
                raise Refused(413, too_large)
            if len(body) > self._limits.short_body_bytes and not self._is_long:
                await self._long_bodies.acquire_on_behalf_of(self)
                self._is_long = True
        return attrs.evolve(asked, body=bytes(body))

    async def _event(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            if self._h11.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._h11.receive_data(bytes(await self._stream.receive_some(_PIECE_BYTES)))
        return event

    async def until_gone(self) -> None:
        """Wait until the client has left. What it sends is its next request."""
        ahead = 0
        try:
            while ahead < self._limits.head_bytes and (data := await self._stream.receive_some(_PIECE_BYTES)):
                ahead += len(data)
                self._h11.receive_data(bytes(data))
        except BROKEN:
            return
        if ahead >= self._limits.head_bytes:  # a client that has sent so much is there
            await trio.sleep_forever()

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of an answer."""
        await self._send(self._head(status, headers))

    def _head(self, status: int, headers: Headers) -> h11.Response:
        closing = [(b"connection", b"close")] if self.is_last else []
        return h11.Response(status_code=status, headers=[*headers, *closing])

    async def pass_on(self, piece: bytes, more: Callable[[], Awaitable[bytes]]) -> None:
        """Send an answer's body as its pieces come, `piece` first, and then its end,
        which is an empty one.
        """
        # One scope for all pieces: to enter one takes as long as to send a piece.
        with trio.CancelScope() as taking:
            while piece:
                taking.deadline = trio.current_time() + self._limits.send_s
                try:
                    await self._stream.send_all(self._h11.send(h11.Data(data=piece)) or b"")
                except (*BROKEN, h11.LocalProtocolError):
                    raise ClientGone from None
                taking.deadline = math.inf
                piece = await more()
        if taking.cancelled_caught:
            raise ClientGone
        await self._send(h11.EndOfMessage())

    async def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """Send a whole answer."""
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        await self._send(self._head(status, headers), h11.Data(data=body), h11.EndOfMessage())

    async def refuse(self, refused: Refused) -> None:
        """Answer with an error, unless an answer has begun; then hang up, slowly enough
        that the client reads it: closing a socket with unread bytes would reset it.
        """
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        self.is_last = True
        await self.answer(refused.status, refused.body())
        with trio.move_on_after(_LINGER_S):
            try:
                if isinstance(self._stream, trio.abc.HalfCloseableStream):
                    await self._stream.send_eof()
                while await self._stream.receive_some(_PIECE_BYTES):
                    pass
            except BROKEN:
                return

    async def _send(self, *events: Any) -> None:
        try:
            data = b"".join([self._h11.send(event) or b"" for event in events])
            if data:
                with trio.fail_after(self._limits.send_s):
                    await self._stream.send_all(data)
        except (*BROKEN, trio.TooSlowError, h11.LocalProtocolError):
            raise ClientGone from None


def listen(
    host: str, port: int, cert: Path | None = None, key: Path | None = None
) -> tuple[list[trio.abc.Listener[Any]], int]:
    """Listen on every address of a host name, with TLS if there is a certificate.
    Return the listeners, and their port.

    Raises:
        ConfigError: that cannot be done.
    """
    sockets = listen_tcp(host, port, port_flag="--port")
    listeners: list[Any] = [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]
    if cert is not None:
        context = server_context(cert, key)
        listeners = [trio.SSLListener(one, context, https_compatible=True) for one in listeners]
    return listeners, sockets[0].getsockname()[1]


@attrs.frozen
class Address:
    """Where an engine is."""

    url: str
    host: str
    port: int
    secure: bool
    base: bytes = b""
    """What its paths begin with, without a slash at the end."""

    @classmethod
    def of(cls, url: str, name: str = "--engine") -> "Address":
        """Read a URL. `name` is the setting that has it.

        Raises:
            ConfigError: it is none.
        """
        bare = url.strip().rstrip("/")
        if not is_engine_url(bare):
            raise ConfigError(f"{name} {url}: must look like http://127.0.0.1:8000, in ASCII, without a user name")
        parts = urlsplit(bare)
        secure = parts.scheme == "https"
        assert parts.hostname is not None
        return cls(bare, parts.hostname, parts.port or (443 if secure else 80), secure, parts.path.encode())

    async def connect(self) -> trio.abc.Stream:
        """Connect to it. Raises OSError."""
        stream: trio.abc.Stream = await trio.open_tcp_stream(self.host, self.port)
        if not self.secure:
            return stream
        secure: trio.abc.Stream = trio.SSLStream(
            stream, _client_context(), server_hostname=self.host, https_compatible=True
        )
        return secure


@functools.cache
def _client_context() -> ssl.SSLContext:
    """Return what engines' certificates are checked by: to read it takes a while."""
    return ssl.create_default_context()


Connect: TypeAlias = Callable[[Address], Awaitable[trio.abc.Stream]]
"""Connects to an engine; raises OSError."""
InThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a function that would hold up the loop, as `trio.to_thread.run_sync`."""


class Answer:
    """An engine's answer: its head, and its body, piece by piece, as it comes."""

    def __init__(self, url: str, head: h11.Response, first: Any, next_event: Callable[[], Awaitable[Any]]) -> None:
        self._url = url
        self._first = first
        self._next_event = next_event
        self.status = head.status_code
        self.headers: Headers = [(name, value) for name, value in head.headers if name not in _BETWEEN]

    async def piece(self) -> bytes:
        """Return the next piece of the body; nothing at its end.

        Raises:
            EngineFailed: the engine stopped in between.
        """
        event, self._first = self._first, None
        if event is None:
            event = await self._next_event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def rest(self, most_bytes: int) -> bytes:
        """Return the rest of the body.

        Raises:
            EngineFailed: the engine stopped in between, or says more than that.
        """
        body = bytearray()
        while piece := await self.piece():
            body += piece
            if len(body) > most_bytes:
                raise EngineFailed(f"{self._url} answers with more than {describe_size(most_bytes)}")
        return bytes(body)


@asynccontextmanager
async def asking(
    address: Address, asked: Asked, limits: HttpLimits, connect: Connect = Address.connect, *, key: str | None = None
) -> AsyncIterator[Answer]:
    """Send a request to an engine, over a connection that ends with the block, and wait
    for the first byte behind the head of the answer. `key` takes the place of the
    client's own.

    Raises:
        EngineFailed: the engine cannot be reached, or does not answer in time.
        Refused: the request cannot be sent on.
    """
    headers = [(name, value) for name, value in asked.headers if name not in _NOT_SENT_ON]
    if key is not None:
        headers = [(name, value) for name, value in headers if name != b"authorization"]
        headers += [(b"authorization", b"Bearer " + key.encode())] if key else []
    headers += [(b"host", with_port(address.host, address.port).encode()), (b"connection", b"close")]
    if asked.body or asked.method not in (b"GET", b"HEAD"):
        headers.append((b"content-length", b"%d" % len(asked.body)))
    protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.head_bytes)
    try:
        request = h11.Request(method=asked.method, target=address.base + asked.target, headers=headers)
        parts = [protocol.send(one) or b"" for one in (request, h11.Data(data=asked.body), h11.EndOfMessage())]
    except h11.LocalProtocolError as error:
        raise Refused(400, f"the request cannot be passed on: {error}") from None
    try:
        with trio.fail_after(limits.connect_s):
            stream = await connect(address)
    except (OSError, UnicodeError, trio.TooSlowError) as error:  # UnicodeError: what no host can be called
        raise EngineFailed(f"{address.url} cannot be reached: {_reason(error)}") from None
    async with stream:
        next_event = functools.partial(_event, protocol, stream, address.url)
        with trio.move_on_after(limits.first_byte_s) as waiting:
            try:
                await stream.send_all(b"".join(parts))
            except BROKEN as error:
                raise EngineFailed(f"{address.url} took no request: {_reason(error)}") from None
            while isinstance(head := await next_event(), h11.InformationalResponse):
                pass
            if not isinstance(head, h11.Response):
                raise EngineFailed(f"{address.url} closed the connection without an answer")
            first = await next_event()
        if waiting.cancelled_caught:
            raise EngineFailed(f"{address.url} has not answered within {limits.first_byte_s:g} s")
        yield Answer(address.url, head, first, next_event)


async def _event(protocol: h11.Connection, stream: trio.abc.Stream, url: str) -> Any:
    try:
        while (event := protocol.next_event()) is h11.NEED_DATA:
            protocol.receive_data(bytes(await stream.receive_some(_PIECE_BYTES)))
    except BROKEN as error:
        has_closed = isinstance(error, h11.RemoteProtocolError) and protocol.trailing_data[1]
        reason = "it closed the connection" if has_closed else _reason(error)
        raise EngineFailed(f"{url} did not answer to the end: {reason}") from None
    return event


def _reason(error: BaseException) -> str:
    # Trio's errors say why by their cause, or those of all addresses that were tried.
    why = _system_error(*getattr(error.__cause__, "exceptions", ()), error.__cause__, error)
    return why or str(error) or type(error).__name__


def _system_error(*errors: BaseException | None) -> str:
    """Return what the system says of the first of these that it says something of."""
    return next(filter(None, (getattr(one, "strerror", None) for one in errors)), "")
