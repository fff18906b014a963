"""This machine and this process, as the doctor looks at them: files below a root, limits, and a few things to try.

All that is not a file is a value or a function in `Host`, so that a test can describe any machine.
"""

import fcntl
import os
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs

__all__ = ["UNLIMITED", "Host", "this_host"]

UNLIMITED: Final = resource.RLIM_INFINITY
_LIMITS: Final = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "fsize": resource.RLIMIT_FSIZE,
    "as": resource.RLIMIT_AS,
}


@attrs.frozen
class Host:
    """What there is to look at."""

    root: Path
    limits: Mapping[str, tuple[int, int]]
    """Soft and hard limit of this process: memlock, nofile, fsize, as. UNLIMITED stands for none."""
    try_memfd: Callable[[], str]
    """Makes and seals a small piece of shared memory; returns why that failed, or nothing."""
    socket_folder: Path
    """Where a server of this user makes its Unix socket."""

    def text(self, path: str) -> str:
        """Return what a file holds, without white space at its ends; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """Return the number that a file begins with, or None."""
        found = re.match(r"\d+", self.text(path))
        return int(found[0]) if found else None

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return (self.root / path).exists()

    def names(self, folder: str) -> list[str]:
        """Return what is in a folder, sorted; nothing if it cannot be read."""
        try:
            return sorted(os.listdir(self.root / folder))
        except OSError:
            return []

    def may(self, capability: int) -> bool:
        """Whether this process has a capability (capabilities(7)), by its number."""
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", self.text("proc/self/status"), re.MULTILINE)
        return found is not None and bool(int(found[1], 16) >> capability & 1)


def this_host(socket_folder: Path) -> Host:
    """Return the machine that this process runs on."""
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
