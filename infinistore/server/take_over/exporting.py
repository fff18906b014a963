"""What a server whose service is over tells of its memory, for the process that goes on
with it; and what of it that process goes on with.

`OneStore` is about a server without tenants.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

from infinistore.core.arena import Arena
from infinistore.core.clients import Client
from infinistore.core.pool_state import PoolState, encode_state
from infinistore.core.store import StoreCore

__all__ = [
    "Ended",
    "OneStore",
    "StandIn",
    "Taken",
    "Whole",
    "make_ownership",
    "take_ownership",
    "watched_of",
    "write_state",
]


@attrs.frozen
class Ended:
    """A connection that the server has ended: a copy of its socket, and its client, if
    that may still touch the pool. Without a copy (there was no descriptor), nobody will
    see when it no longer does."""

    descriptor: int | None
    client: Client | None


@attrs.frozen
class StandIn:
    """A client that stands in for one of the earlier server, until that has ended."""

    client: Client
    core: StoreCore
    on_close: Callable[[], object] | None = None
    """Called when it has been closed."""

    def close(self) -> None:
        """Give back what it has."""
        self.core.close_client(self.client)
        if self.on_close is not None:
            self.on_close()


@attrs.frozen
class Taken:
    """What became of the blocks of an earlier server."""

    kept: int
    dropped: int
    """Blocks that had no checksum, or no place in this pool."""
    stand_ins: list[list[StandIn]]
    """Who stands in for each connection, in their order; at last for the process."""


class Whole(Protocol):
    """All that a server has in memory."""

    def __len__(self) -> int:
        """Return the number of keys."""

    @property
    def arenas(self) -> Sequence[Arena]:
        """All arenas, in an order that stays."""

    def describe(self) -> list[bytes]:
        """Return what is to be known of the arenas before they are used, as bytes;
        none if all are one pool."""

    def export(self, instance: str, ended: Sequence[Ended]) -> tuple[list[Ended], list[bytes]]:
        """Return all connections that have to be watched, in order, and the bytes of
        the state. The service is over."""

    def adopt(self, state: Any) -> Taken:
        """Take over the blocks that `export` told of, of which nothing is here yet.

        Raises:
            ConfigError: something that is still in use has no place in this pool.
        """

    def verify_some(self, most_bytes: int) -> bool:
        """Hash about so many bytes that were taken over; whether any is left."""

    @property
    def checksum_drops(self) -> int:
        """How many blocks were not what their checksum says."""


class OneStore:
    """The store of a server without tenants."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core

    def __len__(self) -> int:
        return len(self._core)

    @property
    def arenas(self) -> Sequence[Arena]:
        """Those of its pool."""
        return self._core.pool.arenas

    def describe(self) -> list[bytes]:
        """Nothing: all arenas are one pool."""
        return []

    def export(self, instance: str, ended: Sequence[Ended]) -> tuple[list[Ended], list[bytes]]:
        """See `Whole`: in `PoolState.pins`, there is one group for each connection, and
        at last that of this process."""
        watched, pins = watched_of(self._core, ended)
        return watched, encode_state(self._core.hand_over.export(instance, pins))

    def adopt(self, state: PoolState) -> Taken:
        """See `Whole`."""
        adopted = self._core.hand_over.adopt(state)
        return Taken(adopted.kept, adopted.dropped, [[StandIn(one, self._core)] for one in adopted.stand_ins])

    def verify_some(self, most_bytes: int) -> bool:
        """See `Whole`."""
        return self._core.hand_over.verify_some(most_bytes)

    @property
    def checksum_drops(self) -> int:
        """See `Whole`."""
        return self._core.statistics().checksum_drops


def watched_of(core: StoreCore, ended: Sequence[Ended]) -> tuple[list[Ended], list[list[Client]]]:
    """Return those of a store that have to be watched: `ended`, and clients of which
    nobody can tell when they touch the pool no more. And the clients of each of them,
    with those of this process at last."""
    clients = {one.client for one in ended}
    others = [client for client in core.clients if client not in clients]
    watched = [*ended, *(Ended(None, client) for client in others if client.state == "quarantined")]
    own = [client for client in others if client.state != "quarantined"]
    return watched, [*([one.client] if one.client is not None else [] for one in watched), own]


def write_state(pieces: Sequence[bytes]) -> int:
    """Write the state to a file in memory, and return its descriptor.

    Raises:
        OSError: there is no descriptor left, or no memory.
    """
    descriptor = os.memfd_create("infinistore-state", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(pieces)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_ownership() -> int:
    """Return the descriptor of what decides who serves a pool that two processes map: a
    pipe with one byte in it. The kernel gives the byte to one of all that ever read.

    Raises:
        OSError: there is no descriptor left.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with open(writer, "wb", buffering=0) as file:
        file.write(b"\0")
    return reader


def take_ownership(descriptor: int) -> bool:
    """Become the one that serves; False if another process did before."""
    return bool(os.read(descriptor, 1))
