"""RDMA devices made of memory copies, in this process: with the checks that a device
makes, and faults on demand.

A `Fabric` connects the devices that are opened on it. Each transfer is checked against
what both ends registered and connected, byte by byte: a wrong key, a span that ends too
late, a write where only reads are allowed, a peer that is gone. Work can be held back,
to look at what happens meanwhile.

Memory of other devices is known by a dmabuf, whose descriptor says which memory it is
(`Fabric.dmabufs`). What is written there arrives late: with the next read of the same
memory.
"""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any
from unittest import mock

import attrs

from infinistore.errors import TransferFailed
from infinistore.transports.rdma import ibverbs
from infinistore.transports.rdma.devices import Address, Place
from infinistore.transports.rdma.plan import Piece
from infinistore.transports.rdma.verbs import Completion, DeviceLimits, Endpoint, NoRdma, Operation

__all__ = ["Fabric", "FakeDevice", "FakeQueue", "FakeRegion", "fabric_in_use"]

LOCAL_ACCESS, REMOTE_INVALID, REMOTE_ACCESS, FLUSHED, RETRIES = 8, 9, 10, 5, 12


@attrs.define(eq=False)
class FakeRegion:
    device: "FakeDevice"
    address: int
    length: int
    local_key: int
    remote_key: int
    remote: bool
    writable: bool
    remote_address: int
    late: list[tuple[int, bytes]] | None = None
    """For a device's memory: what was written to it and has not arrived."""

    def close(self) -> None:
        with self.device.fabric.lock:
            self.device.regions.pop(self.local_key, None)

    def holds(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def arrive(self) -> None:
        while self.late:
            target, content = self.late.pop(0)
            ctypes.memmove(target, content, len(content))


@attrs.define(eq=False)
class _Work:
    queue: "FakeQueue"
    operation: Operation
    pieces: Sequence[Piece]
    batch: int


class FakeQueue:
    """A queue pair. It makes the same demands as a real one: connected before work,
    events acknowledged, one close.
    """

    def __init__(self, device: "FakeDevice", *, serves: bool) -> None:
        fabric = device.fabric
        self.device = device
        self.serves = serves
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.endpoint = Endpoint(next(fabric.numbers), next(fabric.numbers), device.gid, 0, device.mtu, 16)
        self.peer: Endpoint | None = None
        self.state = "reset"
        self.in_flight = 0
        self.completions: deque[Completion] = deque()
        self._armed = False

    def connect(self, peer: Endpoint, *, dead_after_s: float) -> None:
        assert self.state == "reset"
        assert dead_after_s > 0
        if self.device.fabric.refuses_to_connect:
            raise TransferFailed("the device refuses these parameters")
        self.peer = peer
        self.state = "ready"

    def post(self, operation: Operation, pieces: Sequence[Piece], batch: int) -> None:
        fabric = self.device.fabric
        with fabric.lock:
            assert self.serves
            assert self.state in ("ready", "error")
            assert len(pieces) > 0
            self.in_flight += len(pieces)
            assert self.in_flight <= self.device.limits.depth, "more work than the queue has room for"
            assert max(piece[4] for piece in pieces) <= self.device.limits.longest_bytes
            fabric.batches += 1
            fabric.requests += len(pieces)
            fabric.work.append(_Work(self, operation, pieces, batch))
            fabric.has_work.set()
            if not fabric.held:
                fabric.run()

    def poll(self) -> Sequence[Completion]:
        with self.device.fabric.lock:
            found, self.completions = list(self.completions), deque()
            return found

    def arm(self) -> None:
        with self.device.fabric.lock:
            self._armed = True

    def take_events(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def complete(self, batch: int, status: int) -> None:
        self.completions.append(Completion(batch, status))
        if self._armed:
            self._armed = False
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self.device.fabric.lock:
            if self.state != "closed":
                self.state = "closed"
                self.device.fabric.queues.pop(self.endpoint.queue)
                os.close(self.fd)


class FakeDevice:
    """A port. `limits` are small, so that whatever is long is split and whatever is
    many waits.
    """

    link = "Ethernet"

    def __init__(self, fabric: "Fabric", name: str, limits: DeviceLimits) -> None:
        self.fabric = fabric
        self.name = name
        self.limits = limits
        self.gid = f"{abs(hash(name)) % 16**12:032x}"
        self.mtu = 1024
        self.regions: dict[int, FakeRegion] = {}
        self.closed = False

    @property
    def place(self) -> str:
        return f"{self.name} port 1"

    @property
    def reason(self) -> str:
        return "made of memory copies"

    def register(self, address: int, length: int, *, remote: bool, writable: bool = True) -> FakeRegion:
        fabric = self.fabric
        with fabric.lock:
            assert not self.closed
            if fabric.refuses_to_register:
                raise NoRdma("no more memory may be pinned; raise `ulimit -l`")
            key = next(fabric.numbers)
            return self._keep(FakeRegion(self, address, length, key, key, remote, writable, address))

    def register_dmabuf(self, fd: int, offset: int, length: int) -> FakeRegion:
        fabric = self.fabric
        with fabric.lock:
            assert not self.closed
            if fabric.refuses_dmabufs:
                raise NoRdma(f"{self.name} does not register a dmabuf: Operation not supported")
            base, whole = fabric.dmabufs[os.fstat(fd).st_ino]
            assert 0 <= offset <= offset + length <= whole, "beyond the end of the dmabuf"
            key = next(fabric.numbers)
            return self._keep(FakeRegion(self, base + offset, length, key, key, True, True, offset, []))

    def _keep(self, region: FakeRegion) -> FakeRegion:
        self.regions[region.local_key] = region
        self.fabric.registrations += 1
        self.fabric.registered_bytes += region.length
        return region

    def create_queue(self, *, serves: bool) -> FakeQueue:
        with self.fabric.lock:
            assert not self.closed
            if self.fabric.refuses_queues:
                raise NoRdma(f"{self.name} has no more queue pairs")
            queue = FakeQueue(self, serves=serves)
            self.fabric.queues[queue.endpoint.queue] = queue
            return queue

    def close(self) -> None:
        with self.fabric.lock:
            if not self.closed:
                self.closed = True
                for queue in [queue for queue in self.fabric.queues.values() if queue.device is self]:
                    queue.close()
                self.regions.clear()
                self.fabric.devices.remove(self)

    def abandon(self) -> None:
        self.closed = True


class Fabric:
    """What connects the devices, and what may go wrong with it."""

    def __init__(self, limits: DeviceLimits | None = None) -> None:
        self.lock = threading.RLock()
        self.limits = limits or DeviceLimits(depth=8, longest_bytes=3000)
        self.numbers = count(100)
        self.queues: dict[int, FakeQueue] = {}
        self.devices: list[FakeDevice] = []
        self.work: deque[_Work] = deque()
        self.absent = ""
        """Why no device can be opened, if none can."""
        self.has_work = threading.Event()
        """Some was posted since this was cleared."""
        self.held = False
        self.unplugged = False
        self.refuses_to_register = self.refuses_to_connect = self.refuses_queues = self.refuses_dmabufs = False
        self.asked_near: list[Address | None] = []
        """Near which address each device was to be."""
        self.asked_for: list[tuple[Address | None, Place | None]] = []
        """Which peer each was to reach, and near which place it was to be."""
        self.dmabufs: dict[int, tuple[int, int]] = {}
        """The memory behind a descriptor, address and length, by the descriptor's
        inode.
        """
        self.statuses: deque[int] = deque()
        """With which status the next requests end, 0 for as usual."""
        self.batches = self.requests = self.registrations = self.registered_bytes = self.moved_bytes = 0

    def open(
        self,
        name: str | None,
        port: int = 1,
        link: str | None = None,
        gid_index: int = -1,
        near: Address | None = None,
        *,
        peer: Address | None = None,
        place: Place | None = None,
    ) -> FakeDevice:
        self.asked_near.append(near)
        self.asked_for.append((peer, place))
        if self.absent:
            raise NoRdma(self.absent)
        device = FakeDevice(self, name or "fake", self.limits)
        self.devices.append(device)
        return device

    def release(self) -> None:
        """Let go on what was held back."""
        with self.lock:
            self.held = False
            self.run()

    def run(self) -> None:
        while self.work:
            self._carry_out(self.work.popleft())

    def _carry_out(self, work: _Work) -> None:
        queue = work.queue
        if queue.state == "closed":
            return
        queue.in_flight -= len(work.pieces)
        for piece in work.pieces:
            status = FLUSHED if queue.state == "error" else self._move(queue, work.operation, piece)
            if status:
                queue.state = "error"
                queue.complete(work.batch, status)
                return
        queue.complete(work.batch, 0)

    def _move(self, queue: FakeQueue, operation: Operation, piece: Piece) -> int:
        status = self.statuses.popleft() if self.statuses else 0
        if status:
            return status
        here, local_key, there, remote_key, length = piece
        local = queue.device.regions.get(local_key)
        if local is None or not local.holds(here, length) or (operation is Operation.READ and not local.writable):
            return LOCAL_ACCESS
        assert queue.peer is not None
        peer = self.queues.get(queue.peer.queue)
        if self.unplugged or peer is None or peer.state != "ready" or peer.peer != queue.endpoint:
            return RETRIES
        remote = next((known for known in peer.device.regions.values() if known.remote_key == remote_key), None)
        if peer.serves:
            return REMOTE_INVALID
        if remote is None or not remote.remote:
            return REMOTE_ACCESS
        there += remote.address - remote.remote_address
        if not remote.holds(there, length):
            return REMOTE_ACCESS
        if operation is Operation.WRITE and not remote.writable:
            return REMOTE_ACCESS
        self.moved_bytes += length
        if operation is Operation.READ:
            remote.arrive()
            ctypes.memmove(here, there, length)
        elif remote.late is not None:
            remote.late.append((there, ctypes.string_at(here, length)))
        else:
            ctypes.memmove(there, here, length)
        return 0


@contextmanager
def fabric_in_use(limits: DeviceLimits | None = None, **settings: Any) -> Iterator[Fabric]:
    """A fabric that servers and clients of this process open their devices on; at the
    end all must be closed.
    """
    fabric = Fabric(limits)
    for name, value in settings.items():
        setattr(fabric, name, value)
    with mock.patch.object(ibverbs, "open_device", fabric.open):
        yield fabric
    assert fabric.queues == {}
    assert fabric.devices == []
