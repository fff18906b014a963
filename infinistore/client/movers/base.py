"""What a mover is: one way for blocks to travel over a connection.

A connection has a list of movers, in order of preference: `[rdma, inline]`, say. Each
request, or part of one, goes to the first mover that can carry it. `inline` is always
the last, and carries everything.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from infinistore.client.movers.channel import Channel
from infinistore.client.options import Options
from infinistore.protocol.messages import Keys, Numbers
from infinistore.protocol.versions import Capability

Destination: TypeAlias = Callable[[Sequence[int], int], list[memoryview]]
"""Given the sizes of blocks and the number of the first of them in the batch, returns
the memory for those that are there."""
Handler: TypeAlias = Callable[[Any], Coroutine[Any, Any, Any]]
"""Carries out one kind of request. None: it did not, and the next mover shall."""


class CannotMove(Exception):
    """A mover cannot be used for this connection; the message says why.

    `lasting`: nor for any other connection to this run of the server.
    """

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


class PutPart(NamedTuple):
    """A part of a batch to store, as large as the server takes at once.

    The result is the list of keys that were skipped because they were there.
    """

    keys: list[str]
    views: list[memoryview]
    sizes: list[int]
    total_bytes: int
    replace: bool
    on_device: bool = False
    """Whether the views are memory of GPUs, which this process cannot read or write."""
    ttl_us: int = 0
    """After how many microseconds the blocks end; 0: they do not."""


class GetPart(NamedTuple):
    """A part of a batch to read, of as many keys as the server takes at once.

    The result is how many of the keys, from the front, were read or found missing: at
    least one. `capacities` is the room for each block in bytes, or empty if there is
    any room.
    """

    keys: Keys
    capacities: Numbers
    views: Sequence[memoryview] | None
    """The memory of the caller, one for each key, if the blocks go there."""
    destination: Destination
    first: int
    """The number of the first key in its batch."""
    verify: bool
    on_device: bool = False


class Closable(Protocol):
    """Something that is closed when it is of no more use."""

    closed: bool


class Mover(ABC):
    """One way for the blocks of one connection.

    `handlers` has what it carries out: `PutPart` and `GetPart`, and of the requests of
    a store what it can do better than by those (`Lease`, `Reserve`, `Commit`, `Exists`,
    `MatchPrefix`). Whatever a handler leaves pinned or reserved belongs to the
    connection, by `channel.pins` and `channel.holding`.
    """

    name: ClassVar[str]
    """What `transport` of the statistics says."""
    writes_before_it_tells: ClassVar[bool] = False
    """Whether blocks of a part are written before it is known that another is missing.
    """
    handlers: Mapping[type[Any], Handler]
    inline_bytes: int = 0
    """Up to how many bytes in memory of this process it leaves a put to `inline`."""
    mapped: Closable | None = None
    """Memory of the server that it has mapped: closed when the server has ended, and
    nothing can be moved any more."""
    place = ""
    """Where it moves blocks, or why it is the one in use, for `transport_reason`."""

    @abstractmethod
    def why_not(self, request: Any) -> str:
        """Say why it cannot carry a request that it handles; empty if it can."""

    def close(self) -> None:  # noqa: B027  # most have nothing to let go of
        """Let go of what it has. Once this returns, no byte of a call moves."""


class MoverSource(ABC):
    """What a store has of one way to move blocks; makes the movers of its connections.

    Any thread may use it. `open` is called for a connection that has said hello.
    """

    name: ClassVar[str]
    takes_unix_socket: ClassVar[bool] = False
    """Whether its connections must be by the server's Unix socket."""
    needs: ClassVar[Capability] = Capability(0)
    """The capabilities that the server must have."""

    @abstractmethod
    async def open(self, channel: Channel, stream: Any) -> Mover:
        """Make the mover of a connection, whose `stream` has the conversation
        `channel`.

        Raises:
            CannotMove: it cannot be used with this server, or not now.
        """

    @property
    def due(self) -> bool:
        """Whether a new connection should try it. Not for a while after it failed."""
        return True

    @property
    def retry_is_due(self) -> bool:
        """Whether connections that had to do without it may be replaced now."""
        return False

    def close(self) -> None:  # noqa: B027  # most have nothing to let go of
        """Let go of everything, when the movers that were made of it are closed."""

    def let_go(self) -> None:  # noqa: B027  # most have nothing to let go of
        """The same in a forked child, without the parent's threads and mappings."""


class SourceFactory(Protocol):
    """What the `client_mover` of an `infinistore.transports.Transport` is.

    A store calls it once, when it is opened with `transport=NAME`, before it connects.
    It must not block. The store closes the source.
    """

    def __call__(self, options: Options, clock: Callable[[], float]) -> MoverSource:
        """Make the source of one store.

        Args:
            options: those of the store. The server knows the store by `options.name`.
            clock: the time in seconds that the store keeps its deadlines by.

        Raises:
            ConfigError: the options do not fit this transport.
        """
