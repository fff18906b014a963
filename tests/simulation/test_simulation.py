"""The simulation itself: runs repeat exactly, find planted bugs, and nothing else."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from types import ModuleType

import attrs
import pytest

from infinistore.core import StoreCore
from infinistore.core.clients import Client
from tests.simulation.faults import FaultKind, FaultSettings
from tests.simulation.scenario import Scenario
from tests.simulation.simulate import simulate

KINDS = (0, 1, 2, 3, 5)
"""Seeds of all kinds of scenarios: with points of the product that happen seldom, with
shared memory, with disks, and with a cluster."""
_HASHES = (
    "from tests.simulation.scenario import Scenario\n"
    "from tests.simulation.simulate import simulate\n"
    "for seed in {seeds}: print(simulate(Scenario.from_seed(seed).shortened(15)).trace_hash)"
)


def hashes(seeds: Sequence[int]) -> list[str]:
    return [simulate(Scenario.from_seed(seed).shortened(15)).trace_hash for seed in seeds]


def test_the_seeds_of_these_tests_are_of_all_kinds() -> None:
    scenarios = [Scenario.from_seed(seed) for seed in KINDS]
    assert any(one.buggify.points for one in scenarios)
    assert any(one.sharing.clients for one in scenarios)
    assert any(one.disks.disks for one in scenarios)
    assert any(one.cluster.nodes for one in scenarios)


def test_a_seed_gives_the_same_run_twice_and_in_another_process_with_another_hash_seed() -> None:
    here = hashes(KINDS)
    assert hashes(KINDS) == here
    command = [sys.executable, "-c", _HASHES.format(seeds=KINDS)]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    elsewhere = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert elsewhere == here


def test_a_process_that_has_loaded_pytorch_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    without = hashes(KINDS[:2])
    loaded = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert hashes(KINDS[:2]) == without
    assert sys.modules["torch"] is loaded


def test_other_seeds_give_other_runs() -> None:
    assert len(set(hashes((0, 8, 16)))) == 3


@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_wrong(seed: int) -> None:
    assert simulate(Scenario.from_seed(seed).shortened(25)).violations == []


def test_most_calls_succeed_although_every_kind_of_fault_happens() -> None:
    """Otherwise runs would check little."""
    chances = {kind.name.lower(): 0.004 for kind in FaultKind} | {"corrupt_payload": 0.05}  # few messages have one
    every_kind = FaultSettings(**chances, most_outage_s=1.0)
    calls, returned = 0, 0
    faults: Counter[str] = Counter()
    for seed in range(6):
        scenario = Scenario.from_seed(seed).shortened(60)
        outcome = simulate(attrs.evolve(scenario, faults=every_kind, deadline_s=1.0, clients=3))
        assert outcome.violations == []
        faults += outcome.faults
        calls += outcome.calls
        returned += outcome.ends["RETURNED"]
    assert {kind.name for kind in FaultKind} <= faults.keys()
    assert returned > calls / 2


def test_a_lost_delete_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    delete, numbers = StoreCore.delete, count()

    def lose_some(core: StoreCore, keys: Sequence[str]) -> int:
        return len(keys) if next(numbers) % 50 == 49 else delete(core, keys)

    monkeypatch.setattr(StoreCore, "delete", lose_some)
    assert any(simulate(Scenario.from_seed(seed)).violations for seed in range(40))


def test_a_hold_that_holds_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def match_only(core: StoreCore, client: Client, keys: Sequence[str], hold_s: float) -> tuple[int, int]:
        matched = core.match_prefix(keys)
        return matched, 1 if matched else 0

    monkeypatch.setattr(StoreCore, "hold_prefix", match_only)
    assert any(simulate(Scenario.from_seed(seed)).violations for seed in range(40))


def test_a_release_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, numbers = StoreCore.release, count()
    monkeypatch.setattr(StoreCore, "release", lambda core, lease: next(numbers) % 40 == 39 or release(core, lease))
    assert any(simulate(Scenario.from_seed(seed)).violations for seed in range(40))
