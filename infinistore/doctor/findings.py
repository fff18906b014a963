"""The findings of `infinistore doctor`: a line, a level, and a remedy."""

import enum
from collections.abc import Iterable

import attrs

__all__ = ["Finding", "Level", "bad", "good", "warning", "worst"]


class Level(enum.Enum):
    """The level of a finding."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but not optimally or not for everything."""
    BAD = "bad"
    """A requested or generally required feature does not work."""


@attrs.frozen
class Finding:
    """One finding. `remedy` is empty if nothing is to be done; `details` are further
    lines.
    """

    topic: str
    subject: str
    level: Level
    text: str
    remedy: str = ""
    details: tuple[str, ...] = ()


def good(topic: str, subject: str, text: str, *, details: Iterable[str] = ()) -> Finding:
    """Return a good finding."""
    return Finding(topic, subject, Level.GOOD, text, details=tuple(details))


def warning(topic: str, subject: str, text: str, remedy: str, *, details: Iterable[str] = ()) -> Finding:
    """Return a warning."""
    return Finding(topic, subject, Level.WARNING, text, remedy, tuple(details))


def bad(topic: str, subject: str, text: str, remedy: str, *, details: Iterable[str] = ()) -> Finding:
    """Return a bad finding."""
    return Finding(topic, subject, Level.BAD, text, remedy, tuple(details))


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level; GOOD without findings."""
    levels = list(Level)
    return max((finding.level for finding in findings), key=levels.index, default=Level.GOOD)
