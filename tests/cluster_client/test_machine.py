"""Any sequence of calls to a cluster of three whose nodes vanish and return: nothing
wrong is ever read, and what is on nodes that are there is found.

Each value tells its key and its version.
"""

from contextlib import ExitStack
from typing import Any

import pytest
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

from infinistore.client.extension import Environment
from infinistore.cluster.placement import Placement
from infinistore.errors import PartialPut, StoreUnavailable
from tests.clients.dresses import DRESSES, opened
from tests.clients.event_loops import Loops
from tests.cluster_client.clusters import Cluster, Given
from tests.examples import examples

NAMES = [f"{{group {number % 5}}}/{number}" for number in range(20)]
NOBODY = "infinistore+static://nobody"
some = st.lists(st.sampled_from(NAMES), unique=True, max_size=12)


class ClusterMachine(RuleBasedStateMachine):
    """Drives a store of a cluster, and keeps what each node should have."""

    cluster: Cluster
    loops: Loops
    dress: str

    @initialize()
    def start(self) -> None:
        self.cluster.clear()
        self.closing = ExitStack()
        self.nodes = self.cluster.nodes()
        given = Given(self.nodes)
        environment = Environment(membership=lambda url: given)
        store = opened(self.loops, self.dress, NOBODY, environment=environment, lookup_deadline_s=60, lazy=True)
        self.store = self.closing.enter_context(store)
        self.owner = dict(zip(NAMES, Placement(given.view).owners(NAMES), strict=True))
        self.model: dict[str, bytes] = {}
        self.away: set[int] = set()
        self.unsure: set[int] = set()  # nodes that the store may still take for lost
        self.version = 0

    def teardown(self) -> None:
        self.closing.close()

    def is_away(self, name: str) -> bool:
        return self.owner[name] in self.away

    def expected(self, names: list[str]) -> list[bytes | None]:
        return [None if self.is_away(name) else self.model.get(name) for name in names]

    def check(self, names: list[str], found: list[Any]) -> None:
        for name, value, wanted in zip(names, found, self.expected(names), strict=True):
            if self.owner[name] in self.unsure:
                assert value in (wanted, None)
            else:
                assert value == wanted

    @rule(names=some)
    def put(self, names: list[str]) -> None:
        self.version += 1
        items = {name: f"{name} {self.version}".encode() for name in names}
        stored, missed = names, list[str]()
        try:
            self.store.put_many(items)
        except PartialPut as error:
            stored, missed = error.stored, [*error.failed, *error.unknown]
        assert sorted([*stored, *missed]) == sorted(names)
        assert {self.owner[name] for name in missed} <= self.away | self.unsure
        assert not any(map(self.is_away, stored))
        self.model.update({name: items[name] for name in stored})

    @rule(names=some)
    def get(self, names: list[str]) -> None:
        self.check(names, [value and bytes(value) for value in self.store.get_many(names)])

    @rule(names=some)
    def get_into(self, names: list[str]) -> None:
        buffers = [bytearray(40) for _ in names]
        lengths = self.store.get_many_into(list(zip(names, buffers, strict=True)))
        self.check(names, [length and bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)])

    @rule(names=some)
    def lease(self, names: list[str]) -> None:
        with self.store.lease(names) as views:
            self.check(names, [view and bytes(view) for view in views])

    @rule(names=some)
    def look_up(self, names: list[str]) -> None:
        there = [value is not None for value in self.expected(names)]
        sure = [self.owner[name] not in self.unsure for name in names]
        found = self.store.exists_many(names)
        assert [one for one, known in zip(found, sure, strict=True) if known] == [
            one for one, known in zip(there, sure, strict=True) if known
        ]
        match = self.store.match_prefix(names, hold_s=5)
        assert match <= [*there, False].index(False)
        if all(sure):
            assert match == [*there, False].index(False)
        self.store.release_hold(match.hold)

    @rule(names=some)
    def delete(self, names: list[str]) -> None:
        try:
            assert self.store.delete(names) == sum(name in self.model for name in names)
            assert not any(map(self.is_away, names))
        except StoreUnavailable:
            assert {self.owner[name] for name in names} & (self.away | self.unsure)
        held = [name for name in names if self.owner[name] in self.unsure - self.away]
        present = dict(zip(held, self.look(held), strict=True))  # deleted, or not
        for name in names:
            if not self.is_away(name) and not present.get(name):
                self.model.pop(name, None)

    def look(self, names: list[str]) -> list[bool]:
        stored = [set() if number in self.away else member.keys() for number, member in enumerate(self.cluster.members)]
        return [name in stored[self.owner[name]] for name in names]

    @rule(number=st.integers(0, 2))
    def vanish(self, number: int) -> None:
        if number not in self.away:
            self.cluster.members[number].stop()
            self.away.add(number)
            self.model = {name: value for name, value in self.model.items() if self.owner[name] != number}

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.away)))
        self.cluster.members[number].start()
        self.away.remove(number)
        self.unsure.add(number)

    @invariant()
    def nothing_is_where_it_does_not_belong(self) -> None:
        for number, member in enumerate(self.cluster.members):
            if number not in self.away:
                stored = member.keys()
                assert all(self.owner[name] == number for name in stored)


@pytest.mark.parametrize("dress", DRESSES)
def test_nothing_wrong_is_read_while_nodes_vanish_and_return(three: Cluster, loops: Loops, dress: str) -> None:
    machine = type("Machine", (ClusterMachine,), {"cluster": three, "loops": loops, "dress": dress})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(6), stateful_step_count=25, deadline=None)
    )
