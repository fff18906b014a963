"""What the supervisor and a shard say to each other, over a pair of sockets.

Each message is one packet, a pickle: both ends are the same program of the same user,
and nothing that came over a network is in it. The kernel closes the supervisor's end
with its process, however it ends, and the shard takes that as its own end.

A shard gives a sign of life again and again. If its event loop hangs, no more come, and
the supervisor counts its silence, in beats of its own. While the supervisor does not
run either, because the machine sleeps, all processes are stopped, or there is no
processor time, its beats do not come, and nothing is counted; what the shard said
meanwhile is heard before the next beat. So no clock is compared, and a change of the
time of day changes nothing.
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
from infinistore.protocol.messages import Shard
from infinistore.server.listeners import ServerAddresses

__all__ = [
    "Alive",
    "Drain",
    "Link",
    "Listening",
    "Met",
    "Refused",
    "Reload",
    "Serving",
    "Silence",
    "Start",
    "beat_of",
    "receive_start",
]

_LONGEST_BYTES: Final = 1 << 17
_PARTS: Final = 8
_BEATS: Final = _PARTS + 2
"""More beats than parts: the loop may have stopped just before it would have given a
sign, and the supervisor may have heard the last one just before a beat."""


@attrs.frozen
class Start:
    """To a shard, first of all: what it is."""

    index: int
    config: ServerConfig
    core: int | None
    """The core on which it serves; None for any."""
    management_socket: Path | None
    """Where it has its management API; None for nowhere."""
    beat_s: float
    """The time between its signs of life."""


@attrs.frozen
class Alive:
    """From a shard, again and again: its event loop runs."""


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


Message: TypeAlias = Start | Alive | Listening | Met | Serving | Refused | Reload | Drain


class Link:
    """One end. Within Trio only, except for `receive_first`."""

    def __init__(self, sock: socket.socket) -> None:
        self._plain = sock
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._sending = trio.Lock()

    @staticmethod
    def pair() -> "tuple[Link, socket.socket]":
        """Return the supervisor's end, and the shard's, to be given to its process."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Link(own), other

    async def send(self, message: Message) -> None:
        """Send a message; to an end that is gone, nothing."""
        async with self._sending:  # it may have to wait for room, and only one task can
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


def beat_of(bound_s: float) -> float:
    """Return the time between two signs of life, and between two beats of the
    supervisor, if a loop may stand still for `bound_s`."""
    return bound_s / _PARTS


class Silence:
    """The silence of one process.

    It is too long if the loop has stood still for the bound of `beat_of`, and that is
    found before 1.5 times as long is over, if the supervisor runs all the while.
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._beats = 0
        self._begun = trio.Event()

    def heard(self) -> None:
        """Note a sign of life."""
        self._beats = 0
        self._begun.set()

    @property
    def has_begun(self) -> bool:
        """Whether the process has given a sign of life."""
        return self._begun.is_set()

    async def wait(self) -> None:
        """Wait until it lasts too long. It begins with the first sign of life: what a
        process does before, nobody knows."""
        await self._begun.wait()
        while self._beats < _BEATS:
            await trio.sleep(self._beat_s)
            self._beats += 1
