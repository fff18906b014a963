"""How a session gets its requests: those that come whole, which most do, and those that
come in pieces, for which others may have to wait.
"""

from collections.abc import Callable, Sequence

from infinistore.protocol.effects import LongBody
from infinistore.protocol.server_connection import Received, ServerConnection
from infinistore.server.budgets.body_budget import BodyBudget, BodyGrant
from infinistore.transports.base import Stream, drive

__all__ = ["Receiving"]


class Receiving:
    """The requests of one connection. Once one was begun, its client may send nothing
    for `stall_s` seconds. `end` ends the session.
    """

    def __init__(
        self,
        connection: ServerConnection,
        stream: Stream,
        body_budget: BodyBudget,
        stall_s: float,
        end: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._body_budget = body_budget
        self._stall_s = stall_s
        self._end = end
        self._body: BodyGrant | None = None

    async def next(self, room: Sequence[memoryview] | None) -> Received | None:
        """Wait for the next request, which has not come whole; None at the end of the
        stream. `room` is that of the connection.
        """
        connection = self._connection
        if room is not None:
            count = await self._stream.receive_into(room)
            connection.arrived(count)
            if not count:
                return None
            if (received := connection.take()) is not None:
                return received
        received = await drive(connection.receive(), self._stream, stall_s=self._stall_s, admit_body=self._admit_body)
        self.free()
        return received

    async def _admit_body(self, body: LongBody) -> None:
        self._body = await self._body_budget.acquire(body, self._end)

    @property
    def ended(self) -> bool:
        """Whether the session was ended because a long request did not come."""
        return self._body is not None and self._body.ended

    def free(self) -> None:
        """Give back the memory of a long body, which has become a request or was given
        up.
        """
        if self._body is not None:
            self._body_budget.release(self._body)
            self._body = None
