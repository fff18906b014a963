"""Shrinking: the smallest scenario found that fails in the same way.

A scenario is made smaller by running the seed again with fewer clients, fewer
operations, fewer kinds of faults, and settings as they are by default. What still fails
is made smaller again, until nothing helps or enough runs were made. The same scenario
always shrinks to the same one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from tests.simulation.scenario import Scenario

__all__ = ["shrink"]

_MOST_RUNS = 150
_COUNTS = ("clients", "operations", "events")
"""What is halved, in a scenario and its sections; at least 1."""


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], most_runs: int = _MOST_RUNS) -> tuple[Scenario, int]:
    """Return a smaller scenario that fails, or this one, and how many runs it took.

    `fails` runs a scenario, and tells whether it fails as this one does.
    """
    runs = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(scenario):
            if runs == most_runs:
                return scenario, runs
            runs += 1
            if fails(smaller):
                scenario, progress = smaller, True
                break
    return scenario, runs


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that are one step smaller, the boldest step first."""
    yield from _fewer(scenario)
    sections = {name: section for name, section in _fields(scenario) if attrs.has(type(section))}
    for name, section in sections.items():
        for fewer in _fewer(section):
            yield attrs.evolve(scenario, **{name: fewer})
    for name, section in sections.items():
        for plainer in _plainer(section):
            yield attrs.evolve(scenario, **{name: plainer})


def _fewer(thing: Any) -> Iterator[Any]:
    """The same with counts that are halved, or less by one."""
    for name, value in _fields(thing):
        if name in _COUNTS and value > 1:
            yield attrs.evolve(thing, **{name: value // 2})
            if value > 3:
                yield attrs.evolve(thing, **{name: value - 1})


def _plainer(section: Any) -> Iterator[Any]:
    """The same with all settings as by default, but for counts; then with one more."""
    defaults = {
        field.name: field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
        for field in attrs.fields(type(section))
        if field.default is not attrs.NOTHING and field.name not in _COUNTS
    }
    changed = [name for name, default in defaults.items() if getattr(section, name) != default]
    if len(changed) > 1:
        yield attrs.evolve(section, **{name: defaults[name] for name in changed})
    for name in changed:
        yield attrs.evolve(section, **{name: defaults[name]})


def _fields(thing: Any) -> Iterator[tuple[str, Any]]:
    for field in attrs.fields(type(thing)):
        yield field.name, getattr(thing, field.name)
