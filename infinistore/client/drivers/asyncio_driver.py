"""`open_store` for asyncio and uvloop: the store of a server, of a cluster, and the
embedded one.

`asyncio_gather` is what `Together` asks for, with the outcomes of `trio_gather`.
"""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, Unpack, assert_never, cast

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
from infinistore.errors import StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.effects import Fill, Pause, Receive, ReceiveDescriptors, Send
from infinistore.protocol.messages import StoreRequest
from infinistore.transports.sockets.asyncio_streams import AsyncioSocketStream, connect_tcp, connect_unix
from infinistore.transports.sockets.spin import Spinner

_T = TypeVar("_T")


async def asyncio_gather(parts: Sequence[Part]) -> list[Outcome]:
    """Carry out parts at the same time; return their outcomes in order."""
    if len(parts) == 1:
        return [await _outcome(parts[0])]
    if not parts:
        await asyncio.sleep(0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_outcome(part)) for part in parts]
    return [task.result() for task in tasks]


async def _outcome(part: Part) -> Outcome:
    return await (outcome_of(part) if part.hedge is None else _race(part))


async def _race(part: Part) -> Outcome:
    """Carry out a part that has a hedge. Nothing of it runs on afterwards."""
    hedge = part.hedge
    assert hedge is not None
    loop = asyncio.get_running_loop()
    waiting = asyncio.timeout(None)
    attempts: list[asyncio.Task[list[Outcome]]] = []

    async def ask(late: Sequence[Part]) -> list[Outcome]:
        found = await asyncio_gather(late)
        if hedge.is_full(found) and not over:
            waiting.reschedule(loop.time())
        return found

    def begin() -> None:
        if late := hedge.begin():
            attempts.append(loop.create_task(ask(late)))

    over = False
    first: Outcome | None = None
    timer = loop.call_later(hedge.after_s, begin)
    try:
        try:
            async with waiting:
                try:
                    first = await outcome_of(part)
                finally:
                    over = True
        except TimeoutError:
            if not waiting.expired():
                raise
        timer.cancel()
        late = attempts[0] if attempts else None
        others = None
        if late is not None and (late.done() or isinstance(first, KeptError)):
            others = await late
    finally:
        timer.cancel()
        for task in attempts:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # which is raised where its answer is wanted
    return hedge.settle(first, others)


class ClusterAsyncioStore(AsyncClusterStore):
    """Calls to the nodes of a cluster, from tasks of any loop. `make` makes the store
    of one node.

    What goes on after a call does so in a task of its loop. Whoever makes a store calls
    `close`, from any thread.
    """

    clock = staticmethod(time.monotonic)
    _gather = staticmethod(asyncio_gather)
    _sleep_for = staticmethod(asyncio.sleep)

    def __init__(self, *arguments: Any, **shared: Any) -> None:
        self._tasks: dict[asyncio.Task[None], asyncio.AbstractEventLoop] = {}
        super().__init__(*arguments, **shared)

    def close(self) -> None:
        """Close the stores of the nodes; their connections when their calls end."""
        super().close()
        for task, loop in list(self._tasks.items()):
            with suppress(RuntimeError):  # its loop was closed
                loop.call_soon_threadsafe(task.cancel)

    async def aclose(self) -> None:
        """Close the store, and wait until the tasks of this loop have ended."""
        self.close()
        mine = [task for task, loop in list(self._tasks.items()) if loop is asyncio.get_running_loop()]
        if mine:
            await asyncio.wait(mine)

    def _begin(self, work: ClusterCall[None]) -> None:
        task = asyncio.create_task(self.drive(work))
        self._tasks[task] = asyncio.get_running_loop()
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)


_LOOK_AGAIN_S = 1.0
"""A loop that is closed with a slot on its way tells nobody."""


@explained
def open_store(
    url: str | None = None, *, environment: Environment | None = None, **given: Unpack[StoreOptions]
) -> AsyncOpening:
    """Open a store, for asyncio: `async with open_store(...) as store`.

    Any number of tasks may share it, in the loop that opened it or in another one, in
    another thread. Without a URL the store is embedded: the engine runs in this
    process, and the store ends with the block. `StoreOptions` explains the arguments.
    Without Linux, as on macOS, there are embedded stores without disks, and TCP;
    anything else raises ConfigError.

    Raises:
        ConfigError: an option or the URL cannot be used.
        StoreUnavailable: no server answers there. Not with `lazy`.
        AuthenticationFailed: the token is missing or wrong. Not with `lazy`.
        OutOfMemory: no memory for an embedded store.
        RuntimeError: under another library than asyncio.
    """
    return AsyncOpening(partial(connect, url, environment=environment, **given))


async def connect(
    url: str | None = None, *, environment: Environment | None = None, **given: Unpack[StoreOptions]
) -> AsyncStore:
    """Open a store as `open_store` does, and return it: `await store.aclose()` closes
    it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("infinistore.aio is for asyncio; under Trio use infinistore.open_store") from None
    address, options = make_options(url, given)
    if address is None:
        # Taking the memory of the pool takes a moment, and leaves no thread behind when
        # it is cancelled.
        return _EmbeddedAsyncioStore(EmbeddedStore(options), options)
    return await connected(address, options, environment, ClusterAsyncioStore, RemoteAsyncioStore)


class _EmbeddedAsyncioStore(AsyncEmbeddedStore):
    async def _call(self, request: StoreRequest[_T]) -> _T:
        self.embedded.check_usable()
        await asyncio.sleep(0)
        operations = EmbeddedOperations(self.embedded, verify=self.verifies)
        exchange = operations.handlers[type(request)](operations, request)
        try:
            while True:
                effect = exchange.send(None)
                if isinstance(effect, AwaitDisk):
                    await asyncio.wait([asyncio.wrap_future(effect.done)], timeout=effect.within_s)
                else:
                    await asyncio.sleep(0)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            exchange.close()
            operations.close()


class RemoteAsyncioStore(AsyncRemoteStore[ClusterAsyncioStore]):
    """Calls to a server. Whoever makes one calls `close`, from any thread."""

    clock = staticmethod(time.monotonic)
    _make_cluster = ClusterAsyncioStore
    _owes_a_turn = False

    @staticmethod
    def _make_turns(free: int) -> "Slots":
        return Slots(free)

    async def _in_time(self, call: Call[None], attempt: Attempt) -> None:
        try:
            async with asyncio.timeout(self.calls.options.deadline_s):
                await self._drive(call, attempt)
        except TimeoutError:
            raise self.calls.deadline_exceeded(attempt) from None

    async def _call(self, request: StoreRequest[_T], within_s: float | None = None) -> _T:
        if self._sharded is not None:
            return await self._call_shards(request)
        self.calls.pool.check_open()
        attempt = self.calls.attempt(idempotent=request.idempotent, within_s=within_s)
        limit_s = self.calls.options.deadline_s if within_s is None else within_s
        slots = self.payload_turns if request.moves_blocks else self.lookup_turns
        if request.waits:
            slots = self.waiting_turns
        if self._owes_a_turn:  # and now, when nothing is lost if this is cancelled
            self._owes_a_turn = False
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(limit_s), slots:
                return await self._drive(self.calls.call(request, attempt), attempt)
        except ShardsFound as found:
            if self.calls.is_node:
                raise
            self._go_on(found.shards, None)
        except TimeoutError:
            raise self.calls.deadline_exceeded(attempt) from None
        return await self._call_shards(request)

    async def _drive(self, call: Call[_T], attempt: Attempt) -> _T:  # noqa: C901, PLR0912  # one dispatch
        """Run a call. A broken stream is raised inside it, so that it can try again."""
        stream: Any = None
        result: Any = None
        if self.calls.over_tls is not None:
            call = self.calls.over_tls(call, attempt)
        try:
            effect: CallEffect = call.send(None)
            while True:
                if attempt.stream is not stream:
                    stream = attempt.stream
                    stream.waited = False
                try:
                    if isinstance(effect, Receive):
                        result = await stream.receive_into(effect.views)
                    elif isinstance(effect, Send):
                        await stream.send_all(effect.views)
                    elif isinstance(effect, Fill):
                        await effect.receive_by(stream.receive_into)
                    elif isinstance(effect, ReceiveDescriptors):
                        result = await stream.receive_descriptors(effect.views, effect.descriptors)
                    elif isinstance(effect, Connect):
                        result = await self._connect(effect.address)
                    elif isinstance(effect, Sleep):
                        await asyncio.sleep(effect.seconds)
                    elif isinstance(effect, Pause):
                        await asyncio.sleep(0)
                    else:
                        assert_never(effect)
                except StoreUnavailable as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            self._owes_a_turn = stream is None or not stream.waited  # it was quick, and nobody else had theirs
            call.close()

    async def _connect_sockets(self, address: StoreUrl) -> AsyncioSocketStream:
        spinner = Spinner(self.calls.options.spin_us)
        patience_s = self.calls.patience_s
        try:
            async with asyncio.timeout(None if patience_s == math.inf else patience_s):
                if address.path:
                    stream = await connect_unix(address.path, spinner)
                else:
                    stream = await connect_tcp(address.host, address.port, spinner, self.calls.dialer)
        except TimeoutError:
            raise StoreUnavailable(f"{address} accepts no connection within {patience_s:g} s") from None
        if patience_s < math.inf:
            stream.silence_s, stream.ask = SILENT_AFTER * patience_s, partial(ask_if_there, self, patience_s)
        return stream


class Slots:
    """A semaphore with `free` slots for tasks of any loop and thread, first in first
    out.

    A waiting task checks every `look_again_s` seconds for slots that were handed to a
    loop that has been closed.
    """

    def __init__(self, free: int, look_again_s: float = _LOOK_AGAIN_S) -> None:
        self._look_again_s = look_again_s
        self._lock = threading.Lock()
        self.free = free
        """How many more may go at once."""
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._on_the_way: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}  # told, and perhaps never resumed

    async def __aenter__(self) -> None:
        if self._on_the_way:
            self._take_back()
        with self._lock:
            if self.free:
                self.free -= 1
                return
            loop = asyncio.get_running_loop()
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting[turn] = loop
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=self._look_again_s)
                self._take_back()
        except BaseException:  # cancelled; or nobody will go on with this
            self._leave_line(turn)
            raise
        self._on_the_way.pop(turn, None)

    async def __aexit__(self, *_: object) -> None:
        self._hand_on()

    def _leave_line(self, turn: asyncio.Future[None]) -> None:
        with self._lock:
            waited = self._waiting.pop(turn, None) is not None
        if not waited and self._on_the_way.pop(turn, None) is not None:  # the slot was for the one who leaves
            self._hand_on()

    def _take_back(self) -> None:
        """Hand on the slots that were on their way to loops that were closed."""
        for turn, loop in list(self._on_the_way.items()):
            if loop.is_closed() and self._on_the_way.pop(turn, None) is not None:
                self._hand_on()

    def _hand_on(self) -> None:
        """Give the slot to the first in line whose loop is open, or put it back."""
        while True:
            with self._lock:
                if not self._waiting:
                    self.free += 1
                    return
                turn = next(iter(self._waiting))
                loop = self._on_the_way[turn] = self._waiting.pop(turn)
            try:
                loop.call_soon_threadsafe(_set, turn)
            except RuntimeError:
                if self._on_the_way.pop(turn, None) is None:  # somebody else has taken it back
                    return
                continue
            return


def _set(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
