"""What a store takes from the process that it runs in. A simulation passes another one.

The server has an environment of its own, `infinistore.server.environment`.
"""

import socket
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import attrs

from infinistore.client.movers.shm.mapped_pool import Machine
from infinistore.cluster.locate import ClusterUrl
from infinistore.cluster.membership import Membership

Network: TypeAlias = Callable[..., Any]
"""What makes the streams of a store instead of the system's sockets: called with the
URL to connect to, and by a blocking store also with the deadline on `time.monotonic`.
For Trio and asyncio it is asynchronous."""


@attrs.frozen
class Environment:
    """How a store reaches the network, chance, and memory that it shares with a server.
    Its time is that of its loop.
    """

    connect: Network | None = None
    """None for the system's sockets."""
    random: Random = attrs.field(factory=Random)
    """What spreads the retries of clients that lost a server at the same time."""
    machine: Machine = attrs.field(factory=Machine)
    """What the server's pool is mapped and watched with, by shared memory."""
    host_name: Callable[[], str] = socket.gethostname
    """Returns the name of this machine, as the nodes of a cluster say theirs."""
    membership: Callable[[ClusterUrl], Membership] | None = None
    """What tells who is in a cluster; None for what its URL names."""
