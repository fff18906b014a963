"""The acts of a cluster: one node is killed, and another one joins.

1. The node that has the middle of prompt A is killed. What it had is missing, nothing
   else, and no call fails: decode loads the prefix up to the first hole.
2. When the membership has dropped the node, prefill computes what is missing. The other
   nodes take it.
3. A node joins. While it warms up, decode reads what it now owns from the nodes that
   had it before, and copies it: nothing is computed again.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio
from attrs import frozen

import infinistore
from infinistore.demo.display import Display
from infinistore.demo.layout import KVLayout, block_keys, chunk_names
from infinistore.demo.messages import DemoError, Finished, Job
from infinistore.demo.own_cluster import OwnCluster
from infinistore.demo.processes import WorkerProcess
from infinistore.demo.result import JoinResult, LossResult, NodesResult
from infinistore.demo.text import Prompt
from infinistore.demo.watching import watched

if TYPE_CHECKING:
    from infinistore.client import AsyncStore
    from infinistore.statistics import NodeStatistics

__all__ = ["ClusterActs", "wait_for_view"]

_CHECK_S: Final = 0.05
_VIEW_S: Final = 60.0
WARM_UP_S: Final = 5.0


@frozen
class ClusterActs:
    """Those who play, and who shows it. `store` is the router's own connection."""

    cluster: OwnCluster
    store: "AsyncStore"
    layout: KVLayout
    prefill: WorkerProcess
    decode: WorkerProcess
    display: Display

    async def play(self, prompts: Sequence[Prompt]) -> NodesResult:
        """Play it after `prompts` were stored.

        Raises `DemoError` if a node that was not killed misses a block, or a byte is
        wrong.
        """
        first = prompts[0]
        keys = self._keys([first])
        all_keys = self._keys(prompts)
        nodes = len(self.cluster.nodes)
        owners = await self._owners(all_keys)
        self.display.spread(owners)
        async with watched(self.store, self.display):
            loss = await self._lose(first, keys, owners)
            join = await self._join(first, all_keys)
        return NodesResult(nodes, "etcd" if self.cluster.has_etcd else "file", loss, join)

    async def _lose(self, prompt: Prompt, keys: list[str], owners: dict[str, set[str]]) -> LossResult:
        middle = keys[len(keys) // 2]
        victim = next((name for name, theirs in owners.items() if middle in theirs), next(iter(owners)))
        self.display.act("A node is lost", f"{victim}, which has the middle of prompt {prompt.name}, is killed")
        await self.cluster.kill(victim)
        killed_at = trio.current_time()
        self.display.clear()
        decoded = await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=True))
        found = await self.store.exists_many(keys)
        missing = {key for key, is_there in zip(keys, found, strict=True) if not is_there}
        if missing != set(keys) & owners[victim]:
            wrong = len(missing ^ (set(keys) & owners[victim]))
            raise DemoError(f"{wrong:,} blocks are missing that {victim} did not have, or there although it had them")
        self.display.lost(prompt.name, victim, len(keys), len(missing))
        if not self.cluster.has_etcd:
            self.cluster.forget(victim)
        await wait_for_view(self.store, lambda nodes: all(node.id != victim for node in nodes))
        out_s = trio.current_time() - killed_at
        self.display.dropped(victim, out_s, by_lease=self.cluster.has_etcd)
        again = await self.prefill.run(Job(prompt.name, prompt.tokens))
        whole = await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=again.unstored_blocks > 0))
        return LossResult(victim, len(keys), len(missing), out_s, decoded, again, whole)

    async def _join(self, prompt: Prompt, keys: list[str]) -> JoinResult:
        share = f"its share of the keys grows for {WARM_UP_S:.0f} s" if self.cluster.has_etcd else "it gets its share"
        self.display.act("A node joins", f"{share}, while decode reads")
        newcomer = await self.cluster.start_node(warm_up_s=WARM_UP_S)
        await wait_for_view(self.store, lambda nodes: any(node.id == newcomer for node in nodes))
        reads: list[Finished] = []
        if not self.cluster.has_etcd:
            reads.append(await self._read_quietly(prompt))
            reads.append(await self._read_quietly(prompt))
        while await _state_of(self.store, newcomer) == "joining" and self.cluster.has_etcd:
            reads.append(await self._read_quietly(prompt))
        if not self.cluster.has_etcd:
            self.cluster.set_warm(newcomer)
            await wait_for_view(self.store, lambda nodes: all(node.state == "serving" for node in nodes))
        self.display.warmed(prompt.name, reads)
        owners = await self._owners(keys)
        moved = len(owners[newcomer])
        self.display.moved(newcomer, moved, len(keys))
        self.display.clear()
        decoded = await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=True))
        return JoinResult(newcomer, len(keys), moved, reads, decoded)

    async def _read_quietly(self, prompt: Prompt) -> Finished:
        with self.display.muted():
            return await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=True))

    async def _owners(self, keys: Sequence[str]) -> dict[str, set[str]]:
        """Ask each node by itself which of the keys it has."""
        found: dict[str, set[str]] = {}
        for name, server in self.cluster.nodes.items():
            async with infinistore.open_store(server.url) as store:
                there = await store.exists_many(list(keys))
            found[name] = {key for key, is_there in zip(keys, there, strict=True) if is_there}
        return found

    def _keys(self, prompts: Sequence[Prompt]) -> list[str]:
        names = (chunk_names(self.layout, prompt.tokens) for prompt in prompts)
        return list(dict.fromkeys(key for some in names for key in block_keys(self.layout, some)))


async def wait_for_view(store: "AsyncStore", is_right: "Callable[[Sequence[NodeStatistics]], bool]") -> None:
    """Wait until the nodes of the view are as wanted.

    Raises `DemoError` if they are not in time.
    """
    with trio.move_on_after(_VIEW_S):
        while True:
            if is_right(await _nodes(store)):
                return
            await trio.sleep(_CHECK_S)
    raise DemoError(f"the cluster did not become what it should be within {_VIEW_S:.0f} s; is this machine very busy?")


async def _nodes(store: "AsyncStore") -> "Sequence[NodeStatistics]":
    cluster = (await store.stats()).cluster
    return [] if cluster is None else cluster.nodes


async def _state_of(store: "AsyncStore", name: str) -> str:
    return next((node.state for node in await _nodes(store) if node.id == name), "")
