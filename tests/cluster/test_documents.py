"""Nodes as JSON."""

import contextlib
import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.cluster.documents import (
    ClusterConfig,
    Drain,
    read_config,
    read_drain,
    read_file,
    read_node,
    read_purged,
    write_config,
    write_drain,
    write_node,
)
from infinistore.cluster.membership import Node, NodeState

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "address", "nodes", "weight", "state", "zone", "placement", "copies", "done", "groups"]
            ),
            inner,
        )
    ),
    max_leaves=10,
)


@given(values)
def test_any_document_is_read_or_raises_one_error(document: Any) -> None:
    for read in (read_config, read_node, lambda value: read_file(json.dumps(value), 0)):
        with contextlib.suppress(ValueError):
            read(document)
    drain = read_drain(json.dumps(document).encode())
    assert read_drain(write_drain(drain)) == drain


@given(st.binary(max_size=20))
def test_any_bytes_of_a_file_are_refused_and_ask_for_a_drain(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not JSON|must (be an object|have a list)"):
        read_file(text, 0)
    assert read_drain(text) == Drain()


NAMES = st.text(max_size=9) | st.just("x" * 256)
COUNTS = st.integers(0, 9) | st.sampled_from([2**63 - 1, 2**63])


@given(
    st.builds(
        Node,
        id=NAMES.filter(bool),
        address=st.sampled_from(["infinistore://a:1", "infinistores://a:1", "tcp://[::1]:2", "rdma://b.example:3"]),
        instance=NAMES,
        weight=st.integers(0, 10_000),
        capacity_bytes=COUNTS,
        state=st.sampled_from(NodeState),
        zone=NAMES,
        host=NAMES,
        protocol=st.integers(0, 99) | st.just(2**31),
        founding=st.booleans(),
        generation=COUNTS,
    )
)
def test_a_node_is_read_as_it_was_written(node: Node) -> None:
    written = write_node(node)
    read = read_node(written, id=node.id, generation=node.generation)
    assert (read, read.founding) == (node, node.founding)
    assert {"id", "generation"}.isdisjoint(json.loads(written))


@given(st.integers(1, 8))
def test_a_configuration_is_read_as_it_was_written(copies: int) -> None:
    assert json.loads(write_config(ClusterConfig(copies))) == {"placement": 1, "copies": copies}
    assert read_config(write_config(ClusterConfig(copies))) == ClusterConfig(copies)
    assert read_config("{}") == ClusterConfig(1)


@given(st.builds(Drain, st.booleans(), *[COUNTS] * 9))
def test_a_drain_is_read_as_it_was_written(drain: Drain) -> None:
    assert read_drain(write_drain(drain)) == drain
    broken = {**json.loads(write_drain(drain)), "moved_groups": -1, "done": 1}
    assert read_drain(json.dumps(broken).encode()) == attrs.evolve(drain, moved_groups=0, done=False)


def test_a_drain_tells_how_far_it_is() -> None:
    half = Drain(groups=9, moved_groups=3, skipped_groups=1, size_bytes=300, done_bytes=100, elapsed_s=5)
    assert (half.ratio, str(half)) == (1 / 3, "4 of 9 groups")
    assert half.left_s == pytest.approx(10)
    over = attrs.evolve(half, failed_groups=2, done_bytes=301)
    assert (over.ratio, over.left_s, str(over)) == (1, 0, "4 of 9 groups, 2 could not be moved")
    assert (attrs.evolve(half, size_bytes=0).ratio, attrs.evolve(half, size_bytes=1, done_bytes=1).ratio) == (0, 1)
    assert attrs.evolve(half, elapsed_s=0).left_s is attrs.evolve(half, done_bytes=0).left_s is None


@given(COUNTS)
def test_what_a_node_has_purged_is_read_up_to_the_last_revision_there_can_be(revision: int) -> None:
    assert read_purged(str(revision).encode()) == (revision if revision < 2**63 else 0)
    assert read_purged(b"?") == read_purged(b'"1"') == read_purged(b"-1") == 0


def test_a_file_lists_nodes_by_address_alone() -> None:
    view = read_file(
        '{"nodes": [{"id": "b", "address": "h:1"}, {"id": "a", "address": "tcp://g", "weight": 7}], "copies": 2}', 3
    )
    assert view.nodes == (Node("a", "tcp://g:22345", weight=7), Node("b", "infinistore://h:1"))
    assert (view.epoch, view.copies) == (3, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "^is not JSON: Expecting"),
        ("[]", "^must be an object$"),
        ("{}", '^must have a list of "nodes"$'),
        ('{"nodes": [], "placement": 2}', "placement version 2, and this is 1: use one release of InfiniStore for"),
        ('{"nodes": [], "placement": true}', "placement version True"),
        ('{"nodes": [], "copies": 0}', "copies 0: it must be a whole number between 1 and 8"),
        ('{"nodes": [], "copies": 9}', "copies 9: it must"),
        ('{"nodes": [], "copies": [1]}', "copies a list: it must"),
        ('{"nodes": [], "copies": {"a": 1}}', "copies an object: it must"),
        ('{"nodes": [], "copies": true}', "copies True: it must"),
        ('{"nodes": [{"address": "h"}]}', r"^nodes\[0\] needs an id, a text of at most 256 characters$"),
        (f'{{"nodes": [{{"id": "{"x" * 257}", "address": "h"}}]}}', "needs an id"),
        ('{"nodes": [{"id": "a"}]}', r"^nodes\[0\] needs an address, such as 10.0.0.7:22345$"),
        ('{"nodes": [{"id": "a", "address": "h", "zone": 1}]}', "a zone that is no text of at most 256 characters"),
        ('{"nodes": [{"id": "a", "address": "h:x"}]}', "'h:x' that must be HOST:PORT"),
        ('{"nodes": [{"id": "a", "address": "http://h"}]}', "begins with none of infinistore, infinistores, tcp, rdma"),
        ('{"nodes": [{"id": "a", "address": "tcp://a://b:1"}]}', "'tcp://a://b:1' that must be HOST:PORT, such as"),
        (
            '{"nodes": [{"id": "a", "address": "h", "weight": -1}]}',
            "weight that is no whole number from 0 to 10000: -1",
        ),
        ('{"nodes": [{"id": "a", "address": "h", "weight": 10001}]}', "weight that is no whole number from 0"),
        ('{"nodes": [{"id": "a", "address": "h", "weight": true}]}', "weight that is no whole number from 0"),
        (
            '{"nodes": [{"id": "a", "address": "h", "state": "gone"}]}',
            "has the state 'gone'; there are joining, serving,",
        ),
        ('{"nodes": [{"id": "a", "address": "h", "state": []}]}', "has the state a list; there are"),
        ('{"nodes": [{"id": "a", "address": "h", "founding": 1}]}', "a founding that is neither true nor false: 1"),
        ('{"nodes": [{"id": "a", "address": "h"}, {"id": "a", "address": "i"}]}', r"nodes\[1\] has the id 'a' of ano"),
        ('{"nodes": [{"id": "a", "address": "h"}, {"id": "b", "address": "h:22345"}]}', "list each server once"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_file(text, 0)
