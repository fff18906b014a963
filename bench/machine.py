"""What a benchmark sees of the machine that it runs on, for every figure to be read
with: cores, caches that they share, NUMA nodes, and the interpreter.
"""

import os
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

from infinistore.host import nodes_here, parse_list

__all__ = ["Machine", "this_machine"]


class Machine(NamedTuple):
    """What matters for a figure: if it differs, figures are not comparable."""

    processor: str
    cores: int
    """How many this process may use, by its affinity and its control group."""
    physical_cores: int
    """How many there are below these: fewer where two threads share a core."""
    nodes: dict[str, list[int]]
    """The cores of each NUMA node that this process may use, by the node's number;
    without those that have none.
    """
    memory_gib: int
    python: str
    linux: str

    def describe(self) -> str:
        """Name it in one line."""
        physical = "" if self.physical_cores >= self.cores else f" ({self.physical_cores} physical)"
        nodes = ", ".join(f"node {name}: {len(cores)} cores" for name, cores in self.nodes.items())
        numa = f"{len(self.nodes)} NUMA nodes ({nodes})" if len(self.nodes) > 1 else "one NUMA node"
        cores = f"{self.cores} core{'s' * (self.cores != 1)}{physical}"
        return f"{cores}, {self.processor}, {numa}, {self.memory_gib} GiB, {self.python}, Linux {self.linux}"


def this_machine(root: Path = Path("/"), allowed: frozenset[int] | None = None) -> Machine:
    """Return what is seen of this machine, and of its /proc and /sys below `root`."""
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    nodes = {str(node): sorted(cores & allowed) for node, cores in nodes_here(root).items() if cores & allowed}
    model = re.search(r"^model name\s*: (.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return Machine(
        model[1] if model else platform.machine(),
        min(len(allowed), _granted(root) or len(allowed)),
        len({_siblings(root, core) for core in allowed}),
        nodes,
        round(int(memory[1]) / 2**20) if memory else 0,
        f"{sys.implementation.name} {platform.python_version()}",
        platform.release(),
    )


def _siblings(root: Path, core: int) -> frozenset[int]:
    """Return the threads of the physical core that has this one."""
    text = _text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return parse_list(text) if text else frozenset([core])


def _granted(root: Path) -> int | None:
    """Return how many cores the control group grants, one at least; None for all. In a
    container its own group is the root of what is mounted.
    """
    found = re.match(r"(\d+) (\d+)", _text(root / "sys/fs/cgroup/cpu.max"))
    return max(1, int(found[1]) // int(found[2])) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
