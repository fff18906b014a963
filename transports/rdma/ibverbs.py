"""RDMA devices by pyverbs, the Python binding of rdma-core: an open port, the memory
registered with it, and its queue pairs.

pyverbs is loaded when it is needed. Two releases are in use, 44 (Debian 12) and 59.
They differ in where the enumerations are, and in whether a completion channel tells its
descriptor. `load_pyverbs` hides the first difference, and `VerbsDevice` the second.

The cost of a work request in Python decides how fast small blocks move. So the requests
are made once and chained once; to post a batch, five fields of each are set, and one
call hands over the chain.

Everything is closed explicitly and in order: what is left to the garbage collector is
destroyed in any order, and pyverbs 44 crashes then. In a forked child nothing is closed
at all, because the kernel would do it to the parent.
"""

import atexit
import ctypes
import errno
import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NamedTuple

import attrs

from infinistore.errors import TransferFailed
from infinistore.sizes import in_units
from infinistore.transports.rdma.choice import ChosenPort, choose_port
from infinistore.transports.rdma.devices import Address, Place
from infinistore.transports.rdma.plan import Piece
from infinistore.transports.rdma.verbs import Completion, DeviceLimits, Endpoint, NoRdma, Operation

_REMEDY = (
    "install pyverbs for this Python (Debian, for the system's Python: apt-get install python3-pyverbs, and link"
    " /usr/lib/python3/dist-packages/pyverbs into the virtual environment's site-packages)"
)
_lock = threading.Lock()
"""Held while pyverbs is imported, and while a device or a channel is opened."""


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@attrs.frozen
class Pyverbs:
    """The parts of pyverbs that are used, wherever this release has them."""

    enums: Any
    error: type[Exception]
    device: Any
    pd: Any
    cq: Any
    qp: Any
    mr: Any
    wr: Any
    addr: Any


def load_pyverbs(load: Callable[[str], Any] = import_module) -> Pyverbs:
    """Import pyverbs.

    Raises:
        NoRdma: it is not installed, or does not fit this Python or this machine.
    """
    with _lock, _without_log_settings():
        try:
            load("pyverbs")
            parts = [load(f"pyverbs.{name}") for name in ("device", "pd", "cq", "qp", "mr", "wr", "addr")]
            error = load("pyverbs.pyverbs_error").PyverbsError
            try:
                enums = load("pyverbs.enums")
            except ImportError:  # from some release after 44 on
                enums = load("pyverbs.libibverbs_enums")
        except ImportError as problem:
            raise NoRdma(f"pyverbs cannot be imported ({problem})", _REMEDY) from None
    return Pyverbs(enums, error, *parts)


@contextmanager
def _without_log_settings() -> Iterator[None]:
    """Undo the `logging.basicConfig` that importing pyverbs calls."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


CHAIN = 64
"""How many work requests one batch has at most."""
_RETRIES = 5  # 7 would mean for ever to some devices
_TIMEOUT_UNIT_S = 4.096e-6
_HOPS = 64
_POLL = 16


class WorkRequests:
    """A chain of work requests of one kind, to be posted over and over.

    A chain has one end, the last request, and it alone asks for a completion. A batch
    of n is the last n of them: so neither the links nor the flags ever change, and
    there is no way in pyverbs to cut a chain.

    `requests` is the chain, and `spans` has the local memory of each request.
    """

    def __init__(self, pyverbs: Pyverbs, opcode: int, length: int = CHAIN) -> None:
        wr, enums = pyverbs.wr, pyverbs.enums
        self.spans = [wr.SGE(0, 0, 0) for _ in range(length)]
        self.requests = [wr.SendWR(opcode=opcode, num_sge=1, sg=[span], send_flags=0) for span in self.spans]
        for request, span in zip(self.requests, self.spans, strict=True):
            request.sg_list = span  # the span itself in place of a copy, so that it can be set
        for request, following in zip(self.requests, self.requests[1:], strict=False):
            request.next_wr = following  # keeps the address only; the list keeps the request
        self.requests[-1].send_flags = enums.IBV_SEND_SIGNALED

    def fill(self, pieces: Sequence[Piece], batch: int) -> Any:
        """Set a batch up, at most as long as the chain; return the request to post."""
        requests = self.requests[-len(pieces) :]
        for request, span, piece in zip(requests, self.spans[-len(pieces) :], pieces, strict=True):
            span.addr, span.lkey, address, key, span.length = piece
            request.set_wr_rdma(key, address)
        self.requests[-1].wr_id = batch
        return requests[0]


class QueueParts(NamedTuple):
    """A queue pair, its completion queue, and the channel that tells of completions."""

    pair: Any
    completions: Any
    channel: Any
    fd: int


class VerbsQueue:
    """A queue pair, as `infinistore.transports.rdma.verbs.Queue` describes."""

    def __init__(self, pyverbs: Pyverbs, device: "VerbsDevice", parts: QueueParts, *, serves: bool) -> None:
        self.fd = parts.fd
        self.endpoint = Endpoint(
            parts.pair.qp_num, secrets.randbits(24), device.port.gid, device.port.lid, device.mtu, device.reads
        )
        self._pyverbs = pyverbs
        self._device = device
        self._pair, self._completions, self._channel, _ = parts
        self._serves = serves
        self._closed = False

    def connect(self, peer: Endpoint, *, dead_after_s: float) -> None:
        """Connect to a peer."""
        pyverbs, device = self._pyverbs, self._device
        enums = pyverbs.enums
        attributes = pyverbs.qp.QPAttr(port_num=device.port.number)
        attributes.pkey_index = 0
        attributes.qp_access_flags = (
            0
            if self._serves  # nobody writes or reads here: this side does what is done
            else enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        )
        attributes.path_mtu = min(peer.mtu, device.mtu).bit_length() - 8  # enum ibv_mtu: 256 bytes is 1
        attributes.dest_qp_num = peer.queue
        attributes.rq_psn = peer.packet
        attributes.sq_psn = self.endpoint.packet
        attributes.max_dest_rd_atomic = device.reads
        attributes.max_rd_atomic = max(1, min(peer.reads, device.initiator_depth))
        attributes.min_rnr_timer = 12
        attributes.timeout = timeout_exponent(dead_after_s)
        attributes.retry_cnt = _RETRIES
        attributes.rnr_retry = _RETRIES
        attributes.ah_attr = self._route(peer)
        try:
            self._pair.to_rts(attributes)
        except pyverbs.error as error:
            if getattr(error, "error_code", None) == errno.EINVAL:
                device.look_again()
            raise TransferFailed(f"{device.place} cannot be connected to GID {gid_text(peer.gid)}: {error}") from error

    def _route(self, peer: Endpoint) -> Any:
        addr, port = self._pyverbs.addr, self._device.port
        if port.lid and peer.lid:  # InfiniBand, in one subnet
            return addr.AHAttr(dlid=peer.lid, is_global=0, port_num=port.number)
        route = addr.GlobalRoute(dgid=addr.GID(gid_text(peer.gid)), sgid_index=port.gid_index, hop_limit=_HOPS)
        return addr.AHAttr(gr=route, is_global=1, port_num=port.number)

    def post(self, operation: Operation, pieces: Sequence[Piece], batch: int) -> None:
        """Post one batch."""
        try:
            self._pair.post_send(self._device.work(operation).fill(pieces, batch))
        except self._pyverbs.error as error:
            raise TransferFailed(f"{self._device.place} takes no work: {error}") from error

    def poll(self) -> Sequence[Completion]:
        """Return what was completed since the last call."""
        try:
            _, found = self._completions.poll(_POLL)
        except self._pyverbs.error as error:
            raise TransferFailed(f"{self._device.place} tells of no completions: {error}") from error
        return [Completion(one.wr_id, one.status) for one in found]

    def arm(self) -> None:
        """Make `fd` readable with the next completion."""
        self._completions.req_notify()

    def take_events(self) -> None:
        """Take and acknowledge events: with any left, it cannot be destroyed."""
        while True:
            try:
                self._channel.get_cq_event(self._completions)
            except self._pyverbs.error as error:
                if getattr(error, "error_code", None) != errno.EAGAIN:
                    raise TransferFailed(f"{self._device.place} tells of no completions: {error}") from error
                return
            self._completions.ack_events(1)

    def close(self) -> None:
        """Destroy the queue pair, then its completion queue and channel."""
        if not self._closed:
            self._closed = True
            for part in (self._pair, self._completions, self._channel):
                part.close()
            self._device.forget(self)

    def abandon(self) -> None:
        """In a forked child: never destroy anything."""
        self._closed = True


def timeout_exponent(dead_after_s: float) -> int:
    """Return the local acknowledge timeout, 4.096 us times 2 to this power, after whose
    retries a peer counts as dead.

    Devices may take up to four times as long (InfiniBand Architecture Specification,
    9.7.6.1.3).
    """
    return min(31, max(1, math.floor(math.log2(dead_after_s / (_RETRIES + 1) / _TIMEOUT_UNIT_S))))


def gid_text(gid: str) -> str:
    """Return 32 hexadecimal digits in groups of four, as pyverbs reads them."""
    return ":".join(gid[first : first + 4] for first in range(0, 32, 4))


MOST_REQUESTS = 4 * CHAIN
"""Work requests in one queue pair: four batches in flight hide the time of posting."""
LONGEST_BYTES = 1 << 30
"""In one work request, if the device allows as much."""
EVENT_DESCRIPTOR = "anon_inode:[infinibandevent]"
"""What the descriptor of a completion channel leads to."""


def open_device(
    name: str | None,
    port: int = 1,
    link: str | None = None,
    gid_index: int = -1,
    near: Address | None = None,
    *,
    peer: Address | None = None,
    place: Place | None = None,
) -> "VerbsDevice":
    """Open a port of an RDMA device; without a name, the best one that works. `link` is
    "IB" or "Ethernet", and -1 prefers no GID. A port is preferred that has `near`, an
    address of this machine that peers are known to reach; with a `place`, where the
    memory is that is to be moved, the nearest of those that reach `peer`.

    Raises:
        NoRdma: there is none, or it cannot be used.
    """
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
        with self._refusing("cannot be opened"), _lock:
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
        """How many reads of its peer a queue pair accepts at a time."""
        self.initiator_depth = max(1, min(attributes.max_qp_init_rd_atom, 16))
        """How many reads of its own a queue pair has in flight, at most."""
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
        """Register memory of another device, at addresses from `offset` on."""
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
        with _lock:
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
        """The work requests of all queue pairs: posting copies them."""
        return self._work[operation]

    def forget(self, queue: VerbsQueue) -> None:
        """Note that a queue pair was closed."""
        self._queues.discard(queue)

    def look_again(self) -> None:
        """Choose the port's address again: GIDs change with the network's addresses."""
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
        """In a forked child: keep all objects for ever, which are the parent's."""
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
