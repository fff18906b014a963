"""The network between the nodes of a world.

Connections are in `streams.py`. The network makes them, and says how long bytes are on
their way, which ways are blocked, and what happens at which message:
`Network.on_message` decides about each.
"""

import random
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

import attrs
import trio

from infinistore.errors import StoreUnavailable
from tests.simulation.streams import Connection, Message, Pipe, SimulatedStream, Trigger
from tests.simulation.world import World

__all__ = ["Listener", "Network", "NetworkSettings", "as_socket"]


@attrs.frozen
class NetworkSettings:
    """How slow the network is, in seconds, and how much fits into it, in bytes."""

    least_delay_s: float = 0.00005
    most_delay_s: float = 0.002
    buffers: tuple[int, ...] = (700, 2000, 8192, 65536)
    """What one direction of a connection takes before its sender waits."""
    checkpoint_chance: float = 0.1
    """That a call on a stream lets other tasks go first although it need not wait."""
    vanished_after_s: float = 60.0
    """When an end gives a connection up over which nothing is acknowledged."""


class Listener:
    """What a server listens on: a socket by its methods only."""

    def __init__(self, network: "Network", node: str, address: str, family: socket.AddressFamily) -> None:
        self.node = node
        self.address = address
        self.family = family
        self.is_open = True
        self._network = network
        self._waiting: deque[SimulatedStream] = deque()
        self._changed = trio.lowlevel.ParkingLot()

    def fileno(self) -> int:
        """Say that there is no descriptor."""
        return -1

    def close(self) -> None:
        """Accept no more connections; end those that nobody has accepted."""
        if self.is_open:
            self.is_open = False
            self._network.stop_listening(self)
            while self._waiting:
                self._waiting.popleft().close()
            self._changed.unpark_all()

    def add(self, stream: SimulatedStream) -> None:
        """A client has connected."""
        self._waiting.append(stream)
        self._changed.unpark()

    async def accept(self) -> SimulatedStream:
        """Wait for the next connection."""
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if not self.is_open:
                raise trio.ClosedResourceError
            await self._changed.park()
        return self._waiting.popleft()


class Network:
    """All connections of a world, and the ways between its nodes."""

    stream_class: type[SimulatedStream] = SimulatedStream

    def __init__(self, world: World, settings: NetworkSettings) -> None:
        self.world = world
        self.settings = settings
        self.on_message: Callable[[Message], Trigger | None] = lambda message: None
        """What decides whether something happens at a message."""
        self.connections: dict[int, Connection] = {}
        """Those that at least one end has not closed yet, by their numbers."""
        self._random: random.Random = world.generator("network")
        self._listeners: dict[str, Listener] = {}
        self._numbers = 0
        self._blocked: dict[tuple[str, str], int] = {}
        self._unblocked = trio.lowlevel.ParkingLot()

    # Addresses

    def listen(self, node: str, address: str, family: socket.AddressFamily = socket.AF_INET) -> Listener:
        """Listen at an address, which nobody else does."""
        assert address not in self._listeners
        listener = self._listeners[address] = Listener(self, node, address, family)
        return listener

    def stop_listening(self, listener: Listener) -> None:
        """Nobody listens at its address any more."""
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    async def connect(self, node: str, server: str, address: str = "") -> SimulatedStream:
        """Connect from a node to an address of a server; by default, its name.

        Raises:
            StoreUnavailable: nobody listens there.
        """
        address = address or server
        await trio.sleep(2 * self.delay())
        while self.is_blocked(node, server) or self.is_blocked(server, node):
            await self._unblocked.park()
        listener = self._listeners.get(address)
        if listener is None:
            raise StoreUnavailable(f"cannot connect to {address}: connection refused")
        self._numbers += 1
        choose = self._random.choice
        capacities = choose(self.settings.buffers), choose(self.settings.buffers)
        connection = Connection(self, self._numbers, node, server, capacities)
        self.connections[connection.number] = connection
        self.world.trace.add(node, "connect", connection.number, *capacities)
        listener.add(connection.server_end)
        return connection.client_end

    # Bytes on their way

    def delay(self) -> float:
        """Choose how long something is on its way, in seconds."""
        least, most = self.settings.least_delay_s, self.settings.most_delay_s
        return least + (most - least) * self._random.random() ** 2

    def checkpoint_now(self) -> bool:
        """Choose whether a call that need not wait lets others go first."""
        return self._random.random() < self.settings.checkpoint_chance

    def carry(self, connection: Connection, pipe: Pipe, arrive: Callable[[], None]) -> None:
        """Call a function when what is sent now arrives at the other end."""
        clock = self.world.clock
        pipe.last_arrival = max(pipe.last_arrival, clock.now + self.delay())

        def deliver() -> None:
            if pipe.held or self.is_blocked(pipe.source, pipe.target):
                pipe.held.append(arrive)
            elif not connection.is_silent:
                arrive()

        clock.at(pipe.last_arrival, deliver)

    # What goes wrong

    def is_blocked(self, source: str, target: str) -> bool:
        """Whether nothing gets from one node to another."""
        return bool(self._blocked) and (source, target) in self._blocked

    def block(self, source: str, target: str) -> None:
        """Let nothing through from one node to another, until `unblock`."""
        way = (source, target)
        self._blocked[way] = self._blocked.get(way, 0) + 1
        for connection in self.connections.values():
            if {connection.client, connection.server} == {source, target}:
                self._give_up_later(connection, lambda: self.is_blocked(source, target))

    def unblock(self, source: str, target: str) -> None:
        """End one `block`. What was held back arrives now."""
        way = (source, target)
        if way not in self._blocked:
            return
        self._blocked[way] -= 1
        if self._blocked[way]:
            return
        del self._blocked[way]
        for connection in list(self.connections.values()):
            for pipe in connection.pipes:
                if (pipe.source, pipe.target) == way:
                    held, pipe.held = pipe.held, []
                    for arrive in held:
                        if not connection.is_silent:
                            arrive()
        self._unblocked.unpark_all()

    def silence(self, connection: Connection) -> None:
        """Let nothing arrive over a connection any more. Its ends learn it late."""
        connection.is_silent = True
        self._give_up_later(connection, lambda: True)

    def _give_up_later(self, connection: Connection, still: Callable[[], bool]) -> None:
        def give_up() -> None:
            if still():
                connection.cut("the other end has not answered for long")

        self.world.clock.after(self.settings.vanished_after_s, give_up)

    def heal(self) -> None:
        """Be fast, end all blocks, and cut what leads nowhere."""
        self.settings = attrs.evolve(self.settings, most_delay_s=self.settings.least_delay_s)
        for way in list(self._blocked):
            self._blocked[way] = 1
            self.unblock(*way)
        for connection in list(self.connections.values()):
            if connection.is_silent or connection.lost:
                connection.cut("the network is well again")

    def of_node(self, node: str) -> list[Connection]:
        """Return the connections of a node."""
        return [one for one in self.connections.values() if node in (one.client, one.server)]

    def forget(self, connection: Connection) -> None:
        """Both ends of a connection are closed."""
        self.connections.pop(connection.number, None)


def as_socket(listener: Listener) -> socket.socket:
    """Return a listener as the type that a server takes."""
    return cast(socket.socket, listener)
