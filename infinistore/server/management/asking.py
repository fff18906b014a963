"""Asks the management API of another server on this machine, over its Unix socket.

One request, one connection. The answer is JSON or text of any length, because both ends
are ours; the caller bounds the time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import h11

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.trio_streams import connect_unix

__all__ = ["Answer", "ask"]

_RECEIVE_BYTES: Final = 64 * 1024


@attrs.frozen
class Answer:
    """An answer to a request."""

    status: int
    body: bytes


async def ask(path: Path, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
    """Send a request to the server at this socket, and return its answer.

    Raises:
        StoreUnavailable: nobody listens there, or the connection broke.
    """
    connection = h11.Connection(h11.CLIENT)
    given = {"host": "localhost", "connection": "close", "content-length": str(len(body)), **headers}
    fields = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    events: list[Any] = [
        h11.Request(method=method, target=target, headers=fields),
        h11.Data(data=body),
        h11.EndOfMessage(),
    ]
    stream = await connect_unix(str(path))
    try:
        await stream.send_all([memoryview(b"".join(connection.send(event) or b"" for event in events))])
        answered, parts = 0, list[bytes]()
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                count = await stream.receive_into([buffer])
                connection.receive_data(bytes(buffer[:count]))
            elif isinstance(event, h11.Response):
                answered = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return Answer(answered, b"".join(parts))
    except h11.RemoteProtocolError as error:
        raise StoreUnavailable(f"no answer from {path}: {error}") from None
    finally:
        stream.close()
