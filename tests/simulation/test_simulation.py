"""The simulation itself: runs repeat exactly, find planted bugs, and nothing else."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from infinistore.core import StoreCore
from infinistore.core.clients import Client
from tests.simulation.faults import FaultKind, FaultSettings
from tests.simulation.kinds import KINDS
from tests.simulation.nodes import ServerNode
from tests.simulation.pythons import ROOT, other_pythons
from tests.simulation.scenario import Scenario
from tests.simulation.simulate import simulate
from tests.simulation.test_guard import Watched, watch

FAILED_ONCE = (1_001_000, 1_001_517, 1_001_853, 1_002_003, 1_002_093, 1_003_908, 1_005_848, 2_102_304, 5_100_272)
"""Seeds of campaigns for which something was mended, here or in the product."""
_OPERATIONS = 20
_HASHES = (
    "from tests.simulation.scenario import Scenario\n"
    "from tests.simulation.simulate import simulate\n"
    f"for seed in reversed({KINDS}):\n"
    f"    print(seed, simulate(Scenario.from_seed(seed).shortened({_OPERATIONS})).trace_hash)"
)


@cache
def watched(seed: int) -> Watched:
    """What became of a seed, which is run once."""
    return watch(Scenario.from_seed(seed).shortened(_OPERATIONS))


def hashes() -> dict[str, str]:
    return {str(seed): watched(seed).outcome.trace_hash for seed in KINDS}


def test_the_seeds_of_these_tests_are_of_all_kinds() -> None:
    scenarios = [Scenario.from_seed(seed) for seed in KINDS]
    assert any(one.buggify.points for one in scenarios)
    assert any(one.sharing.clients for one in scenarios)
    assert any(one.disks.disks for one in scenarios)
    assert any(one.cluster.nodes for one in scenarios)
    assert any(one.etcd.registers for one in scenarios)
    assert any(one.tenants.tenants for one in scenarios)
    assert any(one.has_retention for one in scenarios)


def hashes_by(python: str | Path) -> dict[str, str]:
    """Return those of all kinds in another process with another hash seed, which runs
    them in another order: so nothing of a run is left for the next one.
    """
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [python, "-c", _HASHES], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize("seed", KINDS)
def test_nothing_is_wrong_and_no_clock_chance_or_thread_of_the_process_is_used_by_whatever_name(seed: int) -> None:
    assert watched(seed).outcome.violations == []
    assert watched(seed).used == set()


@pytest.mark.process
def test_a_seed_gives_the_same_run_in_another_process_with_another_hash_seed_and_another_seed_another() -> None:
    assert hashes_by(sys.executable) == hashes()
    assert len(set(hashes().values())) == len(KINDS)


@pytest.mark.process
def test_a_seed_gives_the_same_run_with_every_other_python() -> None:
    """In CI, three Pythons have an environment here when this one is tested."""
    others = other_pythons()
    if not others:
        pytest.skip("no other Python has what tests need; this makes one: make test PYTHON=python3.13 TEST_TORCH=none")
    assert {version: hashes_by(python) for version, python in others.items()} == dict.fromkeys(others, hashes())


def test_a_process_that_has_loaded_pytorch_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.from_seed(KINDS[2]).shortened(_OPERATIONS)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    without = simulate(scenario).trace_hash
    loaded = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert simulate(scenario).trace_hash == without
    assert sys.modules["torch"] is loaded


def test_nothing_is_asked_of_a_server_that_crashes_in_the_middle_of_something(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = ServerNode.crash

    def refuse(server: ServerNode) -> None:
        raise AssertionError("a store was entered twice at a time")

    def crash_and_ask_nothing(server: ServerNode, *args: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ServerNode, "note_losses", refuse)
            crash(server, *args, **options)

    monkeypatch.setattr(ServerNode, "crash", crash_and_ask_nothing)
    outcome = simulate(attrs.evolve(Scenario.plain(1), faults=FaultSettings(crash=0.05)))
    assert outcome.faults["CRASH"]
    assert outcome.violations == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_nothing_is_wrong_where_something_was(seed: int) -> None:
    assert simulate(Scenario.from_seed(seed).shortened(25)).violations == []


@pytest.mark.parametrize(
    "seed",
    [94, 53, *(pytest.param(s, marks=pytest.mark.nightly) for s in (22, 70, 6_000_430, 6_001_102, 5, 101, 533))],
)
def test_nothing_is_wrong_with_tenants_that_change(seed: int) -> None:
    """Of one server, and of a cluster."""
    scenario = Scenario.from_seed(seed).shortened(25)
    assert scenario.tenants.tenants
    outcome = simulate(scenario)
    assert outcome.violations == []
    assert outcome.faults["TENANTS_CHANGED"]


@pytest.mark.nightly
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


@pytest.mark.nightly
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
    assert any(simulate(Scenario.from_seed(seed)).violations for seed in range(18, 58))  # one in 40 has it


def test_a_release_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, numbers = StoreCore.release, count()
    monkeypatch.setattr(StoreCore, "release", lambda core, lease: next(numbers) % 40 == 39 or release(core, lease))
    assert any(simulate(Scenario.from_seed(seed)).violations for seed in range(1, 41))
