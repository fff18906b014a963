"""What goes wrong in a run: which kinds of faults, how often, and where.

Every fault happens when a message has been sent up to some byte. So a server crashes in
the middle of a block, drains while a put is half sent, and a call is cancelled between
its head and its payload, far more often than if faults came at random times. A run has
only some kinds of faults (swarm testing: A. Groce et al., ISSTA 2012), for some hide
what others would show.
"""

import enum
import random
from collections.abc import Callable, Mapping
from functools import partial

import attrs

from tests.simulation.buggify import Buggify, Point
from tests.simulation.history import Call, History
from tests.simulation.network import Network
from tests.simulation.nodes import ServerNode
from tests.simulation.streams import Connection, Message, Trigger
from tests.simulation.world import World

__all__ = ["BuggifySettings", "FaultKind", "FaultSettings", "Faults"]


class FaultKind(enum.Enum):
    """What can happen at a message."""

    CUT = "both ends lose the connection"
    CUT_FOR_CLIENT = "the client loses the connection, and the server learns it late"
    CUT_FOR_SERVER = "the server loses the connection, and the client learns it late"
    SILENCE = "nothing arrives any more, and nobody is told"
    STALL = "what is sent from now on arrives late"
    PARTITION = "nothing gets from either node to the other for a while"
    PARTITION_ONE_WAY = "nothing gets from one node to the other for a while"
    CORRUPT_PAYLOAD = "a byte of a block arrives wrong"
    CORRUPT_HEADER = "the first bytes of a header arrive wrong"
    CANCEL = "the call of the client is cancelled"
    CRASH = "the server crashes"
    CRASH_SILENTLY = "the machine of the server loses its power"
    DRAIN = "the server is told to stop"


@attrs.frozen(kw_only=True)
class FaultSettings:
    """How likely each kind of fault is: the chance of one message. 0 for those that a
    run does not have.
    """

    cut: float = 0.0
    cut_for_client: float = 0.0
    cut_for_server: float = 0.0
    silence: float = 0.0
    stall: float = 0.0
    partition: float = 0.0
    partition_one_way: float = 0.0
    corrupt_payload: float = 0.0
    corrupt_header: float = 0.0
    cancel: float = 0.0
    crash: float = 0.0
    crash_silently: float = 0.0
    drain: float = 0.0
    most_outage_s: float = 3.0
    """How long the longest stall, partition or restart takes, in seconds."""

    @property
    def chances(self) -> list[tuple[FaultKind, float]]:
        """The kinds that a run has, with their chances."""
        of_all = [(kind, getattr(self, kind.name.lower())) for kind in FaultKind]
        return [(kind, chance) for kind, chance in of_all if chance]

    @classmethod
    def choose(cls, chance: random.Random) -> "FaultSettings":
        """Choose some kinds of faults, and how likely each is."""
        wanted = chance.choice([0.0, 0.2, 0.5, 0.5, 0.8])
        chosen = {}
        for kind in FaultKind:
            if chance.random() < wanted:
                chosen[kind.name.lower()] = chance.choice(_CHANCES.get(kind, (0.003, 0.01, 0.02)))
        return cls(**chosen, most_outage_s=chance.choice([0.05, 0.5, 3.0, 20.0]))


_SELDOM = (0.002, 0.004)
_CHANCES = {
    FaultKind.SILENCE: _SELDOM,
    FaultKind.CRASH: _SELDOM,
    FaultKind.CRASH_SILENTLY: _SELDOM,
    FaultKind.DRAIN: _SELDOM,
    FaultKind.CORRUPT_PAYLOAD: (0.02, 0.1),  # for few messages have one
}


_SELDOM_ASKED = {
    Point.SHORT_READ_AHEAD: 0.5,
    Point.SHORT_SLICE: 0.5,
    Point.ACCEPT_REFUSED: 0.2,
    Point.FULL_BODY_BUDGET: 0.5,
    Point.GROWTH_REFUSED: 0.97,
    Point.PREPARE_REFUSED: 0.5,
    Point.SPARE_REFUSED: 0.5,
    Point.TABLES_REFUSED: 0.5,
    Point.SLOW_THREAD: 0.5,
    Point.REMOVAL_COLLISION: 0.2,
    Point.HAZARDS_FULL: 0.2,
    Point.TOUCH_LOG_FULL: 0.5,
    Point.COMMIT_BY_MESSAGE: 0.2,
}
"""Points that few things ask, each with the chance that it has at least."""


@attrs.frozen
class BuggifySettings:
    """What the product does although it seldom does it, and how likely that is each
    time; more so where it is seldom asked.
    """

    points: tuple[str, ...] = ()
    """The names of points."""
    chance: float = 0.02

    @classmethod
    def choose(cls, chance: random.Random) -> "BuggifySettings":
        """Choose some points."""
        wanted = chance.choice([0.0, 0.2, 0.5])
        often = 0.9 if wanted else 0.0
        points = [point for point in Point if chance.random() < (often if point in _SELDOM_ASKED else wanted)]
        return cls(tuple(point.name for point in points), chance.choice([0.01, 0.05, 0.2]))

    def make(self, chance: random.Random) -> Buggify:
        """Make what decides."""
        chances = {Point[name]: self.chance for name in self.points}
        for point in chances.keys() & _SELDOM_ASKED.keys():
            chances[point] = max(self.chance, _SELDOM_ASKED[point])
        return Buggify(chance, chances)


class Faults:
    """Brings the faults of a run about, until `heal`."""

    def __init__(
        self,
        world: World,
        network: Network,
        servers: Mapping[str, ServerNode],
        history: History,
        settings: FaultSettings,
    ) -> None:
        self.world = world
        self.network = network
        self.servers = servers
        self.history = history
        self.settings = settings
        self._chances = settings.chances
        self._random = world.generator("faults")
        self._active = True
        self._acts: dict[FaultKind, Callable[[Message], Trigger | None]] = {
            FaultKind.CUT: self._cut,
            FaultKind.CUT_FOR_CLIENT: self._cut_for_one,
            FaultKind.CUT_FOR_SERVER: self._cut_for_one,
            FaultKind.SILENCE: self._silence,
            FaultKind.STALL: self._stall,
            FaultKind.PARTITION: self._partition,
            FaultKind.PARTITION_ONE_WAY: self._partition,
            FaultKind.CORRUPT_PAYLOAD: self._corrupt_payload,
            FaultKind.CORRUPT_HEADER: self._corrupt_header,
            FaultKind.CANCEL: self._cancel,
            FaultKind.CRASH: self._crash,
            FaultKind.CRASH_SILENTLY: self._crash,
            FaultKind.DRAIN: self._drain,
        }
        self._kind = FaultKind.CUT
        network.on_message = self._on_message

    def heal(self) -> None:
        """From now on nothing goes wrong."""
        self._active = False
        self.network.heal()

    def _on_message(self, message: Message) -> Trigger | None:
        if not self._active:
            return None
        drawn = self._random.random()
        for kind, chance in self._chances:
            drawn -= chance
            if drawn < 0:
                self._kind = kind
                return self._acts[kind](message)
        return None

    def _at(self, message: Message, act: Callable[[], None], *, noted: bool = True) -> Trigger:
        """Do something at some byte of a message; often at one of its boundaries."""
        whole = message.head_bytes + message.payload_bytes
        inside = self._random.randrange(whole + 1)
        in_payload = message.head_bytes + self._random.randrange(message.payload_bytes + 1)
        at_byte = self._random.choice([0, message.head_bytes, inside, in_payload, in_payload, whole - 1, whole])
        kind = self._kind

        def happen() -> None:
            if self._active:
                if noted:
                    self.world.fault(kind.name, _where(message.connection), message.kind, at_byte)
                act()

        return Trigger(at_byte, happen)

    def _outage_s(self) -> float:
        return self.settings.most_outage_s * self._random.random() ** 3

    def _cut(self, message: Message) -> Trigger:
        return self._at(message, lambda: message.connection.cut("the network cut it"))

    def _cut_for_one(self, message: Message) -> Trigger:
        connection, later_s = message.connection, self._outage_s()
        cut = connection.cut_for_client if self._kind is FaultKind.CUT_FOR_CLIENT else connection.cut_for_server
        return self._at(message, lambda: cut("the network cut it", later_s))

    def _silence(self, message: Message) -> Trigger:
        return self._at(message, lambda: self.network.silence(message.connection))

    def _stall(self, message: Message) -> Trigger:
        seconds = self._outage_s()

        def stall() -> None:
            message.pipe.last_arrival = max(message.pipe.last_arrival, self.world.clock.now + seconds)

        return self._at(message, stall)

    def _partition(self, message: Message) -> Trigger:
        connection, seconds = message.connection, self._outage_s()
        ways = [(connection.client, connection.server), (connection.server, connection.client)]
        if self._kind is FaultKind.PARTITION_ONE_WAY:
            ways = [self._random.choice(ways)]

        def partition() -> None:
            for way in ways:
                self.network.block(*way)
                self.world.clock.after(seconds, partial(self.network.unblock, *way))

        return self._at(message, partition)

    def _corrupt_payload(self, message: Message) -> Trigger | None:
        if not message.payload_bytes:
            return None
        kind, connection = message.kind, message.connection
        keys = message.keys if message.from_client else []

        def corrupt() -> None:
            if not self._active:
                return
            self.world.fault(FaultKind.CORRUPT_PAYLOAD.name, _where(connection), kind, at_byte)
            message.pipe.flip = 1 << flipped
            self.history.corrupted_puts += [(key, connection.user or self._copy(key, connection)) for key in keys]
            if not message.from_client:
                self.history.corrupted_replies.append((self.world.clock.now, connection.client))

        at_byte = message.head_bytes + self._random.randrange(message.payload_bytes)
        flipped = self._random.randrange(8)
        return Trigger(at_byte, corrupt)

    def _copy(self, key: str, connection: Connection) -> Call:
        """Return what stands for a copy to another node, made in the background
        and with the checksum that the block has. Nobody learns what came of it.
        """
        checked = key not in self.history.unchecked_keys
        now, number = self.world.clock.now, connection.number
        return Call(0, connection.client, "put", [key], now, verified=checked, connections={number: connection})

    def _corrupt_header(self, message: Message) -> Trigger:
        connection = message.connection

        def corrupt() -> None:
            if self._active:
                self.world.fault(FaultKind.CORRUPT_HEADER.name, _where(connection), message.kind)
                message.pipe.flip = 1 << flipped
                self.history.corrupted_heads.append((self.world.clock.now, connection.client))

        flipped = self._random.randrange(8)
        return Trigger(self._random.randrange(4), corrupt)

    def _cancel(self, message: Message) -> Trigger | None:
        call = message.connection.user
        if call is None:
            return None
        return self._at(message, call.scope.cancel)

    def _crash(self, message: Message) -> Trigger:
        restart_after_s = self._outage_s()
        silently = self._kind is FaultKind.CRASH_SILENTLY
        keeps_disk = self._random.random() < 0.7

        server = self.servers[message.connection.server]

        def crash() -> None:
            if server.is_up:
                server.crash(restart_after_s, silently=silently, keeps_disk=keeps_disk)

        return self._at(message, crash, noted=False)

    def _drain(self, message: Message) -> Trigger:
        restart_after_s = self._outage_s()

        server = self.servers[message.connection.server]

        def drain() -> None:
            if server.is_up:
                server.drain(restart_after_s)

        return self._at(message, drain, noted=False)


def _where(connection: Connection) -> str:
    return f"connection {connection.number}"
