"""What `infinistore doctor` says: one finding a line, how serious it is, and what would help."""

import enum
from collections.abc import Iterable

import attrs

__all__ = ["Finding", "Level", "bad", "good", "warning", "worst"]


class Level(enum.Enum):
    """How serious a finding is."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but less well than it could, or not for everything."""
    BAD = "bad"
    """Something that was asked for, or that everybody needs, does not work."""


@attrs.frozen
class Finding:
    """One line. `remedy` is empty where nothing needs to be done; `details` are lines for who wants to know more."""

    topic: str
    subject: str
    level: Level
    text: str
    remedy: str = ""
    details: tuple[str, ...] = ()


def good(topic: str, subject: str, text: str, *, details: Iterable[str] = ()) -> Finding:
    """Say that something is as it should be."""
    return Finding(topic, subject, Level.GOOD, text, details=tuple(details))


def warning(topic: str, subject: str, text: str, remedy: str, *, details: Iterable[str] = ()) -> Finding:
    """Say that something could be better."""
    return Finding(topic, subject, Level.WARNING, text, remedy, tuple(details))


def bad(topic: str, subject: str, text: str, remedy: str, *, details: Iterable[str] = ()) -> Finding:
    """Say that something does not work."""
    return Finding(topic, subject, Level.BAD, text, remedy, tuple(details))


def worst(findings: Iterable[Finding]) -> Level:
    """Return the level of the most serious of them; GOOD if there is none."""
    levels = list(Level)
    return max((finding.level for finding in findings), key=levels.index, default=Level.GOOD)
