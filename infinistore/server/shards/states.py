"""What the supervisor knows of its shards, and what it decides: when all of them can
meet, whether the whole serves, and when a shard that ended is started again.

No processes and no clock: the supervisor tells what happened, and when.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from infinistore.protocol.messages import Shard
from infinistore.server.listeners import ServerAddresses

__all__ = ["Fleet", "ShardState"]

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 15.0
_STEADY_S: Final = 60.0


class ShardState:
    """One shard: its process, if it has one, and its past ones.

    It is restarted at once after a long life, with doubling pauses after short ones: a
    shard that cannot run must not keep a core busy with starting it.
    """

    def __init__(self, index: int, management_socket: Path | None) -> None:
        self.index = index
        self.management_socket = management_socket
        self.addresses: ServerAddresses | None = None
        """Where it listens, or did: it is restarted at the same port."""
        self.pid: int | None = None
        self.restarts = 0
        self.hangs = 0
        """How often its event loop hung."""
        self._serving_since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    @property
    def serves(self) -> bool:
        """Whether it serves clients."""
        return self._serving_since is not None

    @property
    def state(self) -> str:
        """ "starting", "serving", or "down" until it is restarted."""
        return "down" if self.pid is None else "serving" if self.serves else "starting"

    def started(self, pid: int) -> None:
        """Note that it has a process."""
        self.pid = pid

    def serving(self, now: float) -> None:
        """Note that it serves."""
        self._serving_since = now

    def ended(self, now: float) -> float:
        """Note that its process is gone. Return how long to wait before the next one,
        in seconds.
        """
        if self._serving_since is not None and now - self._serving_since >= _STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        self.pid = self._serving_since = None
        self.restarts += 1
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def described(self) -> dict[str, Any]:
        """Return it as `GET /shards` does."""
        unix_socket = self.addresses.unix_socket if self.addresses else None
        return {
            "shard": self.index,
            "state": self.state,
            "pid": self.pid,
            "port": self.addresses.port if self.addresses else None,
            "unix_socket": None if unix_socket is None else str(unix_socket),
            "restarts": self.restarts,
            "hangs": self.hangs,
        }


@attrs.define
class Fleet:
    """All shards of a server."""

    shards: Sequence[ShardState]
    draining: bool = False
    _served: bool = False

    @property
    def state(self) -> str:
        """ "starting" until all shards have served at the same time, then "serving",
        then "draining". While one restarts, the others serve, and its blocks are
        missing.
        """
        self._served = self._served or self.all_serve
        return "draining" if self.draining else "serving" if self._served else "starting"

    @property
    def all_serve(self) -> bool:
        """Whether all shards serve now."""
        return all(shard.serves for shard in self.shards)

    def places(self) -> list[Shard] | None:
        """Return where all shards are; None until all listen."""
        found = [shard.addresses for shard in self.shards if shard.addresses is not None]
        if len(found) < len(self.shards):
            return None
        return [Shard(one.port, str(one.unix_socket or "")) for one in found]
