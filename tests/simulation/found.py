"""Scenarios that failed once, in a file: `make test` runs them for ever."""

import json
from pathlib import Path
from typing import Any

import cattrs

from tests.simulation.scenario import Scenario

__all__ = ["FOUND", "add_found", "as_json", "from_json", "load_found"]

FOUND = Path(__file__).with_name("found.json")
"""A list of objects: `why`, what was wrong, and `scenario`."""

_converter = cattrs.Converter(forbid_extra_keys=True)


def load_found(path: Path = FOUND) -> list[tuple[str, Scenario]]:
    """Return what was wrong and the scenario, for each in the file."""
    return [(one["why"], _converter.structure(one["scenario"], Scenario)) for one in _read(path)]


def add_found(why: str, scenario: Scenario, path: Path = FOUND) -> int:
    """Add a scenario, unless it is there, and return its number: the first is 1."""
    entry = {"why": why, "scenario": json.loads(as_json(scenario))}
    entries = _read(path)
    scenarios = [one["scenario"] for one in entries]
    if entry["scenario"] in scenarios:
        return scenarios.index(entry["scenario"]) + 1
    path.write_text(json.dumps([*entries, entry], indent=1, ensure_ascii=False) + "\n")
    return len(entries) + 1


def as_json(scenario: Scenario) -> str:
    """Return a scenario in one line, without single quotes."""
    return json.dumps(_converter.unstructure(scenario))


def from_json(text: str) -> Scenario:
    """Return the scenario of such a line.

    Raises:
        ValueError: it is none.
    """
    try:
        return _converter.structure(json.loads(text), Scenario)
    except (ValueError, TypeError, KeyError, AttributeError, cattrs.BaseValidationError) as error:
        raise ValueError(f"no scenario: {error}") from error


def _read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())) if path.exists() else []
