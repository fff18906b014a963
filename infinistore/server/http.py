"""HTTP/1.1 for the management API: an ASGI server on Trio, as small as one can be in which everything is bounded.

h11 knows the protocol, an ASGI application knows the answers, and this moves bytes between them. A request is read
whole before the application sees it, and its response is sent whole: both are small here. Headers, bodies, connections
and every wait have a limit; whatever a client sends is answered or ends its own connection, and nothing else; and a
cancelled server stops at once, even if a client reads no response.

Those promises are why it is here: of the ASGI servers, hypercorn alone runs on Trio, and it shields its sends from
cancellation, lets an unforeseen error of one connection end all, and bounds neither connections nor a whole request.

Left to others: what the paths mean, and who may ask.
"""

import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import unquote_to_bytes

import attrs
import h11
import trio

from infinistore.errors import StoreUnavailable
from infinistore.transports.base import Stream
from infinistore.transports.sockets import accept

__all__ = ["Application", "HttpLimits", "serve_connection", "serve_http"]

_log = logging.getLogger("infinistore.server")
_NO_DESCRIPTORS_PAUSE_S = 0.1
_LINGER_S = 1.0
_RECEIVE_BYTES = 16 * 1024

_Scope: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Scope]]
_Send: TypeAlias = Callable[[_Scope], Awaitable[None]]
Application: TypeAlias = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
"""An ASGI 3 application; it is asked for http only."""


@attrs.frozen
class HttpLimits:
    """What a client may send, and how long it may take.

    `head_s` bounds the wait for a request's head, from the end of the one before; `request_s` the rest: the body, the
    application, the response.
    """

    head_bytes: int = 16 * 1024
    body_bytes: int = 64 * 1024
    head_s: float = 10.0
    request_s: float = 30.0
    connections: int = 64


@attrs.define
class _Response:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = attrs.field(factory=list)
    body: bytearray = attrs.field(factory=bytearray)


class _RefusedRequest(Exception):
    """A request that is answered here, and the last of its connection."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


async def serve_http(
    application: Application, listeners: Sequence[socket.socket], limits: HttpLimits | None = None
) -> None:
    """Serve the application on these listeners until cancelled. Over the limit, connections wait to be accepted."""
    limits = limits or HttpLimits()
    slots = trio.Semaphore(limits.connections)
    async with trio.open_nursery() as connections:

        async def serve(stream: Stream) -> None:
            try:
                await serve_connection(application, stream, limits)
            finally:
                slots.release()

        async def accept_from(listener: socket.socket) -> None:
            while True:
                await slots.acquire()
                try:
                    stream = await accept(listener)
                except OSError as error:
                    slots.release()
                    _log.warning("cannot accept a management connection", extra={"error": error.strerror})
                    await trio.sleep(_NO_DESCRIPTORS_PAUSE_S)
                else:
                    connections.start_soon(serve, stream)

        for listener in listeners:
            connections.start_soon(accept_from, listener)


async def serve_connection(application: Application, stream: Stream, limits: HttpLimits) -> None:
    """Serve one connection until its client leaves or something about it is wrong; then it is closed."""
    connection = _Connection(application, stream, limits)
    try:
        await connection.run()
    except StoreUnavailable:
        pass  # how a broken stream says so
    except Exception:  # noqa: BLE001  # a fault of ours in one connection must not end all the others
        _log.exception("a management connection ended by an internal error")
    finally:
        stream.close()


class _Connection:
    def __init__(self, application: Application, stream: Stream, limits: HttpLimits) -> None:
        self._application = application
        self._stream = stream
        self._limits = limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))

    async def run(self) -> None:
        try:
            while await self._serve_one():
                self._h11.start_next_cycle()
                await trio.lowlevel.checkpoint()
        except _RefusedRequest as refused:
            await self._refuse(refused.status, str(refused))
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint, str(error))

    async def _serve_one(self) -> bool:
        """Answer the next request; False if there is none, or can be none after it."""
        event: Any = None
        with trio.move_on_after(self._limits.head_s):
            event = await self._next_event()
        if event is None and self._h11.trailing_data[0]:
            raise _RefusedRequest(408, f"the request's head had not come within {self._limits.head_s:g} s")
        if not isinstance(event, h11.Request):
            return False
        if event.http_version not in (b"1.0", b"1.1"):
            raise _RefusedRequest(505, "this server speaks HTTP/1.1")
        with trio.move_on_after(self._limits.request_s) as scope:
            body = await self._read_body(event)
            response = await self._ask_application(event, body)
        if scope.cancelled_caught:
            status = 408 if self._h11.their_state is h11.SEND_BODY else 503
            raise _RefusedRequest(status, f"the request was not done within {self._limits.request_s:g} s")
        await self._send_response(response, with_body=event.method != b"HEAD")
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

    async def _read_body(self, request: h11.Request) -> bytes:
        most = self._limits.body_bytes
        lengths = [value for name, value in request.headers if name == b"content-length"]
        if lengths and int(lengths[0]) > most:
            raise _RefusedRequest(413, f"a body may have {most} bytes, not {lengths[0].decode()[:40]}")
        body = bytearray()
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data)
            body += event.data
            if len(body) > most:
                raise _RefusedRequest(413, f"a body may have {most} bytes, not more")
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
        try:
            await self._application(_scope(request), receive, send)
            assert response.status, "the application gave no response"
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
        """Say what is wrong, if the client can still be told, and give it time to read that before its connection ends:
        closing on unread bytes would reset it."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        phrase = HTTPStatus(status).phrase
        text = f'{{"error": "{phrase}: {_plain(problem)}"}}'.encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await self._send_response(_Response(status, headers, bytearray(text)), with_body=True)
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
