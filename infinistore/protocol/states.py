"""The states of a connection, and the events that lead from one to the next.

Both ends run on the tables `SERVER` and `CLIENT`, which `docs/protocol.md` prints. An
event that is not in the table of a state cannot happen there: a peer that causes one
violates the protocol, and in this end it is a `LocalProtocolError`.
"""

import enum
from collections.abc import Mapping


class LocalProtocolError(RuntimeError):
    """A call that the state of the connection does not allow: a bug in the caller."""


class Event(enum.StrEnum):
    """What happens at one end. The value is its description in the documentation."""

    HELLO = "a `Hello`"
    REQUEST = "a request without payload"
    REQUEST_WITH_PAYLOAD = "a `Put`"
    NOTICE = "a `Release`, `Abort` or `Touch`"
    SENT = "all of it is sent"
    PAYLOAD = "the rest of the payload"
    REPLY = "a reply"
    REPLY_WITH_PAYLOAD = "a reply with payload"
    SECOND_REPLY = "waiting for a second reply"
    FATAL = "a fatal error"
    END = "the end of the stream"


class Transitions(dict[Event, "State"]):
    """The events that may happen in a state of one end, and the states that follow."""

    def __init__(self, end: str, state: "State", follows: Mapping[Event, "State"]) -> None:
        super().__init__(follows)
        self._where = f"{end} in the state {state.name}"
        self.listens = not _HEARD[end].isdisjoint(follows)
        """Whether the peer may send something now."""

    def __missing__(self, event: Event) -> "State":
        raise LocalProtocolError(f"{event} is not possible for a {self._where}")

    def check_listens(self) -> None:
        """Raise `LocalProtocolError` unless the peer may send something now."""
        if not self.listens:
            raise LocalProtocolError(f"nothing can be received by a {self._where}")


class State(enum.Enum):
    """The state of one end.

    `server` and `client` map the events that may happen to the next state.
    """

    HELLO = enum.auto()
    """Before the hello."""
    READY = enum.auto()
    """Between two requests."""
    ASKING = enum.auto()
    """A client sends a request."""
    TELLING = enum.auto()
    """A client sends a message that has no reply."""
    PAYLOAD = enum.auto()
    """The head of a frame has arrived, and its payload has not."""
    REPLYING = enum.auto()
    """The server prepares a reply; the client waits for one."""
    SENDING = enum.auto()
    """A server sends a reply."""
    CLOSED = enum.auto()
    """The conversation has ended."""

    server: Transitions
    client: Transitions


SERVER: dict[State, dict[Event, State]] = {
    State.HELLO: {
        Event.HELLO: State.REPLYING,
        Event.END: State.CLOSED,
        Event.FATAL: State.CLOSED,
    },
    State.READY: {
        Event.REQUEST: State.REPLYING,
        Event.REQUEST_WITH_PAYLOAD: State.PAYLOAD,
        Event.NOTICE: State.READY,
        Event.END: State.CLOSED,
        Event.FATAL: State.CLOSED,
    },
    State.PAYLOAD: {
        Event.PAYLOAD: State.REPLYING,
        Event.FATAL: State.CLOSED,
    },
    State.REPLYING: {
        Event.PAYLOAD: State.REPLYING,  # of no bytes
        Event.REPLY: State.SENDING,
        Event.FATAL: State.CLOSED,
    },
    State.SENDING: {
        Event.SENT: State.READY,
        Event.FATAL: State.CLOSED,  # not sent: it would look like a part of the reply
    },
    State.CLOSED: {
        Event.FATAL: State.CLOSED,
    },
}
"""The events at a server: it receives requests, and sends replies and fatal errors."""

CLIENT: dict[State, dict[Event, State]] = {
    State.HELLO: {
        Event.HELLO: State.ASKING,
        Event.END: State.CLOSED,
    },
    State.READY: {
        Event.REQUEST: State.ASKING,
        Event.NOTICE: State.TELLING,
        Event.SECOND_REPLY: State.REPLYING,
        Event.PAYLOAD: State.READY,  # of no bytes
        Event.END: State.CLOSED,
    },
    State.ASKING: {
        Event.SENT: State.REPLYING,
        Event.END: State.CLOSED,
    },
    State.TELLING: {
        Event.SENT: State.READY,
        Event.END: State.CLOSED,
    },
    State.REPLYING: {
        Event.REPLY: State.READY,
        Event.REPLY_WITH_PAYLOAD: State.PAYLOAD,
        Event.FATAL: State.CLOSED,
        Event.END: State.CLOSED,
    },
    State.PAYLOAD: {
        Event.PAYLOAD: State.READY,
        Event.END: State.CLOSED,
    },
    State.CLOSED: {
        Event.END: State.CLOSED,
    },
}
"""The events at a client: it sends requests, and receives replies and fatal errors."""

_HEARD = {
    "server": {Event.HELLO, Event.REQUEST, Event.REQUEST_WITH_PAYLOAD, Event.NOTICE},
    "client": {Event.REPLY, Event.REPLY_WITH_PAYLOAD, Event.FATAL},
}

for _state in State:
    # One attribute and one lookup; a table of tables would take two lookups.
    _state.server = Transitions("server", _state, SERVER.get(_state, {}))
    _state.client = Transitions("client", _state, CLIENT.get(_state, {}))
