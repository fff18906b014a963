"""HTTP/1.1 for the management API: a minimal ASGI server on Trio in which everything is
bounded.

h11 implements the protocol, an ASGI application the answers, and this module moves
bytes between them. A request is read completely before the application sees it, and its
response is sent completely: both are small here. Headers, bodies, connections and every
wait have a limit. Whatever a client sends is answered or ends its own connection, and
nothing else. A cancelled server stops at once, even if a client reads no response.

When all connections are taken, the one whose client has kept the server waiting longest
is closed for the next one. Probes are answered however busy the API is.

Other servers do not promise that: hypercorn is the only ASGI server that runs on Trio,
and it shields its sends from cancellation, lets an unexpected error of one connection
end all of them, and bounds neither connections nor a complete request.

The application defines the paths and checks permissions.
"""

import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import unquote_to_bytes

import attrs
import h11
import trio

from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.protocol.codec import MAGIC
from infinistore.server.budgets import LogBudget
from infinistore.server.listeners import NO_DESCRIPTORS_PAUSE_S
from infinistore.server.security import ORIGIN, PRIVATE, is_private, origin_of
from infinistore.sizes import in_units
from infinistore.transports.base import Stream
from infinistore.transports.sockets.trio_streams import accept

_log = logging.getLogger("infinistore.server")
_LINGER_S = 1.0
_RECEIVE_BYTES = 16 * 1024

_Scope: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Scope]]
_Send: TypeAlias = Callable[[_Scope], Awaitable[None]]
Application: TypeAlias = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
"""An ASGI 3 application; it gets only http scopes."""


@attrs.frozen
class HttpLimits:
    """What a client may send, and how long it may take.

    `head_s` bounds the wait for the head of a request, from the end of the previous
    one. `request_s` bounds the rest: the body, the application and the response.
    `requests` bounds the requests that the application answers at a time, except for
    the paths in `probes`; one more gets a 503.
    """

    head_bytes: int = 16 * 1024
    body_bytes: int = 64 * 1024
    head_s: float = 10.0
    request_s: float = 30.0
    connections: int = 64
    requests: int = 32
    probes: frozenset[str] = frozenset()


@attrs.define
class _Response:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = attrs.field(factory=list)
    body: bytearray = attrs.field(factory=bytearray)


class _RefusedRequest(Exception):
    """A request that this module refuses, and the last one of its connection."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


async def serve_http(
    application: Application,
    listeners: Sequence[socket.socket],
    limits: HttpLimits | None = None,
    secure: Callable[[Stream], Stream] | None = None,
) -> None:
    """Serve the application until cancelled; `secure` puts TLS over each stream."""
    slots = ConnectionSlots(limits or HttpLimits())
    log_budget = slots.log_budget
    async with trio.open_nursery() as connections:

        async def accept_from(listener: socket.socket) -> None:
            while True:
                try:
                    stream: Stream = await accept(listener)
                    if secure is not None:
                        stream = secure(stream)
                except OSError as error:
                    slots.drop_longest()
                    log_budget.log(logging.WARNING, "cannot accept a management connection", error=error.strerror)
                    await trio.sleep(NO_DESCRIPTORS_PAUSE_S)
                else:
                    connections.start_soon(serve_connection, application, stream, slots)

        for listener in listeners:
            connections.start_soon(accept_from, listener)


class ConnectionSlots:
    """The open connections and the requests being answered, against their limits."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.log_budget = LogBudget()
        self._waiting: dict[trio.CancelScope, None] = {}  # for their clients; the longest first
        self._answering = 0
        self._probing = 0

    def enter(self, scope: trio.CancelScope) -> None:
        """Take a slot for a connection, which waits for its client. `scope` ends it."""
        if len(self._waiting) + self._answering + self._probing >= self.limits.connections:
            self.drop_longest()
            self.log_budget.log(logging.INFO, "too many management connections; the most silent was closed")
        self._waiting[scope] = None

    def drop_longest(self) -> None:
        """Close the connection that has waited longest for its client, if one waits."""
        for longest in self._waiting:
            longest.cancel()
            del self._waiting[longest]
            break

    def leave(self, scope: trio.CancelScope) -> None:
        """Give the slot of a connection back."""
        self._waiting.pop(scope, None)

    @contextmanager
    def answering(self, scope: trio.CancelScope, path: str) -> Iterator[None]:
        """Keep a connection from being closed for another within the block."""
        probes = path in self.limits.probes
        if not probes and self._answering >= self.limits.requests:
            raise _RefusedRequest(503, f"{self.limits.requests} requests are being answered; ask again in a moment")
        self._waiting.pop(scope, None)
        self._probing += probes
        self._answering += not probes
        try:
            yield
        finally:
            self._probing -= probes
            self._answering -= not probes
            self._waiting[scope] = None


async def serve_connection(application: Application, stream: Stream, slots: ConnectionSlots) -> None:
    """Serve one connection until its client leaves or breaks a rule, then close it."""
    scope = trio.CancelScope()
    slots.enter(scope)
    try:
        with scope:
            await _Connection(application, stream, slots, scope).run()
    except TlsFailed as error:
        slots.log_budget.log(logging.INFO, "no TLS on a management connection", error=str(error))
        await _answer_plainly(stream)
    except StoreUnavailable:
        pass  # how a broken stream says so
    except Exception:  # noqa: BLE001  # a fault of ours in one connection must not end all the others
        _log.exception("a management connection ended by an internal error")
    finally:
        slots.leave(scope)
        stream.close()


async def _answer_plainly(stream: Any) -> None:
    """Answer a client that does not speak TLS."""
    if stream.session.peer_is_plain:
        text = b'{"error": "this port speaks TLS: use https://"}'
        head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
        with trio.move_on_after(_LINGER_S), suppress(StoreUnavailable):
            await stream.inner.send_all([memoryview(head + b"content-length: %d\r\n\r\n" % len(text) + text)])
            await stream.inner.send_eof()
            buffer = [memoryview(bytearray(_RECEIVE_BYTES))]
            while await stream.inner.receive_into(buffer):
                pass


class _Connection:
    def __init__(
        self, application: Application, stream: Stream, slots: ConnectionSlots, scope: trio.CancelScope
    ) -> None:
        self._application = application
        self._stream = stream
        self._slots = slots
        self._scope = scope
        self._limits = limits = slots.limits
        self._wants_body = True
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))

    async def run(self) -> None:
        try:
            while await self._serve_one():
                self._h11.start_next_cycle()
                self._wants_body = True  # until the next one is known to be HEAD
                await trio.lowlevel.checkpoint()
        except _RefusedRequest as refused:
            await self._refuse(refused.status, str(refused))
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint, str(error))

    async def _serve_one(self) -> bool:
        """Answer the next request; False if there is none, or none may follow."""
        event: Any = None
        with trio.move_on_after(self._limits.head_s):
            event = await self._next_event()
        if event is None and self._h11.trailing_data[0]:
            raise _RefusedRequest(408, f"the request's head had not come within {self._limits.head_s:g} s")
        if not isinstance(event, h11.Request):
            return False
        self._wants_body = event.method != b"HEAD"
        if event.http_version not in (b"1.0", b"1.1"):
            raise _RefusedRequest(505, "this server speaks HTTP/1.1")
        with trio.move_on_after(self._limits.request_s) as scope:
            body = await self._read_body(event)
            response = await self._ask_application(event, body)
        if scope.cancelled_caught:
            status = 408 if self._h11.their_state is h11.SEND_BODY else 503
            raise _RefusedRequest(status, f"the request was not done within {self._limits.request_s:g} s")
        await self._send_response(response, with_body=self._wants_body)
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    async def _next_event(self) -> Any:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._h11.they_are_waiting_for_100_continue:
                go_on: Any = h11.InformationalResponse(status_code=100, headers=[])
                await self._send_bytes(self._h11.send(go_on))
            count = await self._stream.receive_into([self._buffer])
            self._h11.receive_data(bytes(self._buffer[:count]))
            if self._h11.their_state is h11.IDLE and self._h11.trailing_data[0].startswith(MAGIC):  # an unended line
                raise _RefusedRequest(400, "this port speaks HTTP; stores connect to the service port")

    async def _read_body(self, request: h11.Request) -> bytes:
        most = self._limits.body_bytes
        lengths = [value for name, value in request.headers if name == b"content-length"]
        if lengths and int(lengths[0]) > most:
            raise _RefusedRequest(413, f"a body may have {in_units(most)}, not {lengths[0].decode()[:40]}")
        body = bytearray()
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data)
            body += event.data
            if len(body) > most:
                raise _RefusedRequest(413, f"a body may have {in_units(most)}, not more")
        return bytes(body)

    async def _ask_application(self, request: h11.Request, body: bytes) -> _Response:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> _Scope:
            for message in messages:
                return message
            await trio.sleep_forever()
            raise AssertionError("not reached")

        async def send(message: _Scope) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = list(message.get("headers", ()))
            else:
                response.body += message.get("body", b"")

        response = _Response()
        asked = _scope(request)
        asked[ORIGIN], asked[PRIVATE] = origin_of(self._stream), is_private(self._stream)
        try:
            with self._slots.answering(self._scope, asked["path"]):
                await self._application(asked, receive, send)
            assert response.status, "the application gave no response"
        except _RefusedRequest:
            raise
        except Exception:  # noqa: BLE001  # whatever it is, the client gets an answer and the server goes on
            path = request.target.partition(b"?")[0][:200].decode("latin-1")
            _log.exception("a management request failed", extra={"path": path})
            raise _RefusedRequest(500, "internal error of the server; its log has more") from None
        return response

    async def _send_response(self, response: _Response, *, with_body: bool) -> None:
        headers = [
            *((name, value) for name, value in response.headers if name.lower() != b"content-length"),
            (b"content-length", str(len(response.body)).encode()),
            (b"date", formatdate(usegmt=True).encode()),
        ]
        parts: list[Any] = [h11.Response(status_code=response.status, headers=headers)]
        if with_body:
            parts.append(h11.Data(data=bytes(response.body)))
        parts.append(h11.EndOfMessage())
        await self._send_bytes(b"".join(self._h11.send(part) or b"" for part in parts))

    async def _send_bytes(self, data: bytes | None) -> None:
        with trio.move_on_after(self._limits.request_s) as scope:
            await self._stream.send_all([memoryview(data or b"")])
        if scope.cancelled_caught:
            raise StoreUnavailable("the client did not take its response in time")

    async def _refuse(self, status: int, problem: str) -> None:
        """Answer with an error, unless a response has begun, and wait until the client
        has read it: closing a socket with unread bytes would reset the connection.
        """
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        phrase = HTTPStatus(status).phrase
        text = f'{{"error": "{phrase}: {_plain(problem)}"}}'.encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await self._send_response(_Response(status, headers, bytearray(text)), with_body=self._wants_body)
        await self._stream.send_eof()
        with trio.move_on_after(_LINGER_S):
            while await self._stream.receive_into([self._buffer]):
                pass


def _plain(text: str) -> str:
    """Return text that can stand inside JSON as it is."""
    return "".join(character for character in text if character.isascii() and character.isprintable()).translate(
        {ord('"'): "'", ord("\\"): "/"}
    )


def _scope(request: h11.Request) -> _Scope:
    path, _, query = request.target.partition(b"?")
    if not path.startswith(b"/"):  # the form for proxies: http://host/path
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    headers: Iterable[tuple[bytes, bytes]] = request.headers
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode(),
        "method": request.method.decode(),
        "scheme": "http",
        "path": unquote_to_bytes(path).decode(errors="replace"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": list(headers),
        "client": None,
        "server": None,
    }
