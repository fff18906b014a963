"""Any sequence of calls to a cluster of three whose nodes drain, leave and come back:
everything that was put is found, and nothing else.

Each value tells its key and its version. The order of values is not promised across a
change of a key's place (docs/promises.md): of a key that was put while nodes drained or
joined, older values may be elsewhere, and a later drain may lead to them.
"""

from contextlib import ExitStack
from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infinistore.cluster.membership import NodeState
from infinistore.server.cluster import Others
from tests.cluster_client.clusters import Cluster, Given, open_given, pass_on, until
from tests.examples import examples

NAMES = [f"{{group {number % 7}}}/{number}" for number in range(28)]
some = st.lists(st.sampled_from(NAMES), unique=True, max_size=12)


class DrainingMachine(RuleBasedStateMachine):
    """Drives a store of a cluster, and drains its nodes as they do themselves."""

    cluster: Cluster

    @initialize()
    def start(self) -> None:
        self.cluster.clear()
        self.closing = ExitStack()
        self.nodes = dict(enumerate(self.cluster.nodes()))
        self.given = Given(list(self.nodes.values()))
        self.store: Any = self.closing.enter_context(open_given(self.given, lazy=True))
        self.model: dict[str, bytes] = {}
        self.left_behind: dict[str, set[bytes]] = {}
        """Older values that nodes may have that drain, or own no more."""
        self.older: dict[str, set[bytes]] = {}
        """Those of them that may be found."""
        self.version = 0

    def teardown(self) -> None:
        self.closing.close()

    def give(self) -> None:
        self.given.give([self.nodes[number] for number in sorted(self.nodes)])

    def those(self, state: NodeState) -> list[int]:
        return [number for number, node in sorted(self.nodes.items()) if node.state is state]

    @rule(names=some, replace=st.booleans())
    def put(self, names: list[str], replace: bool) -> None:
        self.version += 1
        items = {name: f"{name} {self.version}".encode() for name in names}
        if not self.those(NodeState.DRAINING):  # then it may be where a put does not look
            skipped = self.store.put_many(items, replace=replace)
            assert sorted(skipped) == sorted(name for name in names if name in self.model and not replace)
            items = {name: value for name, value in items.items() if name not in skipped}
        else:
            self.store.put_many(items)
        for name in items:
            if self.settled:
                self.older.pop(name, None)
            elif name in self.model:
                self.left_behind.setdefault(name, set()).add(self.model[name])
        self.model.update(items)

    @rule(names=some)
    def delete(self, names: list[str]) -> None:
        assert self.store.delete(names) == sum(name in self.model for name in names)
        for name in names:
            for values in (self.model, self.left_behind, self.older):
                values.pop(name, None)

    @rule(names=some)
    def look_up(self, names: list[str]) -> None:
        there = [name in self.model for name in names]
        assert self.store.exists_many(names) == there
        assert self.store.match_prefix(names) == [*there, False].index(False)

    @invariant()
    def everything_is_found(self) -> None:
        if hasattr(self, "store"):
            found = [value and bytes(value) for value in self.store.get_many(NAMES)]
            for name, value in zip(NAMES, found, strict=True):
                assert value == self.model.get(name) or value in self.older.get(name, ())
            until(lambda: not self.store.calls.counters.warming_bytes)  # a delete meanwhile might come too early

    @property
    def settled(self) -> bool:
        """Whether each key has one place, where a put replaces what is there."""
        return len(self.those(NodeState.SERVING)) == len(self.nodes)

    @property
    def staying(self) -> list[int]:
        return [*self.those(NodeState.SERVING), *self.those(NodeState.JOINING)]

    @precondition(lambda self: len(self.staying) > 1)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        for name, values in self.left_behind.items():
            self.older.setdefault(name, set()).update(values)
        number = data.draw(st.sampled_from(self.staying))
        self.nodes[number] = attrs.evolve(self.nodes[number], state=NodeState.DRAINING)
        self.give()

    @precondition(lambda self: self.those(NodeState.DRAINING))
    @rule(data=st.data(), leaves=st.booleans())
    def pass_on(self, data: st.DataObject, leaves: bool) -> None:
        number = data.draw(st.sampled_from(self.those(NodeState.DRAINING)))
        given: Any = self.given
        pass_on(self.cluster.members[number], Others(given, self.nodes[number].id))
        if leaves:
            del self.nodes[number]
            self.give()
            if self.settled:
                self.left_behind.clear()

    @precondition(lambda self: len(self.nodes) == 2 and len(self.those(NodeState.SERVING)) == 2)
    @rule()
    def come_back(self) -> None:
        (number,) = {0, 1, 2} - self.nodes.keys()
        self.cluster.members[number].look(self.cluster.members[number].core.purge)  # it was started again
        self.nodes[number] = attrs.evolve(self.cluster.nodes()[number], state=NodeState.JOINING)
        self.give()


def test_nothing_is_missing_while_nodes_drain_leave_and_come_back(three: Cluster) -> None:
    machine = type("Machine", (DrainingMachine,), {"cluster": three})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(20), stateful_step_count=20, deadline=None)
    )
