"""The requests of one connection that are answered in one step.

Most requests for one block, or about keys, have nothing to wait for, apart from the
socket that takes the answer, which has room for it. So while the session waits for the
next one, its stream may hand it over to `answer`, and no task is woken for it
(`ReactingStream`). What takes more is left to the session, which calls `begin` first.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Exists, ExistsReply, Message
from infinistore.protocol.server_connection import Received
from infinistore.server.connection.conversation import Conversation
from infinistore.server.connection.holdings import Holdings
from infinistore.server.movers.base import ConnectionMover, Handler, QuickHandler
from infinistore.server.recorder import OK, Recorder, outcome_of
from infinistore.transports.base import ReactingStream

__all__ = ["AnswersAtOnce"]

_OF_ONE_KEY = ExistsReply(b"\0"), ExistsReply(b"\1")


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
        self._begun_bytes = 0

    def handlers_of(
        self, movers: Sequence[ConnectionMover], handlers: Mapping[type[Message], Handler]
    ) -> dict[type[Message], QuickHandler]:
        """Return what there is for the requests that these movers answer."""
        found: dict[type[Message], QuickHandler] = {}
        for mover in movers:
            found |= {kind: one for kind, one in mover.quick.items() if handlers[kind] == mover.handlers[kind]}
        return found if self._conversation.disk is not None else found | {Exists: self._exists}

    def answer(self, received: Received, stream: ReactingStream) -> bool:
        """Answer a request; False if the session is to do that, or to end it."""
        message = received.message
        handler = self.handlers.get(type(message))
        if handler is None or self.ended:
            return False
        conversation, clock = self._conversation, self._recorder.clock
        traffic = conversation.traffic
        start, sent_before = clock(), traffic.sent_bytes
        self._holdings.listen()
        try:
            begun = handler(message, received, True)
        except Exception as error:  # noqa: BLE001  # the session knows what to do about it
            self._begun = KeptError(error)
            return False
        if begun is None:
            return False
        try:
            rest = stream.send_now(begun)
        except Exception as error:  # what was asked for is done, and whoever asked has gone
            self._count(received, outcome_of(error), start, sent_before)
            raise
        finally:
            conversation.core.free_replaced()
        if rest:
            self._begun = [memoryview(b"".join(rest))]  # the pool may be changed until it is sent
            # Counted by the session, with the request.
            self._begun_bytes, traffic.sent_bytes = traffic.sent_bytes - sent_before, sent_before
            return False
        conversation.connection.end_reply()
        self._count(received, OK, start, sent_before)
        return True

    def _count(self, received: Received, outcome: str, start: float, sent_before: int) -> None:
        conversation, recorder = self._conversation, self._recorder
        traffic = conversation.traffic
        traffic.requests += 1
        traffic.received_bytes += received.payload_bytes
        moved_bytes = received.payload_bytes + traffic.sent_bytes - sent_before
        recorder.record(type(received.message), conversation.transport, outcome, moved_bytes, recorder.clock() - start)

    def begin(self, received: Received) -> Sequence[memoryview] | None:
        """Return an answer, or what is left of it, to be sent by the session; None if
        that has to do more. Raises why a request is refused."""
        begun, self._begun = self._begun, None
        if isinstance(begun, KeptError):
            raise begun.again()
        if begun is not None:
            self._conversation.traffic.sent_bytes += self._begun_bytes
            return begun
        message: Any = received.message
        handler = self.handlers.get(type(message))
        begun = None if handler is None else handler(message, received, False)
        self.likely = begun is not None or (handler is not None and len(message.keys) == 1)
        return begun

    def _exists(self, request: Exists, received: Received, at_once: bool) -> Sequence[memoryview]:
        core = self._conversation.core
        present = core.exists(request.keys)
        if request.touch:
            core.touch(list(compress(request.keys, present)))
        reply = ExistsReply(present) if len(present) != 1 else _OF_ONE_KEY[present[0]]
        return self._conversation.connection.begin_reply(reply)
