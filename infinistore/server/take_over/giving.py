"""The server's part when another process takes its place.

The other process is a client on the server's Unix socket, of the same user. It takes
three steps (`TakeOverStep`). At the first it gets the sockets and the memory, and the
server serves on. At the second the server ends its service: it accepts no more
connections, finishes what is under way, and writes down what its pool has. With that
goes the ownership of the pool, which only one of the two can take
(`memory.take_ownership`): the other process once it is ready, or this one if that
has gone or takes too long. Whoever has taken it serves, and the other never does, for
however long either was stopped.

Leaves to others: to accept and to end sessions (`infinistore.server.server`), and what
is written down (`infinistore.core.hand_over`).
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import attrs
import trio

from infinistore.errors import InvalidRequest
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Keys, TakeOver, TakeOverReply, TakeOverStep
from infinistore.protocol.server_connection import Received
from infinistore.protocol.versions import Capability
from infinistore.server.connection import Conversation
from infinistore.server.listeners import Listeners
from infinistore.server.take_over.memory import Ended, ServerMemory, make_ownership, take_ownership, write_state
from infinistore.transports.base import Stream
from infinistore.transports.sockets.raw_sockets import MAX_DESCRIPTORS, peer_user
from infinistore.transports.sockets.unix_listener import UnixListener

_log = logging.getLogger("infinistore.server")
ARENA_OF_GROUP = "arena of a group"
"""The name of an arena of a group, which older releases do not look for."""
DECIDE_S = 60.0
"""How long the other process may take from the end of the service to its own begin."""
_DECIDE_FOR_EACH_KEY_S = 100e-6
"""And for each key besides: it needs a third of that on a busy machine."""


@attrs.define
class _Handed:
    """What one step hands over: descriptors, with a name and a number each."""

    descriptors: list[int] = attrs.field(factory=list)
    names: list[str] = attrs.field(factory=list)
    numbers: list[int] = attrs.field(factory=list)

    def add(self, name: str, descriptor: int, number: int = 0) -> None:
        self.names.append(name)
        self.descriptors.append(descriptor)
        self.numbers.append(number)


class HandoverServer:
    """Lets one process at a time take the place of a server.

    Close it last: the other process learns by that, that this one uses the memory of
    the pool no more.
    """

    whole: ServerMemory
    """What the server has in memory. Whoever composes the server sets it."""

    def __init__(self) -> None:
        self.listeners: Listeners | None = None
        """What the server listens on."""
        self.refusal = ""
        """Why no process may take over; empty if one may."""
        self._lifeline = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._own: list[int] = []  # descriptors to be closed
        self._handed = _Handed()
        self._ready = trio.Event()
        self._over = trio.Event()
        self._ownership: int | None = None
        self._left: list[UnixListener] = []
        """Those whose paths go to whoever serves."""
        self.wanted = trio.Event()
        """Set when the service is to end."""
        self.taker: Conversation | None = None
        """The connection of the process that takes over."""
        self.refuses = False
        """Whether the server stops, or has handed over."""
        self.inherited: Callable[[], list[Ended]] = list
        """Returns what an earlier server has ended, and is still open."""
        self._failure = ""  # why nothing could be handed over

    # For the connection of the other process

    async def answer(self, conversation: Conversation, message: TakeOver, received: Received) -> None:
        """Answer a step.

        Raises:
            InvalidRequest: this process may not take over, or not now.
        """
        if message.step == TakeOverStep.BEGIN and not message.first:
            self._begin(conversation)
        elif self.taker is not conversation:
            raise InvalidRequest("--take-over: this process does not take over, or took too long")
        if message.step == TakeOverStep.END:
            raise InvalidRequest("--take-over: the server ends when the ownership of its pool has been taken")
        if message.step == TakeOverStep.HAND_OVER and not message.first:
            _log.info("handing over to another process")
            self.wanted.set()
            await self._ready.wait()
        if self._failure:
            raise InvalidRequest(f"--take-over: {self._failure}; try again")
        handed = self._handed
        reply = TakeOverReply(Keys(handed.names), pack_u64(handed.numbers))
        some = handed.descriptors[message.first : message.first + MAX_DESCRIPTORS]
        await conversation.send(conversation.connection.reply(reply, descriptors=some), conversation.limits.grace_s)

    def left(self, conversation: Conversation) -> None:
        """The connection is over: the other process serves, or has gone."""
        if self.taker is conversation:
            if not self.wanted.is_set():
                self.taker = None
            self._over.set()

    def _begin(self, conversation: Conversation) -> None:
        if self.refusal:
            raise InvalidRequest(f"--take-over: {self.refusal}")
        sock = socket_of(conversation.stream)
        if sock is None or sock.family != socket.AF_UNIX:
            raise InvalidRequest("--take-over: only a process on the server's Unix socket may")
        if peer_user(sock) != os.geteuid():
            raise InvalidRequest(
                f"--take-over: only the user of the server may ({os.geteuid()}); start it as that user"
            )
        if Capability.OWNERSHIP not in conversation.connection.peer.capabilities:
            raise InvalidRequest(
                "--take-over: the server is of a newer release than the process that takes over, which would not know"
                " how; start one that is not older"
            )
        if self.taker is not None or self.refuses:
            what = "another process takes over already" if self.taker is not None else "the server is stopping"
            raise InvalidRequest(f"--take-over: {what}; try again in a moment")
        self.taker = conversation
        self._failure = ""
        self._close_own()
        self._over = trio.Event()
        self._handed = handed = _Handed()
        assert self.listeners is not None
        handed.add("lifeline", self._lifeline[0])
        for listener in self.listeners.clients:
            handed.add(_name_of(listener), listener.fileno())
        for listener in self.listeners.management:
            handed.add("management", listener.fileno())
        self._add_arenas(handed)

    def _add_arenas(self, handed: _Handed) -> None:
        described = self.whole.describe()
        if described:
            try:
                self._own.append(write_state(described))
            except OSError as error:
                raise InvalidRequest(f"--take-over: the server cannot describe its pools: {error.strerror}") from None
            handed.add("groups", self._own[-1])
        for arena in self.whole.arenas:
            handed.add(ARENA_OF_GROUP if described else "arena", arena.fd, arena.length)

    # For the server

    @property
    def lifeline(self) -> int:
        """The end of a pipe that hangs up when this process has ended."""
        return self._lifeline[0]

    def refuse(self, *, shards: bool) -> None:
        """Refuse every process, if this server has what no other can take over yet."""
        if shards:
            self.refusal = "the server has several shards; start as many (--shards)"

    def stop(self) -> None:
        """Let no process begin any more."""
        self.refuses = True

    def hand_over(self, instance: str, ended: Sequence[Ended]) -> None:
        """Tell the other process what the server has. The service is over: nobody
        changes it any more. The descriptors of `ended` belong to this object now."""
        ended = [*ended, *self.inherited()]
        self._own += [one.descriptor for one in ended if one.descriptor is not None]
        watched, state = self.whole.export(instance, ended)
        self._handed = handed = _Handed()
        try:
            self._own.append(write_state(state))
            handed.add("state", self._own[-1])
            self._own.append(make_ownership())
        except OSError as error:
            self.fail(f"the server cannot write down what its pool has: {error.strerror}")
            return
        self._ownership = self._own[-1]
        handed.add("ownership", self._ownership)
        for one in watched:
            if one.descriptor is None:
                handed.add("no-stream", self._lifeline[0])
            else:
                handed.add("stream", one.descriptor)
        assert self.listeners is not None
        self._left = [one for one in self.listeners.clients if isinstance(one, UnixListener) and one.owns_path]
        for listener in self._left:  # before the other process can serve there, however this one ends
            listener.leave_path()
        self._ready.set()

    def fail(self, why: str) -> None:
        """Tell the other process that nothing can be handed over."""
        self._failure = why
        self._ready.set()

    async def decide(self) -> bool:
        """Wait until the other process serves, or has gone; whether it serves."""
        with trio.move_on_after(DECIDE_S + _DECIDE_FOR_EACH_KEY_S * len(self.whole)):
            await self._over.wait()
        taker, self.taker = self.taker, None
        if taker is not None:
            taker.stream.close()
        ownership, self._ownership = self._ownership, None
        if ownership is not None and not take_ownership(ownership):
            _log.info("another process has taken over")
            return True
        _log.warning("the process that was to take over has gone; serving on")
        self._close_own()
        for listener in self._left:
            with suppress(OSError):  # somebody has removed it
                listener.own_path()
        self.wanted, self._ready = trio.Event(), trio.Event()
        return False

    def _close_own(self) -> None:
        own, self._own = self._own, []
        for descriptor in own:
            with suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        """Tell that this process uses its memory no more."""
        self._close_own()
        for descriptor in self._lifeline:
            with suppress(OSError):
                os.close(descriptor)
        self._lifeline = (-1, -1)


async def refuse_take_over(message: TakeOver, received: Received) -> None:
    """Answer a step at a server that no process can take over.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest("--take-over: this server cannot be taken over")


def socket_of(stream: Stream) -> socket.socket | None:
    """Return the socket of a stream, below TLS; None for a stream that has none."""
    inner = getattr(stream, "inner", stream)
    return cast("socket.socket | None", getattr(inner, "socket", None))


def _name_of(listener: socket.socket) -> str:
    if listener.family != socket.AF_UNIX:
        return "tcp"
    return "own-unix" if isinstance(listener, UnixListener) and listener.owns_path else "unix"
