"""What `stats()` returns, and how it crosses the wire.

The same frozen objects are read by everybody: the client, the command line, and whatever else shows numbers.
"""

import attrs
from cattrs import Converter
from cattrs.errors import BaseValidationError

from infinistore.core.statistics import StoreStatistics
from infinistore.errors import ProtocolError
from infinistore.protocol.messages import Tree
from infinistore.transports.spin import SpinStatistics

__all__ = ["ServerStatistics", "Stats", "statistics_from_tree", "statistics_to_tree"]


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
class Stats:
    """What a client knows: which path its bytes take and why, its store, and the server, if there is one."""

    transport: str
    transport_reason: str
    store: StoreStatistics
    server: ServerStatistics | None = None


_converter = Converter()


def statistics_to_tree(server: ServerStatistics, store: StoreStatistics) -> Tree:
    """Turn statistics into nested maps of plain values."""
    return Tree({"server": _converter.unstructure(server), "store": _converter.unstructure(store)})


def statistics_from_tree(tree: Tree) -> tuple[ServerStatistics, StoreStatistics]:
    """Turn nested maps back into statistics.

    Raises:
        ProtocolError: they are none.
    """
    try:
        return (
            _converter.structure(tree["server"], ServerStatistics),
            _converter.structure(tree["store"], StoreStatistics),
        )
    except (LookupError, TypeError, ValueError, BaseValidationError) as error:
        raise ProtocolError(f"the server's statistics are not those of this release: {error!r:.300}") from None
