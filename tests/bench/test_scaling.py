"""What `bench/scaling.py` makes of assumptions: known models, and what follows when one
number changes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import scaling


def told(*yours: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the rows by their first cell, by the title of their table."""
    return {
        table.title: {row[0]: tuple(row[1:]) for row in table.rows}
        for table in scaling.tables(scaling.with_yours(["nodes=8", *yours]), keys=1_000)
    }


@pytest.mark.parametrize(
    ("yours", "size"),
    [
        ([], "320 KiB"),  # Llama 3.3 70B in bf16
        (["element_bytes=1"], "160 KiB"),
        (["layers=32"], "128 KiB"),  # Llama 3.1 8B
    ],
)
def test_the_cache_of_a_token_is_that_of_the_model(yours: list[str], size: str) -> None:
    assert told(*yours)["What the model asks for"]["KV cache of a token"] == (size,)


def test_a_server_gives_what_its_processors_or_its_link_allow() -> None:
    mine = ["tcp_put_s_per_gb=0.6", "tcp_get_s_per_gb=0.4", "request_us=100", "shard_cost=2", "shards=4"]
    found = told(*mine, "link_gbit_s=16", "link_use=0.75")["What one server gives"]
    assert found["one core, TCP"][:3] == ("10,000", "1.0 GB/s", "1.0 GB/s, its processors")
    assert found["4 shards, TCP"][:3] == ("20,000", "2.0 GB/s", "1.5 GB/s, its link")
    assert found["4 shards, RDMA"][2] == "1.5 GB/s, its link"


@given(nodes=st.integers(1, 12), groups=st.integers(1, 40))
def test_what_is_simulated_is_possible(nodes: int, groups: int) -> None:
    shape = scaling.balance(nodes, groups, keys=2_000, prompts=20)
    assert 1 <= shape.uneven <= nodes
    assert 1 <= shape.asked <= min(nodes, groups)
    assert 1 / nodes <= shape.busiest <= 1
    assert 0 <= shape.usable <= 1 - 1 / nodes * (groups == 1) + 1e-9
    if nodes > 1:
        # One that is lost leaves its keys to all others, and moves none of theirs.
        assert nodes / (nodes - 1) - 1e-9 <= shape.uneven_without


@pytest.mark.parametrize(("nodes", "groups"), [(8, 1), (8, 8), (100, 8), (100, 64)])
def test_what_is_left_of_a_prompt_is_what_chance_gives(nodes: int, groups: int) -> None:
    """The first group on a lost node comes after `j` groups that are on others."""
    other = 1 - 1 / nodes
    expected = sum(other**j / nodes * j / groups for j in range(groups)) + other**groups
    assert scaling.balance(nodes, groups, keys=20_000).usable == pytest.approx(expected, abs=0.02)


def test_a_lost_node_is_everything_if_there_is_one() -> None:
    assert scaling.balance(1, 8, keys=100) == scaling.Shape(1, 1.0, 1, 1, 0, 0)
    assert told()["A node is lost"]["1"][1] == "0 %"


@pytest.mark.parametrize("word", ["pipes=3", "layers", "layers=many", "layers=0", "layers=-1", "layers=nan"])
def test_what_is_no_assumption_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"is none of|must be more|could not convert"):
        scaling.with_yours([word])


def test_yours_are_marked_and_the_others_say_where_they_are_from() -> None:
    found = {one.name: one for one in scaling.with_yours(["layers=61"])}
    assert (found["layers"].value, found["layers"].how) == (61, "yours")
    assert all(one.where and one.how in ("measured", "assumed") for one in scaling.ASSUMPTIONS)
