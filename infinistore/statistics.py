"""What `stats()` returns, and how it crosses the wire.

The same frozen objects are read by everybody: the client, the command line, and whatever else shows numbers.
"""

import math
from typing import Any, NamedTuple

import attrs
from cattrs import Converter
from cattrs.errors import BaseValidationError

from infinistore.core.statistics import StoreStatistics
from infinistore.errors import ProtocolError
from infinistore.protocol.messages import Tree
from infinistore.transports.spin import SpinStatistics

__all__ = [
    "LATENCY_BOUNDS_S",
    "ArenaStatistics",
    "ClientStatistics",
    "OperationStatistics",
    "PrefixStatistics",
    "ServerDetails",
    "ServerStatistics",
    "StatisticsTree",
    "Stats",
    "statistics_from_tree",
    "statistics_to_tree",
]


@attrs.frozen
class ServerStatistics:
    """What a server has done since it started. Bytes are payload only."""

    instance: str
    version: str
    uptime_s: float
    connections_open: int
    connections_total: int
    connections_refused: int
    requests: int
    errors: int
    received_bytes: int
    sent_bytes: int
    spin: SpinStatistics
    """What waiting awake for quick clients took, and how often it paid."""


@attrs.frozen
class OperationStatistics:
    """One kind of request over one transport, with one outcome ("ok", or the name of an error)."""

    kind: str
    transport: str
    outcome: str
    count: int
    payload_bytes: int
    latency_sum_s: float
    latency_counts: list[int]
    """How many took at most as long as the bounds in `LATENCY_BOUNDS_S`, each counted once, and last those that took
    longer. From the request's head to its reply having left."""


@attrs.frozen
class ClientStatistics:
    """One connection that is open. Bytes are payload only; `pinned_bytes` are leased and reserved."""

    name: str
    transport: str
    connected_s: float
    requests: int
    errors: int
    received_bytes: int
    sent_bytes: int
    pinned_bytes: int


@attrs.frozen
class ArenaStatistics:
    """One arena: how full each of its parts is, first to last, all of the same length; 0.0 to 1.0."""

    index: int
    length_bytes: int
    used_bytes: int
    fill: list[float]


@attrs.frozen
class PrefixStatistics:
    """Keys that begin alike, up to the separator: estimated from a sample."""

    prefix: str
    keys: int
    payload_bytes: int


@attrs.frozen
class ServerDetails:
    """What only an operator wants to see, and what costs more to gather."""

    operations: list[OperationStatistics]
    clients: list[ClientStatistics]
    arenas: list[ArenaStatistics]
    prefixes: list[PrefixStatistics]
    state: str
    """"serving" or "draining"."""
    max_connections: int | None = None
    """How many connections the server takes; None: not told."""
    max_pinned_bytes: int | None = None
    """How much one connection may lease and reserve together; None: not told."""


LATENCY_BOUNDS_S = (
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""The upper bounds of the latency histograms, in seconds."""


@attrs.frozen
class Stats:
    """What a client knows: which path its bytes take and why, its store, and the server, if there is one."""

    transport: str
    transport_reason: str
    store: StoreStatistics
    server: ServerStatistics | None = None
    details: ServerDetails | None = None
    """Only if they were asked for, and only of a server."""


class StatisticsTree(NamedTuple):
    """What a server sends."""

    server: ServerStatistics
    store: StoreStatistics
    details: ServerDetails | None


def _structure_float(value: Any, _: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measure of anything")
    return number


_converter = Converter()
_converter.register_structure_hook(float, _structure_float)


def statistics_to_tree(server: ServerStatistics, store: StoreStatistics, details: ServerDetails | None = None) -> Tree:
    """Turn statistics into nested maps and lists of plain values."""
    parts = {"server": server, "store": store} | ({} if details is None else {"details": details})
    return Tree({name: _converter.unstructure(part) for name, part in parts.items()})


def statistics_from_tree(tree: Tree) -> StatisticsTree:
    """Turn nested maps and lists back into statistics.

    Raises:
        ProtocolError: they are none.
    """
    try:
        return StatisticsTree(
            _converter.structure(tree["server"], ServerStatistics),
            _converter.structure(tree["store"], StoreStatistics),
            _converter.structure(tree["details"], ServerDetails) if "details" in tree else None,
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, BaseValidationError) as error:
        raise ProtocolError(f"the server's statistics are not those of this release: {error!r:.300}") from None
