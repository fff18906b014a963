"""The server: a Trio nursery around the store core. `serve` runs one, in this process;
`serve_shards` one of several processes, for which more is imported on first use.
"""

from typing import TYPE_CHECKING

import infinistore.namesake  # noqa: F401 - the command of the original leads here, if that was installed last
from infinistore.server.composition import serve
from infinistore.server.listeners import ServerAddresses
from infinistore.server.security import check_files
from infinistore.server.server import Server

if TYPE_CHECKING:
    from infinistore.server.shards import ShardProcess, serve_shards

__all__ = ["Server", "ServerAddresses", "ShardProcess", "check_files", "serve", "serve_shards"]


if not TYPE_CHECKING:  # a checker that saw this would believe in every name

    def __getattr__(name: str) -> object:
        if name not in ("ShardProcess", "serve_shards"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from infinistore.server import shards

        return getattr(shards, name)
