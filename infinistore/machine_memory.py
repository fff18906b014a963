"""How much memory this process may still take, before the kernel starts to kill.

Shared memory is paid for when it is touched, and a process that touches too much is
killed without a word. So the arena asks here first. The answer is the smallest of what
the machine has available and what each control group (version 1 or 2) above this
process leaves.

Promises: reads a few small files, never raises for one that is missing or odd (what
cannot be read does not limit). Leaves to others: races between two processes that ask
at the same time.
"""

from collections.abc import Iterator
from pathlib import Path

import attrs

__all__ = ["MemoryLimit", "available_memory", "free_huge_pages"]


@attrs.frozen
class MemoryLimit:
    """The tightest bound found: `available_bytes` more may be taken, as `source` says
    (for messages)."""

    available_bytes: int
    source: str


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryLimit:
    """Return how many bytes this process may still take, and who says so.

    `proc` and `cgroups` are where proc(5) and cgroups(7) are mounted; tests give their
    own.
    """
    limits = [MemoryLimit(_meminfo(proc).get("MemAvailable", 1 << 62), "MemAvailable in /proc/meminfo")]
    limits.extend(_cgroup_limits(proc, cgroups))
    return min(limits, key=lambda limit: limit.available_bytes)


def free_huge_pages(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return (free huge pages of the default size, bytes in one); (0, 2 MiB) where the
    kernel does not say."""
    meminfo = _meminfo(proc)
    return meminfo.get("HugePages_Free", 0), meminfo.get("Hugepagesize", 2 << 20)


def _meminfo(proc: Path) -> dict[str, int]:
    """Return /proc/meminfo as bytes (or plain counts, for the lines without a unit)."""
    values: dict[str, int] = {}
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            yield from _group_limits(cgroups, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _group_limits(
                cgroups / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _group_limits(root: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[MemoryLimit]:
    """Yield what the group and each of its parents leave.

    Inside a container the path may name a group that is not mounted here; then its
    parents, down to the root of the mount (which is the container's own group), are
    what counts.
    """
    folder = root / group.strip("/")
    while True:
        bound, used = _number(folder / limit), _number(folder / usage)
        if bound is not None and used is not None:
            # The kernel gives file cache back before it kills.
            left = max(0, bound - used + _field(folder / "memory.stat", cache))
            yield MemoryLimit(left, str(folder / limit))
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None if there is no file, or it says
    "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _field(path: Path, name: str) -> int:
    for line in _lines(path):
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0
