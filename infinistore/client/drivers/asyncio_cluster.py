"""The store made of stores, for asyncio and uvloop."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar, assert_never, cast

from infinistore.client.api.store import AsyncStore
from infinistore.client.cluster.opening import SILENT_AFTER, ClusterStore, check_there
from infinistore.client.connection.effects import Background, ClusterCall, ClusterEffect, InThread, Sleep, Together
from infinistore.client.drivers.at_once import asyncio_at_once
from infinistore.client.environment import Environment
from infinistore.client.movers.rdma import StoreRdma
from infinistore.client.options import Options, StoreUrl
from infinistore.client.requests import Request
from infinistore.client.worker_threads import in_thread
from infinistore.cluster.locate import ClusterUrl
from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.asyncio_streams import AsyncioSocketStream, connect_tcp, connect_unix
from infinistore.transports.sockets.spin import Spinner

__all__ = ["ClusterAsyncioStore"]

_T = TypeVar("_T")


class ClusterAsyncioStore(ClusterStore, AsyncStore):
    """Calls to the nodes of a cluster, from tasks of any loop. `make` makes the store
    of one node.

    What goes on after a call does so in a task of its loop. Whoever makes a store calls
    `close`, from any thread.
    """

    def __init__(
        self,
        url: ClusterUrl,
        options: Options,
        environment: Environment,
        make: Callable[..., Any],
        *,
        rdma: StoreRdma | None = None,
        shard_ports: tuple[int, ...] | None = None,
    ) -> None:
        self._tasks: dict[asyncio.Task[None], asyncio.AbstractEventLoop] = {}
        super().__init__(
            url, options, environment, make, connect=_connect, clock=time.monotonic, rdma=rdma, shard_ports=shard_ports
        )

    async def connect(self) -> None:
        """Ask all nodes whether they are there; one of them must be."""
        await self.drive(self.calls.check())

    def close(self) -> None:
        """Close the stores of the nodes; their connections when the calls under way
        end. Any number of times.
        """
        self._close_nodes()
        for task, loop in list(self._tasks.items()):
            with suppress(RuntimeError):  # its loop was closed
                loop.call_soon_threadsafe(task.cancel)

    async def ended(self) -> None:
        """Wait until the tasks of this loop have ended, after `close`."""
        mine = [task for task, loop in list(self._tasks.items()) if loop is asyncio.get_running_loop()]
        if mine:
            await asyncio.wait(mine)

    async def _call(self, request: Request[_T]) -> _T:
        return await self.drive(self.calls.call(request))

    async def drive(self, call: ClusterCall[_T]) -> _T:
        """Run a call."""
        result: Any = None
        try:
            effect: ClusterEffect = call.send(None)
            while True:
                if isinstance(effect, Together):
                    result = await asyncio_at_once(effect.parts)
                elif isinstance(effect, Background):
                    task = asyncio.create_task(self.drive(effect.work))
                    self._tasks[task] = asyncio.get_running_loop()
                    task.add_done_callback(self._forget)
                    result = True
                elif isinstance(effect, InThread):
                    await in_thread(effect.work)
                elif isinstance(effect, Sleep):
                    await asyncio.sleep(effect.seconds)
                else:
                    assert_never(effect)
                effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            call.close()

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task, None)


async def _connect(options: Options, store: Callable[[], Any], url: StoreUrl) -> AsyncioSocketStream:
    spinner = Spinner(options.spin_us)
    patience_s = options.lookup_deadline_s
    try:
        async with asyncio.timeout(patience_s):
            if url.path:
                found = await connect_unix(url.path, spinner)
            else:
                found = await connect_tcp(url.host, url.port, spinner, store().calls.dialer)
    except TimeoutError:
        raise StoreUnavailable(f"{url} accepts no connection within {patience_s:g} s") from None
    return _PatientStream(found.socket, spinner, store, patience_s)


class _PatientStream(AsyncioSocketStream):
    """A stream that makes sure from time to time that the other end is there, while it
    waits for it.
    """

    def __init__(self, sock: socket.socket, spinner: Spinner, store: Callable[[], Any], patience_s: float) -> None:
        super().__init__(sock, spinner)
        self._store = store
        self._ping_s = patience_s
        self._patience_s = SILENT_AFTER * patience_s

    async def _readable(self, sock: socket.socket) -> None:
        await self._patiently(super()._readable, sock)

    async def _writable(self, sock: socket.socket) -> None:
        await self._patiently(super()._writable, sock)

    async def _patiently(self, wait: Callable[[socket.socket], Awaitable[None]], sock: socket.socket) -> None:
        while True:
            try:
                async with asyncio.timeout(self._patience_s):
                    return await wait(sock)
            except TimeoutError:
                pass
            await check_there(self._store(), self._ping_s)
