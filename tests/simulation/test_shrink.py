"""What failed is made as small as it fails, kept, and told so that it can be run
again.
"""

from pathlib import Path

import attrs
import pytest
from rich.console import Console

from tests.simulation.faults import FaultSettings
from tests.simulation.found import add_found, load_found
from tests.simulation.report import failure
from tests.simulation.scenario import Scenario
from tests.simulation.shrink import shrink
from tests.simulation.trial import Trial, try_scenario


def large() -> Scenario:
    scenario = Scenario.from_seed(3)
    workload = attrs.evolve(scenario.workload, operations=100, keys=2)
    return attrs.evolve(scenario, clients=4, workload=workload, faults=FaultSettings(cut=0.03))


def test_clients_and_operations_become_as_few_as_still_fail() -> None:
    smallest, _ = shrink(large(), lambda scenario: scenario.clients >= 2 and scenario.workload.operations >= 13)
    assert (smallest.clients, smallest.workload.operations) == (2, 13)
    assert smallest.faults == FaultSettings()
    assert smallest.workload == attrs.evolve(smallest.workload, keys=4)


def test_what_the_failure_needs_stays() -> None:
    smallest, _ = shrink(large(), lambda scenario: scenario.faults.cut > 0)
    assert smallest.faults == FaultSettings(cut=0.03)
    assert (smallest.clients, smallest.workload.operations) == (1, 1)


def test_a_scenario_that_cannot_become_smaller_stays() -> None:
    scenario = large()
    assert shrink(scenario, lambda _: False)[0] == scenario


def test_shrinking_ends_when_enough_was_tried() -> None:
    tried = []

    def note(scenario: Scenario) -> bool:
        tried.append(scenario)
        return False

    shrink(large(), note, most_runs=5)
    assert len(tried) == 5


def test_what_was_found_is_kept_once_and_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    for scenario in (large(), Scenario.from_seed(1), large()):
        add_found("a get gave what nobody put", scenario, path)
    assert load_found(path) == [
        ("a get gave what nobody put", large()),
        ("a get gave what nobody put", Scenario.from_seed(1)),
    ]


def test_a_report_says_what_is_wrong_and_how_to_run_it_again() -> None:
    trial = try_scenario(attrs.evolve(Scenario.from_seed(7), clients=1))
    failed = attrs.evolve(trial, problems=["a get gave what nobody put"])
    console = Console(width=160)
    with console.capture() as captured:
        console.print(failure(failed, failed, 12))
    text = captured.get()
    assert "a get gave what nobody put" in text
    assert "To run it again: make simulate SEED=7" in text


def test_an_error_that_ends_a_run_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scenario: Scenario) -> None:
        raise RuntimeError("every task waits")

    monkeypatch.setattr("tests.simulation.trial.simulate", broken)
    trial = try_scenario(Scenario.from_seed(1))
    assert "every task waits" in trial.problems[0]
    assert trial.fails_as(Trial(trial.scenario, ["another"], error="RuntimeError"))
    assert not trial.fails_as(Trial(trial.scenario, ["another"]))


def test_a_smaller_run_that_breaks_another_promise_is_another_finding() -> None:
    scenario = Scenario.from_seed(1)
    found = Trial(scenario, ["client-1: key-3 changed while it was leased"])
    assert found.fails_as(Trial(scenario, ["something else", "client-2: key-17 changed while it was leased"]))
    assert not found.fails_as(Trial(scenario, ["when all clients are idle, this is left: {'leases': 2}"]))
    assert not found.fails_as(Trial(scenario, []))


def test_what_was_found_once_is_clean() -> None:
    found = {why: try_scenario(scenario).problems for why, scenario in load_found()}
    assert not any(found.values()), found
