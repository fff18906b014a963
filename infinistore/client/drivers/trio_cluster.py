"""The store made of stores, for Trio."""

import math
from collections.abc import Callable
from typing import Any, TypeVar, assert_never, cast

import trio

from infinistore.client.api.store import AsyncStore
from infinistore.client.cluster.opening import SILENT_AFTER, ClusterStore, check_there
from infinistore.client.connection.effects import Background, ClusterCall, ClusterEffect, InThread, Sleep, Together
from infinistore.client.drivers.at_once import trio_at_once
from infinistore.client.environment import Environment
from infinistore.client.movers.rdma import StoreRdma
from infinistore.client.options import Options, StoreUrl
from infinistore.client.requests import Request
from infinistore.client.worker_threads import in_thread
from infinistore.cluster.locate import ClusterUrl
from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.trio_streams import SocketStream, connect_tcp, connect_unix

__all__ = ["ClusterTrioStore"]

_T = TypeVar("_T")


class ClusterTrioStore(ClusterStore, AsyncStore):
    """Calls to the nodes of a cluster. `make` makes the store of one node.

    What goes on after a call does so in system tasks, which end with the store: a
    nursery around the caller's `async with` would wrap its errors.
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
        self._ended: dict[trio.CancelScope, trio.Event] = {}
        super().__init__(
            url,
            options,
            environment,
            make,
            connect=_connect,
            clock=trio.current_time,
            rdma=rdma,
            shard_ports=shard_ports,
        )

    async def connect(self) -> None:
        """Ask all nodes whether they are there; one of them must be."""
        await self.drive(self.calls.check())

    async def aclose(self) -> None:
        """Close the store, and wait until what goes on in the background has ended."""
        self.close()
        ended = list(self._ended.values())
        for scope in list(self._ended):
            scope.cancel()
        with trio.CancelScope(shield=True):  # they end at their next checkpoint
            for event in ended:
                await event.wait()

    def close(self) -> None:
        """Close the stores of the nodes; their connections when the calls under way
        end.
        """
        self._close_nodes()

    async def _call(self, request: Request[_T]) -> _T:
        return await self.drive(self.calls.call(request))

    async def drive(self, call: ClusterCall[_T]) -> _T:
        """Run a call."""
        result: Any = None
        try:
            effect: ClusterEffect = call.send(None)
            while True:
                if isinstance(effect, Together):
                    result = await trio_at_once(effect.parts)
                elif isinstance(effect, Background):
                    trio.lowlevel.spawn_system_task(self._go_on, effect.work, name="infinistore cluster")
                    result = True
                elif isinstance(effect, InThread):
                    await in_thread(effect.work)
                elif isinstance(effect, Sleep):
                    await trio.sleep(effect.seconds)
                else:
                    assert_never(effect)
                effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            call.close()

    async def _go_on(self, work: ClusterCall[None]) -> None:
        with trio.CancelScope() as scope:
            self._ended[scope] = ended = trio.Event()
            try:
                await self.drive(work)
            finally:
                del self._ended[scope]
                ended.set()


async def _connect(options: Options, store: Callable[[], Any], url: StoreUrl) -> SocketStream:
    patience_s = options.lookup_deadline_s
    with trio.move_on_after(patience_s):
        connecting = connect_unix(url.path) if url.path else connect_tcp(url.host, url.port, store().calls.dialer)
        stream = await connecting
        return _PatientStream(stream.socket, store, patience_s)
    raise StoreUnavailable(f"{url} accepts no connection within {patience_s:g} s")


class _PatientStream(SocketStream):
    """A stream that makes sure from time to time that the other end is there, while it
    waits for it.
    """

    def __init__(self, sock: Any, store: Callable[[], Any], patience_s: float) -> None:
        super().__init__(sock)
        self._store = store
        self._ping_s = patience_s
        self._patience_s = SILENT_AFTER * patience_s

    async def _wait(self, until_ready: Any, deadline: float = math.inf) -> None:
        while True:
            try:
                return await super()._wait(until_ready, min(deadline, trio.current_time() + self._patience_s))
            except TimeoutError:
                if trio.current_time() >= deadline:
                    raise
            await check_there(self._store(), self._ping_s)
