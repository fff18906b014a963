"""How much memory this process could still take.

The answer is a reading of this moment, not a promise: others take memory too. Taking it is left to `core/arena.py`.
"""

import os
from pathlib import Path

from infinistore.sizes import KIB

__all__ = ["available_memory_bytes"]


def available_memory_bytes() -> int:
    """Return what the kernel says is available, or less if a memory cgroup (a container) bounds this process."""
    available_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available_bytes = int(line.split()[1]) * KIB
        return min([available_bytes, *_cgroup_rooms_bytes()])
    except (OSError, ValueError, IndexError):  # a sandbox that hides these files: the machine's memory has to do
        return available_bytes


def _cgroup_rooms_bytes() -> list[int]:
    """What each memory cgroup above this process still allows (version 2, and version 1's own group)."""
    rooms = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit_name, used_name = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, used_name = (
                Path("/sys/fs/cgroup/memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit = (folder / limit_name).read_text().strip()
                if limit != "max":
                    rooms.append(max(0, int(limit) - int((folder / used_name).read_text())))
            except OSError:  # inside a container the names above its root are not there
                pass
            if folder == root:
                break
    return rooms
