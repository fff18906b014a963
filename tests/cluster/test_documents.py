"""Nodes as JSON."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.cluster.documents import ClusterConfig, read_config, read_file, read_node, write_config, write_node
from infinistore.cluster.membership import Node, NodeState

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "address", "nodes", "weight", "state", "zone", "placement", "copies"]), inner
        )
    ),
    max_leaves=10,
)


@given(values)
def test_any_document_is_read_or_raises_one_error(document: Any) -> None:
    for read in (read_config, read_node, lambda value: read_file(json.dumps(value), 0)):
        with contextlib.suppress(ValueError):
            read(document)


@given(st.binary(max_size=20))
def test_any_bytes_of_a_file_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not JSON|must (be an object|have a list)"):
        read_file(text, 0)


@given(
    st.builds(
        Node,
        id=st.text(min_size=1, max_size=9),
        address=st.sampled_from(["infinistore://a:1", "tcp://[::1]:2", "rdma://b.example:3"]),
        instance=st.text(max_size=5),
        weight=st.integers(0, 10_000),
        capacity_bytes=st.integers(0, 2**62),
        state=st.sampled_from(NodeState),
        zone=st.text(max_size=5),
        host=st.text(max_size=5),
        protocol=st.integers(0, 99),
    )
)
def test_a_node_is_read_as_it_was_written(node: Node) -> None:
    assert read_node(write_node(node), id=node.id, generation=0) == node


def test_a_configuration_is_read_as_it_was_written() -> None:
    assert read_config(write_config(ClusterConfig(copies=3))) == ClusterConfig(copies=3)


def test_a_file_lists_nodes_by_address_alone() -> None:
    view = read_file(
        '{"nodes": [{"id": "b", "address": "h:1"}, {"id": "a", "address": "tcp://g", "weight": 7}], "copies": 2}', 3
    )
    assert view.nodes == (Node("a", "tcp://g:22345", weight=7), Node("b", "infinistore://h:1"))
    assert (view.epoch, view.copies) == (3, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ("{}", 'must have a list of "nodes"'),
        ('{"nodes": [], "placement": 2}', "placement version 2, and this is 1"),
        ('{"nodes": [], "copies": 0}', "copies 0: it must be a whole number between 1 and 8"),
        ('{"nodes": [{"address": "h"}]}', r"nodes\[0\] needs an id"),
        ('{"nodes": [{"id": "a"}]}', r"nodes\[0\] needs an address"),
        ('{"nodes": [{"id": "a", "address": "h:x"}]}', "'h:x' that must be HOST:PORT"),
        ('{"nodes": [{"id": "a", "address": "http://h"}]}', "begins with none of infinistore, infinistores, tcp, rdma"),
        ('{"nodes": [{"id": "a", "address": "h", "weight": -1}]}', "weight that is no whole number from 0 to 10000"),
        ('{"nodes": [{"id": "a", "address": "h", "state": "gone"}]}', "there are joining, serving, draining"),
        ('{"nodes": [{"id": "a", "address": "h"}, {"id": "a", "address": "i"}]}', r"nodes\[1\] has the id 'a' of ano"),
        ('{"nodes": [{"id": "a", "address": "h"}, {"id": "b", "address": "h:22345"}]}', "list each server once"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_file(text, 0)
