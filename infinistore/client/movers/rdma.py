"""Blocks by RDMA: the server reads and writes this process's registered memory.

Blocks in memory that the caller has registered move from where they are. Others go
through a staging buffer: in one request if they fit, else piece by piece. Both are
atomic, because the server keeps the room or the pin until the end. Small batches go
inline over the stream: one round trip, and nothing to set up.

When a call ends, however it ends, no byte of it moves any more: either its reply has
come, or its queue pair is destroyed. If a transfer fails, the stream still works, so
the call goes on inline, unless the URL asks for RDMA alone.

Blocks in memory of GPUs have no other way than RDMA, however small they are. They have
no checksums either: this process does not see them. Before a transfer, a call waits for
the GPU's earlier work, because a card reads and writes the memory as it is at that
moment. After a read, it makes the card's writes visible to the GPU, which takes next to
no time.

The device is opened with the first connection that may use it. Where it fails by
itself, the reason is kept, and it is tried again after a pause that doubles each time.
Meanwhile other paths serve. A server to which a transfer fails has a pause of its own.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final, cast

from infinistore.client.memory.buffers import DeviceBatch, Registration
from infinistore.client.memory.copying import copy_blocks, hash_blocks
from infinistore.client.movers.base import CannotMove, GetPart, Mover, MoverSource, PutPart
from infinistore.client.movers.channel import Channel, expect
from infinistore.client.movers.inline import read_payload, skipped_keys
from infinistore.client.options import Options
from infinistore.client.worker_threads import in_thread
from infinistore.errors import DeadlineExceeded, DeviceMemoryUnreachable, LimitExceeded, ProtocolError, TransferFailed
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.effects import Pause, Span
from infinistore.protocol.messages import (
    MISSING,
    NO_CHECKSUM,
    Abort,
    Commit,
    CountReply,
    HelloReply,
    Keys,
    Numbers,
    PutReply,
    RdmaConnect,
    RdmaConnectReply,
    RdmaFetch,
    RdmaFill,
    RdmaGet,
    RdmaGetReply,
    RdmaPut,
    Release,
    Reserve,
    ReserveReply,
)
from infinistore.protocol.versions import Capability
from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import DeviceMemory, DeviceSpan, RegisteredDeviceMemory, current_gpu, gpu_place
from infinistore.transports.rdma import ibverbs
from infinistore.transports.rdma.choice import near_address
from infinistore.transports.rdma.devices import Address, Place, there_is_rdma
from infinistore.transports.rdma.memory import RegisteredMemory, RegisteredSpan, Staging
from infinistore.transports.rdma.plan import Placement
from infinistore.transports.rdma.verbs import Device, Endpoint, NoRdma, Queue

FIRST_PAUSE_S: Final = 1.0
"""How long something is left alone after a failure; twice as long after the next."""
_LONGEST_PAUSE_S: Final = 60.0


class RdmaPause:
    """What follows a failure, in any thread: of two at the same time, one counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reason = ""
        self._over_at = 0.0
        self.pause_s = 0.0
        """The pause after the last failure; 0 once it has worked."""

    def begin(self, reason: str) -> None:
        """Note a failure."""
        self._reason = reason
        self.pause_s = min(_LONGEST_PAUSE_S, self.pause_s * 2 or FIRST_PAUSE_S)
        self._over_at = self._clock() + self.pause_s

    def end(self) -> None:
        """Note that it works."""
        self.pause_s = 0.0
        self._reason = ""

    @property
    def resting(self) -> bool:
        """Whether it failed, and is left alone for now."""
        return bool(self._reason) and self._clock() < self._over_at

    def check(self) -> None:
        """Raise NoRdma, with the reason, if it is not the time to try."""
        if self.resting:
            raise NoRdma(f"{self._reason}; tried again in {self._over_at - self._clock():.0f} s")


_log = logging.getLogger("infinistore.client")
DEAD_AFTER_S = 0.25


class StoreRdma:
    """What all connections of a store share, in any thread. `forced`: no other path."""

    def __init__(self, options: Options, clock: Callable[[], float], *, forced: bool) -> None:
        self.forced = forced
        self.asked_for = forced or bool(options.device)
        """Whether RDMA comes before shared memory."""
        self.memory = RegisteredMemory()
        self.device_memory = RegisteredDeviceMemory()
        self.pause = RdmaPause(clock)
        """After a failure of the device itself."""
        self._options = options
        self._lock = threading.RLock()
        self.device: Device | None = None
        """The device, while it is open."""
        self._registrations: dict[Registration, RegisteredSpan | DeviceSpan | None] = {}
        self._staging: list[Staging] = []
        self._closed = False
        self._users = 0  # connections that have a queue pair

    def is_likely(self, hello: HelloReply) -> bool:
        """Whether both sides have a device, for who has not asked for one."""
        return bool(hello.rdma) and there_is_rdma()

    def take_device(self, near: Address | None = None, peer: Address | None = None) -> Device:
        """Return the device, until `release`; if it is opened now, preferably one near
        an address of ours by which a server was reached, whose
        address is `peer`.

        Raises:
            NoRdma: there is none here, or it is not the time to try.
        """
        with self._lock:
            if not self.forced:
                self.pause.check()
            try:
                device = self._opened(near, peer)
            except NoRdma as error:
                self.pause.begin(str(error))
                raise
            self._users += 1
            return device

    def release(self, staging: Staging | None) -> None:
        """End what `take_device` began, when the queue pair is destroyed."""
        with self._lock:
            if staging is not None:
                self._staging.append(staging)
            self._users -= 1
            if self._closed and not self._users:
                self._close_device()

    def register(self, memory: memoryview | DeviceMemory) -> Registration:
        """Register memory, now if a device is open, else when one is.

        Raises:
            NoRdma: now, and the system does not allow it.
        """
        registration = Registration(len(memory), self._unregister)
        if isinstance(memory, DeviceMemory):
            registration.device_memory = memory
        else:
            registration.view = memory
        with self._lock:
            self._registrations[registration] = None
            if self.device is not None:
                try:
                    self._make_known(registration, self.device)
                except BaseException:
                    del self._registrations[registration]
                    raise
        return registration

    def why_not_registered(self, blocks: Sequence[DeviceMemory]) -> str | None:
        """Return why RDMA can never move these blocks of GPUs; None if it can."""
        if self.device_memory.locate(blocks) is not None:
            return None
        with self._lock:
            known = [one for one in self._registrations if one.device_memory is not None]
        for block in blocks:
            holding = [one for one in known if one.device_memory is not None and one.device_memory.holds(block)]
            if not holding:
                return f"the tensor is on {block.place} and not registered: register it with the store first"
            if all(one.problem for one in holding):
                return holding[0].problem
        return None

    def take_staging(self) -> Staging:
        """Return a staging buffer that nobody uses.

        Raises:
            NoRdma: another one cannot be registered.
        """
        with self._lock:
            if self._staging:
                return self._staging.pop()
            try:
                return Staging(self._opened(), self._options.staging_bytes)
            except NoRdma as error:
                self.pause.begin(str(error))
                raise

    def close(self) -> None:
        """Unregister all and close the device, when the calls under way have ended."""
        with self._lock:
            self._closed = True
            if not self._users:
                self._close_device()

    def _close_device(self) -> None:
        for registration in list(self._registrations):
            registration.close()
        self._staging.clear()
        device, self.device = self.device, None
        if device is not None:
            device.close()

    def let_go(self) -> None:
        """In a forked child: the device is the parent's."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._closed = True
        device, self.device = self.device, None
        if device is not None:
            device.abandon()

    def _opened(self, near: Address | None = None, peer: Address | None = None) -> Device:
        if self._closed:
            raise NoRdma("the store was closed")
        if self.device is None:
            options = self._options
            name = options.device or None
            place = self._place() if name is None else None
            device = ibverbs.open_device(name, options.ib_port, None, options.gid_index, near, peer=peer, place=place)
            try:
                for registration in self._registrations:
                    self._make_known_later(registration, device)
            except BaseException:
                device.close()
                raise
            self.device = device
        return self.device

    def _place(self) -> Place | None:
        """Where the GPU is whose memory is registered, or which this process uses."""
        registered = (one.device_memory.ordinal for one in self._registrations if one.device_memory is not None)
        ordinal = next(registered, None)
        if ordinal is None:
            ordinal = current_gpu()
        return None if ordinal is None else gpu_place(cuda_driver.load_cuda(), ordinal)

    def _make_known(self, registration: Registration, device: Device) -> None:
        span: RegisteredSpan | DeviceSpan
        if registration.device_memory is None:
            span = RegisteredSpan(device, registration.view)
            self.memory.add(span)
        else:
            span = DeviceSpan(device, registration.device_memory, cuda_driver.load_cuda())
            self.device_memory.add(span)
        self._registrations[registration] = span
        registration.registered = True

    def _make_known_later(self, registration: Registration, device: Device) -> None:
        """Register what the caller gave before there was a device. What cannot be done
        for a GPU is no reason to do without RDMA."""
        try:
            self._make_known(registration, device)
        except NoRdma as error:
            if registration.device_memory is None:
                raise
            registration.problem = str(error)
            _log.warning("memory of a GPU is not registered for RDMA: %s", str(error))

    def _unregister(self, registration: Registration) -> None:
        with self._lock:
            span = self._registrations.pop(registration, None)
            if isinstance(span, DeviceSpan):
                self.device_memory.remove(span)
            elif span is not None:
                self.memory.remove(span)
            if span is not None:
                span.close()


def register(rdma: StoreRdma, memory: memoryview | DeviceMemory) -> Registration:
    """Register memory of a caller's.

    Raises:
        LimitExceeded: the system does not let so much memory be pinned.
        DeviceMemoryUnreachable: memory of a GPU cannot be registered here.
    """
    try:
        return rdma.register(memory)
    except NoRdma as error:
        kind = DeviceMemoryUnreachable if isinstance(memory, DeviceMemory) else LimitExceeded
        raise kind(str(error)) from error


_OTHER_WAYS = "infinistore.tensors copies it by way of the host, and tensor.cpu() by hand"


def check_registered(rdma: StoreRdma | None, batch: DeviceBatch) -> None:
    """Refuse what RDMA can never move, before anything is waited for or sent.

    Raises:
        DeviceMemoryUnreachable: the memory is not registered, or there is no RDMA.
    """
    if rdma is None:
        raise DeviceMemoryUnreachable(
            f"the tensor is on {batch.blocks[0].place}, and this store has no RDMA; {_OTHER_WAYS}"
        )
    problem = rdma.why_not_registered(batch.blocks)
    if problem is not None:
        raise DeviceMemoryUnreachable(f"{problem}; {_OTHER_WAYS}")


def wait_for_gpus(batch: DeviceBatch) -> None:
    """Wait for the GPU's work that was queued before the call.

    Raises:
        DeviceMemoryUnreachable: the work has failed.
    """
    try:
        batch.wait()
    except (NoRdma, RuntimeError) as error:  # as CUDA and PyTorch say that the GPU has failed
        raise DeviceMemoryUnreachable(f"what {batch.blocks[0].place} was told before has failed: {error}") from error


async def wait_for_gpus_aside(batch: DeviceBatch) -> None:
    """The same for asynchronous stores: in a thread, unless the GPU is done."""
    if not batch.is_done():  # asking is faster than a thread
        await in_thread(lambda: wait_for_gpus(batch))


def flush(batch: DeviceBatch) -> None:
    """Make what the card wrote visible to the GPU."""
    cuda = cuda_driver.load_cuda()
    for ordinal in sorted({block.ordinal for block in batch.blocks}):
        cuda.flush(ordinal)


class RdmaMover(Mover):
    """Moves the blocks of one connection by the queue pair beside it."""

    name = "rdma"
    writes_before_it_tells = True

    def __init__(self, channel: Channel, rdma: StoreRdma, pause: RdmaPause, queue: Queue, inline_bytes: int) -> None:
        self._channel = channel
        self._connection = channel.connection
        self._rdma = rdma
        self._pause = pause
        self._queue: Queue | None = queue
        self.inline_bytes = inline_bytes
        self._staged: Staging | None = None
        self._owed: Release | Abort | None = None
        """What gives back what the server keeps for the batch under way, if it keeps
        anything.
        """
        self.handlers = {PutPart: self.put, GetPart: self.get}

    def why_not(self, request: PutPart | GetPart) -> str:
        """Say why it cannot carry a part; empty if it can."""
        if request.on_device:
            return ""
        if self._queue is None:
            return "a transfer has failed on this connection"
        if isinstance(request, PutPart) and request.total_bytes <= self.inline_bytes:
            return "a small batch is quicker inline"
        return ""

    def close(self) -> None:
        """Destroy the queue pair: after this, it accesses no memory of this process."""
        queue, self._queue = self._queue, None
        staged, self._staged = self._staged, None
        if queue is not None:
            queue.close()
            self._rdma.release(staged)

    # Put

    async def put(self, part: PutPart) -> list[str] | None:
        """Put a part; None if RDMA has failed, and the part shall go another way."""
        if part.on_device:
            return await self._put_from_device(part)
        try:
            return await self._put_from_host(part)
        except (TransferFailed, DeadlineExceeded, NoRdma) as error:
            if not await self._goes_on_without(error):
                raise
        return None

    async def _put_from_host(self, part: PutPart) -> list[str]:
        placement = self._rdma.memory.locate(part.views, writable=False)
        verify = self._channel.verify
        if placement is not None:
            checksums = (await hash_blocks(part.views)) if verify else []
            return await self._put_at(part, placement, checksums)
        staging = self._staging()
        if part.total_bytes > len(staging):
            return await self._put_in_pieces(part, staging)
        checksums = await copy_blocks(part.views, staging.views(part.sizes), hash_targets=verify)
        addresses = list(accumulate(part.sizes[:-1], initial=staging.span.address))
        return await self._put_at(part, Placement(addresses, [staging.span.key]), checksums)

    async def _put_at(self, part: PutPart, placement: Placement, checksums: list[int]) -> list[str]:
        put = RdmaPut(
            Keys(part.keys),
            pack_u64(part.sizes),
            pack_u64(placement.addresses),
            _one_if_same(placement.keys),
            pack_u64(checksums),
            part.replace,
            part.ttl_us,
        )
        reply = expect(PutReply, await self._channel.ask(put))
        self._works()
        return skipped_keys(part.keys, reply)

    async def _put_in_pieces(self, part: PutPart, staging: Staging) -> list[str]:
        reserved = expect(ReserveReply, (await self._channel.ask(Reserve(pack_u64(part.sizes)))))
        self._channel.holding = True
        self._owed = Abort(reserved.reservation)
        checksums = (await hash_blocks(part.views)) if self._channel.verify else []
        source = Span(part.views)
        first = 0
        while source.remaining:
            count = 0
            for view in _next_views(source, len(staging)):
                staging.span.view[count : count + len(view)] = view
                count += len(view)
                await Pause()
            fill = RdmaFill(reserved.reservation, first, count, staging.span.address, staging.span.key)
            expect(CountReply, (await self._channel.ask(fill)))
            first += count
        commit = Commit(reserved.reservation, Keys(part.keys), pack_u64(checksums), part.replace, part.ttl_us)
        reply = expect(PutReply, (await self._channel.ask(commit)))
        self._channel.holding = False
        self._owed = None
        self._works()
        return skipped_keys(part.keys, reply)

    # Get

    async def get(self, part: GetPart) -> int | None:
        """Read a part; return how many keys were answered, None for another way."""
        if part.on_device:
            return await self._get_to_device(part)
        try:
            return await self._get_to_host(part)
        except (TransferFailed, DeadlineExceeded, NoRdma) as error:
            if not await self._goes_on_without(error):
                raise
        return None

    async def _get_to_host(self, part: GetPart) -> int:
        keys, capacities, views, destination, first, verify, _ = part
        target = None if views is None else self._rdma.memory.locate(views, writable=True)
        staging: Staging | None = None
        if target is not None:
            get = RdmaGet(keys, capacities, pack_u64(target.addresses), _one_if_same(target.keys), 0, self.inline_bytes)
        else:
            staging = self._staging()
            place = pack_u64([staging.span.address]), pack_u64([staging.span.key])
            get = RdmaGet(keys, capacities, *place, len(staging), self.inline_bytes)
        reply = expect(RdmaGetReply, await self._channel.ask(get))
        self._channel.holding = bool(reply.lease)
        self._owed = Release(reply.lease) if reply.lease else None
        self._channel.check_reply(get, reply)
        targets = destination(reply.sizes, first)
        if reply.inline:
            await read_payload(self._channel, part.keys, reply, targets, verify=part.verify)
            return len(reply.sizes)
        if staging is None:
            hashes = (await hash_blocks(targets)) if verify else []
        elif reply.lease:
            await self._fetch(reply, staging, targets)
            hashes = (await hash_blocks(targets)) if verify else []
        else:
            sources = staging.views(map(len, targets))
            hashes = await copy_blocks(sources, targets, hash_targets=verify)
        self._works()
        if verify:
            await self._check_hashes(keys, reply, hashes)
        return len(reply.sizes)

    async def _fetch(self, reply: RdmaGetReply, staging: Staging, targets: list[memoryview]) -> None:
        span = Span(targets)
        first = 0
        while span.remaining:
            count = min(len(staging), span.remaining)
            fetch = RdmaFetch(reply.lease, first, count, staging.span.address, staging.span.key)
            expect(CountReply, (await self._channel.ask(fetch)))
            span.copy_in(staging.span.view[:count])
            first += count
            await Pause()
        await self._connection.notify(Release(reply.lease))
        self._channel.holding = False
        self._owed = None

    async def _check_hashes(self, keys: Keys, reply: RdmaGetReply, hashes: list[int]) -> None:
        present = [i for i, size in enumerate(reply.sizes) if size != MISSING]
        pairs = zip(present, hashes, strict=True)
        bad = [keys[i] for i, found in pairs if reply.checksums[i] not in (NO_CHECKSUM, found)]
        if bad:
            await self._channel.report(bad, len(present))

    # Memory of GPUs

    async def _put_from_device(self, part: PutPart) -> list[str]:
        placement = self._locate(part.views)
        try:
            return await self._put_at(part, placement, [])
        except (TransferFailed, DeadlineExceeded) as error:
            if not await self._goes_on_without(error):
                raise
            raise DeviceMemoryUnreachable(f"{error}; nothing was stored") from error

    async def _get_to_device(self, part: GetPart) -> int:
        assert part.views is not None
        target = self._locate(part.views)
        place = pack_u64(target.addresses), _one_if_same(target.keys)
        get = RdmaGet(part.keys, part.capacities, *place, read_back=True)
        try:
            reply = expect(RdmaGetReply, await self._channel.ask(get))
        except (TransferFailed, DeadlineExceeded) as error:
            if not await self._goes_on_without(error):
                raise
            raise DeviceMemoryUnreachable(str(error)) from error
        self._channel.check_reply(get, reply)
        if reply.lease or (reply.inline and set(reply.sizes) != {MISSING}):
            raise ProtocolError("the server did not write to the memory that it was given")
        part.destination(reply.sizes, part.first)
        self._works()
        return len(reply.sizes)

    def _locate(self, views: Sequence[memoryview]) -> Placement:
        placement: Placement | None = self._rdma.device_memory.locate(cast("Sequence[DeviceMemory]", views))
        # it was registered when the call began
        if placement is None:
            raise DeviceMemoryUnreachable("the memory was unregistered")
        return placement

    # The queue pair

    def _works(self) -> None:
        """Note that bytes were moved."""
        self._pause.end()
        self._rdma.pause.end()

    def _staging(self) -> Staging:
        if self._staged is None:
            self._staged = self._rdma.take_staging()
        return self._staged

    async def _goes_on_without(self, error: TransferFailed | DeadlineExceeded | NoRdma) -> bool:
        """Give up RDMA after a failure; False if the call cannot continue without it.

        Then the caller gets the failure. The server's queue pair is destroyed already,
        but what it has sent may still be on the way, and the caller's memory is about
        to be used again: so this side is destroyed first.
        """
        self.close()
        self._channel.holding = True  # so that the next call makes another connection
        if not isinstance(error, NoRdma):  # else it is the device that failed, which has noted that
            self._pause.begin(str(error))
        if isinstance(error, DeadlineExceeded) or (self._rdma.forced and isinstance(error, TransferFailed)):
            return False
        if self._rdma.forced:
            raise TransferFailed(str(error)) from error
        if self._owed is not None:  # for the call that goes on: it may need that room
            await self._connection.notify(self._owed)
            self._owed = None
        return True


def _one_if_same(keys: Sequence[int]) -> Numbers:
    """Return the keys of the blocks' memory to send: a single one if all are equal."""
    return pack_u64(keys[:1] if keys and list(keys).count(keys[0]) == len(keys) else keys)


def _next_views(span: Span, most_bytes: int) -> list[memoryview]:
    """Take views of what comes next, up to so many bytes."""
    views: list[memoryview] = []
    room = min(most_bytes, span.remaining)
    while room:
        some = span.next_views(room)
        count = sum(map(len, some))
        span.advance(count)
        views += some
        room -= count
    return views


class RdmaSource(MoverSource):
    """Makes movers for connections to a server with an RDMA device of the same kind.

    The device is the store's, which closes it: memory is registered with it even where
    no connection moves blocks by it. `pause` is that of the server: where a transfer
    failed, other servers may still be reached by the same device.

    `asked_for` says that the caller named RDMA or a device. Else it is left alone where
    one side has no device.
    """

    name = "rdma"
    needs = Capability.RDMA

    def __init__(self, rdma: StoreRdma, pause: RdmaPause, inline_bytes: int, *, asked_for: bool) -> None:
        self.rdma = rdma
        self.pause = pause
        self._inline_bytes = inline_bytes
        self._asked_for = asked_for

    async def open(self, channel: Channel, stream: Any) -> RdmaMover:
        """Connect a queue pair, and make the mover that uses it."""
        rdma = self.rdma
        if not self._asked_for and not rdma.is_likely(channel.hello):
            raise CannotMove("")
        if not channel.hello.rdma:
            raise CannotMove("no RDMA: the server has no RDMA; its log says why", lasting=True)
        try:
            return await self._connect(channel, stream)
        except NoRdma as error:
            raise CannotMove(f"no RDMA: {error}") from error

    async def _connect(self, channel: Channel, stream: Any) -> RdmaMover:
        rdma = self.rdma
        if not rdma.forced:
            self.pause.check()
        device = rdma.take_device(*_addresses(stream))
        queue = None
        rests = self.pause
        try:
            if device.link != channel.hello.rdma:
                raise NoRdma(f"{device.place} is {device.link}, the server's port is {channel.hello.rdma}")
            rests = rdma.pause
            queue = device.create_queue(serves=False)
            rests = self.pause
            end = queue.endpoint
            request = RdmaConnect(end.queue, end.packet, end.gid, end.lid, end.mtu, end.reads)
            reply = expect(RdmaConnectReply, await channel.ask(request))
            queue.connect(
                Endpoint(reply.queue, reply.packet, reply.gid, reply.lid, reply.mtu, reply.reads),
                dead_after_s=DEAD_AFTER_S,
            )
        except BaseException as error:
            if queue is not None:
                queue.close()
            rdma.release(None)
            if not isinstance(error, NoRdma | TransferFailed):
                raise
            rests.begin(str(error))
            raise NoRdma(str(error)) from error
        mover = RdmaMover(channel, rdma, self.pause, queue, self._inline_bytes)
        mover.place = f"by {device.place}"
        return mover

    @property
    def retry_is_due(self) -> bool:
        """Whether the pause is over, or bytes were moved by another connection."""
        return self.due

    @property
    def due(self) -> bool:
        """Whether a new connection should try it, if it can be had at all."""
        return not self.rdma.pause.resting and not self.pause.resting


def _addresses(stream: Any) -> tuple[Address | None, Address | None]:
    """The addresses of this connection: ours, and the server's."""
    with suppress(OSError, AttributeError):  # closed meanwhile: the next request tells; or simulated
        names = stream.socket.getsockname(), stream.socket.getpeername()
        own, peer = (near_address(name[0]) if isinstance(name, tuple) else None for name in names)
        return own, peer
    return None, None
