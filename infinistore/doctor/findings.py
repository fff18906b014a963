"""What every check of `infinistore doctor` is given, and what it answers with: a
`Host`, and findings, each a line, a level, and a remedy.

A `Host` is this machine and process: files below a root, limits, probes. Everything
except files is a value or a function of `Host`, so that a test can describe any
machine.
"""

import enum
import fcntl
import os
import re
import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import attrs


class Level(enum.Enum):
    """The level of a finding."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but not optimally or not for everything."""
    BAD = "bad"
    """A requested or generally required feature does not work."""


@attrs.frozen
class Finding:
    """A finding. `remedy` is empty if none is needed; `details` are more lines."""

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


UNLIMITED: Final = resource.RLIM_INFINITY
_LIMITS: Final = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "fsize": resource.RLIMIT_FSIZE,
    "as": resource.RLIMIT_AS,
}


@attrs.frozen
class Host:
    """The machine to check."""

    root: Path
    limits: Mapping[str, tuple[int, int]]
    """Soft and hard limits: memlock, nofile, fsize, as; or UNLIMITED."""
    try_memfd: Callable[[], str]
    """Creates and seals some shared memory. Returns the error, or an empty string."""
    socket_folder: Path
    """Where a server of this user creates its Unix socket."""

    def text(self, path: str) -> str:
        """Return the stripped contents of a file; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """Return the number at the beginning of a file, or None."""
        found = re.match(r"\d+", self.text(path))
        return int(found[0]) if found else None

    def exists(self, path: str) -> bool:
        """Whether the file or folder exists."""
        return (self.root / path).exists()

    def names(self, folder: str) -> list[str]:
        """Return the sorted contents of a folder; empty if it cannot be read."""
        try:
            return sorted(os.listdir(self.root / folder))
        except OSError:
            return []

    def may(self, capability: int) -> bool:
        """Whether this process has a capability, by number (capabilities(7))."""
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", self.text("proc/self/status"), re.MULTILINE)
        return found is not None and bool(int(found[1], 16) >> capability & 1)


def this_host(socket_folder: Path) -> Host:
    """Return the machine of this process."""
    limits = {name: resource.getrlimit(number) for name, number in _LIMITS.items()}
    return Host(Path("/"), limits, _try_memfd, socket_folder)


def _try_memfd() -> str:
    try:
        fd = os.memfd_create("infinistore-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(fd, 0, 1 << 16)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        return f"the file it makes: {error.strerror}"
    finally:
        os.close(fd)
    return ""
