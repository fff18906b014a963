"""Hedged reads: when a node is late, the other copies are asked, within a budget."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from infinistore.client.cluster.calls import Budget
from infinistore.client.cluster.nodes import AnswerTimes
from infinistore.client.cluster.reads import Hedge, hedges_for
from infinistore.client.requests import (
    Batch,
    Get,
    GetInto,
    Lease,
)
from infinistore.errors import ChecksumMismatch, PartialPut, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Exists
from tests.bad_days.clients import KINDS, run_with_store
from tests.clients.stores import damage
from tests.cluster_client.clusters import PATIENT, Cluster, Member
from tests.cluster_client.silent_network import Network, run_in_virtual_time

NAMES = [f"key {number}" for number in range(120)]
"""Half of them are enough that each node owns some, wherever it listens."""
BLOCKS = {name: name.encode() * 100 for name in NAMES}
BY_REQUESTS = ["transport=inline", "known_blocks=0&inline_bytes=0"]
"""Ways to read that ask the server each time: inline, and over shared memory."""


def spoil(member: Member, names: Sequence[str]) -> None:
    """Damage what a server has of these blocks."""
    member.look(partial(damage, member.core, *member.keys() & set(names)))


async def learn(store: Any) -> None:
    """Read often enough that the client knows how long answers take."""
    await store.put_many(BLOCKS)
    for _ in range(10):
        assert await store.get_many(NAMES) == list(BLOCKS.values())
        assert await store.exists_many(NAMES) == [True] * len(NAMES)
        buffers = [bytearray(len(block)) for block in BLOCKS.values()]
        await store.get_many_into(list(zip(NAMES, buffers, strict=True)))
        async with store.lease(NAMES) as views:
            assert views == list(BLOCKS.values())
    hurry(store)


class Plenty(Budget):
    """A budget that lasts: on a busy machine, nodes that are there are late, too, and
    would spend it.
    """

    def spend(self, count: int) -> bool:
        return True


def hurry(store: Any) -> None:
    """Have whatever is late hedged, and soon, however slow the machine has been."""
    calls = getattr(store, "wrapped", store).calls
    calls.budget = Plenty()
    for node in calls.nodes.begin().nodes:
        node.answers = AnswerTimes()
        for kind in (Exists, Get, GetInto, Lease):
            node.answers.note(kind, len(NAMES), 0.001)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", BY_REQUESTS)
def test_reads_do_not_wait_for_a_silent_node_where_there_is_another_copy(kind: str, way: str, three: Cluster) -> None:
    async def body(store: Any) -> None:
        await learn(store)
        before = (await store.stats()).cluster
        three.members[0].silence()
        try:
            buffers = [bytearray(len(block) + 1) for block in BLOCKS.values()]
            lengths = await store.get_many_into(list(zip(NAMES, buffers, strict=True)))
            assert lengths == [len(block) for block in BLOCKS.values()]
            assert [bytes(buffer[:-1]) for buffer in buffers] == list(BLOCKS.values())
            hurry(store)
            assert await store.get_many(NAMES[:60]) == list(BLOCKS.values())[:60]
            hurry(store)
            assert await store.exists_many(NAMES[:60]) == [True] * 60
            hurry(store)
            async with store.lease(NAMES[60:]) as views:
                assert views == list(BLOCKS.values())[60:]
            for buffer in buffers:
                buffer[:] = bytes(len(buffer))
        finally:
            three.members[0].wake()
        for _ in range(5):  # what the node says now, nobody listens to
            assert await store.get_many(NAMES) == list(BLOCKS.values())
        assert not any(any(buffer) for buffer in buffers)
        after = (await store.stats()).cluster
        assert after.hedges >= before.hedges + 4
        assert after.hedges_won >= before.hedges_won + 4
        assert after.lost_reads == 0

    run_with_store(kind, three.url("copies=2", way), body, **PATIENT)
    for member in three.members:
        member.wait_until_quiet()


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_node_is_asked_whether_it_is_there(kind: str, three: Cluster) -> None:
    async def body(store: Any) -> None:
        with suppress(PartialPut):  # on a busy machine, others may be late, too
            await store.put_many(BLOCKS)
        three.members[0].silence()
        found = await store.get_many(NAMES)
        assert all(value in (None, BLOCKS[name]) for name, value in zip(NAMES, found, strict=True))
        while not any(node.problem for node in (await store.stats()).cluster.nodes):
            pass

    try:
        run_with_store(kind, three.url("copies=2", "transport=inline"), body, deadline_s=600.0, lazy=True)
    finally:
        three.members[0].wake()


def test_without_the_option_nobody_else_is_asked() -> None:
    async def body(store: Any, network: Network) -> None:
        await learn(store)
        network.silent.add("a")
        begun = trio.current_time()
        assert await store.get_many(NAMES) == list(BLOCKS.values())
        assert trio.current_time() - begun == 1.0  # half of the deadline is for the other copy
        assert (await store.stats()).cluster.hedges == 0

    run_in_virtual_time(body, copies=2, hedged_reads=False, deadline_s=2.0)


def test_where_both_copies_are_silent_a_read_ends_when_the_nodes_are_lost() -> None:
    async def body(store: Any, network: Network) -> None:
        await learn(store)
        network.silent.update("ab")
        there = network.keys("c")
        begun = trio.current_time()
        wanted = [BLOCKS[name] if name in there else None for name in NAMES]
        assert await store.get_many(NAMES) == wanted
        assert await store.exists_many(NAMES) == [name in there for name in NAMES]
        assert trio.current_time() - begun <= 4.0

    run_in_virtual_time(body, copies=2, deadline_s=2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_one_node_has_damaged_is_read_from_the_other_copy(kind: str, three: Cluster) -> None:
    async def body(store: Any) -> None:
        await store.put_many(BLOCKS)
        spoil(three.members[0], NAMES)
        assert await store.get_many(NAMES) == list(BLOCKS.values())
        await store.put_many(BLOCKS)
        for member in three.members:
            spoil(member, NAMES[:1])
        with pytest.raises(ChecksumMismatch):
            await store.get_many(NAMES)

    run_with_store(kind, three.url("copies=2", "known_blocks=0"), body, **PATIENT)


def test_at_most_one_key_in_twenty_is_asked_for_again() -> None:
    budget = Budget()
    while budget.spend(1):
        pass
    again = 0
    for _ in range(1000):
        budget.earn(10)
        again += 10 * budget.spend(10)
    assert 400 <= again <= 510  # 5 % of 10,000, and what one may be in debt


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=100))
def test_the_budget_holds_whatever_the_batches(steps: list[tuple[int, int]]) -> None:
    budget = Budget()
    asked = again = largest = 0
    for earned, wanted in steps:
        budget.earn(earned)
        asked += earned
        if budget.spend(wanted):
            again += wanted
            largest = max(largest, wanted)
    assert again <= 64 + asked / 20 + largest


@given(st.lists(st.floats(0.0001, 10.0), min_size=1, max_size=50))
def test_an_answer_is_late_after_more_than_the_usual_time_and_less_than_everything(times: list[float]) -> None:
    answers = AnswerTimes()
    assert answers.late_s(Get, 5) is None
    for seconds in times:
        answers.note(Get, 5, seconds)
    late = answers.late_s(Get, 7)  # of about the same size
    assert late is not None
    assert min(times) * 0.999 <= answers.usual_s(Get, 5) <= late
    assert late <= max(times) * 5.001
    assert answers.late_s(Get, 1) == late  # nothing is known of one key, and it takes no longer
    assert answers.late_s(Get, 50) is None
    assert answers.late_s(Exists, 5) is None


def make_call(*times: Sequence[float], lookup_s: float = 0.4, lost: int = -1) -> Any:
    """A call to nodes whose answers took so long, one of which is lost."""
    nodes = []
    for number, known in enumerate(times):
        answers = AnswerTimes()
        for seconds in known:
            answers.note(Get, 1, seconds)
        nodes.append(SimpleNamespace(store=number, answers=answers, lost=number == lost))
    calls = SimpleNamespace(clock=lambda: 0.0, lookup_s=lookup_s, budget=Budget(), hedges=True)
    counters = SimpleNamespace(hedges=0, hedges_won=0)
    view = SimpleNamespace(nodes=nodes, view=SimpleNamespace(copies=2))
    return SimpleNamespace(view=view, calls=calls, counters=counters, left_s=30.0)


@pytest.mark.parametrize(
    ("first", "other", "after_s"),
    [
        ([], [], 0.2),  # nothing is known: half of what a lookup may take
        ([0.01] * 50, [], pytest.approx(0.01, rel=0.01)),
        ([0.0001] * 50, [], 0.002),  # never before that
        ([5.0] * 50, [0.01] * 50, 0.2),  # a node that is always slow is late all the same
        ([5.0] * 50, [5.0] * 50, pytest.approx(5.0, rel=0.01)),  # where all are slow, none is late
    ],
)
def test_when_a_node_is_late(first: list[float], other: list[float], after_s: float) -> None:
    assert Hedge(make_call(first, other), Get(["key"]), 0, [0], [(0, 1)]).after_s == after_s


def test_the_other_copies_are_asked_for_what_they_have_each() -> None:
    call = make_call([], [], [])
    hedge = Hedge(call, Get(["a", "b", "c"]), 0, [0, 2], [(0, 1), (1, 2), (0, 2)])
    assert [(part.store, part.request) for part in hedge.begin()] == [(1, Get(["a"])), (2, Get(["c"]))]
    assert call.counters.hedges == 1
    assert hedge.is_full([[bytearray(b"1")], [bytearray(b"3")]])
    assert hedge.settle(None, [[bytearray(b"1")], [bytearray(b"3")]]) == [b"1", b"3"]
    assert (hedge.won, call.counters.hedges_won) == (True, 1)


def test_nobody_is_asked_if_a_copy_is_lost_or_the_budget_is_spent() -> None:
    lost = make_call([], [], lost=1)
    assert Hedge(lost, Get(["a"]), 0, [0], [(0, 1)]).begin() == []
    spent = make_call([], [])
    spent.calls.budget.left = 0.0
    assert Hedge(spent, Get(["a"]), 0, [0], [(0, 1)]).begin() == []
    assert (lost.counters.hedges, spent.counters.hedges) == (0, 0)


@pytest.mark.parametrize("short", [None, bytearray(5), KeptError(StoreUnavailable("planned"))])
def test_an_answer_that_lacks_something_or_does_not_fit_is_not_taken(short: Any) -> None:
    buffer = bytearray(4)
    call = make_call([], [])
    hedge = Hedge(call, GetInto(Batch(["a"], [memoryview(buffer)])), 0, [0], [(0, 1)])
    (part,) = hedge.begin()
    assert isinstance(part.request, Get)  # nothing is written to the caller's memory yet
    others = [short if isinstance(short, KeptError) else [short]]
    assert not hedge.is_full(others)
    assert hedge.settle([4], others) == [4]
    assert hedge.is_full([[bytearray(b"xyz")]])
    assert hedge.settle(None, [[bytearray(b"xyz")]]) == [3]
    assert buffer == b"xyz\0"


def test_an_error_that_comes_at_once_does_not_make_a_node_look_fast() -> None:
    call = make_call([0.5], [])
    refused = KeptError(StoreUnavailable("planned"))
    for _ in range(50):
        hedge = Hedge(call, Get(["a"]), 0, [0], [(0, 1)])
        assert hedge.settle(refused, None) is refused
        hedge.begin()
        assert hedge.settle(refused, [[bytearray(b"xyz")]]) == [b"xyz"]  # the other copy has it
    assert call.view.nodes[0].answers.usual_s(Get, 1) == 0.5
    assert Hedge(call, Get(["a"]), 0, [0], [(0, 1)]).settle([b"xyz"], None) == [b"xyz"]
    assert call.view.nodes[0].answers.usual_s(Get, 1) < 0.5


def test_only_reads_of_what_has_a_copy_have_a_hedge() -> None:
    call = make_call([], [])
    places = [(0, 1), (0,), (1, 0)]
    hedges = hedges_for(call, Get(["a", "b", "c"]), [(0, [0, 1]), (1, [2])], places)
    assert [hedge is not None for hedge in hedges] == [False, True]
    call.view.view.copies = 1
    assert hedges_for(call, Get(["a"]), [(0, [0])], places) == []
