"""`open_store` for asyncio and uvloop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, Unpack, cast

from infinistore.client.address import Address
from infinistore.client.async_store import AsyncStore
from infinistore.client.embedded import EmbeddedOperations, EmbeddedStore
from infinistore.client.in_place import Kept
from infinistore.client.operations import Operation
from infinistore.client.options import Options, StoreOptions, make_options
from infinistore.client.rdma import ClientRdma
from infinistore.client.registration import Registration
from infinistore.client.remote import LOOKUP_CONNECTIONS, Call, Connect, RemoteCalls, Sleep, Use
from infinistore.errors import StoreUnavailable
from infinistore.protocol.effects import Pause, Receive, ReceiveDescriptors, Send
from infinistore.transports.asyncio_sockets import AsyncioSocketStream, connect_tcp, connect_unix
from infinistore.transports.device_memory import DeviceMemory
from infinistore.transports.spin import Spinner

__all__ = ["RemoteAsyncioStore", "open_store"]

_T = TypeVar("_T")


@asynccontextmanager
async def open_store(url: str | None = None, **given: Unpack[StoreOptions]) -> AsyncGenerator[AsyncStore, None]:
    """Open a store, for asyncio: `async with open_store(...) as store`.

    Any number of tasks may use it at once, in the loop that opened it or in another one, in another thread. Arguments
    and errors are those of `infinistore.open_store`.
    """
    address, options = make_options(url, given)
    if address is None:
        # Taking the memory of the pool takes a moment, and leaves no thread behind when it is cancelled.
        embedded = EmbeddedStore(options)
        try:
            yield _EmbeddedAsyncioStore(embedded, options)
        finally:
            embedded.close()
        return
    store = RemoteAsyncioStore(address, options)
    try:
        if not options.lazy:
            await store.connect()
        yield store
    finally:
        store.close()


class _EmbeddedAsyncioStore(AsyncStore):
    def __init__(self, store: EmbeddedStore, options: Options) -> None:
        self._store = store
        self._verify = options.verify == "always"

    async def _call(
        self,
        operation: Operation[_T],
        *,
        idempotent: bool = True,
        payload: bool = False,
        pinning: bool = False,
        kept: Kept | None = None,
    ) -> _T:
        self._store.check_usable()
        await asyncio.sleep(0)
        operations = EmbeddedOperations(self._store, verify=self._verify)
        exchange = operation(operations)
        try:
            while True:
                next(exchange)
                await asyncio.sleep(0)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            exchange.close()
            operations.close()


class RemoteAsyncioStore(AsyncStore):
    """Calls to a server. Look-ups have connections of their own, and never wait behind blocks.

    It connects when it is first used, or at once by `connect`; whoever makes one calls `close`, from any thread.
    """

    def __init__(self, address: Address, options: Options) -> None:
        self._calls: RemoteCalls[AsyncioSocketStream] = RemoteCalls(address, options, time.monotonic)
        self._payload_slots = _Slots(options.max_connections)
        self._lookup_slots = _Slots(LOOKUP_CONNECTIONS)

    async def connect(self) -> None:
        """Make the first connection, without retries: a wrong address or token is known at once."""
        attempt = self._calls.attempt()
        try:
            async with asyncio.timeout(self._calls.options.deadline_s):
                await self._drive(self._calls.first(attempt))
        except TimeoutError:
            raise self._calls.deadline_exceeded(attempt) from None

    def close(self) -> None:
        """Close the connections; those of calls under way, when they end. Any number of times."""
        self._calls.close()

    def _register(self, memory: memoryview | DeviceMemory) -> Registration:
        return self._calls.register(memory)

    def _rdma(self) -> ClientRdma:
        return self._calls.rdma

    async def _call(
        self,
        operation: Operation[_T],
        *,
        idempotent: bool = True,
        payload: bool = False,
        pinning: bool = False,
        kept: Kept | None = None,
    ) -> _T:
        self._calls.check_open()
        attempt = self._calls.attempt(idempotent=idempotent)
        slots = self._payload_slots if payload else self._lookup_slots
        try:
            async with asyncio.timeout(self._calls.options.deadline_s), slots:
                return await self._drive(self._calls.call(operation, attempt, pinning=pinning, kept=kept))
        except TimeoutError:
            raise self._calls.deadline_exceeded(attempt) from None

    async def _drive(self, call: Call[_T]) -> _T:
        """Run a call. A broken stream is raised inside it, so that it can try again."""
        stream: Any = None  # a call asks for one before it moves bytes
        result: Any = None
        try:
            effect = next(call)
            while True:
                try:
                    if isinstance(effect, Receive):
                        result = await stream.receive_into(effect.views)
                    elif isinstance(effect, Send):
                        await stream.send_all(effect.views)
                    elif isinstance(effect, ReceiveDescriptors):
                        result = await stream.receive_descriptors(effect.views, effect.descriptors)
                    elif isinstance(effect, Connect):
                        result = stream = await self._connect(effect.address)
                    elif isinstance(effect, Use):
                        stream = effect.stream
                    elif isinstance(effect, Sleep):
                        await asyncio.sleep(effect.seconds)
                    elif isinstance(effect, Pause):
                        await asyncio.sleep(0)
                except StoreUnavailable as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            call.close()

    async def _connect(self, address: Address) -> AsyncioSocketStream:
        spinner = Spinner(self._calls.options.spin_us * 1e-6)
        if address.path:
            return await connect_unix(address.path, spinner)
        return await connect_tcp(address.host, address.port, spinner)


class _Slots:
    """So many at a time; the others wait in line. Like `asyncio.Semaphore`, but for tasks of any loop and thread."""

    def __init__(self, free: int) -> None:
        self._lock = threading.Lock()
        self._free = free
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            loop = asyncio.get_running_loop()
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._leave_line(loop, turn)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._hand_on()

    def _leave_line(self, loop: asyncio.AbstractEventLoop, turn: "asyncio.Future[None]") -> None:
        with self._lock:
            waited = (loop, turn) in self._waiting
            if waited:
                self._waiting.remove((loop, turn))
        if not waited:  # the slot was on its way to the one who leaves
            self._hand_on()

    def _hand_on(self) -> None:
        """Give the slot to the first in line, or put it back. A loop that has been closed since is passed over."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                loop, turn = self._waiting.popleft()
            try:
                loop.call_soon_threadsafe(_set, turn)
            except RuntimeError:
                continue
            return


def _set(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
