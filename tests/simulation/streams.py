"""Connections, as streams of both ends.

Bytes arrive in order, late, and in pieces. A connection knows where messages begin, so
that something can happen at a chosen byte of a chosen message.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import outcome
import trio

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import HEADER_BYTES, decode_body, head_bytes, parse_header
from infinistore.protocol.effects import Span
from infinistore.protocol.messages import KINDS
from infinistore.transports.base import React
from tests.simulation.clock import Timer

if TYPE_CHECKING:
    from tests.simulation.network import Network

__all__ = ["Connection", "Message", "Pipe", "SimulatedStream", "Trigger"]

_UNLIMITED = 1 << 62


class Message(NamedTuple):
    """A message that begins on a connection. `head` is its header and its body."""

    connection: "Connection"
    from_client: bool
    kind: str
    number: int
    head: bytes
    head_bytes: int
    payload_bytes: int

    @property
    def keys(self) -> list[str]:
        """The keys that it names."""
        body_bytes = parse_header(
            memoryview(self.head), max_body_bytes=_UNLIMITED, max_payload_bytes=_UNLIMITED
        ).body_bytes
        body = decode_body(self.number, memoryview(self.head)[HEADER_BYTES : HEADER_BYTES + body_bytes])
        return list(getattr(body, "keys", ()))

    @property
    def pipe(self) -> "Pipe":
        """The direction in which it goes."""
        return self.connection.pipes[0 if self.from_client else 1]


class Trigger(NamedTuple):
    """Something that happens when a message has been sent up to a byte."""

    at_byte: int
    act: Callable[[], None]


class Pipe:
    """One direction of a connection: bytes on their way, and those that arrived."""

    def __init__(self, source: str, target: str, capacity_bytes: int) -> None:
        self.source = source
        self.target = target
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self.arrived = bytearray()
        self.ended = False
        """Nothing more will arrive."""
        self.last_arrival = 0.0
        """When what was sent last arrives. What is sent later arrives later."""
        self.held: list[Callable[[], None]] = []
        """What a blocked way holds back."""
        self.begun = b""
        """What was sent of a header that is not complete."""
        self.frame_left = 0
        self.trigger: Trigger | None = None
        self.trigger_left = 0
        self.flip = 0
        """What is added to the next byte that is sent, bit by bit."""
        self.reader: trio.lowlevel.Task | None = None
        self.writer: trio.lowlevel.Task | None = None

    def wake_reader(self) -> None:
        task, self.reader = self.reader, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def wake_writer(self) -> None:
        task, self.writer = self.writer, None
        if task is not None:
            trio.lowlevel.reschedule(task)


class Connection:
    """A connection between a client and a server."""

    def __init__(self, network: "Network", number: int, client: str, server: str, capacities: tuple[int, int]) -> None:
        self.network = network
        self.number = number
        self.client = client
        self.server = server
        self.user: Any = None
        """The call of the client that used it last."""
        self.is_silent = False
        """Nothing arrives any more, and nobody is told."""
        self.lost = False
        """One end was told that it is lost; perhaps the other one has yet to be."""
        self.server_closed_s = math.inf
        """When the server closed its end: it does nothing for the client any more."""
        self.pipes = Pipe(client, server, capacities[0]), Pipe(server, client, capacities[1])
        make = network.stream_class
        self.client_end = make(self, self.pipes[0], self.pipes[1], from_client=True)
        self.server_end = make(self, self.pipes[1], self.pipes[0], from_client=False)

    def cut(self, why: str) -> None:
        """Lose the connection: nothing arrives any more, and both ends learn it now."""
        self.lost = True
        self.client_end.break_off(why)
        self.server_end.break_off(why)

    def cut_for_client(self, why: str, server_learns_after_s: float) -> None:
        """Lose the connection for the client. The server gets what is on its way, and
        learns it later.
        """
        self.lost = True
        self.client_end.break_off(why)
        self.network.world.clock.after(server_learns_after_s, lambda: self.server_end.break_off(why))

    def cut_for_server(self, why: str, client_learns_after_s: float) -> None:
        """Lose the connection for the server. The client gets what is on its way, and
        learns it later.
        """
        self.lost = True
        self.server_end.break_off(why)
        self.network.world.clock.after(client_learns_after_s, lambda: self.client_end.break_off(why))


class SimulatedStream:
    """One end of a connection: an `infinistore.transports.base.Stream`, and what a
    client needs of one.
    """

    passes_descriptors = False

    def __init__(self, connection: Connection, outgoing: Pipe, incoming: Pipe, *, from_client: bool) -> None:
        self.connection = connection
        self.outgoing = outgoing
        self.incoming = incoming
        self.from_client = from_client
        self.closed = False
        self.broken = ""
        """Why nothing can be sent or received any more; empty while it can."""
        self._peer_is_gone = False
        self._network = connection.network
        self._clock = connection.network.world.clock

    @property
    def socket(self) -> Any:
        """What a client closes when the last pin of a connection is gone."""
        return self

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send all of these views, in order."""
        deadline = self._clock.now + within_s
        span = Span(views)
        if self._network.checkpoint_now():
            await trio.lowlevel.checkpoint()
        while span.remaining:
            if not self._send_some(span):
                await self._wait(self.outgoing, "writer", deadline)

    def send_now(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Send what there is room for; return what is left."""
        span = Span(views)
        while span.remaining and self._send_some(span):
            pass
        return span.next_views(span.remaining)

    def _send_some(self, span: Span) -> bool:
        """Send some bytes; False if there is no room."""
        pipe = self.outgoing
        self._check()
        if self._peer_is_gone:
            raise StoreUnavailable("the connection broke: the other end has closed it")
        in_message = bool(pipe.frame_left) or self._begin_message(pipe, span)
        room = pipe.capacity_bytes - pipe.taken_bytes
        if room <= 0:
            return False
        count = min(room, span.remaining, pipe.frame_left if in_message else HEADER_BYTES)
        if pipe.trigger is not None:
            count = min(count, pipe.trigger_left)
        if count:
            data = b"".join(span.next_views(count))
            self._send(pipe, data)
            span.advance(count)
            if in_message:
                pipe.frame_left -= count
            else:
                pipe.begun += data
        if pipe.trigger is not None:
            pipe.trigger_left -= count
            if not pipe.trigger_left:
                trigger, pipe.trigger = pipe.trigger, None
                trigger.act()
        return True

    async def receive_or_react(self, views: Sequence[memoryview], react: React) -> int:
        """As `receive_into`; chance decides whether what comes goes to `react`."""
        while True:
            count = await self.receive_into(views)
            if not count or self._network.checkpoint_now():
                return count
            if (answer := react(count)) is not None:
                return answer

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Wait for at least one byte, and fill the views from the front."""
        pipe = self.incoming
        if self._network.checkpoint_now():
            await trio.lowlevel.checkpoint()
        while True:
            self._check()
            if pipe.arrived:
                break
            if pipe.ended:
                await trio.lowlevel.checkpoint()
                return 0
            await self._wait(pipe, "reader", deadline)
        span = Span(views)
        count = min(len(pipe.arrived), span.remaining)
        span.copy_in(memoryview(bytes(pipe.arrived[:count])))
        del pipe.arrived[:count]
        pipe.taken_bytes -= count
        pipe.wake_writer()
        return count

    async def send_eof(self) -> None:
        """Tell the peer that nothing more will be sent."""
        self._check()
        self._send_end()
        await trio.lowlevel.checkpoint()

    def fileno(self) -> int:
        """As of a socket that has no descriptor any more: there is none to watch."""
        return -1

    def close(self) -> None:
        """Close this end: the peer reads what is on its way, then the end; what it
        sends breaks.
        """
        if self.closed:
            return
        self.closed = True
        connection = self.connection
        peer = connection.server_end if self.from_client else connection.client_end
        if not self.from_client:
            connection.server_closed_s = self._clock.now
        if not self.broken:
            self._send_end()
            self._network.carry(connection, self.outgoing, peer.lose_peer)
        for pipe in (self.incoming, self.outgoing):
            pipe.wake_reader()
            pipe.wake_writer()
        if peer.closed:
            self._network.forget(connection)

    def lose_peer(self) -> None:
        """The other end was closed: what came can be read, but nothing sent."""
        if not self.broken:
            self._peer_is_gone = True
            self.outgoing.wake_writer()

    def break_off(self, why: str) -> None:
        """Learn that the connection is lost."""
        if not self.broken and not self.closed:
            self.broken = why
            self.incoming.arrived.clear()
            self.incoming.wake_reader()
            self.outgoing.wake_writer()

    def is_stale(self) -> bool:
        """Whether the peer has closed it, or said something that nobody asked for."""
        return bool(self.broken or self.incoming.ended or self.incoming.arrived)

    def _begin_message(self, pipe: Pipe, span: Span) -> bool:
        """Note that a message begins; False if its header is not complete yet."""
        world = self._network.world
        begun = pipe.begun
        first = begun + b"".join(span.next_views(HEADER_BYTES - len(begun)))
        if len(first) < HEADER_BYTES:
            return False
        pipe.begun = b""
        header = parse_header(memoryview(first), max_body_bytes=_UNLIMITED, max_payload_bytes=_UNLIMITED)
        length = head_bytes(header.body_bytes)
        pipe.frame_left = length + header.payload_bytes - len(begun)
        head = begun + b"".join(span.next_views(length - len(begun)))
        connection = self.connection
        message = Message(
            connection, self.from_client, KINDS[header.kind].__name__, header.kind, head, length, header.payload_bytes
        )
        if self.from_client:
            connection.user = world.call_of_task(trio.lowlevel.current_task())
            if connection.user is not None:
                connection.user.sent(connection, message.kind)
        world.trace.add(
            f"connection {connection.number}", message.kind, header.body_bytes, header.payload_bytes, header.deadline_us
        )
        trigger = self._network.on_message(message)
        if trigger is not None:
            pipe.trigger = trigger
            pipe.trigger_left = max(0, min(trigger.at_byte - len(begun), pipe.frame_left))
        return True

    def _send(self, pipe: Pipe, data: bytes) -> None:
        if pipe.flip:
            data = bytes([data[0] ^ pipe.flip]) + data[1:]
            pipe.flip = 0
        pipe.taken_bytes += len(data)

        def arrive() -> None:
            pipe.arrived += data
            pipe.wake_reader()

        self._network.carry(self.connection, pipe, arrive)

    def _send_end(self) -> None:
        pipe = self.outgoing

        def arrive() -> None:
            pipe.ended = True
            pipe.wake_reader()

        self._network.carry(self.connection, pipe, arrive)

    async def _wait(self, pipe: Pipe, role: str, deadline: float) -> None:
        """Wait until the pipe has changed.

        Raises:
            TimeoutError: the deadline has passed.
        """
        task = trio.lowlevel.current_task()
        setattr(pipe, role, task)
        timer: Timer | None = None

        def late() -> None:
            if getattr(pipe, role) is task:  # else it was woken, and its process is stopped
                setattr(pipe, role, None)
                trio.lowlevel.reschedule(task, outcome.Error(TimeoutError()))

        def abort(_: Any) -> trio.lowlevel.Abort:
            setattr(pipe, role, None)
            return trio.lowlevel.Abort.SUCCEEDED

        if deadline != math.inf:
            timer = self._clock.at(deadline, late)
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            if timer is not None:
                timer.cancel()

    def _check(self) -> None:
        if self.closed:
            raise StoreUnavailable("the connection was closed on this side")
        if self.broken:
            raise StoreUnavailable(f"the connection broke: {self.broken}")
