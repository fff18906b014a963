"""What a call asks its driver for, besides bytes to move: a connection, time, and in a
cluster, requests to several stores at once and work that goes on after the call.
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from socket import socket
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from infinistore.client.options import StoreUrl
from infinistore.errors import InfiniStoreException
from infinistore.kept_errors import KeptError
from infinistore.protocol.effects import Fill, Pause, Receive, ReceiveDescriptors, Send
from infinistore.protocol.messages import StoreRequest

_T = TypeVar("_T")
Outcome: TypeAlias = Any
"""What a part returned, or a `KeptError` if it raised an error of this package."""


class ClientStream(Protocol):
    """What a call needs of a stream. How bytes go through it is up to the driver."""

    socket: socket

    def close(self) -> None:
        """Close it, at once."""

    def is_stale(self) -> bool:
        """Whether the peer has closed it, or said something that nobody asked for."""


class Connect(NamedTuple):
    """Connect to this address; the result is the stream."""

    address: StoreUrl

    def __await__(self) -> Generator["Connect", Any, Any]:
        return (yield self)


class Sleep(NamedTuple):
    """Wait for so many seconds."""

    seconds: float

    def __await__(self) -> Generator["Sleep", None, None]:
        yield self


CallEffect: TypeAlias = Send | Receive | Fill | ReceiveDescriptors | Pause | Connect | Sleep
Call: TypeAlias = Coroutine[CallEffect, Any, _T]
"""A coroutine whose awaits end in these effects."""


class LatePart(Protocol):
    """What to do about a part that is late."""

    after_s: float
    """After how many seconds it is."""

    def begin(self) -> "Sequence[Part]":
        """Return what to ask in its place; nothing if there is nothing to ask."""

    def is_full(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether what was asked has answered for the whole part, which ends then."""

    def settle(self, first: Outcome | None, others: Sequence[Outcome] | None) -> Outcome:
        """Return the outcome of the part. All that could write to the caller's memory
        has ended. `first` is None if the part was ended; `others` are None if what was
        asked was ended, or nothing was.
        """


class Part(NamedTuple):
    """A request, the store of a node that carries it out, and how long that may take.

    Without `within_s`, it may take as long as any call of the store. A part with a
    `hedge` that is late races with what that asks.
    """

    store: Any
    request: StoreRequest[Any]
    within_s: float | None = None
    hedge: LatePart | None = None


async def outcome_of(part: Part) -> Outcome:
    """Carry out a part without its hedge, under Trio or asyncio."""
    try:
        return await part.store._call(part.request, part.within_s)
    except InfiniStoreException as error:
        return KeptError(error)


class Together(NamedTuple):
    """Carry out all parts at the same time; the result is their outcomes, in order.

    An error of one does not end the others. Other tasks run meanwhile, even if there
    are no parts.
    """

    parts: Sequence[Part]

    def __await__(self) -> Generator["Together", list[Outcome], list[Outcome]]:
        return (yield self)


class Background(NamedTuple):
    """Begin this call, whose result nobody waits for, and go on.

    It ends with the store at the latest. The result is whether it was begun: a process
    may get no more threads.
    """

    work: "ClusterCall[None]"

    def __await__(self) -> Generator["Background", bool, bool]:
        return (yield self)


class InThread(NamedTuple):
    """Do this blocking work without blocking other tasks. Its error is raised."""

    work: Callable[[], None]

    def __await__(self) -> Generator["InThread", None, None]:
        yield self


ClusterEffect: TypeAlias = Together | Background | InThread | Sleep
ClusterCall: TypeAlias = Coroutine[ClusterEffect, Any, _T]
"""A coroutine whose awaits end in these effects."""
