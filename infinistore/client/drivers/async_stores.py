"""What the stores for Trio and for asyncio have in common."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, assert_never, cast

from infinistore.client.api.store import AsyncStore
from infinistore.client.cluster.opening import ClusterStore, RemoteStore
from infinistore.client.connection.calls import Attempt
from infinistore.client.connection.effects import (
    Background,
    Call,
    ClusterCall,
    ClusterEffect,
    InThread,
    Outcome,
    Part,
    Sleep,
    Together,
)
from infinistore.client.connection.routing import ShardsFound
from infinistore.client.environment import Environment
from infinistore.client.operations.embedded import EmbeddedStore
from infinistore.client.options import Options, StoreUrl
from infinistore.client.worker_threads import in_thread
from infinistore.cluster.locate import ClusterUrl
from infinistore.protocol.messages import StoreRequest

_T = TypeVar("_T")


class AsyncClusterStore(ClusterStore, AsyncStore):
    """Calls to the nodes of a cluster. `make` makes the store of one node."""

    _gather: Callable[[Sequence[Part]], Awaitable[list[Outcome]]]
    _sleep_for: Callable[[float], Awaitable[None]]

    async def connect(self) -> None:
        """Ask all nodes whether they are there; one of them must be."""
        await self.drive(self.calls.check())

    @abstractmethod
    async def aclose(self) -> None:
        """Close the store, and wait until what goes on in the background has ended."""

    @abstractmethod
    def _begin(self, work: ClusterCall[None]) -> None:
        """Run a call in the background."""

    async def _call(self, request: StoreRequest[_T]) -> _T:
        return await self.drive(self.calls.call(request))

    async def drive(self, call: ClusterCall[_T]) -> _T:
        """Run a call."""
        result: Any = None
        try:
            effect: ClusterEffect = call.send(None)
            while True:
                if isinstance(effect, Together):
                    result = await self._gather(effect.parts)
                elif isinstance(effect, Background):
                    self._begin(effect.work)
                    result = True
                elif isinstance(effect, InThread):
                    await in_thread(effect.work)
                elif isinstance(effect, Sleep):
                    await self._sleep_for(effect.seconds)
                else:
                    assert_never(effect)
                effect = call.send(result)
        except StopIteration as stop:
            return cast("_T", stop.value)
        finally:
            call.close()


_Cluster = TypeVar("_Cluster", bound=AsyncClusterStore)


class AsyncRemoteStore(RemoteStore[_Cluster], AsyncStore):
    """Calls to a server. It connects when it is first used, or at once by `connect`."""

    async def connect(self) -> None:
        """Connect now, without retries: a wrong address or token is known at once."""
        attempt = self.calls.attempt()
        try:
            await self._in_time(self.calls.first(attempt), attempt)
        except ShardsFound as found:
            sharded = self._go_on(found.shards, None)
        else:
            return
        if sharded is not None:
            await sharded.connect()

    @abstractmethod
    async def _in_time(self, call: Call[None], attempt: Attempt) -> None:
        """Run a call; raise `DeadlineExceeded` if its time is over before its end."""

    async def aclose(self) -> None:
        """Close the store, and wait until what goes on in the background has ended."""
        self.close()
        if self._sharded is not None:
            await self._sharded.aclose()

    async def _call_shards(self, request: StoreRequest[_T]) -> _T:
        while (sharded := self._sharded) is not None:
            try:
                return await sharded._call(request)
            except ShardsFound as found:
                self._go_on(found.shards, sharded)
        return await self._call(request)


async def connected(
    address: StoreUrl | ClusterUrl,
    options: Options,
    environment: Environment | None,
    cluster: type[AsyncClusterStore],
    remote: type[AsyncRemoteStore[Any]],
) -> AsyncStore:
    """Return the store at an address, connected unless it is to be lazy."""
    store: AsyncClusterStore | AsyncRemoteStore[Any]
    if isinstance(address, ClusterUrl):
        store = cluster(address, options, environment or Environment(), remote)
    else:
        store = remote(address, options, environment)
    try:
        if not options.lazy:
            await store.connect()
    except BaseException:
        await store.aclose()
        raise
    return store


class AsyncEmbeddedStore(AsyncStore):
    """Calls to a store in this process."""

    def __init__(self, store: EmbeddedStore, options: Options) -> None:
        self.embedded = store
        """The engine."""
        self.verifies = options.verify == "always"

    async def aclose(self) -> None:
        """Close the store."""
        if self.embedded.disks is None:
            self.embedded.close()
        else:  # which takes a while
            await in_thread(self.embedded.close)

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the pool."""
        return self.embedded.mapped_arenas()
