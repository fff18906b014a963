"""Clients that share memory with their server, in the simulation: bugs in the order of
accesses are found, and nothing else.
"""

from itertools import count

import pytest

from tests.simulation.scenario import Scenario
from tests.simulation.shared_memory_mutants import MUTANTS
from tests.simulation.simulate import simulate

_MOST_RUNS = 40


def test_nothing_is_wrong() -> None:
    scenarios = (one for one in map(Scenario.from_seed, count(1)) if one.sharing.clients)
    for _ in range(2):
        scenario = next(scenarios).shortened(40)
        assert simulate(scenario).violations == [], scenario.seed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("bug", "first_seed"),  # of many that find it; any other will do after some more
    [
        ("hazards erased before the copy", 1),
        ("hazards without a fence", 1),
        ("removals checked before hazards are set", 25),
        ("committed before the payload", 1),
        ("replacement not announced", 1),
        ("commit words not looked at", 1),
    ],
)
def test_a_planted_bug_is_found(bug: str, first_seed: int) -> None:
    seeds = (seed for seed in count(first_seed) if Scenario.from_seed(seed).sharing.clients)
    with MUTANTS[bug]():
        assert any(simulate(Scenario.from_seed(next(seeds))).violations for _ in range(_MOST_RUNS))
