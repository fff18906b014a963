"""Rows of figures in a file, which is written as each row ends: so a run that is cut off
loses the row at which it was, and `--resume` goes on with the next one.

    {"settings": ..., "machines": [...], "left_out": [...],
     "rows": [{"row": NAME, "machine": 0, ...}], "missing": [NAME, ...]}

A row is a comparison within itself, of things that took turns. So a run may go on on
another machine: each row says by `machine` which one of `machines` it is from.
`left_out` says what this machine cannot measure, and `missing` which rows are not
measured yet.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import Machine

__all__ = ["Record", "RecordError", "add_record_arguments"]


class RecordError(Exception):
    """A file cannot be gone on with; the text says why, and what helps."""


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where rows go, whether those that are there count, and how long it takes."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each row to this file as it ends")
    parser.add_argument("--resume", action="store_true", help="measure only rows that this file lacks")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="begin no row that would end later than that, except the first (no limit)",
    )


class Record:
    """The rows of one run.

    `settings` is what rows must have in common to be in one file; `planned` names those
    that are wanted, in their order. Without a path, nothing is written.

    Raises:
        RecordError: the file to go on with has other settings, or is none.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        machine: Machine,
        planned: Sequence[str],
        *,
        left_out: Sequence[str] = (),
        resume: bool = False,
        limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._planned = planned
        self._limit_s = limit_s
        self._clock = clock
        self._began = self._last = clock()
        self._longest_s = 0.0
        found = _read(path) if resume and path is not None and path.exists() else {}
        plain = json.loads(json.dumps(settings))  # as it is read: a tuple is a list there
        if found and found["settings"] != plain:
            other = ", ".join(sorted(name for name in plain if found["settings"].get(name) != plain[name]))
            raise RecordError(f"{path} was made with other settings ({other}); leave --resume out to begin anew")
        self.found: dict[str, Any] = found | {"settings": plain, "left_out": list(left_out)}
        """What the file holds; what else belongs there may be put into it."""
        machines = self.found.setdefault("machines", [])
        if machine._asdict() not in machines:
            machines.append(machine._asdict())
        self._machine = machines.index(machine._asdict())
        self.found.setdefault("rows", [])
        self.write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that are there, from earlier runs, too."""
        rows: list[dict[str, Any]] = self.found["rows"]
        return rows

    @property
    def missing(self) -> list[str]:
        """Return the planned rows that are not there."""
        there = {row["row"] for row in self.rows}
        return [name for name in self._planned if name not in there]

    def may_begin(self) -> bool:
        """Say whether there is time for one more row, as long as the longest so far. For
        the first there always is: else a run whose servers start slowly never gets on.
        """
        spent = self._clock() - self._began
        return self._limit_s is None or not self._longest_s or spent + self._longest_s <= self._limit_s

    def add(self, name: str, figures: Mapping[str, Any]) -> None:
        """Add a row that has just ended."""
        now = self._clock()
        self._longest_s, self._last = max(self._longest_s, now - self._last), now
        self.rows.append({"row": name, "machine": self._machine, **figures})
        self.write()

    def write(self) -> None:
        """Write the file, in one step: who is killed meanwhile leaves the old one."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.found | {"missing": self.missing}, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert {"settings", "machines", "rows"} <= found.keys()
    except (ValueError, AssertionError, AttributeError):
        raise RecordError(f"{path} is no record of rows; leave --resume out to begin anew") from None
    return found
