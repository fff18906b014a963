"""Statistics as a server sends them: what a client takes back, whatever came."""

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.errors import ProtocolError
from infinistore.protocol.codec import statistics_from_tree, statistics_to_tree
from infinistore.protocol.messages import Tree
from infinistore.statistics import DrainStatistics

from .monitor.made import make_client, make_details, make_disk, make_disks, make_operation, make_server, make_store

PARTS = (
    make_server(),
    make_store(),
    make_details(operations=[make_operation()], clients=[make_client()]),
    make_disks(make_disk("/mnt/a"), make_disk("/mnt/b", state="off", alarm="the disk is off")),
    DrainStatistics("draining", 9, 4, 1, 0, 4, 700, size_bytes=2000, done_bytes=1000, elapsed_s=5, left_s=5.0),
)
TREE = statistics_to_tree(*PARTS)

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)


def paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(found for key, value in inner for found in paths(value, (*path, key)))]


def changed(path: tuple[Any, ...], value: Any) -> Tree:
    tree = copy.deepcopy(TREE)
    *parents, last = path
    target: Any = tree
    for key in parents:
        target = target[key]
    target[last] = value
    return tree


def test_statistics_come_back_as_they_were() -> None:
    assert tuple(statistics_from_tree(TREE)) == PARTS


def test_a_store_without_disks_sends_what_the_last_release_did() -> None:
    tree = statistics_to_tree(*PARTS[:3])
    assert set(tree) == {"server", "store", "details"}
    assert tuple(statistics_from_tree(tree)) == (*PARTS[:3], None, None)


@given(
    st.sampled_from(paths(TREE)[1:]), plain | st.lists(plain, max_size=2) | st.dictionaries(st.text(max_size=3), plain)
)
def test_another_value_anywhere_is_taken_or_refused_by_one_error(path: tuple[Any, ...], value: Any) -> None:
    with contextlib.suppress(ProtocolError):
        statistics_from_tree(changed(path, value))


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    "path", [("server", "uptime_s"), ("server", "requests"), ("details", "clients", 0, "connected_s")]
)
def test_a_number_that_is_none_is_refused(path: tuple[Any, ...], number: float) -> None:
    with pytest.raises(ProtocolError, match="are not those of this release"):
        statistics_from_tree(changed(path, number))
