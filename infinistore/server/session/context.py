"""What all sessions of one server share."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from infinistore.core.store import StoreCore
from infinistore.protocol.messages import HelloReply, Tree
from infinistore.server.budgets import BodyBudget, LogBudget
from infinistore.server.connection import SessionLimits
from infinistore.server.maintenance import PoolGrowth
from infinistore.server.movers.base import Mover
from infinistore.server.recorder import Recorder
from infinistore.server.take_over.giving import Giving
from infinistore.server.take_over.kept import Keeping

if TYPE_CHECKING:
    from infinistore.server.budgets import Rates
    from infinistore.server.disk import DiskService, ServerDisks

__all__ = ["ServerContext"]


@attrs.frozen
class ServerContext:
    """The store, and the limits and counters that belong to the server as a whole."""

    core: StoreCore
    hello: HelloReply
    """The answer to every Hello."""
    limits: SessionLimits
    statistics: Callable[[bool], Awaitable[Tree]]
    """The answer to a Statistics request, without or with details."""
    movers: Sequence[Mover]
    """The movers of the server; the first one with a handler for a request answers
    it.
    """
    growth: PoolGrowth | None
    """What makes the pool larger, if it may grow."""
    disk: "DiskService | None"
    """The disks below the store that a session uses, if it has any."""
    recorder: Recorder
    log_budget: LogBudget
    body_budget: BodyBudget
    disks: "ServerDisks | None" = None
    """All disks of the server, if it has any."""
    giving: Giving | None = None
    """What lets another process take the server's place, if one may."""
    keeping: Keeping | None = None
    """What keeps the pool for the next run of the service, if anything does."""
    rates: "Rates | None" = None
    """How fast requests are read, if that is limited."""
