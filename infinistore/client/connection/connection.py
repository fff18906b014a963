"""One connection to a server: the stream, the conversation on it, its movers and its
pins.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from infinistore.client.connection.turns import Turn
from infinistore.client.memory.pins import HasSocket, Pins
from infinistore.client.movers.base import Closable, Mover, MoverSource
from infinistore.client.movers.channel import Channel, expect
from infinistore.client.movers.inline import InlineMover
from infinistore.client.operations.remote import RemoteOperations
from infinistore.client.options import Options
from infinistore.errors import ProtocolError
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.messages import Hello, HelloReply
from infinistore.protocol.states import State

__all__ = ["Connection"]

_AnyStream = TypeVar("_AnyStream")


class Connection(Generic[_AnyStream]):
    """A stream, the conversation on it, and what can be asked over it. One call uses it
    at a time.
    """

    def __init__(self, stream: _AnyStream, options: Options, clock: Callable[[], float]) -> None:
        self.stream = stream
        self.turn: Turn | None = None
        """The turn of its current or last call; see `turns.py`. None: that call cannot
        be interrupted at arbitrary points."""
        self.passed_over: Sequence[MoverSource] = ()
        """Better transports that failed when it was made. It is replaced when one is
        due for another try."""
        self._options = options
        self.protocol = ClientConnection()
        self.pins = Pins(cast(HasSocket, stream), self.protocol)
        self.channel = Channel(self.protocol, self.pins, clock, verify=options.verify == "always")
        self.movers: Sequence[Mover] = ()
        """Those before inline."""
        self.mapped: Closable | None = None
        """Memory of the server that its movers have mapped, closed when the server has
        ended.
        """
        self.operations: RemoteOperations | None = None
        """What carries out requests, when it is open."""

    async def greet(self) -> HelloReply:
        """Say hello, once, before anything else.

        Raises:
            AuthenticationFailed: the token is missing or wrong.
            VersionMismatch: the server is of another version.
            LimitExceeded: the server has all the connections it takes.
            ProtocolError: what answers is no server of ours.
        """
        hello = Hello(name=self._options.name, token=self._options.token)
        request = self.protocol.request(hello, deadline_us=self.channel.remaining_us())
        reply = expect(HelloReply, await request)
        for name in ("max_body_bytes", "max_batch_keys", "max_batch_bytes", "max_value_bytes"):
            if not getattr(reply, name):
                raise ProtocolError(f"the server says that it takes nothing: its {name} is 0")
        self.channel.hello = reply
        return reply

    def open(self, movers: Sequence[Mover], path: tuple[str, str]) -> None:
        """Get ready for requests, by these movers and inline. `path` names the
        transport, and why.
        """
        self.channel.path = path
        self.movers = movers
        self.mapped = next((mover.mapped for mover in movers if mover.mapped is not None), None)
        self.operations = RemoteOperations(self.channel, [*movers, InlineMover(self.channel)])

    def close(self) -> None:
        """Free what its movers have. No byte moves after this.

        The stream is closed by its creator.
        """
        for mover in self.movers:
            mover.close()

    @property
    def usable(self) -> bool:
        """Return whether another request may follow.

        False while one is incomplete, or after it was given up then.
        """
        return (
            self.protocol.state is State.READY
            and self.operations is not None
            and not self.channel.holding
            and not self.pins.reserved
        )

    @property
    def at_rest(self) -> bool:
        """Whether no request is half-way."""
        return self.protocol.state is State.READY
