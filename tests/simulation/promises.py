"""What docs/promises.md says, read from its tables.

The checker allows the errors that the table of calls lists, and deviates from the other
promises only as the table of exceptions says.
"""

import enum
import re
from functools import cache
from pathlib import Path

__all__ = ["PAGE", "PromiseException", "allowed_errors", "promise_exceptions"]

PAGE = Path(__file__).parents[2] / "docs" / "promises.md"
_EVERY_CALL = frozenset({"StoreUnavailable", "DeadlineExceeded"})
_ROW = re.compile(r"^\| `(?P<name>[a-z_-]+)` \|(?P<rest>.*)\|$", re.MULTILINE)


class PromiseException(enum.Enum):
    """The exceptions, by their names in the table."""

    LATE_OUTCOME = "late-outcome"
    EVICTION = "eviction"
    RESTART = "restart"
    CHECKSUM_DROP = "checksum-drop"
    SPLIT_BATCH = "split-batch"
    LATE_READ = "late-read"
    OLDER_BLOCK = "older-block"
    DISK_FULL = "disk-full"
    DISK_FAILED = "disk-failed"
    LOST_NODE = "lost-node"
    OTHER_PLACE = "other-place"


def _rows(heading: str) -> dict[str, str]:
    """Return the rows of the table in a section, by the name in their first column."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return {row["name"]: row["rest"] for row in _ROW.finditer(section)}


@cache
def promise_exceptions() -> frozenset[PromiseException]:
    """Return the exceptions that the page lists."""
    return frozenset(PromiseException(name) for name in _rows("Exceptions"))


@cache
def _errors_of_calls() -> dict[str, frozenset[str]]:
    return {
        name: _EVERY_CALL | frozenset(re.findall(r"`([A-Z]\w+)`", rest.split("|")[-1]))
        for name, rest in _rows("The calls").items()
    }


def allowed_errors(method: str) -> frozenset[str]:
    """Return the names of the errors that a method may raise."""
    return _errors_of_calls()[method]
