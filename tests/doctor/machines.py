"""Machines for the doctor to look at: the kernel's files below a folder, limits, and
what is installed.
"""

from collections.abc import Mapping
from pathlib import Path

import attrs

from infinistore.doctor import Host, Software
from infinistore.doctor.findings import UNLIMITED

HEALTHY = {
    "proc/meminfo": "MemAvailable:  120000000 kB\nHugePages_Total:       0\nHugePages_Free:        0\n",
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
    "proc/sys/kernel/osrelease": "6.1.0-35-amd64\n",
    "proc/sys/net/core/somaxconn": "4096\n",
    "proc/sys/net/core/rmem_max": "212992\n",
    "proc/sys/net/core/wmem_max": "212992\n",
    "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
    "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
}

SOFTWARE = Software(
    "cpython 3.11.2",
    "/opt/venv/bin/python",
    ("trio>=0.25", "attrs>=23.2", 'torch>=2.2; extra == "torch"'),
    {"trio": "0.30.0", "attrs": "25.1"}.get,
    lambda: "44.0",
    lambda: "",
)


def machine(root: Path, files: Mapping[str, str] | None = None, **limits: int) -> Host:
    """A machine with nothing to complain of, except what is given."""
    for name, text in (HEALTHY | dict(files or {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    unlimited = dict.fromkeys(("memlock", "nofile", "fsize", "as"), (UNLIMITED, UNLIMITED))
    return Host(root, unlimited | {name: (soft, UNLIMITED) for name, soft in limits.items()}, lambda: "", root / "run")


def with_memfd_problem(host: Host, problem: str) -> Host:
    return attrs.evolve(host, try_memfd=lambda: problem)
