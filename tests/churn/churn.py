"""One run: servers come, go and change while clients use the cluster. Then all is
quiet, and it is measured what one more node, and one less, changes.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import attrs

from infinistore.client.requests import Batch, Get, Put
from infinistore.cluster.membership import Node, NodeState
from infinistore.cluster.placement import Placement
from infinistore.errors import StoreUnavailable
from infinistore.protocol.messages import Delete, Exists, Keys, MatchPrefix
from tests.churn.world import ChurnWorld, Client

__all__ = ["Outcome", "Settings", "run"]

_QUIET_S = 75.0
"""In this time every client has read all of etcd again, several times."""
_LEASE_S = 10.0
_STEPS = 5
_SIGMAS = 5.0
"""How far a count of keys may be from what is expected, for it is a count."""
_GROUP = 8
_GROUPS = 6


@attrs.frozen
class Settings:
    """How large a run is."""

    seed: int
    nodes: int
    clients: int
    events: int
    copies: int
    most_delay_s: float
    keys: int = 6000
    """How many keys movement and balance are measured with."""

    @classmethod
    def choose(cls, seed: int, nodes: int | None = None) -> "Settings":
        """Choose everything from a seed."""
        chance = random.Random(f"{seed}/settings")
        chosen = chance.choice([3, 8, 8, 30, 100, 300, 1000])
        return cls(
            seed,
            nodes or chosen,
            clients=chance.choice([2, 4, 6]),
            events=chance.choice([10, 20, 40]),
            copies=chance.choice([1, 1, 2]),
            most_delay_s=chance.choice([0.01, 1.0, 8.0]),
        )


@attrs.define
class Outcome:
    """What a run came to."""

    settings: Settings
    problems: list[str] = attrs.field(factory=list)
    calls: int = 0
    views: int = 0
    """How many views clients have heard of, together."""
    events: Counter[str] = attrs.field(factory=Counter)
    moved: float = 0.0
    """The share of the keys that moved to one more node, times the number of nodes."""
    balance: float = 0.0
    """Keys of the node with most, relative to its share."""
    usable: float = 0.0
    """The mean part of a prefix that is there after one node was lost."""


def run(settings: Settings) -> Outcome:
    """Run what these settings say."""
    made = _Run(settings)
    try:
        return made.run()
    finally:
        made.world.close()


class _Run:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.outcome = Outcome(settings)
        self.world = ChurnWorld(
            settings.seed, clients=settings.clients, most_delay_s=settings.most_delay_s, copies=settings.copies
        )
        self.random = self.world.generator("churn")
        self.versions: Counter[str] = Counter()
        self._is_over = False
        self._prompts = itertools.count()

    def run(self) -> Outcome:
        world = self.world
        for _ in range(self.settings.nodes):
            world.write(world.add())
        for client in world.clients:
            client.listen()
        self._quiet()
        for client in world.clients:
            self._work_on(client)
        for _ in range(self.settings.events):
            self._event()
            world.timeline.run(self.random.choice([0.1, 2.0, 15.0]) * self.random.random())
        self._is_over = True
        world.etcd.away.clear()
        world.write_again()
        self._quiet()
        self._check_agreement()
        self._measure_join()
        self._measure_balance()
        self._measure_loss()
        self.outcome.views = sum(client.views for client in world.clients)
        return self.outcome

    def _quiet(self) -> None:
        self.world.timeline.run(_QUIET_S)

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(f"{self.world.timeline.now:.3f} s: {text}")

    # What happens

    def _up(self) -> list[Node]:
        return list(self.world.written.values())

    def _event(self) -> None:
        events: list[Callable[[], None]] = [self._join] * 3 + [self._drain] * 2 + [self._kill] * 2 + [self._start_again]
        events += [self._weigh, self._lose_a_third, self._forget_a_third, self._lose_etcd]
        events += [self._empty_etcd, self._cut_watches, self._compact]
        event = self.random.choice(events)
        self.outcome.events[event.__name__.strip("_").replace("_", " ")] += 1
        event()

    def _join(self) -> None:
        node = self.world.add(self.random.choice([50, 100, 100, 200]))
        for step in range(1, _STEPS + 1):
            joining = attrs.evolve(node, state=NodeState.JOINING, weight=max(1, node.weight * step // _STEPS))
            self._soon(2.0 * (step - 1), node, partial(self.world.write, joining), first=step == 1)
        self._soon(2.0 * _STEPS, node, partial(self.world.write, node))

    def _soon(self, seconds: float, node: Node, act: Callable[[], None], *, first: bool = False) -> None:
        """Let a node do something after a while, if it is still there then."""

        def do() -> None:
            standing = self.world.written.get(node.id)
            if first or (standing is not None and standing.instance == node.instance):
                act()

        self.world.timeline.after(seconds, do)

    def _drain(self) -> None:
        node = self.random.choice(self._up())
        if len(self._up()) > 2 and node.state is NodeState.SERVING:
            self.world.write(attrs.evolve(node, state=NodeState.DRAINING))
            self._soon(5.0, node, partial(self._end, node, 0.0))

    def _kill(self) -> None:
        if len(self._up()) > 2:
            self._end(self.random.choice(self._up()), _LEASE_S * self.random.random())

    def _end(self, node: Node, erased_after_s: float) -> None:
        del self.world.written[node.id]
        self.world.servers[node.address].end()
        self.world.timeline.after(erased_after_s, lambda: self._erase(node))

    def _erase(self, *nodes: Node) -> None:
        """Let leases of nodes end, unless there are newer ones."""
        self.world.erase(*(node.id for node in nodes if node.id not in self.world.written))

    def _start_again(self) -> None:
        """A server dies and comes back where it was, with nothing."""
        node = self.random.choice(self._up())
        again = self.world.start(node.id, node.address.partition("://")[2], weight=node.weight)
        self.world.write(again)

    def _weigh(self) -> None:
        node = self.random.choice(self._up())
        if node.state is NodeState.SERVING:
            self.world.write(attrs.evolve(node, weight=self.random.choice([10, 100, 100, 300])))

    def _third(self) -> list[Node]:
        return self.random.sample(self._up(), len(self._up()) // 3)

    def _lose_a_third(self) -> None:
        lost = self._third()
        if len(lost) > 20:  # it may happen several times
            lost = lost[: -(-len(lost) // 2)]
        for node in lost:
            del self.world.written[node.id]
            self.world.servers[node.address].end()
        self.world.timeline.after(_LEASE_S, lambda: self._erase(*lost))

    def _forget_a_third(self) -> None:
        """The leases of a third end, and the servers are there: they say so, later."""
        self.world.erase(*(node.id for node in self._third()))
        self.world.timeline.after(1.0 + _LEASE_S * self.random.random(), self.world.write_again)

    def _lose_etcd(self) -> None:
        self.world.etcd.away.add(0)

        def back() -> None:
            self.world.etcd.away.clear()
            self.world.write_again()

        self.world.timeline.after(60.0 * self.random.random(), back)

    def _empty_etcd(self) -> None:
        self.world.restart_etcd(empty=True)
        self.world.timeline.after(_LEASE_S * self.random.random(), self.world.write_again)

    def _cut_watches(self) -> None:
        self.world.cut_watches()

    def _compact(self) -> None:
        self.world.etcd.compact()
        self.world.cut_watches()

    # What clients do

    def _work_on(self, client: Client) -> None:
        if not self._is_over:
            self._work(client)
            self.world.timeline.after(0.5 * self.random.random(), partial(self._work_on, client))

    def _work(self, client: Client) -> None:
        self.outcome.calls += 1
        keys = self._prompt(self.random.randrange(20))
        match self.random.randrange(5):
            case 0 | 1:
                self._put(client, keys)
            case 2:
                self._get(client, self.random.sample(keys, self.random.randint(1, len(keys))))
            case 3:
                self._match(client, keys)
            case _:
                with suppress(StoreUnavailable):
                    client.call(Delete(Keys(self.random.sample(keys, 3))))

    def _prompt(self, number: int) -> list[str]:
        """Return the keys of a prompt, in groups with one tag each."""
        return [f"{{{number}/{group}}}/{block}" for group in range(_GROUPS) for block in range(_GROUP)]

    def _put(self, client: Client, keys: Sequence[str]) -> None:
        self.versions.update(keys)
        values = [memoryview(f"{key}@{self.versions[key]};".encode()) for key in keys]
        with suppress(StoreUnavailable):
            client.call(Put(Batch(list(keys), values)))

    def _get(self, client: Client, keys: Sequence[str]) -> int:
        """Read keys, and return how many are there."""
        found = client.call(Get(list(keys)))
        for key, value in zip(keys, found, strict=True):
            if value is not None:
                name, _, version = bytes(value).decode().removesuffix(";").rpartition("@")
                if name != key or not 1 <= int(version) <= self.versions[key]:
                    self._problem(f"{client.name} read {bytes(value)!r} under {key}")
        return sum(value is not None for value in found)

    def _match(self, client: Client, keys: Sequence[str]) -> int:
        """Match a prefix, which nothing can change meanwhile; return its length."""
        matched: int = client.call(MatchPrefix(Keys(list(keys)))).matched
        there = client.call(Exists(Keys(list(keys))))
        if matched != [*there, False].index(False):
            self._problem(f"{client.name} matched {matched} of {list(zip(keys, there, strict=True))}")
        return matched

    # What must hold

    def _check_agreement(self) -> None:
        """Every client believes what etcd says, and places keys alike."""
        standing = {node.id: node for node in self._up()}
        sample = [f"key {number}" for number in range(200)]
        expected: list[str] | None = None
        for client in self.world.clients:
            view = client.view
            heard = {node.id: attrs.evolve(node, generation=0) for node in view.nodes}
            if heard != standing:
                wrong = {
                    node_id for node_id in heard.keys() | standing.keys() if heard.get(node_id) != standing.get(node_id)
                }
                self._problem(f"{client.name} is wrong about {len(wrong)} nodes: {sorted(wrong)[:3]}")
                continue
            owners = self._owners(client, sample)
            anew = Placement(view)
            if owners != [view.nodes[index].id for index in anew.owners(sample)]:
                self._problem(f"{client.name} places keys otherwise than one that starts now")
            if expected is not None and owners != expected:
                self._problem(f"{client.name} places keys otherwise than others")
            expected = owners

    def _owners(self, client: Client, keys: Sequence[str]) -> list[str]:
        used = client.nodes.begin()
        try:
            return [used.view.nodes[index].id for index in used.placement.owners(keys)]
        finally:
            client.nodes.end(used)

    def _measure_join(self) -> None:
        """One more node takes its share of the keys, and no other key moves."""
        keys = [f"{self.settings.seed}/{number}" for number in range(self.settings.keys)]
        client = self.world.clients[0]
        before = self._owners(client, keys)
        total = sum(node.weight for node in self._up())
        node = self.world.add()
        self.world.write(node)
        self._quiet()
        after = self._owners(client, keys)
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        self.outcome.moved = len(moved) / len(keys) * (total + node.weight) / node.weight
        if set(moved) - {node.id}:
            self._problem(f"{node.id} joined, and keys moved to others: {sorted(set(moved) - {node.id})[:5]}")
        expected = len(keys) * node.weight / (total + node.weight)
        if len(moved) > 1.1 * expected + _SIGMAS * expected**0.5:
            self._problem(f"{node.id} joined, and {len(moved)} keys moved instead of {expected:.0f}")

    def _measure_balance(self) -> None:
        """Each node has its share of the keys."""
        keys = [f"{self.settings.seed}/{number}" for number in range(self.settings.keys)]
        counts = Counter(self._owners(self.world.clients[-1], keys))
        total = sum(node.weight for node in self._up())
        for node in self._up():
            expected = len(keys) * node.weight / total
            self.outcome.balance = max(self.outcome.balance, counts[node.id] / expected)
            if abs(counts[node.id] - expected) > 0.05 * expected + _SIGMAS * expected**0.5 + 3:
                self._problem(f"{node.id} has {counts[node.id]} keys instead of {expected:.0f}")

    def _measure_loss(self) -> None:
        """What other nodes have is found after one is lost, before and after clients
        hear of it; with copies, everything is.
        """
        writer = self.world.clients[0]
        prompts = [self._prompt(1000 + number) for number in range(10)]
        for keys in prompts:
            self._put(writer, keys)
        for client in self.world.clients:
            for keys in prompts:
                if self._get(client, keys) != len(keys) or self._match(client, keys) != len(keys):
                    self._problem(f"{client.name} does not find what {writer.name} has put")
        lost = self._owners(writer, prompts[0][-1:])[0]
        usable = [self._usable(keys, lost) for keys in prompts]
        self.outcome.usable = sum(usable) / sum(map(len, prompts))
        self._end(self.world.written[lost], _LEASE_S)
        for when in ("before", "after"):
            for client in self.world.clients:
                for keys, expected in zip(prompts, usable, strict=True):
                    for _ in range(2):  # a node is lost after two failures
                        client.call(Exists(Keys(keys)))
                    if self._match(client, keys) != expected:
                        self._problem(f"{client.name} cannot use {expected} of a prefix {when} it heard of a loss")
                    self._get(client, keys)
            self._quiet()

    def _usable(self, keys: Sequence[str], lost: str) -> int:
        if self.settings.copies > 1:
            return len(keys)
        owners = self._owners(self.world.clients[0], keys)
        return [*owners, lost].index(lost)
