"""The table of states: every line of it happens at a real connection, and nothing that
is not in it does.
"""

from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from infinistore.errors import OutOfMemory, ProtocolError
from infinistore.protocol.client_connection import ClientConnection, Encoded
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.effects import Send
from infinistore.protocol.messages import (
    MISSING,
    ErrorReply,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Keys,
    Message,
    Purge,
    Put,
    Release,
)
from infinistore.protocol.server_connection import ServerConnection
from infinistore.protocol.states import CLIENT, SERVER, Event, LocalProtocolError, State
from tests.examples import examples
from tests.tables import for_each

from .wire import Wire, frame

ONE_KEY = Keys(["k"])
HELLO_REPLY = HelloReply("0123", "1.0", 2**26, 8192, 2**28, 2**24)
PUT = Put(ONE_KEY, pack_u64([5]), checksums=False)
GET = Get(ONE_KEY, pack_u64(), checksums=False)
SERVER_EVENTS = sorted({event for follows in SERVER.values() for event in follows})
CLIENT_EVENTS = sorted({event for follows in CLIENT.values() for event in follows})
REFUSED = (ProtocolError, LocalProtocolError)


class ServerEnd:
    """A server's connection to which events happen."""

    HEARD: ClassVar[dict[Event, bytes]] = {
        Event.HELLO: frame(Hello()),
        Event.REQUEST: frame(Purge()),
        Event.REQUEST_WITH_PAYLOAD: frame(PUT, announced=5),
        Event.NOTICE: frame(Release(1)),
        Event.END: b"",
    }

    def __init__(self) -> None:
        self.connection = ServerConnection(max_body_bytes=2**20, max_payload_bytes=2**20)

    @property
    def state(self) -> State:
        return self.connection.state

    def happens(self, event: Event) -> None:
        connection = self.connection
        if event in self.HEARD:
            Wire(self.HEARD[event]).run(connection.receive())
        elif event is Event.PAYLOAD:
            room = bytearray(connection.payload_left)
            Wire(bytes(len(room))).run(connection.read_payload([memoryview(room)]))
        elif event is Event.REPLY:
            connection.begin_reply(ErrorReply(OutOfMemory.code, "full"))
        elif event is Event.SENT:
            connection.end_reply()
        else:
            assert event is Event.FATAL
            Wire().run(connection.reply_fatal(OutOfMemory("full")))


class ClientEnd:
    """A client's connection to which events happen. `owed`: a second request went with
    the last.
    """

    def __init__(self) -> None:
        self.connection = ClientConnection()
        self.owed = False
        self._sending: Coroutine[Any, Any, object] | None = None
        self._asked: Encoded | None = None

    @property
    def state(self) -> State:
        return self.connection.state

    def happens(self, event: Event, *, then: bool = False) -> None:
        connection = self.connection
        if event in (Event.HELLO, Event.REQUEST):
            asked = connection.encode(Hello() if event is Event.HELLO else GET, then=GET if then else None)
            self._begin(connection.send(asked))
            self._asked, self.owed = asked, then
        elif event is Event.NOTICE:
            self._begin(connection.notify(Release(1)))
        elif event is Event.SENT:
            if self._sending is None:  # nobody can cause it, but in the table it must not be
                connection.state.client[Event.SENT]
            else:
                with pytest.raises(StopIteration):
                    self._sending.send(0)
                self._sending = None
        elif event is Event.SECOND_REPLY:
            reading = connection.late_reply()
            reading.send(None)
            reading.close()
            self.owed = False
            self._asked = Encoded(GET, 77, b"", None)
        elif event is Event.PAYLOAD:
            room = bytearray(connection.payload_left)
            Wire(bytes(len(room))).run(connection.read_payload([memoryview(room)]))
        elif event is Event.END:
            connection.close()
            self._sending = None
        else:
            self._hear(event)

    def _begin(self, sending: Coroutine[Any, Any, object]) -> None:
        assert isinstance(sending.send(None), Send)
        self._sending = sending

    def _hear(self, event: Event) -> None:
        asked = self._asked or Encoded(GET, 1, b"", None)
        reply: Message = HELLO_REPLY if isinstance(asked.message, Hello) else GetReply(pack_u64([MISSING]), pack_u64())
        payload = b""
        if event is Event.REPLY_WITH_PAYLOAD:
            asked = asked._replace(message=GET)
            reply, payload = GetReply(pack_u64([5]), pack_u64()), b"12345"
        elif event is Event.FATAL:
            reply = ErrorReply(OutOfMemory.code, "full", fatal=True)
        wire = Wire(frame(reply, announced=len(payload), request_id=asked.request_id))
        try:
            wire.run(self.connection.reply_to(asked))
        except OutOfMemory:
            assert event is Event.FATAL
        else:
            assert event is not Event.FATAL


def server_in(state: State) -> ServerEnd:
    """A server's end that has come to a state as the table says."""
    end = ServerEnd()
    for event in way(SERVER, state):
        end.happens(event)
    assert end.state is state
    return end


def client_in(state: State) -> ClientEnd:
    """A client's end that has come to a state as the table says; a second reply is owed
    where there can be one.
    """
    end = ClientEnd()
    for event in way(CLIENT, state):
        end.happens(event)
    if state is State.READY:
        for event in (Event.REQUEST, Event.SENT, Event.REPLY):
            end.happens(event, then=event is Event.REQUEST)
            end.owed = True
    assert end.state is state
    return end


def way(table: dict[State, dict[Event, State]], wanted: State) -> list[Event]:
    """The shortest way from the beginning to a state."""
    ways: dict[State, list[Event]] = {State.HELLO: []}
    for state in list(State) * len(State):
        for event, after in table.get(state, {}).items():
            if state in ways:
                ways.setdefault(after, [*ways[state], event])
    return ways[wanted]


@for_each(event=SERVER_EVENTS, state=SERVER)
def test_an_event_at_a_server_leads_where_the_table_says_or_is_refused(state: State, event: Event) -> None:
    end = server_in(state)
    if event in SERVER[state]:
        end.happens(event)
        assert end.state is SERVER[state][event]
    else:
        with pytest.raises(REFUSED) as refused:
            end.happens(event)
        assert end.state is state
        heard = event in ServerEnd.HEARD and event is not Event.END
        assert isinstance(refused.value, ProtocolError) == (heard and state in (State.HELLO, State.READY))


@for_each(event=CLIENT_EVENTS, state=CLIENT)
def test_an_event_at_a_client_leads_where_the_table_says_or_is_refused(state: State, event: Event) -> None:
    end = client_in(state)
    if event in (Event.REQUEST, Event.HELLO) and end.owed:  # first the reply that is owed has to be read
        end.happens(Event.SECOND_REPLY)
        end.happens(Event.REPLY)
    if event in CLIENT[state]:
        end.happens(event)
        assert end.state is CLIENT[state][event]
    else:
        with pytest.raises(LocalProtocolError):
            end.happens(event)
        assert end.state is state


def test_every_state_is_in_the_table_of_an_end_and_can_be_reached() -> None:
    assert set(SERVER) | set(CLIENT) == set(State)
    for table in (SERVER, CLIENT):
        assert {after for follows in table.values() for after in follows.values()} | {State.HELLO} == set(table)


def test_a_state_that_an_end_does_not_have_allows_nothing_there() -> None:
    for table, name in ((SERVER, "server"), (CLIENT, "client")):
        for state in set(State) - set(table):
            assert not getattr(state, name)
            with pytest.raises(LocalProtocolError, match=f"not possible for a {name} in the state {state.name}"):
                getattr(state, name)[Event.END]


def test_no_second_reply_is_read_if_no_second_request_was_sent() -> None:
    end = ClientEnd()
    for event in way(CLIENT, State.READY):
        end.happens(event)
    with pytest.raises(LocalProtocolError, match="no other request was sent"):
        end.happens(Event.SECOND_REPLY)
    assert end.state is State.READY


def test_no_request_is_sent_before_the_second_reply_was_read() -> None:
    end = client_in(State.READY)
    with pytest.raises(LocalProtocolError, match="the reply to another request is still to be read"):
        end.happens(Event.REQUEST)
    assert end.state is State.READY


class TwoEnds(RuleBasedStateMachine):
    """Events in any order, at a server and at a client."""

    @initialize()
    def meet(self) -> None:
        self.server, self.client = ServerEnd(), ClientEnd()

    @rule(event=st.sampled_from(SERVER_EVENTS))
    def happens_at_the_server(self, event: Event) -> None:
        before = self.server.state
        if event in SERVER[before]:
            self.server.happens(event)
            assert self.server.state is SERVER[before][event]
        else:
            with pytest.raises(REFUSED):
                self.server.happens(event)
            assert self.server.state is before

    @rule(event=st.sampled_from(CLIENT_EVENTS), then=st.booleans())
    def happens_at_the_client(self, event: Event, then: bool) -> None:
        end, before = self.client, self.client.state
        out_of_turn = before is State.READY and event in (
            {Event.REQUEST} if end.owed else {Event.SECOND_REPLY}
        )  # which depends on what was asked, and not on the state
        if event in CLIENT[before] and not out_of_turn:
            end.happens(event, then=then and event is Event.REQUEST)
            assert end.state is CLIENT[before][event]
        else:
            with pytest.raises(LocalProtocolError):
                end.happens(event)
            assert end.state is before

    @precondition(lambda self: State.CLOSED in (self.server.state, self.client.state))
    @rule()
    def begin_again(self) -> None:
        if self.server.state is State.CLOSED:
            self.server = ServerEnd()
        if self.client.state is State.CLOSED:
            self.client = ClientEnd()


TwoEnds.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40)
test_events_in_any_order_lead_where_the_table_says = TwoEnds.TestCase
