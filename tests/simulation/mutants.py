"""Whether the simulation finds bugs: those that are planted (`planted.py`, and for
shared memory `shared_memory_mutants.py`), and mutants that mutmut makes (`drawn.py`).

Each hunt has a process and a core of its own. A bug counts as found only if the product
without it has nothing wrong in the same run.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
from rich.table import Table

from tests.simulation.drawn import Drawn, draw
from tests.simulation.hunt import Hunt, Plant, hunt
from tests.simulation.planted import PLANTED
from tests.simulation.scenario import Scenario
from tests.simulation.shared_memory_mutants import MUTANTS
from tests.simulation.trial import try_scenario

__all__ = ["DRAWN", "LEAST_FOUND", "MOST_S", "Result", "planted", "run_drawn", "run_planted", "table"]

MOST_S = 60.0
"""How long to look for one bug, in seconds of one core."""
DRAWN = 10
"""How many mutants are drawn,"""
LEAST_FOUND = 8
"""and how many of them have to be found."""


@attrs.frozen
class Result:
    """What became of one bug."""

    name: str
    hunt: Hunt
    without: str
    """What is wrong in the same run without the bug; empty, or the product is at
    fault.
    """

    @property
    def found(self) -> bool:
        """Whether the simulation has found it."""
        return bool(self.hunt.found) and not self.without


def planted() -> dict[str, Plant]:
    """Return all that is planted, by name."""
    replaced = {one.name: Plant(one.sources(), needs=one.needs) for one in PLANTED}
    return replaced | {name: Plant(shared_memory=name) for name in MUTANTS}


def run_planted(seed: int, seconds: float, on_result: Callable[[Result], object]) -> list[Result]:
    """Hunt for everything that is planted, from a seed on."""
    return _hunt_for(planted(), seed, seconds, on_result)


def run_drawn(seed: int, seconds: float, on_result: Callable[[Result], object]) -> tuple[Drawn, list[Result]]:
    """Draw mutants by a seed, and hunt for them from it on."""
    drawn = draw(seed, DRAWN)
    bugs = {one.name: Plant({one.module: one.source}) for one in drawn.mutants}
    return drawn, _hunt_for(bugs, seed, seconds, on_result)


def _hunt_for(
    bugs: dict[str, Plant], first_seed: int, seconds: float, on_result: Callable[[Result], object]
) -> list[Result]:
    def look(plant: Plant) -> Hunt:
        return hunt(plant, seconds, first_seed)

    results = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for name, came in zip(bugs, pool.map(look, bugs.values()), strict=True):
            problems = try_scenario(Scenario.from_seed(came.seed)).problems if came.seed and came.found else []
            results.append(Result(name, came, problems[0] if problems else ""))
            on_result(results[-1])
    return results


def table(title: str, results: Sequence[Result]) -> Table:
    """Return what became of each bug, as a table."""
    made = Table("bug", "seeds", "calls", "seconds", "found by", title=title)
    for one in results:
        said = one.hunt.found.strip().splitlines()[-1] if one.hunt.found else "NOT FOUND"
        if one.without:
            said = f"NOT COUNTED, for it is so without the bug, too: {said}"
        made.add_row(one.name, str(one.hunt.seeds), f"{one.hunt.calls:,}", f"{one.hunt.seconds:.1f}", said[:160])
    return made
