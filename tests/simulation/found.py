"""Scenarios that failed once, in a file: `make test` runs them for ever."""

import json
from pathlib import Path
from typing import Any

import cattrs

from tests.simulation.scenario import Scenario

__all__ = ["FOUND", "add_found", "load_found"]

FOUND = Path(__file__).with_name("found.json")
"""A list of objects: `why`, what was wrong, and `scenario`."""

_converter = cattrs.Converter(forbid_extra_keys=True)


def load_found(path: Path = FOUND) -> list[tuple[str, Scenario]]:
    """Return what was wrong and the scenario, for each in the file."""
    return [(one["why"], _converter.structure(one["scenario"], Scenario)) for one in _read(path)]


def add_found(why: str, scenario: Scenario, path: Path = FOUND) -> None:
    """Add a scenario, unless it is there."""
    entry = {"why": why, "scenario": json.loads(json.dumps(_converter.unstructure(scenario)))}
    entries = _read(path)
    if entry["scenario"] not in [one["scenario"] for one in entries]:
        path.write_text(json.dumps([*entries, entry], indent=1, ensure_ascii=False) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())) if path.exists() else []
