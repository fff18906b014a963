"""`open_store` for Trio: the store of a server, of a cluster, and the embedded one.

What goes on after a call does so in system tasks, which end with the store: a nursery
around the caller's `async with` would wrap its errors.

`trio_gather` is what `Together` asks for. An outcome is what a part returned, or a
`KeptError` of an error of this package; any other error ends the others, and is raised.
A part that has a hedge races against the other copies of its blocks. Whoever is
cancelled leaves no part behind.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, Unpack, assert_never, cast

import trio
from trio.lowlevel import in_trio_task

from infinistore.client.api.store import AsyncOpening, AsyncStore
from infinistore.client.cluster.opening import SILENT_AFTER, ask_if_there
from infinistore.client.connection.calls import Attempt
from infinistore.client.connection.effects import (
    Call,
    CallEffect,
    ClusterCall,
    Connect,
    Outcome,
    Part,
    Sleep,
    outcome_of,
)
from infinistore.client.connection.routing import ShardsFound
from infinistore.client.drivers.async_stores import AsyncClusterStore, AsyncEmbeddedStore, AsyncRemoteStore, connected
from infinistore.client.environment import Environment
from infinistore.client.operations.embedded import AwaitDisk, EmbeddedOperations, EmbeddedStore
from infinistore.client.options import StoreUrl, explained, make_options
from infinistore.client.store_options import StoreOptions
from infinistore.client.worker_threads import in_thread
from infinistore.errors import StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.effects import Fill, Pause, Receive, ReceiveDescriptors, Send
from infinistore.protocol.messages import StoreRequest
from infinistore.transports.sockets.trio_streams import SocketStream, connect_tcp, connect_unix

_T = TypeVar("_T")


async def trio_gather(parts: Sequence[Part]) -> list[Outcome]:
    """Carry out parts at the same time, under Trio; return their outcomes in order."""
    if len(parts) == 1:
        return [await _outcome(parts[0])]
    if not parts:
        await trio.lowlevel.checkpoint()
    outcomes: list[Outcome] = [None] * len(parts)

    async def carry_out(place: int, part: Part) -> None:
        outcomes[place] = await _outcome(part)

    async with trio.open_nursery() as nursery:
        for place, part in enumerate(parts):
            nursery.start_soon(carry_out, place, part)
    return outcomes


async def _outcome(part: Part) -> Outcome:
    return await (outcome_of(part) if part.hedge is None else _race(part))


async def _race(part: Part) -> Outcome:
    """Carry out a part that has a hedge. Nothing of it runs on afterwards."""
    hedge = part.hedge
    assert hedge is not None
    first: Outcome | None = None
    others: list[Outcome] | None = None
    unexpected: KeptError | None = None
    asks = False

    async def ask_others() -> None:
        nonlocal asks, others
        await trio.sleep(hedge.after_s)
        if late := hedge.begin():
            asks = True
            others = await trio_gather(late)
            asks = False
            if hedge.is_full(others):
                waiting.cancel()

    async with trio.open_nursery() as nursery:
        waiting = trio.CancelScope()
        nursery.start_soon(ask_others)
        with waiting:
            try:
                first = await outcome_of(part)
            except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it in a group
                unexpected = KeptError(error)
        if not (asks and isinstance(first, KeptError)):
            nursery.cancel_scope.cancel()
    if unexpected is not None:
        raise unexpected.again()
    return hedge.settle(first, others)


class ClusterTrioStore(AsyncClusterStore):
    """Calls to the nodes of a cluster. `make` makes the store of one node.

    What goes on after a call does so in system tasks, which end with the store: a
    nursery around the caller's `async with` would wrap its errors.
    """

    clock = staticmethod(trio.current_time)
    _gather = staticmethod(trio_gather)
    _sleep_for = staticmethod(trio.sleep)

    def __init__(self, *arguments: Any, **shared: Any) -> None:
        self._ended: dict[trio.CancelScope, trio.Event] = {}
        super().__init__(*arguments, **shared)

    async def aclose(self) -> None:
        """Close the store, and wait until what goes on in the background has ended."""
        self.close()
        ended = list(self._ended.values())
        for scope in list(self._ended):
            scope.cancel()
        with trio.CancelScope(shield=True):  # they end at their next checkpoint
            for event in ended:
                await event.wait()

    def _begin(self, work: ClusterCall[None]) -> None:
        trio.lowlevel.spawn_system_task(self._go_on, work, name="infinistore cluster")

    async def _go_on(self, work: ClusterCall[None]) -> None:
        with trio.CancelScope() as scope:
            self._ended[scope] = ended = trio.Event()
            try:
                await self.drive(work)
            finally:
                del self._ended[scope]
                ended.set()


@explained
def open_store(
    url: str | None = None, *, environment: Environment | None = None, **given: Unpack[StoreOptions]
) -> AsyncOpening:
    """Open a store, for Trio: `async with open_store(...) as store`.

    Any number of tasks may share it. Without a URL the store is embedded: the engine
    runs in this process, and the store ends with the block. `StoreOptions` explains the
    arguments. Without Linux, as on macOS, there are embedded stores without disks, and
    TCP; anything else raises ConfigError.

    Raises:
        ConfigError: an option or the URL cannot be used.
        StoreUnavailable: no server answers there. Not with `lazy`.
        AuthenticationFailed: the token is missing or wrong. Not with `lazy`.
        OutOfMemory: no memory for an embedded store.
        RuntimeError: under another library than Trio.
    """
    return AsyncOpening(partial(connect, url, environment=environment, **given))


async def connect(
    url: str | None = None, *, environment: Environment | None = None, **given: Unpack[StoreOptions]
) -> AsyncStore:
    """Open a store as `open_store` does, and return it: `await store.aclose()` closes
    it, under the same run of Trio.
    """
    if not in_trio_task():
        raise RuntimeError(
            "infinistore.open_store is for Trio; under asyncio use infinistore.aio.open_store, without either"
            " infinistore.blocking.open_store"
        )
    address, options = make_options(url, given)
    if address is None:
        return _EmbeddedTrioStore(await in_thread(lambda: EmbeddedStore(options)), options)
    return await connected(address, options, environment, ClusterTrioStore, RemoteTrioStore)


class _EmbeddedTrioStore(AsyncEmbeddedStore):
    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            await super().aclose()

    async def _call(self, request: StoreRequest[_T]) -> _T:
        self.embedded.check_usable()
        await trio.lowlevel.checkpoint()
        operations = EmbeddedOperations(self.embedded, verify=self.verifies)
        exchange = operations.handlers[type(request)](operations, request)
        try:
            while True:
                effect = exchange.send(None)
                if isinstance(effect, AwaitDisk):
                    await _disk(effect)
                else:
                    await trio.lowlevel.checkpoint()
        except StopIteration as stop:
            result: _T = stop.value
            return result
        finally:
            exchange.close()
            operations.close()


async def _disk(effect: AwaitDisk) -> None:
    """Wait until a disk is done, in a thread of the store."""
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def wake(_: object) -> None:
        with suppress(trio.RunFinishedError):  # nobody waits any more
            token.run_sync_soon(done.set)

    effect.done.add_done_callback(wake)
    with trio.move_on_after(math.inf if effect.within_s is None else effect.within_s):
        await done.wait()


class RemoteTrioStore(AsyncRemoteStore[ClusterTrioStore]):
    """Calls to a server."""

    clock = staticmethod(trio.current_time)
    _make_cluster = ClusterTrioStore
    _make_turns = trio.Semaphore

    async def _in_time(self, call: Call[None], attempt: Attempt) -> None:
        with trio.CancelScope(deadline=attempt.deadline):
            return await self._drive(call, attempt)
        raise self.calls.deadline_exceeded(attempt)

    async def _call(self, request: StoreRequest[_T], within_s: float | None = None) -> _T:
        if self._sharded is not None:
            return await self._call_shards(request)
        calls = self.calls
        calls.pool.check_open()
        attempt = calls.attempt(idempotent=request.idempotent, within_s=within_s)
        slots = self.payload_turns if request.moves_blocks else self.lookup_turns
        if request.waits:
            slots = self.waiting_turns
        try:
            with trio.CancelScope(deadline=attempt.deadline):
                await trio.lowlevel.checkpoint_if_cancelled()
                try:
                    slots.acquire_nowait()  # the turn of the others comes with the wait for the answer
                except trio.WouldBlock:
                    await slots.acquire()
                try:
                    return await self._drive(calls.call(request, attempt), attempt)
                finally:
                    slots.release()
        except ShardsFound as found:
            if calls.is_node:
                raise
            self._go_on(found.shards, None)
        else:
            raise calls.deadline_exceeded(attempt)
        return await self._call_shards(request)

    async def _drive(self, call: Call[_T], attempt: Attempt) -> _T:  # noqa: C901, PLR0912  # one dispatch
        """Run a call. A broken stream is raised inside it, so that it can try again.

        Other tasks get their turn: what was just asked is not answered yet.
        """
        result: Any = None
        asked = waited = False
        if self.calls.over_tls is not None:
            call = self.calls.over_tls(call, attempt)
        try:
            effect: CallEffect = call.send(None)
            while True:
                stream: Any = attempt.stream
                try:
                    if isinstance(effect, Receive):
                        result = await stream.receive_into(effect.views)
                        waited = waited or asked
                    elif isinstance(effect, Send):
                        result = await stream.send_all(effect.views)
                        asked = True
                    elif isinstance(effect, Fill):
                        await effect.receive_by(stream.receive_into)
                    elif isinstance(effect, ReceiveDescriptors):
                        result = await stream.receive_descriptors(effect.views, effect.descriptors)
                    elif isinstance(effect, Connect):
                        result = await self._connect(effect.address)
                    elif isinstance(effect, Sleep):
                        await trio.sleep(effect.seconds)
                    elif isinstance(effect, Pause):
                        await trio.lowlevel.checkpoint()
                    else:
                        assert_never(effect)
                except StoreUnavailable as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            call.close()
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def _connect_sockets(self, address: StoreUrl) -> SocketStream:
        patience_s = self.calls.patience_s
        with trio.move_on_after(patience_s):
            if address.path:
                stream = await connect_unix(address.path)
            else:
                stream = await connect_tcp(address.host, address.port, self.calls.dialer)
            if patience_s < math.inf:
                stream.silence_s, stream.ask = SILENT_AFTER * patience_s, partial(ask_if_there, self, patience_s)
            return stream
        raise StoreUnavailable(f"{address} accepts no connection within {patience_s:g} s")
