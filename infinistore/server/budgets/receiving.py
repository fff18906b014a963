"""How a session gets its requests: those that come whole, which most do, and those that
come in pieces, for which others may have to wait.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from infinistore.protocol.effects import LongBody
from infinistore.protocol.server_connection import Received, ServerConnection
from infinistore.server.budgets.body_budget import BodyBudget, BodyGrant
from infinistore.transports.base import ReactingStream, Stream, can_react, drive

__all__ = ["Receiving"]

_SEEN = -1
"""Says that what has come is in the connection."""
_MOST_AT_ONCE = 8
"""So many requests that came together are answered in one step. A store sends one at a
time; what more comes from others is left to the session, which lets all have turns."""
_MOST_IN_A_ROW = 32
"""So many requests that came together a session gets without a checkpoint. Answers that
are sent count as well, but not all requests have one."""


class Receiving:
    """The requests of one connection. Once one was begun, its client may send nothing
    for `stall_s` seconds. `end` ends the session, which is that of `tenant`.
    """

    def __init__(
        self,
        connection: ServerConnection,
        stream: Stream,
        body_budget: BodyBudget,
        stall_s: float,
        end: Callable[[], None],
        *,
        tenant: str,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._body_budget = body_budget
        self._stall_s = stall_s
        self._end = end
        self._tenant = tenant
        self._body: BodyGrant | None = None
        self.reacts = False
        """Whether the next request is expected to be one that is answered at once."""
        self._receive_or_react: Callable[[Sequence[memoryview]], Awaitable[int]] = stream.receive_into
        self._left: Received | None = None
        self._in_a_row = 0

    def answer_at_once(self, answer: Callable[[Received, ReactingStream], bool]) -> None:
        """Have `answer` do what it can in one step while `next` waits, from now on.
        It returns False for requests that are left to the caller of `next`.
        """
        stream, connection = self._stream, self._connection
        if not can_react(stream):
            return

        def react(count: int) -> int | None:
            connection.arrived(count)
            left = _MOST_AT_ONCE
            while (received := connection.take()) is not None:
                if not left or not answer(received, stream):
                    self._left = received
                    return _SEEN
                left -= 1
            return None if connection.room is not None else _SEEN

        self._receive_or_react = partial(stream.receive_or_react, react=react)

    async def next(self) -> Received | None:
        """Wait for the next request; None at the end of the stream."""
        connection = self._connection
        if (room := connection.room) is None:  # it came with the last one, at least in part
            self._in_a_row = (self._in_a_row + 1) % _MOST_IN_A_ROW
            if not self._in_a_row:
                await trio.lowlevel.checkpoint()
            received = connection.take()
        else:
            count = await (self._receive_or_react(room) if self.reacts else self._stream.receive_into(room))
            if count != _SEEN:
                connection.arrived(count)
            if not count:
                return None
            received, self._left = self._left, None
            if received is None:
                received = connection.take()
        if received is None:
            received = await drive(
                connection.receive(), self._stream, stall_s=self._stall_s, admit_body=self._admit_body
            )
            self.free()
        return received

    async def _admit_body(self, body: LongBody) -> None:
        self._body = await self._body_budget.acquire(body, self._end, self._tenant)

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
