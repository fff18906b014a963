"""`open_store` for Trio."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, Unpack, cast

import trio

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
from infinistore.transports.device_memory import DeviceMemory
from infinistore.transports.sockets import SocketStream, connect_tcp, connect_unix

__all__ = ["open_store"]

_T = TypeVar("_T")


@asynccontextmanager
async def open_store(url: str | None = None, **given: Unpack[StoreOptions]) -> AsyncGenerator[AsyncStore, None]:
    """Open a store, for Trio: `async with open_store(...) as store`.

    Without a URL the store is embedded: the engine runs in this process, and the store ends with the block.

    Args:
        url: `infinistore://HOST:PORT`, `tcp://HOST:PORT` or `unix:///PATH`, with options as in `?deadline_s=5`.
        deadline_s: how long one call may take, in seconds; 30 unless given.
        verify: "always" (the default) makes a checksum of each block written and checks that of each block read;
            "never" does neither.
        token: what the server wants to see; else the file that the URL names by `token_file`, else `INFINISTORE_TOKEN`.
        max_connections: how many connections may carry blocks at a time; 8 unless given. Two more carry look-ups.
        spin_us: how long to wait awake for a quick server before sleeping, in microseconds; 400 unless given, 0 never
            does. (The Trio client always sleeps: other tasks have their turn.)
        inline_bytes: with shared memory, a batch of at most so many bytes goes through the socket all the same: one
            round trip is quicker than two; 65536 unless given.
        copy_threads: with shared memory, how many threads, the caller's included, may copy and hash one batch of 8 MiB
            and more, of blocks of 256 KiB and more on average; 2 unless given, never more than there are cores. The
            others are kept by the store, take numpy, and leave the interpreter's lock free; 1 has the caller alone.
        known_blocks: with shared memory, of how many blocks to remember where they lie, about: what was read or written
            before is read again without asking the server; 65536 unless given, 0 always asks.
        name: what the server's statistics call this client.
        lazy: connect with the first call, not now. A server that is down is then found out by the calls, each of which
            raises `StoreUnavailable` until it is there.
        pool_bytes: embedded only: how much memory the store takes; 256 MiB unless given.
        minimal_allocate_bytes: embedded only: blocks take whole multiples of this; 64 KiB unless given.
        allocator: embedded only: how blocks are placed, by name; "bitmap" unless given.
        huge_pages: embedded only: take huge pages, which the machine must have set aside.

    Raises:
        ConfigError: an option or the URL cannot be used.
        StoreUnavailable: no server answers there; not if `lazy`.
        AuthenticationFailed: the token is missing or wrong; not if `lazy`.
        OutOfMemory: no memory for an embedded store.
    """
    address, options = make_options(url, given)
    if address is None:
        embedded = await trio.to_thread.run_sync(EmbeddedStore, options)
        try:
            yield _EmbeddedTrioStore(embedded, options)
        finally:
            embedded.close()
        return
    store = _RemoteTrioStore(address, options)
    try:
        if not options.lazy:
            await store.connect()
        yield store
    finally:
        store.close()


class _EmbeddedTrioStore(AsyncStore):
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
        await trio.lowlevel.checkpoint()
        operations = EmbeddedOperations(self._store, verify=self._verify)
        exchange = operation(operations)
        try:
            while True:
                next(exchange)
                await trio.lowlevel.checkpoint()
        except StopIteration as stop:
            result: _T = stop.value
            return result
        finally:
            exchange.close()
            operations.close()


class _RemoteTrioStore(AsyncStore):
    """Calls to a server. Look-ups have connections of their own, and never wait behind blocks."""

    def __init__(self, address: Address, options: Options) -> None:
        self._calls: RemoteCalls[SocketStream] = RemoteCalls(address, options, trio.current_time)
        self._payload_slots = trio.Semaphore(options.max_connections)
        self._lookup_slots = trio.Semaphore(LOOKUP_CONNECTIONS)

    async def connect(self) -> None:
        attempt = self._calls.attempt()
        with trio.CancelScope(deadline=attempt.deadline):
            return await self._drive(self._calls.first(attempt))
        raise self._calls.deadline_exceeded(attempt)

    def close(self) -> None:
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
        with trio.CancelScope(deadline=attempt.deadline):
            async with self._payload_slots if payload else self._lookup_slots:
                return await self._drive(self._calls.call(operation, attempt, pinning=pinning, kept=kept))
        raise self._calls.deadline_exceeded(attempt)

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
                        result = await stream.send_all(effect.views)
                    elif isinstance(effect, ReceiveDescriptors):
                        result = await stream.receive_descriptors(effect.views, effect.descriptors)
                    elif isinstance(effect, Connect):
                        result = stream = await _connect(effect.address)
                    elif isinstance(effect, Use):
                        stream = effect.stream
                    elif isinstance(effect, Sleep):
                        await trio.sleep(effect.seconds)
                    elif isinstance(effect, Pause):
                        await trio.lowlevel.checkpoint()
                except StoreUnavailable as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            call.close()


async def _connect(address: Address) -> SocketStream:
    if address.path:
        return await connect_unix(address.path)
    return await connect_tcp(address.host, address.port)
