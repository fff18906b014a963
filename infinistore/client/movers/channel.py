"""What movers share of one connection: the conversation, its limits, and whose time it
takes.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from operator import gt
from typing import Any, TypeAlias, TypeVar

from infinistore.client.memory.pins import Pins
from infinistore.errors import ChecksumMismatch, ProtocolError
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.messages import (
    MISSING,
    Get,
    GetReply,
    HelloReply,
    Keys,
    Lease,
    LeaseReply,
    RdmaGet,
    RdmaGetReply,
    Reply,
    Request,
    Verify,
)
from infinistore.sizes import in_units

_R = TypeVar("_R", bound=Reply)
BlocksReply: TypeAlias = GetReply | LeaseReply | RdmaGetReply


class Channel:
    """The conversation on one connection. One call uses it at a time.

    `clock` gives seconds; `deadline` is when the caller of the moment stops waiting, on
    that clock. `pins` are those of the connection, whichever mover made them.
    """

    def __init__(self, connection: ClientConnection, pins: Pins, clock: Callable[[], float], *, verify: bool) -> None:
        self.connection = connection
        self.pins = pins
        self.clock = clock
        self.deadline = 0.0
        self.verify = verify
        """Whether blocks are hashed, and what is read is checked."""
        self.hello: HelloReply
        """What the server said of itself; set when it has answered the hello."""
        self.path = ("", "")
        """The transport, and why it is the one in use."""
        self.holding = False
        """Whether the server keeps room or pins for the call under way. If that is
        given up, the connection must be, too."""
        self.late: Callable[[], Awaitable[None]] | None = None
        """Reads what the server still has to say to a call that is over. It is awaited
        before anything else is asked."""

    def ask(
        self, request: Request, payload: Iterable[Sequence[memoryview]] = (), payload_bytes: int = 0
    ) -> Coroutine[Any, Any, Reply]:
        """Send a request, and return the reply, as `ClientConnection.request`."""
        if self.late is not None:
            return self._ask_after_late(request, payload, payload_bytes)
        # As remaining_us, without a call. One coroutine less is one less to resume.
        deadline_us = max(1, int((self.deadline - self.clock()) * 1e6))
        return self.connection.request(request, payload, payload_bytes=payload_bytes, deadline_us=deadline_us)

    async def _ask_after_late(
        self, request: Request, payload: Iterable[Sequence[memoryview]], payload_bytes: int
    ) -> Reply:
        await self.read_late_reply()
        return await self.ask(request, payload, payload_bytes)

    async def read_late_reply(self) -> None:
        """Read what the server still has to say to the last call, if it does."""
        late, self.late = self.late, None
        if late is not None:
            await late()

    def remaining_us(self) -> int:
        """How long the caller still waits, in microseconds, not 0: that is for ever."""
        return max(1, int((self.deadline - self.clock()) * 1e6))

    def key_part(self, keys: Sequence[str], first: int) -> Keys:
        """Return as many keys, from number `first` on, as one request may have."""
        most = self.hello.max_batch_keys
        if isinstance(keys, list) and not first and len(keys) <= most:
            return Keys(keys)
        return Keys(list(keys[first : first + most]))

    def check_reply(self, request: Get | Lease | RdmaGet, reply: BlocksReply) -> None:
        """Check that a reply fits the request, the room there is, and the server's
        limits.

        Raises:
            ProtocolError: it does not.
        """
        sizes = reply.sizes
        checksums = len(reply.checksums) if type(request) is not Get or request.checksums else len(sizes)
        if not 0 < len(sizes) <= len(request.keys) or checksums != len(sizes):
            raise ProtocolError(f"a reply with {len(sizes)} sizes to a request for {len(request.keys)} keys")
        if sizes == request.capacities:  # all are there, and of the expected length
            return
        if request.capacities and any(map(gt, sizes, request.capacities)):
            for size, capacity in zip(sizes, request.capacities, strict=False):
                if capacity < size != MISSING:
                    raise ProtocolError(
                        f"the server sends {in_units(size)} where there is room for {in_units(capacity)}"
                    )
        # Before memory is taken for them, believe no more bytes than the server said it
        # sends at a time.
        hello = self.hello
        most = max(hello.max_batch_bytes, hello.max_value_bytes) + 8 * hello.max_batch_keys
        listed = sizes.tolist()  # whatever looks at a list takes half the time that an array takes
        total = sum(listed) - MISSING * listed.count(MISSING)
        if total > most:
            raise ProtocolError(f"the server sends {in_units(total)}, more than its limit of {in_units(most)}")

    async def report(self, bad: list[str], count: int) -> None:
        """Report blocks that are not what was written: the server checks and forgets
        them.

        The next reader gets a miss.

        Raises:
            ChecksumMismatch: always.
        """
        await self.ask(Verify(Keys(bad)))
        raise ChecksumMismatch(f"{len(bad)} of {count} blocks are not what was written, first {bad[0][:100]!r}")


def present_in(reply: BlocksReply) -> Sequence[int]:
    """Return the positions of the blocks of a reply that are there."""
    if MISSING not in reply.sizes:
        return range(len(reply.sizes))
    return [i for i, size in enumerate(reply.sizes) if size != MISSING]


def expect(kind: type[_R], reply: Reply) -> _R:
    """Return the reply, as the kind that answers the request."""
    assert isinstance(reply, kind)
    return reply


def placed(reply: LeaseReply) -> tuple[list[int], list[int]]:
    """Return places and sizes of the present blocks of a reply that was checked."""
    sizes = reply.sizes.tolist()
    if MISSING not in sizes:  # the usual case
        return reply.places.tolist(), sizes
    there = present_in(reply)
    return [reply.places[i] for i in there], [sizes[i] for i in there]


def in_order(sizes: Sequence[int], found: Iterable[memoryview]) -> list[memoryview | None]:
    """Return what was found with None for what is missing."""
    present = iter(found)
    return [None if size == MISSING else next(present) for size in sizes]
