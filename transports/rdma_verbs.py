"""What InfiniStore needs of an RDMA device: memory to register, queue pairs to connect, work to post and to wait for.

The rest of the code sees these few classes. `ibverbs` makes them of pyverbs; the tests make them of memory copies, with
the same checks that a device makes. Everything here is synchronous and belongs to one thread at a time, except that
memory may be registered in another.
"""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import attrs

from infinistore.transports.rdma_choice import NoRdma
from infinistore.transports.rdma_devices import Address
from infinistore.transports.rdma_plan import Piece

__all__ = [
    "Completion",
    "Device",
    "DeviceLimits",
    "Endpoint",
    "NoRdma",
    "OpenDevice",
    "Operation",
    "Queue",
    "Region",
    "describe_status",
    "open_device",
]


class Operation(enum.Enum):
    """What a work request does with the peer's memory."""

    READ = enum.auto()
    WRITE = enum.auto()


@attrs.frozen
class Endpoint:
    """One end of a connection between queue pairs, as the two ends tell each other.

    `queue` is the queue pair's number and `packet` the number of its first packet (24 bits each), `gid` 32 hexadecimal
    digits, `lid` the port's local identifier (0 on Ethernet), `mtu` bytes in a packet, `reads` how many reads the end
    takes at a time.
    """

    queue: int
    packet: int
    gid: str
    lid: int
    mtu: int
    reads: int


@attrs.frozen
class DeviceLimits:
    """What a device can do: work requests in a queue, bytes in a message."""

    depth: int
    longest_bytes: int


class Completion(NamedTuple):
    """A batch of work requests that is done (`status` 0), or a queue pair that has failed."""

    batch: int
    status: int


class Region(Protocol):
    """Registered memory. `remote_key` is what a peer names it by; nobody is told that of the pool.

    `remote_address` is what a peer calls its first byte.
    """

    local_key: int
    remote_key: int
    remote_address: int

    def close(self) -> None:
        """Unregister: when this returns, the device touches the memory no more. Idempotent."""


class Queue(Protocol):
    """A queue pair of a reliable connection, with its completion queue. `fd` is readable when an event is waiting."""

    fd: int
    endpoint: Endpoint

    def connect(self, peer: Endpoint, *, dead_after_s: float) -> None:
        """Connect to a peer. One that answers nothing for about `dead_after_s` fails the work that is in flight.

        Raises:
            TransferFailed: the device refuses these parameters.
        """

    def post(self, operation: Operation, pieces: Sequence[Piece], batch: int) -> None:
        """Post one batch, of at most `DeviceLimits.depth` requests. When all are done, `poll` gives its number.

        Raises:
            TransferFailed: the device refuses them; some may have been posted.
        """

    def poll(self) -> Sequence[Completion]:
        """Return what was completed since the last call."""

    def arm(self) -> None:
        """Make `fd` readable with the next completion. One that came before this call may not count: poll again."""

    def take_events(self) -> None:
        """Take what made `fd` readable. Does not wait."""

    def close(self) -> None:
        """Destroy the queue pair: when this returns, neither side's device moves a byte for it. Idempotent."""


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
        """Register memory; `remote` lets the peer of a queue pair read and, if it is writable, write it.

        Slow: the pages are pinned. The interpreter waits for it, whichever thread calls (pyverbs keeps its lock).

        Raises:
            NoRdma: the system does not allow it.
        """

    def register_dmabuf(self, fd: int, offset: int, length: int) -> Region:
        """Register memory of another device, for a peer to read and write: `length` bytes from `offset` of a dmabuf.

        The descriptor may be closed afterwards.

        Raises:
            NoRdma: the system does not allow it.
        """

    def create_queue(self, *, serves: bool) -> Queue:
        """Make a queue pair. `serves`: it posts work; else it only takes what its peer does to registered memory.

        Raises:
            NoRdma: the device has no more.
        """

    def close(self) -> None:
        """Close everything that was made of it, then the device. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: forget it without a call to the device, which is the parent's."""


OpenDevice: TypeAlias = Callable[[str | None, int, str | None, int, Address | None], Device]
"""Opens a port: device name or None, port number, link ("IB", "Ethernet") or None, preferred GID index or -1, and an
address of this machine that peers are known to reach, or None."""


def open_device(
    name: str | None, port: int = 1, link: str | None = None, gid_index: int = -1, near: Address | None = None
) -> Device:
    """Open a port of an RDMA device; without a name, the first that works. One with the address `near` is preferred.

    Raises:
        NoRdma: there is none, or it cannot be used.
    """
    from infinistore.transports import ibverbs  # late: pyverbs is optional, and slow to import

    return ibverbs.open_device(name, port, link, gid_index, near)


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
