"""What an exchange asks its driver for: bytes to move, or a turn for others.

The protocol does no I/O. Whatever needs bytes to move is a generator, an `Exchange`, that yields one of these and is
resumed when that has been done; a driver for Trio, for threads or for asyncio (or a fuzzer, or a simulated network)
runs it.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

__all__ = ["Exchange", "Pause", "Receive", "ReceiveDescriptors", "Send", "SendDescriptors"]

_T = TypeVar("_T")


class Send(NamedTuple):
    """Send all of these views, in order."""

    views: Sequence[memoryview]


class Receive(NamedTuple):
    """Receive at least one byte into these views, in order; resume with how many, 0 at the end of the stream.

    `idle`: between two frames, where a peer may take all the time it wants; elsewhere it has begun something.
    """

    views: Sequence[memoryview]
    idle: bool = False


class SendDescriptors(NamedTuple):
    """Send all of these views, in order, and with the first byte these descriptors. Over a Unix socket only."""

    views: Sequence[memoryview]
    descriptors: Sequence[int]


class ReceiveDescriptors(NamedTuple):
    """As `Receive`, and append to `descriptors` those that come with the bytes."""

    views: Sequence[memoryview]
    descriptors: list[int]


class Pause(NamedTuple):
    """Let others have their turn; nothing is to be moved. Only what works inside one process yields it."""


Exchange: TypeAlias = Generator[Send | Receive | SendDescriptors | ReceiveDescriptors | Pause, int, _T]
