"""What the supervisor and a shard say to each other, over a pair of sockets.

Each message is one packet, a pickle: both ends are the same program of the same user,
and nothing that came over a network is in it. The kernel closes the supervisor's end
with its process, however it ends, and the shard takes that as its own end.
"""

import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import trio

from infinistore.config import ServerConfig
from infinistore.errors import InfiniStoreException
from infinistore.protocol.shards import Shard
from infinistore.server.listeners import ServerAddresses

__all__ = ["Drain", "Link", "Listening", "Met", "Refused", "Reload", "Serving", "Start", "receive_start"]

_LONGEST_BYTES: Final = 1 << 17


@attrs.frozen
class Start:
    """To a shard, first of all: what it is."""

    index: int
    config: ServerConfig
    core: int | None
    """The core on which it serves; None for any."""
    management_socket: Path | None
    """Where it has its management API; None for nowhere."""


@attrs.frozen
class Listening:
    """From a shard: it has its ports, and has not taken memory yet."""

    addresses: ServerAddresses


@attrs.frozen
class Met:
    """To a shard: where all are. Now it takes its memory and serves."""

    shards: Sequence[Shard]


@attrs.frozen
class Serving:
    """From a shard: it serves clients."""


@attrs.frozen
class Refused:
    """From a shard: it cannot start, with these settings or on this machine."""

    error: type[InfiniStoreException]
    problem: str


@attrs.frozen
class Reload:
    """To a shard: read again what a server does at SIGHUP."""


@attrs.frozen
class Drain:
    """To a shard: stop when the requests under way have finished."""


Message: TypeAlias = Start | Listening | Met | Serving | Refused | Reload | Drain


class Link:
    """One end. Within Trio only, except for `receive_first`."""

    def __init__(self, sock: socket.socket) -> None:
        self._plain = sock
        self._sock = trio.socket.from_stdlib_socket(sock)

    @staticmethod
    def pair() -> "tuple[Link, socket.socket]":
        """Return the supervisor's end, and the shard's, to be given to its process."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Link(own), other

    async def send(self, message: Message) -> None:
        """Send a message; to an end that is gone, nothing."""
        try:
            await self._sock.send(pickle.dumps(message))
        except OSError:  # the receiver finds that out by itself
            await trio.lowlevel.checkpoint()

    async def receive(self) -> Message | None:
        """Wait for the next message; None if the other end is gone."""
        try:
            data = await self._sock.recv(_LONGEST_BYTES)
        except OSError:
            return None
        message: Message | None = pickle.loads(data) if data else None
        return message

    def close(self) -> None:
        """Let the other end know that this one is gone. Idempotent."""
        self._sock.close()


def receive_start(sock: socket.socket) -> Start | None:
    """Wait, before Trio runs, for the first message to a shard; None if its supervisor
    is gone.
    """
    data = sock.recv(_LONGEST_BYTES)
    start: Start | None = pickle.loads(data) if data else None
    return start
