"""Copies from node to node and what deletes keys meanwhile, in any order: once a
deletion has returned, no key comes back.

The calls are those of a cluster's store, on real stores without servers. Each request
to a node is one step, and Hypothesis chooses which step is next.
"""

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.first_fit_allocator import FirstFitAllocator
from infinistore.blocking import PASSES_WHILE_BLOCKS_MOVE
from infinistore.client import requests
from infinistore.client.cluster.calls import ClusterCalls
from infinistore.client.cluster.everywhere import HANDLERS
from infinistore.client.cluster.nodes import Nodes
from infinistore.client.connection.effects import Background, Outcome, Part, Together
from infinistore.client.options import Options
from infinistore.cluster.membership import Node, NodeState
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.core.limits import CoreLimits
from infinistore.protocol import messages
from infinistore.server.cluster import Others
from tests.cluster_client.clusters import Given
from tests.examples import examples

JOINING, SERVING, DRAINING = NodeState
KEYS = [f"prefix/{number}" for number in range(3)]
UNIT_BYTES = 64
Work = Coroutine[Any, Any, object]


class NodeCore:
    """A node: a store without a server, as far as the calls of a cluster use it."""

    def __init__(self) -> None:
        self.calls = SimpleNamespace(breaker=SimpleNamespace(open_until=None, failures=0))
        pool = Pool(FirstFitAllocator(UNIT_BYTES))
        pool.add_arena(create_arena(0, 4096))
        self.core = StoreCore(pool, clock=lambda: 0.0, limits=CoreLimits(), random=Random(1))
        self.client = self.core.open_client("test")

    def close(self) -> None:
        """It is closed with its pool."""

    def put(self, keys: Sequence[str], since: int = 0) -> list[str]:
        reservation = self.core.reserve(self.client, [UNIT_BYTES] * len(keys))
        skipped = self.core.commit(reservation, keys, None, replace=False, since=since)
        return [keys[position] for position in skipped]

    def get(self, keys: Sequence[str]) -> list[bytearray | None]:
        lease = self.core.lease(self.client, keys)
        try:
            return [None if view is None else bytearray(view) for view in lease.views]
        finally:
            self.core.release(lease)

    def answer(self, request: Any) -> Outcome:
        core = self.core
        match request:
            case messages.Exists(keys):
                return messages.Found(map(bool, core.exists(keys)))
            case requests.Get(keys):
                return self.get(keys)
            case messages.TimesLeft(keys):
                return [0 if there else None for there in core.exists(keys)]
            case requests.Put(batch, since=since):
                return self.put(batch.keys, since)
            case messages.Mark(ends_earlier):
                return core.deletions.mark(ends_earlier=ends_earlier)
            case messages.Delete(keys):
                return core.delete(keys)
            case messages.Purge():
                return core.purge()
            case messages.ListKeys(prefix, after, limit):
                return core.keys(prefix, limit, after)
            case _:
                raise NotImplementedError(request)


class Steps:
    """Work that is under way. A step carries out one request to one node, or begins
    work."""

    def __init__(self) -> None:
        self.next: list[Callable[[], object]] = []
        self._begun: list[Work] = []

    def begin(self, work: Work) -> None:
        self._begun.append(work)
        self.next.append(lambda: self._go_on(work, None))

    def take(self, random: Random) -> None:
        self.next.pop(random.randrange(len(self.next)))()

    def close(self) -> None:
        for work in self._begun:
            work.close()

    def _go_on(self, work: Work, result: object) -> None:
        try:
            effect = work.send(result)
            while isinstance(effect, Background):
                self.begin(effect.work)
                effect = work.send(True)
        except StopIteration:
            return
        assert isinstance(effect, Together)
        outcomes: list[Outcome] = [None] * len(effect.parts)
        left = len(outcomes)

        def carry_out(place: int, part: Part) -> None:
            nonlocal left
            outcomes[place] = part.store.answer(part.request)
            left -= 1
            if not left:
                self._go_on(work, outcomes)

        self.next += [partial(carry_out, place, part) for place, part in enumerate(effect.parts)]
        if not effect.parts:
            self.next.append(lambda: self._go_on(work, []))


class Moving:
    """A cluster whose nodes have these states, with stores that see all of it."""

    def __init__(self, states: Sequence[NodeState], copies: int) -> None:
        ids = [chr(97 + number) for number in range(len(states))]
        self.nodes = {name: NodeCore() for name in ids}
        self.given = Given(
            [Node(name, f"infinistore://{name}:1", state=state) for name, state in zip(ids, states, strict=True)],
            copies=copies,
        )
        self.steps = Steps()
        self.deleted = False

    def calls(self, membership: Any) -> ClusterCalls:
        nodes: Nodes[Any] = Nodes(membership, lambda url, instance: self.nodes[url.host])
        return ClusterCalls(nodes, HANDLERS, Options(hedged_reads=False), lambda: 0.0)

    async def read(self) -> None:
        await self.calls(self.given).call(requests.Get(KEYS))

    async def pass_on(self, name: str) -> None:
        """Do as a draining node does."""
        given: Any = self.given
        others = Others(given, name)
        calls = self.calls(others)
        names = [key for key, is_ours in zip(KEYS, others.has_place(KEYS), strict=True) if is_ours]
        for _ in range(2):  # what was refused is tried again
            marks = await calls.call(requests.Marks(names))
            found = await Together([Part(self.nodes[name], requests.Get(names))])
            there = [(key, memoryview(value)) for key, value in zip(names, found[0], strict=True) if value]
            if there:
                await calls.call(requests.Copy(requests.Batch(*map(list, zip(*there, strict=True))), marks))

    async def evict(self, name: str, key: str) -> None:
        self.nodes[name].core.evict_keys([key])

    async def delete(self) -> None:
        await self.calls(self.given).call(messages.Delete(messages.Keys(KEYS)))
        self.deleted = True

    async def purge(self) -> None:
        await self.calls(self.given).call(messages.Purge())
        self.deleted = True

    async def delete_by_prefix(self) -> None:
        calls = self.calls(self.given)
        for _ in range(PASSES_WHILE_BLOCKS_MOVE):
            await calls.call(requests.EndCopies())
            if keys := await calls.call(requests.ListKeysOfEveryNode("prefix/", limit=100)):
                await calls.call(messages.Delete(messages.Keys(keys)))
        self.deleted = True

    def there(self) -> dict[str, list[str]]:
        return {name: keys for name, node in self.nodes.items() if (keys := node.core.all_keys())}

    def run(self, random: Random) -> None:
        while self.steps.next:
            self.steps.take(random)
            if self.deleted:
                assert self.there() == {}

    def close(self) -> None:
        self.steps.close()
        for node in self.nodes.values():
            node.core.close_client(node.client)
            node.core.pool.close()


@pytest.mark.parametrize("delete", [Moving.delete, Moving.purge, Moving.delete_by_prefix])
@settings(max_examples=examples(300), deadline=None)
@given(
    states=st.lists(st.sampled_from(NodeState), min_size=2, max_size=4).filter(
        lambda states: states.count(DRAINING) < len(states) > states.count(SERVING)
    ),
    copies=st.integers(1, 2),
    data=st.data(),
    random=st.randoms(use_true_random=False),
)
def test_no_copy_brings_a_key_back(
    delete: Callable[[Moving], Work],
    states: list[NodeState],
    copies: int,
    data: st.DataObject,
    random: Random,
) -> None:
    moving = Moving(states, copies)
    try:
        for key in KEYS:
            # Also where it does not belong any more: a former owner may have it still.
            for name in data.draw(st.sets(st.sampled_from(list(moving.nodes)))):
                moving.nodes[name].put([key])
        for _ in range(data.draw(st.integers(0, 4))):
            moving.steps.begin(moving.read())
        for name, state in zip(moving.nodes, states, strict=True):
            if state is DRAINING:
                moving.steps.begin(moving.pass_on(name))
        for name in moving.nodes:
            for key in data.draw(st.lists(st.sampled_from(KEYS), max_size=2)):
                moving.steps.begin(moving.evict(name, key))
        moving.steps.begin(delete(moving))
        moving.run(random)
        assert moving.deleted
    finally:
        moving.close()
