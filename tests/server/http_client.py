"""The client of the tests of the management API: one request, one connection, whatever
stream it is given.
"""

import json
from typing import Any

import attrs
import h11

from infinistore.transports.base import Stream
from infinistore.transports.sockets.trio_streams import connect_tcp

__all__ = ["Answer", "ask", "ask_over", "read_answer"]


@attrs.frozen
class Answer:
    """A response, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    address: tuple[str, int], method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes = b""
) -> Answer:
    """Send a request to a server on a real socket."""
    stream = await connect_tcp(*address)
    try:
        return await ask_over(stream, method, path, headers=headers, body=body)
    finally:
        stream.close()


async def ask_over(
    stream: Stream, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes = b""
) -> Answer:
    """Send a request over a stream, and read its response."""
    connection = h11.Connection(h11.CLIENT)
    given = {"Host": "localhost"} | ({"Content-Length": str(len(body))} if body else {}) | (headers or {})
    fields = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    request: Any = h11.Request(method=method, target=path, headers=fields)
    data = connection.send(request) or b""
    if body:
        data += connection.send(h11.Data(data=body)) or b""
    await stream.send_all([memoryview(data + (connection.send(h11.EndOfMessage()) or b""))])
    return await read_answer(stream, connection)


async def read_answer(stream: Stream, connection: h11.Connection) -> Answer:
    """Read the response to a request that was sent."""
    buffer = bytearray(4096)
    response: Any = None
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            count = await stream.receive_into([memoryview(buffer)])
            connection.receive_data(bytes(buffer[:count]))
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            headers = {name.decode().lower(): value.decode() for name, value in response.headers}
            return Answer(response.status_code, headers, body)
        else:
            assert not isinstance(event, h11.ConnectionClosed), "the connection ended before the response did"
