"""What failed is made as small as it fails, kept, and told so that it can be run
again.
"""

import shlex
from functools import partial
from pathlib import Path

import attrs
import pytest

from tests.simulation import __main__ as command
from tests.simulation.faults import FaultSettings
from tests.simulation.found import add_found, from_json, load_found
from tests.simulation.scenario import Scenario
from tests.simulation.shrink import shrink
from tests.simulation.simulate import Outcome, simulate
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
    scenarios = (large(), Scenario.from_seed(1), large())
    assert [add_found("a get gave what nobody put", scenario, path) for scenario in scenarios] == [1, 2, 1]
    assert load_found(path) == [
        ("a get gave what nobody put", large()),
        ("a get gave what nobody put", Scenario.from_seed(1)),
    ]


@pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"seed": 1}', '{"why": "", "scenario": {}}'])
def test_what_is_no_scenario_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no scenario"):
        from_json(text)


def test_a_report_ends_with_the_commands_that_run_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each in one line, which the last one needs nothing but."""
    ran: list[Scenario] = []

    def simulate_badly(scenario: Scenario) -> Outcome:
        ran.append(scenario)
        return attrs.evolve(simulate(scenario), violations=["a get gave what nobody put"])

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["simulation", *arguments])
        assert command.main() == 1
        return capsys.readouterr().out

    found = tmp_path / "found.json"
    add_found("another", Scenario.from_seed(1), found)
    monkeypatch.setattr("tests.simulation.trial.simulate", simulate_badly)
    monkeypatch.setattr(command, "add_found", partial(add_found, path=found))
    monkeypatch.setattr(command, "load_found", partial(load_found, found))
    told = run("--seed", "7")
    assert "a get gave what nobody put" in told
    assert (smallest := ran[-1]).workload.operations == 1
    seed, by_number, by_itself = told.splitlines()[-3:]
    assert seed.endswith("make simulate SEED=7")
    assert by_number.endswith("python -m tests.simulation --found 2")
    for line in (by_number, by_itself):
        _, _, words = line.partition(" -m tests.simulation ")
        ran.clear()
        assert "a get gave what nobody put" in run(*shlex.split(words))
        assert ran == [smallest]


@pytest.mark.parametrize("number", ["0", "-1", "10000", "one"])
def test_a_number_that_nothing_found_has_is_refused(
    number: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["simulation", f"--found={number}"])
    with pytest.raises(SystemExit):
        command.main()
    assert f"found.json has the numbers 1 to {len(load_found())}, and not {number}" in capsys.readouterr().err


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
