"""How a session gets its requests: those that come whole, which most do, those that
come in pieces, for which others may have to wait, and those that are answered in one
step.

Most requests for one block, about keys, or for room and pins in shared memory, have
nothing to wait for, apart from the socket that takes the answer, which has room for it.
So while the session waits for the next one, its stream may hand it over to
`AnswersAtOnce.answer`, and no task is woken for it (`ReactingStream`). What takes more
is left to the session, which calls `begin` first.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from infinistore.answers import exists, match_prefix
from infinistore.kept_errors import KeptError
from infinistore.protocol.effects import LongBody
from infinistore.protocol.messages import Exists, MatchPrefix, Message, Touch
from infinistore.protocol.server_connection import Received, ServerConnection
from infinistore.server.budgets import BodyBudget, BodyGrant
from infinistore.server.connection import Conversation, Holdings
from infinistore.server.movers.base import QuickHandler
from infinistore.server.recorder import OK, Recorder, outcome_of
from infinistore.transports.base import ReactingStream, Stream, can_react, drive

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
        """Give back the memory of a long body, complete or given up."""
        if self._body is not None:
            self._body_budget.release(self._body)
            self._body = None


class AnswersAtOnce:
    """Answers what it can; `handlers` are those of what the client may ask for."""

    def __init__(self, conversation: Conversation, holdings: Holdings, recorder: Recorder) -> None:
        self.handlers: Mapping[type[Message], QuickHandler] = {}
        self.likely = False
        """Whether the next request can probably be answered, as the last one could."""
        self.ended = False
        """Whether no further request is to be answered."""
        self._conversation = conversation
        self._holdings = holdings
        self._recorder = recorder
        self._begun: Sequence[memoryview] | KeptError | None = None
        self._begun_bytes = (0, 0)
        self.own: dict[type[Message], QuickHandler] = {
            Exists: self._exists,
            MatchPrefix: self._match_prefix,
            Touch: self._touch,
        }
        """Those of requests that need no mover."""

    def answer(self, received: Received, stream: ReactingStream) -> bool:
        """Answer a request; False if the session is to do that, or to end it."""
        message = received.message
        handler = self.handlers.get(type(message))
        if handler is None or self.ended:
            return False
        conversation, clock = self._conversation, self._recorder.clock
        traffic = conversation.traffic
        start, before = clock(), (traffic.received_bytes, traffic.sent_bytes)
        self._holdings.listen()
        try:
            begun = handler(message, received, True)
        except Exception as error:  # noqa: BLE001  # the session knows what to do about it
            self._begun = KeptError(error)
            return False
        if begun is None:
            return False
        try:
            rest = stream.send_now(begun) if begun else ()
        except Exception as error:  # what was asked for is done, and whoever asked has gone
            conversation.tidy()
            self._count(received, outcome_of(error), start, before)
            raise
        if rest:
            if conversation.afterwards is None:
                rest = [memoryview(b"".join(rest))]  # the pool may be changed until it is sent
            self._begun = rest
            # Counted by the session, with the request.
            self._begun_bytes = traffic.received_bytes - before[0], traffic.sent_bytes - before[1]
            traffic.received_bytes, traffic.sent_bytes = before
            return False
        conversation.tidy()
        if begun:
            conversation.connection.end_reply()
        self._count(received, OK, start, before)
        return True

    def _count(self, received: Received, outcome: str, start: float, before: tuple[int, int]) -> None:
        conversation, recorder = self._conversation, self._recorder
        traffic = conversation.traffic
        traffic.requests += 1
        traffic.received_bytes += received.payload_bytes
        moved_bytes = traffic.received_bytes + traffic.sent_bytes - sum(before)
        recorder.record(type(received.message), conversation.transport, outcome, moved_bytes, recorder.clock() - start)

    def begin(self, received: Received) -> Sequence[memoryview] | None:
        """Return an answer, or what is left of it, to be sent by the session; None if
        that has to do more. Raises why a request is refused."""
        begun, self._begun = self._begun, None
        if isinstance(begun, KeptError):
            raise begun.again()
        if begun is not None:
            traffic = self._conversation.traffic
            traffic.received_bytes += self._begun_bytes[0]
            traffic.sent_bytes += self._begun_bytes[1]
            return begun
        message: Any = received.message
        handler = self.handlers.get(type(message))
        begun = None if handler is None else handler(message, received, False)
        self.likely = begun is not None or (handler is not None and len(getattr(message, "keys", ())) == 1)
        return begun

    def _exists(self, request: Exists, received: Received, at_once: bool) -> Sequence[memoryview]:
        conversation = self._conversation
        reply = exists(request, conversation.tiers, conversation.client, 0.0)
        return conversation.connection.begin_reply(reply)

    def _match_prefix(self, request: MatchPrefix, received: Received, at_once: bool) -> Sequence[memoryview]:
        conversation = self._conversation
        tiers = conversation.tiers
        reply = match_prefix(request, tiers, conversation.client, 0.0, touch=False)
        begun = conversation.connection.begin_reply(reply)
        if not request.hold_us:
            conversation.afterwards = partial(tiers.core.touch, request.keys[: reply.matched])
        return begun

    def _touch(self, touch: Touch, received: Received, at_once: bool) -> Sequence[memoryview]:
        self._holdings.note_use(touch)
        return ()
