"""The interface to an RDMA device: memory to register, queue pairs to connect, work to
post and wait for.

The rest of the code uses only these few classes. `ibverbs` implements them with
pyverbs. The tests implement them with memory copies, and with the same checks as a
device. Everything here is synchronous and belongs to one thread at a time, except that
another thread may register memory.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import attrs

from infinistore.transports.rdma.choice import NoRdma
from infinistore.transports.rdma.plan import Piece

__all__ = [
    "Completion",
    "Device",
    "DeviceLimits",
    "Endpoint",
    "NoRdma",
    "Operation",
    "Queue",
    "Region",
    "describe_status",
]


class Operation(enum.Enum):
    """What a work request does with the peer's memory."""

    READ = enum.auto()
    WRITE = enum.auto()


@attrs.frozen
class Endpoint:
    """One end of a connection between queue pairs, as the ends exchange it.

    `queue` is the number of the queue pair and `packet` the number of its first packet
    (24 bits each), `gid` 32 hexadecimal digits, `lid` the port's local identifier (0 on
    Ethernet), `mtu` the bytes in a packet, `reads` how many reads the end accepts at a
    time.
    """

    queue: int
    packet: int
    gid: str
    lid: int
    mtu: int
    reads: int


@attrs.frozen
class DeviceLimits:
    """The limits of a device: work requests in a queue, bytes in a message."""

    depth: int
    longest_bytes: int


class Completion(NamedTuple):
    """A batch that is complete (`status` 0), or a queue pair that has failed."""

    batch: int
    status: int


class Region(Protocol):
    """Registered memory. A peer names it by `remote_key`; no peer is told the key of
    the pool.

    `remote_address` is the peer's address of its first byte.
    """

    local_key: int
    remote_key: int
    remote_address: int

    def close(self) -> None:
        """Unregister: afterwards the device leaves the memory alone. Idempotent."""


class Queue(Protocol):
    """A queue pair with its completion queue. `fd` is readable when events wait."""

    fd: int
    endpoint: Endpoint

    def connect(self, peer: Endpoint, *, dead_after_s: float) -> None:
        """Connect to a peer. If it does not answer for about `dead_after_s`, the work
        in flight fails.

        Raises:
            TransferFailed: the device refuses these parameters.
        """

    def post(self, operation: Operation, pieces: Sequence[Piece], batch: int) -> None:
        """Post one batch of at most `DeviceLimits.depth` requests. When all are
        complete, `poll` returns its number.

        Raises:
            TransferFailed: the device refuses them; some may have been posted.
        """

    def poll(self) -> Sequence[Completion]:
        """Return what was completed since the last call."""

    def arm(self) -> None:
        """Make `fd` readable with the next completion; poll again for earlier ones."""

    def take_events(self) -> None:
        """Take what made `fd` readable. Does not wait."""

    def close(self) -> None:
        """Destroy the queue pair: no byte moves for it afterwards. Idempotent."""


class Device(Protocol):
    """An open port of a device. `link` is "InfiniBand" or "Ethernet"."""

    name: str
    link: str
    limits: DeviceLimits

    @property
    def place(self) -> str:
        """The port and its address, for people."""

    @property
    def reason(self) -> str:
        """Why it is this port, and this address of it."""

    def register(self, address: int, length: int, *, remote: bool, writable: bool = True) -> Region:
        """Register memory. `remote` lets the peer of a queue pair read it and, if it is
        writable, write it.

        Slow: the system pins the pages. The interpreter waits, whichever thread calls:
        pyverbs keeps its lock.

        Raises:
            NoRdma: the system does not allow it.
        """

    def register_dmabuf(self, fd: int, offset: int, length: int) -> Region:
        """Register `length` bytes from `offset` of a dmabuf, which is memory of another
        device, for a peer to read and write.

        The descriptor may be closed afterwards.

        Raises:
            NoRdma: the system does not allow it.
        """

    def create_queue(self, *, serves: bool) -> Queue:
        """Create a queue pair. With `serves`, it posts work; else it only executes its
        peer's work on registered memory.

        Raises:
            NoRdma: the device has no more.
        """

    def close(self) -> None:
        """Close all that was made from the device, then the device. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: forget the device, the parent's, without a call."""


_STATUS = {
    1: "local length error",
    2: "local queue pair operation error",
    4: "local protection error",
    5: "flushed: the queue pair is in error",
    6: "memory window bind error",
    7: "bad response",
    8: "local access error",
    9: "remote invalid request: the peer's queue pair is gone, or does not allow this",
    10: "remote access error: the memory that the peer named is not registered, or not as long",
    11: "remote operation error",
    12: "retries exceeded: the peer does not answer",
    13: "receiver-not-ready retries exceeded",
    19: "fatal error of the device",
    20: "response timeout",
    21: "general error",
}


def describe_status(status: int) -> str:
    """Return what the status of a failed work completion means (ibv_poll_cq(3))."""
    return _STATUS.get(status, f"work completion status {status}")
