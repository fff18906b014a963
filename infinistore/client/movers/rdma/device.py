"""RDMA at the client: the device, and the memory that callers register.

The device is opened with the first connection that may use it. Where it fails by
itself, the reason is kept, and it is tried again after a pause that doubles each time.
Meanwhile other paths serve. A server to which a transfer fails has a pause of its own
(`infinistore.client.movers.rdma.source`).
"""

import logging
import threading
from collections.abc import Callable, Sequence

from infinistore.client.memory.buffers import Registration
from infinistore.client.movers.rdma.pause import RdmaPause
from infinistore.client.options import Options
from infinistore.errors import DeviceMemoryUnreachable, LimitExceeded
from infinistore.protocol.messages import HelloReply
from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import DeviceMemory, DeviceSpan, RegisteredDeviceMemory, current_gpu, gpu_place
from infinistore.transports.rdma import opening
from infinistore.transports.rdma.devices import Address, Place, there_is_rdma
from infinistore.transports.rdma.memory import RegisteredMemory, RegisteredSpan, Staging
from infinistore.transports.rdma.verbs import Device, NoRdma

__all__ = ["DEAD_AFTER_S", "StoreRdma", "register"]

_log = logging.getLogger("infinistore.client")
DEAD_AFTER_S = 0.25


class StoreRdma:
    """What all connections of a store share. `forced`: the URL allows no other path.
    Any thread may use it.
    """

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
        """End what `take_device` began, when the queue pair is destroyed; `staging` may
        be used by others then.
        """
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
        """Return why these blocks of GPUs can never be moved by RDMA; None if the
        caller has registered the memory.
        """
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
        """Unregister everything and close the device, when the calls that are under way
        have ended.
        """
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
            device = opening.open_device(name, options.ib_port, None, options.gid_index, near, peer=peer, place=place)
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
