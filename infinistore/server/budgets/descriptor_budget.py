"""How the file descriptors of the process are divided.

Each connection takes one or two: a client on this host has a table in shared memory, a
client with RDMA has a completion channel. A process without free descriptors can accept
no connection, not even a probe. So strangers, the management API, each disk and the
process have their own share, and clients get the rest, up to `--max-connections`.
"""

import os
import resource
from collections.abc import Callable
from typing import Final

from infinistore.errors import ConfigError

__all__ = ["DescriptorBudget"]

_SPARE: Final = 16  # for the process: a look at /proc, a module that is loaded late, a self-test
_LEAST: Final = 4


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd")) - 1  # one is that of the folder


class DescriptorBudget:
    """The number of descriptors for each purpose. The soft limit is raised for them, as
    far as the hard limit allows.

    `clients`, `strangers` and `management` are the wanted numbers of connections,
    `arenas` is the number of arenas that may be added. `open_now` returns how many
    descriptors are open.

    Raises:
        ConfigError: the process may open too few to serve anybody.
    """

    def __init__(
        self,
        *,
        clients: int,
        strangers: int,
        management: int,
        arenas: int,
        open_now: Callable[[], int] = open_descriptors,
    ) -> None:
        self._open_now = open_now
        self._most_clients = clients
        self._for_clients: int | None = None
        self._open_before = open_now()
        self._spare = _SPARE + arenas
        self._limit = _limit_for(self._open_before + 2 * clients + strangers + management + self._spare)
        eighth = max(_LEAST, (self._limit - self._open_before - self._spare) // 8)
        self.strangers = min(strangers, eighth)
        self.management = min(management, eighth)
        self._places(each=2)

    def reserve(self, count: int) -> None:
        """Set so many more aside, for the files of disks; if negative, so many less.

        Raises:
            ConfigError: clients may have what is left already. Nothing has changed.
        """
        for_clients = 2 * self._most_clients if self._for_clients is None else self._for_clients
        wanted = self._open_before + for_clients + self.strangers + self.management + self._spare + count
        limit = _limit_for(wanted)
        if count > 0 and self._for_clients is not None and limit < wanted:
            raise ConfigError(
                f"this process may open {limit} descriptors, too few for more disks; raise the limit: ulimit -n"
            )
        self._limit, self._spare = limit, self._spare + count

    def clients(self, each: int) -> int:
        """Decide how many clients of `each` descriptors there may be, besides what is
        open now.
        """
        most = self._places(each)
        self._for_clients = most * each
        return most

    def _places(self, each: int) -> int:
        self._open_before = self._open_now()
        left = self._limit - self._open_before - self._spare - self.strangers - self.management
        if left < each:
            raise ConfigError(
                f"this process may open {self._limit} descriptors, too few to serve anybody; raise the limit: ulimit -n"
            )
        return min(self._most_clients, left // each)

    def __str__(self) -> str:
        return f"this process may open {self._limit} descriptors (ulimit -n)"


def _limit_for(wanted: int) -> int:
    """Raise the soft limit to `wanted` if possible, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
