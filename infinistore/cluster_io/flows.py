"""Runs the flows of `infinistore.cluster.etcd` on Trio."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

import trio

from infinistore.cluster.etcd.gateway import EtcdMisbehaved
from infinistore.cluster.etcd.session import (
    Effect,
    EtcdUnavailable,
    Exchange,
    Flow,
    NextLine,
    OpenStream,
    Pause,
    Probe,
)
from infinistore.cluster.membership import Node
from infinistore.cluster_io.connections import EtcdConnections

__all__ = ["AskInstance", "FlowRunner"]

_T = TypeVar("_T")
_ASK_AGAIN_S: Final = 0.2
"""After that, a node is asked by another connection, too: if the first packet of one is
lost, it is sent again only after a second."""

AskInstance: TypeAlias = Callable[[Node], Awaitable[str]]
"""Returns the instance of the server at a node's address; empty if none answers."""


class FlowRunner:
    """Runs one flow at a time over its own connections."""

    def __init__(self, connections: EtcdConnections, *, ask_instance: AskInstance) -> None:
        self._connections = connections
        self._ask_instance = ask_instance
        self._wake = trio.Event()

    def wake(self) -> None:
        """End the flow's pause, or its next one."""
        self._wake.set()

    async def run(self, flow: Flow[_T]) -> _T:
        """Run a flow to its end, and return its result."""
        try:
            effect = flow.send(None)
            while True:
                try:
                    result = await self._carry_out(effect)
                except (EtcdUnavailable, EtcdMisbehaved) as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as stop:
            done: _T = stop.value
            return done
        finally:
            flow.close()
            await self._connections.close()

    async def _carry_out(self, effect: Effect) -> object:
        match effect:
            case Exchange():
                return await self._connections.exchange(effect)
            case OpenStream():
                await self._connections.open_stream(effect)
            case NextLine():
                return await self._connections.next_line(effect.timeout_s)
            case Probe():
                return await self._probe(effect)
            case Pause():
                with trio.move_on_after(effect.seconds):
                    await self._wake.wait()
                    self._wake = trio.Event()
        return None

    async def _probe(self, effect: Probe) -> frozenset[str]:
        answered: set[str] = set()

        async def ask(node: Node) -> None:
            async def once() -> None:
                if await self._ask_instance(node) == node.instance:
                    answered.add(node.id)
                asking.cancel_scope.cancel()

            async with trio.open_nursery() as asking:
                asking.start_soon(once)
                await trio.sleep(_ASK_AGAIN_S)
                asking.start_soon(once)

        with trio.move_on_after(effect.timeout_s):
            async with trio.open_nursery() as nursery:
                for node in effect.nodes:
                    nursery.start_soon(ask, node)
        return frozenset(answered)
