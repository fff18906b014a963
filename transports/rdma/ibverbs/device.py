"""RDMA devices by pyverbs: an open port, the memory registered with it, and its queue
pairs.

Everything is closed explicitly and in order: what is left to the garbage collector is
destroyed in any order, and pyverbs 44 crashes then. In a forked child nothing is closed
at all, because the kernel would do it to the parent.
"""

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from infinistore.sizes import in_units
from infinistore.transports.rdma.choice import ChosenPort, choose_port
from infinistore.transports.rdma.devices import Address, Place
from infinistore.transports.rdma.ibverbs.bindings import Pyverbs, load_pyverbs
from infinistore.transports.rdma.ibverbs.queue import CHAIN, QueueParts, VerbsQueue, WorkRequests
from infinistore.transports.rdma.verbs import DeviceLimits, NoRdma, Operation

__all__ = ["VerbsDevice", "open_device"]

MOST_REQUESTS = 4 * CHAIN
"""Work requests in one queue pair: four batches in flight hide the time that posting
the next one takes.
"""
LONGEST_BYTES = 1 << 30
"""In one work request, if the device allows as much."""
EVENT_DESCRIPTOR = "anon_inode:[infinibandevent]"
"""What the descriptor of a completion channel leads to."""
_opening = threading.Lock()  # a channel's descriptor is the one that was opened meanwhile, so nobody else may


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _opening  # noqa: PLW0603
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def open_device(
    name: str | None,
    port: int,
    link: str | None,
    gid_index: int,
    near: Address | None = None,
    *,
    peer: Address | None = None,
    place: Place | None = None,
) -> "VerbsDevice":
    """Open a port; see `infinistore.transports.rdma.opening.open_device`."""
    # Before pyverbs, which nobody needs without a device.
    chosen = choose_port(name, port, link, gid_index, near=near, peer=peer, place=place)
    return VerbsDevice(load_pyverbs(), chosen, lambda: choose_port(chosen.device, port, link, gid_index, near=near))


def event_descriptors(target: str = EVENT_DESCRIPTOR) -> set[int]:
    """Return the open descriptors of this process that lead to `target`."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == target:
                found.add(int(name))
        except OSError:
            continue  # the one that listed the folder, or another thread's, closed since
    return found


class VerbsDevice:
    """An open port of an RDMA device. See `infinistore.transports.rdma.verbs.Device`
    for what its methods promise.

    `event_descriptors` returns the descriptors of all completion channels that are open
    in this process.
    """

    def __init__(
        self,
        pyverbs: Pyverbs,
        port: ChosenPort,
        choose_again: Callable[[], ChosenPort],
        event_descriptors: Callable[[], set[int]] = event_descriptors,
    ) -> None:
        self.name = port.device
        self.link = port.link
        self.port = port
        self._pyverbs = pyverbs
        self._choose_again = choose_again
        self._event_descriptors = event_descriptors
        self._closed = False
        self._regions: set[VerbsRegion] = set()
        self._queues: set[VerbsQueue] = set()
        with self._refusing("cannot be opened"), _opening:
            self._context = pyverbs.device.Context(name=port.device)
        try:
            with self._refusing("cannot be used"):
                attributes = self._context.query_device()
                found = self._context.query_port(port.number)
                self._pd = pyverbs.pd.PD(self._context)
        except BaseException:
            self._context.close()
            raise
        self.limits = DeviceLimits(min(MOST_REQUESTS, attributes.max_qp_wr), min(found.max_msg_sz, LONGEST_BYTES))
        self.mtu = 128 << min(found.active_mtu, 5)  # enum ibv_mtu: 1 is 256 bytes
        self.reads = max(1, min(attributes.max_qp_rd_atom, 16))
        self.initiator_depth = max(1, min(attributes.max_qp_init_rd_atom, 16))
        # A device that nobody closed must not be left to the garbage collector, which
        # would crash the process.
        atexit.register(self.close)
        self._work = {
            Operation.READ: WorkRequests(pyverbs, pyverbs.enums.IBV_WR_RDMA_READ),
            Operation.WRITE: WorkRequests(pyverbs, pyverbs.enums.IBV_WR_RDMA_WRITE),
        }

    @property
    def place(self) -> str:
        """The port and the address it speaks from, for people."""
        return self.port.describe()

    @property
    def reason(self) -> str:
        """Why it is this port, and this address of it."""
        return self.port.reason

    def register(self, address: int, length: int, *, remote: bool, writable: bool = True) -> "VerbsRegion":
        """Register memory."""
        enums = self._pyverbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE if writable else 0
        if remote:
            access |= enums.IBV_ACCESS_REMOTE_READ | (enums.IBV_ACCESS_REMOTE_WRITE if writable else 0)
        with self._refusing(
            f"does not register {in_units(length)} of memory (is `ulimit -l` large enough? RDMA pins it)"
        ):
            memory = self._pyverbs.mr.MR(self._pd, length, access, address=address)
        return self._keep(memory, address)

    def register_dmabuf(self, fd: int, offset: int, length: int) -> "VerbsRegion":
        """Register memory of another device. pyverbs gives it addresses that begin at
        `offset`.
        """
        enums, mr = self._pyverbs.enums, self._pyverbs.mr
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        if not hasattr(mr, "DmaBufMR"):
            raise NoRdma("this release of pyverbs knows no dmabuf", "44 or newer does")
        with self._refusing("does not register a dmabuf"):
            memory = mr.DmaBufMR(self._pd, length, access, dmabuf=fd, offset=offset)
        return self._keep(memory, offset)

    def _keep(self, memory: Any, remote_address: int) -> "VerbsRegion":
        region = VerbsRegion(memory, remote_address, self._regions.discard)
        self._regions.add(region)
        return region

    def create_queue(self, *, serves: bool) -> VerbsQueue:
        """Make a queue pair."""
        depth = self.limits.depth if serves else 1
        made: list[Any] = []
        try:
            with self._refusing("has no more queue pairs"):
                channel, fd = self._create_channel(made)
                completions = self._pyverbs.cq.CQ(self._context, depth + 1, None, channel, 0)
                made.append(completions)
                pair = self._create_pair(completions, depth)
        except BaseException:
            for part in reversed(made):
                part.close()
            raise
        queue = VerbsQueue(self._pyverbs, self, QueueParts(pair, completions, channel, fd), serves=serves)
        self._queues.add(queue)
        return queue

    def _create_pair(self, completions: Any, depth: int) -> Any:
        qp = self._pyverbs.qp
        capacity = qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        wanted = qp.QPInitAttr(
            qp_type=self._pyverbs.enums.IBV_QPT_RC, scq=completions, rcq=completions, cap=capacity, sq_sig_all=0
        )
        return qp.QP(self._pd, wanted)

    def _create_channel(self, made: list[Any]) -> tuple[Any, int]:
        """Return a completion channel and its descriptor, which no longer blocks: a
        wait in it would stop all threads.

        pyverbs 44 does not tell the descriptor, so it is the one that was not there
        before.
        """
        with _opening:
            before = self._event_descriptors()
            channel = self._pyverbs.cq.CompChannel(self._context)
            made.append(channel)
            fd = getattr(channel, "fd", None)
            found = {fd} if fd is not None else self._event_descriptors() - before
        if len(found) != 1:
            raise NoRdma(f"another library opened an RDMA device at the same moment as {self.name}; try again")
        fd = found.pop()
        os.set_blocking(fd, False)
        return channel, fd

    def work(self, operation: Operation) -> WorkRequests:
        """The work requests that all queue pairs of this device post: a device has
        copied them when a post returns.
        """
        return self._work[operation]

    def forget(self, queue: VerbsQueue) -> None:
        """Note that a queue pair was closed."""
        self._queues.discard(queue)

    def look_again(self) -> None:
        """Choose the port's address again: GIDs come and go with the network's
        addresses.
        """
        with suppress(NoRdma):  # then it stays as it was, and fails as it did
            self.port = self._choose_again()

    def close(self) -> None:
        """Close everything that was made of it, then the device."""
        if self._closed:
            return
        self._closed = True
        for queue in list(self._queues):
            queue.close()
        for region in list(self._regions):
            region.close()
        self._pd.close()
        self._context.close()
        atexit.unregister(self.close)

    def abandon(self) -> None:
        """In a forked child: keep every object for ever, since destroying it would
        destroy the parent's.
        """
        self._closed = True
        for region in self._regions:
            region.abandon()
        for queue in self._queues:
            queue.abandon()
        for kept in (self, *self._regions, *self._queues):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._pyverbs.error as error:
            raise NoRdma(f"the RDMA device {self.name} {what}: {error}") from error


class VerbsRegion:
    """Registered memory."""

    def __init__(self, memory: Any, remote_address: int, forget: Callable[["VerbsRegion"], None]) -> None:
        self._memory = memory
        self.remote_address = remote_address
        self._forget = forget
        self._abandoned = False
        self.local_key: int = memory.lkey
        self.remote_key: int = memory.rkey

    def close(self) -> None:
        """Unregister."""
        if not self._abandoned:
            self._forget(self)
            self._memory.close()

    def abandon(self) -> None:
        """In a forked child: never unregister."""
        self._abandoned = True
