"""HTTP/1.1 to one member of etcd, without I/O: one request and its answer at a time."""

from contextlib import suppress

import h11

from infinistore.cluster.etcd.messages import Answer, EtcdMisbehaved
from infinistore.sizes import in_units

__all__ = ["MOST_ANSWER_BYTES", "HttpConversation"]

MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""The longest answer, or line of a stream: some 60,000 nodes."""


class HttpConversation:
    """The requests over one connection: `request` makes bytes to send, and `receive`
    takes what comes until `complete`, or for as long as lines are wanted.

    Bytes that are not HTTP raise `EtcdMisbehaved`; then the connection is of no use.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._connection = h11.Connection(h11.CLIENT)
        self._status = 0
        self._body = bytearray()
        self._looked_at = 0
        self.complete = False
        """Whether the answer is there as a whole."""

    @property
    def reusable(self) -> bool:
        """Whether another request may follow."""
        return self._connection.our_state in (h11.IDLE, h11.DONE) and self._connection.their_state in (
            h11.IDLE,
            h11.DONE,
        )

    @property
    def answer(self) -> Answer:
        """The answer, or what there is of it."""
        return Answer(self._status, bytes(self._body))

    def request(self, path: str, body: bytes, token: str) -> bytes:
        """Return the bytes of a request."""
        if self._connection.our_state is h11.DONE:
            self._connection.start_next_cycle()
        self._status, self.complete, self._looked_at = 0, False, 0
        self._body.clear()
        headers = [("Host", self._host), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if token:
            headers.append(("Authorization", token))
        parts = [h11.Request(method="POST", target=path, headers=headers), h11.Data(body), h11.EndOfMessage()]
        return b"".join(self._connection.send(part) or b"" for part in parts)

    def receive(self, data: bytes) -> None:
        """Take what came; nothing if the peer has closed."""
        try:
            self._connection.receive_data(data)
            while True:
                event = self._connection.next_event()
                if isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > MOST_ANSWER_BYTES:
                        raise EtcdMisbehaved(f"an answer is longer than {in_units(MOST_ANSWER_BYTES)}")
                elif isinstance(event, h11.EndOfMessage):
                    self.complete = True
                elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                    return
        except h11.RemoteProtocolError as error:
            raise EtcdMisbehaved(f"what answers does not speak HTTP: {error}") from None

    def closed(self) -> bool:
        """Note that the peer has closed; return whether the answer is complete."""
        with suppress(EtcdMisbehaved):  # it broke off
            self.receive(b"")
        return self.complete

    def take_line(self) -> bytes | None:
        """Take the next line of the answer, if it is there; the rest of an answer that
        is complete is a line, too.
        """
        end = self._body.find(b"\n", self._looked_at)
        if end < 0:
            self._looked_at = len(self._body)
            if not self.complete or not self._body:
                return None
            end = len(self._body)
        line = bytes(self._body[:end])
        del self._body[: end + 1]
        self._looked_at = 0
        return line
