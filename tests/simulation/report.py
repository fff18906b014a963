"""What people read: why a seed fails and how to run it again, and what many seeds came
to.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.simulation.found import as_json
from tests.simulation.many import Tally
from tests.simulation.scenario import Scenario
from tests.simulation.trace import Event
from tests.simulation.trial import Trial

__all__ = ["again", "console", "counts", "failure", "summary"]

_EVENTS = 40


def failure(trial: Trial, shrunk: Trial, runs: int) -> RenderableType:
    """Say what is wrong with a seed, and show the end of its shrunk run."""
    parts: list[RenderableType] = [Text(f"Seed {trial.scenario.seed} breaks a promise:", style="bold red")]
    parts += [Text(f"  - {problem}") for problem in trial.problems[:10]]
    if len(trial.problems) > 10:
        parts.append(Text(f"  and {len(trial.problems) - 10} more"))
    title = f"The smallest scenario that fails, found in {runs} runs:" if runs else "The scenario:"
    parts.append(Text(f"\n{title}", style="bold"))
    parts += [Text(f"  {line}") for line in _describe(shrunk.scenario)]
    if shrunk.problems != trial.problems:
        parts += [Text("It fails with:"), *(Text(f"  - {problem}") for problem in shrunk.problems[:5])]
    if shrunk.last_events:
        parts += [Text(f"\nIts last {min(_EVENTS, len(shrunk.last_events))} events:", style="bold")]
        parts.append(_events(shrunk.last_events[-_EVENTS:]))
    return Group(*parts)


def again(seed: int, scenario: Scenario, number: int) -> list[str]:
    """Return lines that say how to run a seed again, and what it was shrunk to, which
    has this number in found.json. They must not be wrapped: a log of them has to do
    where that file is lost.
    """
    command = ".venv/bin/python -m tests.simulation"
    return [
        f"To run it again, as it was before: make simulate SEED={seed}",
        f"To run the smallest scenario again: {command} --found {number}",
        f"The same without found.json: {command} --scenario '{as_json(scenario)}'",
    ]


def _describe(scenario: Scenario) -> list[str]:
    """A scenario in lines: its own values, then of each section what is not as by
    default.
    """
    lines = []
    plain = []
    for field in attrs.fields(Scenario):
        value = getattr(scenario, field.name)
        if attrs.has(type(value)):
            lines.append(f"{field.name}: {', '.join(_unusual(value)) or 'as by default'}")
        else:
            plain.append(f"{field.name}={value!r}")
    return [", ".join(plain), *lines]


def _unusual(section: Any) -> list[str]:
    fields = attrs.fields(type(section))
    values = {field.name: getattr(section, field.name) for field in fields}
    defaults = {
        field.name: field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
        for field in fields
    }
    return [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]


def _events(events: Sequence[Event]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("virtual s", "where", "what", "details"):
        table.add_column(heading, justify="right" if heading == "virtual s" else "left", overflow="fold")
    for event in events:
        table.add_row(f"{event.time:.6f}", event.where, event.what, Text(" ".join(map(str, event.details))))
    return table


def summary(tally: Tally) -> Table:
    """What many seeds came to."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{tally.seeds:,}", "seeds")
    table.add_row(f"{tally.calls:,}", f"calls, {tally.calls / max(tally.cpu_s, 1e-9):,.0f} a second of processor time")
    table.add_row(f"{tally.key_operations:,}", "key operations")
    table.add_row(f"{tally.virtual_s / 3600:,.2f}", "hours of virtual time")
    return table


def counts(title: str, counted: Counter[str]) -> RenderableType:
    """How often each of something happened, most often first."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    for name, count in counted.most_common():
        table.add_row(f"{count:,}", name)
    return Group(Text(f"\n{title}", style="bold"), table if counted else Text("none"))


def console() -> Console:
    """A console that keeps lines whole where the output is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=160)
