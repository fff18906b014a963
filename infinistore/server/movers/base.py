"""What a mover is to the server: a way for blocks to travel between a client and the
pool.

A server has one list of movers, composed once. Each connection opens every mover that
is available on it. A request goes to the first mover in the list that has a handler for
its type; the session knows no mover by name.

A package of yours brings a mover as the `server_mover` of its `Transport`
(`infinistore.transports`): a function that takes the server's `ServerConfig` and its
`StoreCore`, may block, and returns a `Mover`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from infinistore.core.arena import Arena
from infinistore.errors import InfiniStoreException, TransferFailed
from infinistore.protocol.messages import HelloReply, Message
from infinistore.protocol.server_connection import Received
from infinistore.server.connection import Conversation, Holdings

Handler: TypeAlias = Callable[[Any, Received], Awaitable[str | None]]
"""Does what a request asks for, and replies to it. What it raises is answered as an
error. What it returns is counted as the outcome; None is "ok".

`ProtocolError` also ends the connection.
"""

QuickHandler: TypeAlias = Callable[[Any, Received, bool], Sequence[memoryview] | None]
"""Does what a request asks for in one step, and returns the reply that has begun, to be
sent, or nothing for a message without one; None, without effect, if it would have to
wait: then the `Handler` does it, and with `at_once` False it is called next. If the
reply is sent `at_once`, before anything else happens, it may have views of the pool;
so it may where `Conversation.afterwards` unpins them.
"""


class ConnectionMover(ABC):
    """A mover on one connection, whose `Holdings` have what the client holds."""

    handlers: Mapping[type[Message], Handler]
    """The requests that it answers on this connection, except those in `quick` that
    never wait."""
    quick: Mapping[type[Message], QuickHandler] = {}
    """What answers some requests at once, always or most of the time."""
    client_touches_pool: ClassVar[bool] = False
    """Whether the client can touch the pool itself until its stream has ended."""

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """End every transfer. What the client holds is given back after this.
        Idempotent.

        If this raises, what the client holds stays in quarantine for good.
        """


class Mover(ABC):
    """A mover of one server."""

    name: ClassVar[str]
    """The name in logs and statistics."""
    requests: ClassVar[tuple[type[Message], ...]] = ()
    """Refused with its reason if it is unavailable and no other mover answers."""
    refusal: ClassVar[type[InfiniStoreException]] = TransferFailed
    """The error of that refusal."""
    descriptors_per_client: int = 0
    """How many descriptors it opens for a client, besides those of the connection."""

    def unavailable(self, conversation: Conversation) -> str:
        """Why it moves nothing on this connection; empty if it does."""
        return ""

    @abstractmethod
    def open(self, conversation: Conversation, holdings: Holdings) -> ConnectionMover:
        """Begin on a connection where it is available."""

    def announce(self, hello: HelloReply) -> HelloReply:
        """Add what a client needs to know of this mover to the answer to Hello."""
        return hello

    def add_arena(self, arena: Arena) -> None:  # noqa: B027  # most look at the pool when they need it
        """Prepare for a further arena. Blocking. The first one was there when the mover
        was made.

        Raises:
            OutOfMemory: it cannot move blocks of this arena, which is therefore not
                used.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """Free what the mover has taken; all connections are over. Idempotent."""
