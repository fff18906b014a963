"""What clients called, when, how it ended, and what it says about the store."""

import enum
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import attrs
import trio

from infinistore.access.tenants import Tenants
from infinistore.errors import PartialPut
from tests.simulation.streams import Connection

__all__ = ["Call", "End", "History", "Hold", "Life", "TableInForce"]


class End(enum.Enum):
    """How a call ended."""

    RUNNING = enum.auto()
    RETURNED = enum.auto()
    REFUSED = enum.auto()
    """It raised, and has no effect."""
    PARTLY = enum.auto()
    """It raised, and some parts of its batch have had their effect."""
    UNKNOWN = enum.auto()
    """It raised or was cancelled, and may have had an effect, or may have it later."""


@attrs.define(eq=False)
class Call:
    """One call of one client. Times are virtual, in seconds."""

    number: int
    client: str
    method: str
    keys: Sequence[str]
    begun: float
    puts: Mapping[str, bytes] = attrs.field(factory=dict)
    """The value that it puts under each key."""
    lasts_s: float = math.inf
    """How long after they are there the keys that it puts end."""
    removes: Sequence[str] = ()
    """The keys that it removes."""
    unpins: Sequence[str] = ()
    """The keys that may be evicted again."""
    is_whole: bool = True
    """Whether its keys are one part, so that it happens in one moment."""
    verified: bool = True
    """Whether it has checked what it has read against checksums, or stored such."""
    ended: float = math.inf
    end: End = End.RUNNING
    error: BaseException | None = None
    seen: list[tuple[str, bytes | None]] = attrs.field(factory=list)
    """The values that it has read; None for a key that was not there."""
    present: list[tuple[str, bool]] = attrs.field(factory=list)
    """Whether keys were there."""
    may_skip: bool = False
    """Whether it puts only what is not there."""
    skipped: Sequence[str] = ()
    """The keys that it did not put, because they were there."""
    lost: bool = False
    """Whether what it did not find may be on a node that was lost."""
    durable: Sequence[str] = ()
    """The keys whose blocks it knows to be durable."""
    connections: dict[int, Connection] = attrs.field(factory=dict)
    """Those over which it sent requests."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """What cancels it."""

    def sent(self, connection: Connection, kind: str) -> None:
        """Note that it sends a message over a connection."""
        if kind != "Hello":
            self.connections[connection.number] = connection

    @property
    def may_have_effect(self) -> bool:
        """Whether it has had an effect, or could have had one."""
        if self.end in (End.UNKNOWN, End.RUNNING):
            return bool(self.connections)
        return self.end is not End.REFUSED

    def part(self, keys: Container[str], node: str = "", *, lost: bool) -> "Call":
        """Return what is known of the part for these keys, of a call to a cluster; all
        of them are of this node, if one is named. `lost` says that lost nodes excuse
        what was not found.
        """
        lost = lost and (self.lost or self.method == "keys")  # no node is missed in a list
        puts = {key: value for key, value in self.puts.items() if key in keys}
        end = self.end
        if isinstance(self.error, PartialPut) and not self.may_skip and puts.keys() <= set(self.error.stored):
            end = End.RETURNED
        elif isinstance(self.error, PartialPut) and puts.keys() <= set(self.error.failed):
            end = End.REFUSED
        elif self.error is not None:  # what one node refuses, others may have done
            end = End.UNKNOWN
        return attrs.evolve(
            self,
            keys=[key for key in self.keys if key in keys],
            puts=puts,
            removes=[key for key in self.removes if key in keys],
            unpins=[key for key in self.unpins if key in keys],
            seen=[(key, value) for key, value in self.seen if key in keys and not (lost and value is None)],
            present=[(key, there) for key, there in self.present if key in keys and (there or not lost)],
            skipped=self.skipped if node else (),  # one copy may have it where another was skipped
            end=end,
            connections={number: one for number, one in self.connections.items() if not node or one.server == node},
        )

    @property
    def latest_s(self) -> float:
        """When it can have had an effect at the latest.

        If its outcome is unknown, what it sent may still be on its way: until the
        server has closed the connections that it used.
        """
        if self.end in (End.UNKNOWN, End.RUNNING):
            return max((one.server_closed_s for one in self.connections.values()), default=self.ended)
        return self.ended


@attrs.define(eq=False)
class Hold:
    """A hold that a client got, or keys that it has pinned. It lasts from `since_s`
    until `until_s` at least.
    """

    match: Call
    keys: Sequence[str]
    since_s: float
    until_s: float
    pins: bool = False
    """Whether it is for the keys, whatever block they have: a hold is for their
    blocks.
    """


@attrs.define(eq=False)
class Life:
    """One server, from its start to its end, after which its memory is lost."""

    begun: float
    ended: float = math.inf
    evicted: bool = False
    """Whether it ever evicted a block."""
    dropped: bool = False
    """Whether it ever dropped a block for its checksum."""
    crashed: bool = False
    """Whether it did not end in an orderly way."""
    recovers: bool = False
    """Whether it has the disks of the server before."""
    recycled: bool = False
    """Whether its disks were full, so that they lost their oldest blocks."""
    damaged_blocks: int = 0
    """Blocks on disk that did not have their checksums."""
    evicted_of: set[str] = attrs.field(factory=set)
    """The tenants of which it ever evicted a block."""


@attrs.define(eq=False)
class TableInForce:
    """The tenants of a server, from some time on until the next ones."""

    begun: float
    """When they can have been in force at the earliest."""
    since_s: float
    """When they certainly were."""
    table: Tenants


@attrs.define
class History:
    """All calls of a run, in the order in which they began."""

    calls: list[Call] = attrs.field(factory=list)
    holds: list[Hold] = attrs.field(factory=list)
    lives: list[Life] = attrs.field(factory=list)
    nodes: dict[str, list[Life]] = attrs.field(factory=dict)
    """The lives of each node of a cluster, if it is one; then `lives` is empty."""
    places: dict[str, str] = attrs.field(factory=dict)
    """The node of each key that had one place, and the same all the time."""
    without_nodes: list[tuple[str, float, float]] = attrs.field(factory=list)
    """Clients that knew of no node which takes blocks, since when, and until when."""
    tenant_of: dict[str, tuple[str, str]] = attrs.field(factory=dict)
    """The tenant of each client, and the digest of its token."""
    tables: list[TableInForce] = attrs.field(factory=list)
    """The tables of tenants, in order."""
    may_lose_nodes: bool = True
    """Whether anything goes wrong for which a client may take a node for lost."""
    has_disks: bool = False
    disks_failed: bool = False
    """Whether anything else went wrong with a disk than that the power failed."""
    calm_since_s: float = math.inf
    """From when on nothing goes wrong any more, and nothing is late."""
    corrupted_puts: list[tuple[str, Call]] = attrs.field(factory=list)
    """Keys with blocks that were corrupted on their way to the server, and the calls
    that put them.
    """
    unchecked_keys: set[str] = attrs.field(factory=set)
    """Keys that were put without checksums at least once."""
    corrupted_replies: list[tuple[float, str]] = attrs.field(factory=list)
    """Clients for which blocks were corrupted on the way from the server, and when."""
    corrupted_heads: list[tuple[float, str]] = attrs.field(factory=list)
    """Clients whose conversation with a server was corrupted, and when."""

    def part(self, keys: Container[str], lives: list[Life], node: str = "", *, lost: bool) -> "History":
        """Return the part for some keys of a cluster: those of one node, if one is
        named. `lost` says that lost nodes excuse what was not found.
        """
        parts = [call.part(keys, node, lost=lost) for call in self.calls]
        return attrs.evolve(
            self,
            calls=[call for call in parts if call.keys or call.removes or call.present],
            holds=[attrs.evolve(hold, keys=[key for key in hold.keys if key in keys]) for hold in self.holds],
            lives=lives,
            nodes={},
        )

    def of_tenant(self, tenant: str) -> "History":
        """Return the part that a tenant has to do with."""
        clients = {client for client, (name, _) in self.tenant_of.items() if name == tenant}
        return attrs.evolve(
            self,
            calls=[call for call in self.calls if call.client in clients],
            holds=[hold for hold in self.holds if hold.match.client in clients],
            lives=_lives_of(tenant, self.lives),
            nodes={name: _lives_of(tenant, lives) for name, lives in self.nodes.items()},
            corrupted_puts=[(key, put) for key, put in self.corrupted_puts if put.client in clients],
        )

    def tables_during(self, call: Call) -> list[Tenants]:
        """Return the tables that can have been in force during a call."""
        until_s = [one.since_s for one in self.tables[1:]] + [math.inf]
        return [
            one.table
            for one, end_s in zip(self.tables, until_s, strict=True)
            if one.begun <= call.ended and end_s >= call.begun
        ]

    def begin(self, client: str, method: str, keys: Sequence[str], begun: float, **facts: Any) -> Call:
        """Note that a client calls a method."""
        call = Call(len(self.calls), client, method, list(keys), begun, **facts)
        self.calls.append(call)
        if not call.verified:
            self.unchecked_keys.update(call.puts)
        return call


def _lives_of(tenant: str, lives: Sequence[Life]) -> list[Life]:
    """Return the lives of a server as one of its tenants sees them."""
    return [attrs.evolve(life, evicted=tenant in life.evicted_of) for life in lives]
