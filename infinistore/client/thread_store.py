"""`open_store` for threads: plain blocking sockets and no event loop."""

import queue
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, cast

from infinistore.client.address import Address
from infinistore.client.blocking_store import BlockingStore
from infinistore.client.embedded import EmbeddedOperations, EmbeddedStore
from infinistore.client.in_place import Kept
from infinistore.client.operations import Operation
from infinistore.client.options import Options, StoreOptions, make_options
from infinistore.client.rdma import ClientRdma
from infinistore.client.registration import Registration
from infinistore.client.remote import LOOKUP_CONNECTIONS, Attempt, Call, Connect, RemoteCalls, Sleep, Use
from infinistore.errors import StoreUnavailable
from infinistore.protocol.effects import Receive, ReceiveDescriptors, Send
from infinistore.transports.blocking_sockets import BlockingSocketStream, connect_tcp, connect_unix
from infinistore.transports.device_memory import DeviceMemory

__all__ = ["RemoteThreadStore", "open_store"]

_T = TypeVar("_T")


@contextmanager
def open_store(url: str | None = None, **given: Unpack[StoreOptions]) -> Generator[BlockingStore, None, None]:
    """Open a store, for threads: `with open_store(...) as store`. Any number of threads may use it at once.

    Arguments and errors are those of `infinistore.open_store`.
    """
    address, options = make_options(url, given)
    if address is None:
        embedded = EmbeddedStore(options)
        try:
            yield _EmbeddedThreadStore(embedded, options)
        finally:
            embedded.close()
        return
    store = RemoteThreadStore(address, options)
    try:
        if not options.lazy:
            store.connect()
        yield store
    finally:
        store.close()


class _EmbeddedThreadStore(BlockingStore):
    def __init__(self, store: EmbeddedStore, options: Options) -> None:
        self._store = store
        self._verify = options.verify == "always"

    def _mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        return self._store.mapped_arenas()

    def _verifies(self) -> bool:
        return self._verify

    def _call(
        self,
        operation: Operation[_T],
        *,
        idempotent: bool = True,
        payload: bool = False,
        pinning: bool = False,
        kept: Kept | None = None,
    ) -> _T:
        operations = EmbeddedOperations(self._store, verify=self._verify)
        exchange = operation(operations)
        try:
            while True:
                next(exchange)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            exchange.close()
            operations.close()


def _slots(count: int) -> "queue.SimpleQueue[None]":
    """Return that many slots. A queue in C: taking and returning one costs a tenth of what a semaphore does."""
    slots: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(count):
        slots.put(None)
    return slots


class RemoteThreadStore(BlockingStore):
    """Calls to a server. Look-ups have connections of their own, and never wait behind blocks.

    It connects when it is first used, or at once by `connect`; whoever makes one calls `close`, from any thread.
    """

    def __init__(self, address: Address, options: Options) -> None:
        self._calls: RemoteCalls[BlockingSocketStream] = RemoteCalls(address, options, time.monotonic)
        self._payload_slots = _slots(options.max_connections)
        self._lookup_slots = _slots(LOOKUP_CONNECTIONS)

    def connect(self) -> None:
        """Make the first connection, without retries: a wrong address or token is known at once."""
        attempt = self._calls.attempt()
        self._drive(self._calls.first(attempt), attempt)

    def close(self) -> None:
        """Close the connections; those of calls under way, when they end. Any number of times."""
        self._calls.close()

    def _mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        return self._calls.mapped_arenas()

    def _verifies(self) -> bool:
        return self._calls.options.verify == "always"

    def _register(self, memory: memoryview | DeviceMemory) -> Registration:
        return self._calls.register(memory)

    def _rdma(self) -> ClientRdma:
        return self._calls.rdma

    def _call(
        self,
        operation: Operation[_T],
        *,
        idempotent: bool = True,
        payload: bool = False,
        pinning: bool = False,
        kept: Kept | None = None,
    ) -> _T:
        attempt = self._calls.attempt(idempotent=idempotent)
        slots = self._payload_slots if payload else self._lookup_slots
        try:
            slots.get(timeout=self._calls.options.deadline_s)
        except queue.Empty:
            raise self._calls.deadline_exceeded(attempt) from None
        try:
            return self._drive(self._calls.call(operation, attempt, pinning=pinning, kept=kept), attempt)
        finally:
            slots.put(None)

    def _drive(self, call: Call[_T], attempt: Attempt) -> _T:
        """Run a call. A broken stream is raised inside it, so that it can try again."""
        stream: Any = None  # a call asks for one before it moves bytes
        result: Any = None
        try:
            effect = next(call)
            while True:
                try:
                    if isinstance(effect, Receive):
                        result = stream.receive_into(effect.views)
                    elif isinstance(effect, Send):
                        stream.send_all(effect.views)
                    elif isinstance(effect, ReceiveDescriptors):
                        result = stream.receive_descriptors(effect.views, effect.descriptors)
                    elif isinstance(effect, Connect):
                        result = stream = self._connect(effect.address, attempt.deadline)
                    elif isinstance(effect, Use):
                        stream = effect.stream
                        stream.deadline = attempt.deadline
                    elif isinstance(effect, Sleep):
                        time.sleep(effect.seconds)
                except StoreUnavailable as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        except TimeoutError:
            raise self._calls.deadline_exceeded(attempt) from None
        finally:
            call.close()

    def _connect(self, address: Address, deadline: float) -> BlockingSocketStream:
        spin_s = self._calls.options.spin_us * 1e-6
        if address.path:
            stream = connect_unix(address.path, deadline, spin_s=spin_s)
        else:
            stream = connect_tcp(address.host, address.port, deadline, spin_s=spin_s)
        stream.deadline = deadline
        return stream
