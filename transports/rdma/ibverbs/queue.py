"""Queue pairs by pyverbs: connecting one, posting work to it, and taking what is done.

The cost of a work request in Python decides how fast small blocks move. So the requests
are made once and chained once; to post a batch, five fields of each are set, and one
call hands over the chain.
"""

import errno
import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from infinistore.errors import TransferFailed
from infinistore.transports.rdma.choice import ChosenPort
from infinistore.transports.rdma.ibverbs.bindings import Pyverbs
from infinistore.transports.rdma.plan import Piece
from infinistore.transports.rdma.verbs import Completion, Endpoint, Operation

__all__ = ["CHAIN", "QueueParts", "VerbsQueue", "WorkRequests", "gid_text", "timeout_exponent"]

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
    """What a queue pair is made of: itself, its completion queue, and the channel that
    tells of completions.
    """

    pair: Any
    completions: Any
    channel: Any
    fd: int


class OpenPort(Protocol):
    """What a queue pair needs of the device that it belongs to."""

    port: ChosenPort
    mtu: int
    """The bytes in a packet, at most."""
    reads: int
    """How many reads of its peer a queue pair accepts at a time."""
    initiator_depth: int
    """How many reads of its own a queue pair has in flight, at most."""

    @property
    def place(self) -> str:
        """The port and its address, for people."""

    def work(self, operation: Operation) -> WorkRequests:
        """Return the work requests that all queue pairs of this device post."""

    def look_again(self) -> None:
        """Choose the port's address again."""

    def forget(self, queue: "VerbsQueue") -> None:
        """Note that a queue pair was closed."""


class VerbsQueue:
    """A queue pair. See `infinistore.transports.rdma.verbs.Queue` for what its methods
    promise.
    """

    def __init__(self, pyverbs: Pyverbs, device: OpenPort, parts: QueueParts, *, serves: bool) -> None:
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
        """Take what made `fd` readable, and acknowledge it: a queue with events left
        cannot be destroyed.
        """
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
    """Return 32 hexadecimal digits in groups of four, as pyverbs and people read
    them.
    """
    return ":".join(gid[first : first + 4] for first in range(0, 32, 4))
