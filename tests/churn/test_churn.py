"""Clusters of up to a thousand servers in virtual time."""

from collections.abc import Collection, Sequence

import attrs
import pytest

from infinistore.cluster.etcd.follower import Departures
from infinistore.core import StoreCore
from tests.churn.churn import Settings, run


@pytest.mark.parametrize("nodes", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_many_servers_and_clients_agree_after_churn(nodes: int) -> None:
    settings = attrs.evolve(Settings.choose(1, nodes=nodes), clients=2, events=5, copies=1, keys=1500)
    assert run(settings).problems == []


@pytest.mark.parametrize("seed", range(4))
def test_any_churn_moves_little_and_loses_only_what_a_lost_node_had(seed: int) -> None:
    settings = attrs.evolve(Settings.choose(seed, nodes=(3, 8, 30, 8)[seed]), events=10, keys=1000, copies=1 + seed % 2)
    outcome = run(settings)
    assert outcome.problems == [], outcome


def test_the_same_seed_goes_the_same_way() -> None:
    settings = attrs.evolve(Settings.choose(2, nodes=8), events=5, keys=500)
    assert run(settings) == run(settings)


def _counts_past_a_hole(core: StoreCore, keys: Sequence[str], *, touch: bool = True) -> int:
    return sum(map(bool, core.exists(keys)))


def _keeps_whoever_was_asked(departures: Departures, ids: Collection[str]) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [(StoreCore, "match_prefix", _counts_past_a_hole), (Departures, "answered", _keeps_whoever_was_asked)],
)
def test_a_bug_is_found(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, bug: object) -> None:
    monkeypatch.setattr(owner, name, bug)
    settings = (
        attrs.evolve(Settings.choose(seed, nodes=8), keys=500, clients=2, most_delay_s=8.0) for seed in range(20)
    )
    assert any(run(one).problems for one in settings)
