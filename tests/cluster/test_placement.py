"""Who owns which key: the same everywhere, balanced, and little moves."""

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import attrs
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.cluster.membership import Node, NodeState, View
from infinistore.cluster.placement import PLACEMENT_VERSION, SLOTS, Placement, slot_of
from infinistore.errors import StoreUnavailable
from infinistore.keys import hash_tag

KEYS = [f"key {number}" for number in range(400)]


def view_of(*weights: int) -> View:
    return View(
        0,
        tuple(
            Node(f"node-{number:03}", f"infinistore://10.0.0.{number}:22345", weight=weight)
            for number, weight in enumerate(weights)
        ),
    )


def without(view: View, index: int) -> View:
    return attrs.evolve(view, nodes=view.nodes[:index] + view.nodes[index + 1 :])


def owners_by_id(placement: Placement, keys: list[str] = KEYS, *, reading: bool = False) -> list[str]:
    return [placement.view.nodes[owner].id for owner in placement.owners(keys, reading=reading)]


def test_slots_that_get_another_owner_are_counted_if_they_were_asked_for() -> None:
    few, more = view_of(100, 100, 100), view_of(100, 100, 100, 100)
    first = Placement(few)
    before = owners_by_id(first)
    assert first.moved_slots == 0
    joined = Placement(more, first)
    assert joined.moved_slots == 0  # nobody has asked yet
    after = owners_by_id(joined)
    gone = {slot_of(key) for key, was, is_ in zip(KEYS, before, after, strict=True) if was != is_}
    assert joined.moved_slots == len(gone) > 0
    owners_by_id(joined)
    assert joined.moved_slots == len(gone)
    back = Placement(few, joined)
    assert owners_by_id(back) == before
    assert back.moved_slots == 2 * len(gone)
    other = Placement(View(0, tuple(attrs.evolve(node, id=f"x{node.id}") for node in few.nodes)), back)
    owners_by_id(other)
    assert other.moved_slots == 2 * len(gone) + len({slot_of(key) for key in KEYS})


weights = st.lists(st.sampled_from([1, 10, 50, 100, 100, 100, 300]), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("plain", "plain"),
        ("{a}", "a"),
        ("model/{group}/17", "group"),
        ("{a}{b}", "a"),
        ("{}{b}", "{}{b}"),
        ("{a", "{a"),
        ("a}b", "a}b"),
        ("}{a}", "a"),
        ("{{a}}", "{a"),
        ("{é}", "é"),
    ],
)
def test_a_hash_tag_is_what_the_first_braces_hold_as_in_redis(key: str, tag: str) -> None:
    assert hash_tag(key) == tag
    assert slot_of(key) == xxhash.xxh3_64_intdigest(tag.encode()) % SLOTS


@settings(max_examples=25)
@given(st.lists(st.text(alphabet="{}ab/é", min_size=1, max_size=8), max_size=40), weights)
def test_a_key_has_the_owner_of_its_slot_whatever_comes_before_it(keys: list[str], shares: list[int]) -> None:
    placement = Placement(view_of(*shares))

    assert placement.owners(keys) == [Placement(view_of(*shares), with_numpy=False).owners([key])[0] for key in keys]
    assert placement.owners(keys) == [placement.ranked(key, 1)[0] for key in keys]
    assert placement.owners(keys) == placement.owners([hash_tag(key) or key for key in keys])


PROGRAM = """
import sys, zlib
from infinistore.cluster.placement import Placement
from infinistore.cluster.membership import Node, View
for weights in ([100] * 7, [1, 50, 100, 300]):
    view = View(0, tuple(Node(str(number), "", weight=weight) for number, weight in enumerate(weights)))
    owners = Placement(view, with_numpy=sys.argv[1] == "numpy").owners([f"key {number}" for number in range(3000)])
    print(zlib.crc32(bytes(owners)))
"""


@pytest.mark.process
def test_owners_do_not_depend_on_the_process_and_are_those_of_this_version() -> None:
    found = set()
    for arrays, seed in (("numpy", "1"), ("plain", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM, arrays]
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert (PLACEMENT_VERSION, found) == (1, {"1306756824\n2958414093\n"})


@settings(max_examples=25)
@given(weights, st.integers(1, 4))
def test_numpy_changes_no_rank(shares: list[int], count: int) -> None:
    view = view_of(*shares)
    plain = Placement(view, with_numpy=False)

    assert Placement(view).owners(KEYS) == plain.owners(KEYS)
    assert Placement(view).ranks(KEYS, count) == plain.ranks(KEYS, count)


@settings(max_examples=25)
@given(weights, st.integers(1, 12))
def test_the_first_rank_owns_and_the_next_inherits(shares: list[int], count: int) -> None:
    placement = Placement(view_of(*shares))
    ranks = placement.ranks(KEYS[:50], count)

    assert [rank[0] for rank in ranks] == placement.owners(KEYS[:50])
    assert {len(set(rank)) for rank in ranks} == {min(count, len(shares))}
    if count > 1 and len(shares) > 1:
        for key, rank in zip(KEYS[:20], ranks, strict=False):
            left = Placement(without(placement.view, rank[0]))
            assert left.view.nodes[left.owners([key])[0]] == placement.view.nodes[rank[1]]


@settings(max_examples=25)
@given(weights, st.sampled_from([1, 10, 100, 300]), st.data())
def test_a_node_that_comes_or_grows_takes_keys_and_nothing_else_moves(
    shares: list[int], more: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(shares) - 1))
    before = Placement(view_of(*shares))
    grown = Placement(view_of(*shares[:index], shares[index] + more, *shares[index + 1 :]))
    nodes = [attrs.evolve(node, id=node.id + "a") for node in before.view.nodes[index : index + 1]]
    joined = Placement(
        View(1, (*before.view.nodes[: index + 1], *nodes, *before.view.nodes[index + 1 :])),
    )
    old = owners_by_id(before)

    for after, winner in ((grown, before.view.nodes[index].id), (joined, nodes[0].id)):
        moved = {new for was, new in zip(old, owners_by_id(after), strict=True) if was != new}
        assert moved <= {winner}


@settings(max_examples=25)
@given(weights, st.data())
def test_only_the_keys_of_a_node_that_goes_move(shares: list[int], data: st.DataObject) -> None:
    before = Placement(view_of(*shares, 100))
    index = data.draw(st.integers(0, len(shares)))
    gone = before.view.nodes[index].id

    after = Placement(without(before.view, index))

    moved = {was for was, new in zip(owners_by_id(before), owners_by_id(after), strict=True) if was != new}
    assert moved <= {gone}


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from([0, 10, 100, 200]), min_size=6, max_size=6), min_size=2, max_size=5), st.data()
)
def test_what_an_older_placement_knew_changes_no_owner(histories: list[list[int]], data: st.DataObject) -> None:
    placement = None
    for shares in histories:
        nodes = tuple(
            Node(
                f"node-{number}",
                "",
                weight=share,
                state=data.draw(st.sampled_from([NodeState.SERVING, NodeState.SERVING, NodeState.DRAINING])),
            )
            for number, share in enumerate(shares)
            if data.draw(st.integers(0, 3))
        )
        view = View(0, nodes)
        placement = Placement(view, placement)
        for reading in (False, True):
            if any(node.weight and (reading or node.state is not NodeState.DRAINING) for node in nodes):
                keys = data.draw(st.sampled_from([KEYS[:300], KEYS[200:600], KEYS[:1]]))
                assert placement.owners(keys, reading=reading) == Placement(view).owners(keys, reading=reading)


@pytest.mark.parametrize("nodes", [1, 7, 20])
def test_a_newcomer_gets_at_most_a_tenth_more_than_its_share(nodes: int) -> None:
    keys = [f"{number:x}" for number in range(50_000)]
    before, after = Placement(view_of(*[100] * nodes)), Placement(view_of(*[100] * (nodes + 1)))
    moved = sum(a != b for a, b in zip(before.owners(keys), after.owners(keys), strict=True))
    assert moved <= 1.1 / (nodes + 1) * len(keys)


@pytest.mark.parametrize(("group", "most"), [(1, 1.05), (64, 1.15)])
def test_200_000_keys_are_balanced_over_eight_nodes(group: int, most: float) -> None:
    keys = [f"model/{{{number // group:032x}}}/{number:032x}" for number in range(200_000)]
    counts = Counter(Placement(view_of(*[100] * 8)).owners(keys))
    assert len(counts) == 8
    assert max(counts.values()) / (len(keys) / 8) <= most


def test_a_node_gets_the_share_of_its_weight() -> None:
    shares = (10, 100, 100, 200, 0)
    counts = Counter(Placement(view_of(*shares)).owners([f"{number:x}" for number in range(100_000)]))
    for node, share in enumerate(shares):
        assert counts[node] / 100_000 == pytest.approx(share / sum(shares), rel=0.1)


def test_a_batch_is_split_by_owner_in_the_order_of_the_keys() -> None:
    placement = Placement(view_of(100, 100, 100))
    owners = placement.owners(KEYS)

    parts = placement.split(KEYS)

    assert sorted(itertools.chain(*(positions for _, positions in parts))) == list(range(len(KEYS)))
    assert all(owners[position] == node for node, positions in parts for position in positions)
    assert all(list(positions) == sorted(positions) for _, positions in parts)
    assert [positions[0] for _, positions in parts] == sorted(positions[0] for _, positions in parts)
    assert placement.split([]) == []
    assert placement.split(["{a}1", "{a}2"]) == [(placement.owners(["{a}"])[0], range(2))]


def test_a_draining_node_is_read_and_not_written() -> None:
    view = view_of(100, 100, 100)
    draining = attrs.evolve(
        view, nodes=(view.nodes[0], attrs.evolve(view.nodes[1], state=NodeState.DRAINING), view.nodes[2])
    )
    placement, before = Placement(draining), Placement(view)

    assert placement.owners(KEYS, reading=True) == before.owners(KEYS)
    assert 1 not in placement.owners(KEYS)
    assert 1 not in itertools.chain(*placement.ranks(KEYS, 3))
    assert placement.ranks(KEYS, 3, reading=True) == before.ranks(KEYS, 3)


def machines_of(*shares: tuple[int, str, str], copies: int = 2) -> View:
    """A view of nodes of these weights, machines and zones."""
    nodes = view_of(*(share for share, _, _ in shares)).nodes
    places = [attrs.evolve(node, host=host, zone=zone) for node, (_, host, zone) in zip(nodes, shares, strict=True)]
    return View(0, tuple(places), copies=copies)


on_machines = st.lists(
    st.tuples(st.sampled_from([50, 100, 100]), st.sampled_from(["m1 r1", "m2 r1", "m3 r2", "m4 r3", "m5 r3"])).map(
        lambda drawn: (drawn[0], drawn[1][:2], drawn[1][3:])
    ),
    min_size=2,
    max_size=9,
)
"""Weights, machines and zones; a machine is in one zone."""


def apart(view: View, ranks: list[Sequence[int]]) -> list[tuple[int, int]]:
    """On how many machines, and in how many zones, these are."""
    return [
        (len({view.nodes[index].host for index in rank}), len({view.nodes[index].zone for index in rank}))
        for rank in ranks
    ]


@settings(max_examples=40)
@given(on_machines, st.integers(1, 3))
def test_copies_are_on_as_many_machines_and_in_as_many_zones_as_there_are(
    shares: list[tuple[int, str, str]], copies: int
) -> None:
    view = machines_of(*shares, copies=copies)
    machines, zones = ({share[field] for share in shares} for field in (1, 2))
    found = apart(view, Placement(view).ranks(KEYS[:60], copies))
    if copies < 3:
        assert set(found) == {(min(copies, len(machines)), min(copies, len(zones)))}
    assert {count for count, _ in found} == {min(copies, len(machines))}


def test_the_machine_of_a_node_that_names_none_is_the_host_of_its_address() -> None:
    nodes = [
        Node(f"{host}/{port}", f"infinistore://{host}:{port}") for host in ("10.0.0.1", "[fd::1]") for port in "12"
    ]
    view = View(0, tuple(nodes), copies=2)
    assert {tuple(sorted(index // 2 for index in rank)) for rank in Placement(view).ranks(KEYS, 2)} == {(0, 1)}


def test_without_another_machine_copies_are_in_other_zones_and_without_either_the_order_is_the_same() -> None:
    one = machines_of((100, "m", "a"), (100, "m", "a"), (100, "m", "b"))
    assert set(apart(one, Placement(one).ranks(KEYS, 2))) == {(1, 2)}
    shares = (100, 100, 100, 300)
    plain = Placement(view_of(*shares))
    for where in (["m/a"] * 4, ["1/a", "2/a", "3/a", "4/a"], ["1/a", "2/b", "3/c", "4/d"]):
        view = machines_of(*((share, one[0], one[2]) for share, one in zip(shares, where, strict=True)))
        assert Placement(view).ranks(KEYS, 4) == plain.ranks(KEYS, 4)


@settings(max_examples=40)
@given(on_machines, st.integers(1, 9))
def test_machines_change_no_owner_and_only_the_order_of_the_others(
    shares: list[tuple[int, str, str]], count: int
) -> None:
    view = machines_of(*shares)
    placement, plain = Placement(view), Placement(attrs.evolve(view, copies=1))
    assert placement.owners(KEYS[:60]) == plain.owners(KEYS[:60])
    ranks = placement.ranks(KEYS[:60], count)
    assert ranks == [rank[:count] for rank in placement.ranks(KEYS[:60], 9)]
    assert Placement(view).ranks(KEYS[:60], count) == Placement(view, with_numpy=False).ranks(KEYS[:60], count)
    for rank, order in zip(ranks, plain.ranks(KEYS[:60], len(shares)), strict=True):
        assert len(set(rank)) == min(count, len(shares))
        assert list(rank[2:]) == [index for index in order if index not in rank[:2]][: max(0, count - 2)]


@settings(max_examples=40)
@given(on_machines, st.data())
def test_one_loss_of_a_node_a_machine_or_a_zone_leaves_a_copy_where_it_is_looked_for(
    shares: list[tuple[int, str, str]], data: st.DataObject
) -> None:
    """As far as there is another one."""
    view = machines_of(*shares)
    field = data.draw(st.sampled_from(["id", "host", "zone"]))
    lost = getattr(data.draw(st.sampled_from(view.nodes)), field)
    left = attrs.evolve(view, nodes=tuple(node for node in view.nodes if getattr(node, field) != lost))
    if not left.nodes:
        return
    before, after = Placement(view).ranks(KEYS[:60], 2), Placement(left).ranks(KEYS[:60], 2)
    for had, has in zip(before, after, strict=True):
        still = {view.nodes[index].id for index in had if getattr(view.nodes[index], field) != lost}
        assert still
        assert still <= {left.nodes[index].id for index in has}


def places_by_id(view: View, keys: Sequence[str]) -> list[list[str]]:
    return [[view.nodes[index].id for index in places] for places in Placement(view).places(keys)]


@settings(max_examples=60)
@given(on_machines, st.integers(1, 2), st.data())
def test_where_nodes_joined_and_drain_keys_have_the_places_that_they_had(
    shares: list[tuple[int, str, str]], copies: int, data: st.DataObject
) -> None:
    """Whoever had a key while all drained ones served, or before others joined."""
    view = machines_of(*shares, copies=copies)
    states = [data.draw(st.sampled_from(NodeState)) for _ in shares]
    changed = attrs.evolve(
        view, nodes=tuple(attrs.evolve(node, state=state) for node, state in zip(view.nodes, states, strict=True))
    )
    here = {node.id for node in changed.nodes if node.state is not NodeState.JOINING}
    now = places_by_id(changed, KEYS[:60])
    written = Placement(changed).ranks(KEYS[:60], copies)
    for rank, places in zip(written, now, strict=True):
        assert places[: len(rank)] == [view.nodes[index].id for index in rank]
    for drained in (True, False):
        old = attrs.evolve(
            view,
            nodes=tuple(
                node
                for node in view.nodes
                if node.id in here and (drained or states[view.nodes.index(node)] is NodeState.SERVING)
            ),
        )
        for had, places in zip(Placement(old).ranks(KEYS[:60], copies), now, strict=True):
            assert {old.nodes[index].id for index in had} <= set(places)


def test_keys_are_looked_for_at_their_former_owner_however_many_nodes_join_at_once() -> None:
    """Such as the shards of one server."""
    view = view_of(*[100] * 8)
    joined = attrs.evolve(
        view,
        nodes=(*view.nodes[:3], *(attrs.evolve(node, state=NodeState.JOINING) for node in view.nodes[3:])),
    )
    before = Placement(attrs.evolve(view, nodes=view.nodes[:3])).owners(KEYS)
    places = Placement(joined).places(KEYS)
    assert all(owner in place for owner, place in zip(before, places, strict=True))
    assert max(map(len, places)) == 3


@pytest.mark.parametrize("view", [View(0), view_of(0, 0)])
def test_a_view_in_which_nobody_owns_anything_says_so(view: View) -> None:
    with pytest.raises(StoreUnavailable, match="no node of the cluster takes blocks"):
        Placement(view).split(["key"])
    assert Placement(view).ranked("key", 2) == ()
    assert Placement(view).places(["key"]) == [()]


@pytest.mark.parametrize("ids", [("b", "a"), ("a", "a")])
def test_a_view_has_its_nodes_in_order_and_each_once(ids: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="order of their ids"):
        View(0, tuple(Node(one, "infinistore://h:1") for one in ids))
