"""A trial: one run of a scenario, and what it was like, small enough to be handed from
process to process.
"""

import re
import time
import traceback
from collections import Counter

import attrs

from tests.simulation.scenario import Scenario
from tests.simulation.simulate import simulate
from tests.simulation.trace import Event

__all__ = ["Trial", "try_scenario"]


@attrs.frozen
class Trial:
    """What a run came to, also if it ended with an error."""

    scenario: Scenario
    problems: list[str]
    """What was found wrong; or the traceback of the error that ended the run."""
    calls: int = 0
    key_operations: int = 0
    faults: Counter[str] = attrs.field(factory=Counter)
    points: Counter[str] = attrs.field(factory=Counter)
    """How often each point of `tests.simulation.buggify` fired, by name."""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    """The processor time of the run."""
    last_events: list[Event] = attrs.field(factory=list)
    error: str = ""
    """The type of the error that ended the run, if one did."""

    def fails_as(self, other: "Trial") -> bool:
        """Whether this fails, and in the way of another trial."""
        if self.error or other.error:
            return self.error == other.error
        return not {_kind(problem) for problem in self.problems}.isdisjoint(map(_kind, other.problems))


def _kind(problem: str) -> str:
    """Return the last line of a problem without keys, clients and numbers."""
    last = problem.strip().rpartition("\n")[2]
    return re.sub(r"[0-9]+(\.[0-9]+)?|'[^']*'", "", last)


def try_scenario(scenario: Scenario) -> Trial:
    """Run a scenario."""
    start = time.process_time()
    try:
        outcome = simulate(scenario)
    except Exception as error:  # noqa: BLE001 - whatever ends a run is a finding
        return Trial(scenario, [traceback.format_exc()], cpu_s=time.process_time() - start, error=type(error).__name__)
    return Trial(
        scenario,
        outcome.violations,
        calls=outcome.calls,
        key_operations=outcome.key_operations,
        faults=outcome.faults,
        points=outcome.buggified,
        virtual_s=outcome.virtual_s,
        cpu_s=time.process_time() - start,
        last_events=[Event(e.time, e.where, e.what, tuple(map(str, e.details))) for e in outcome.last_events]
        if outcome.violations
        else [],
    )
