"""The shards of a server: the processes that it consists of, as `HelloReply` says.

Each shard is a server of its own, at the same host, with a part of the pool. Which keys
it has is for clients to decide (`infinistore.cluster`).
"""

from collections.abc import Sequence

import attrs

from infinistore.errors import ProtocolError
from infinistore.protocol.fields import Keys

__all__ = ["MOST_SHARDS", "Shard", "shards_from_texts", "shards_to_texts"]

MOST_SHARDS = 256
"""How many shards a server may have."""


@attrs.frozen
class Shard:
    """Where a shard is reached: its TCP port, and its Unix socket or an empty text."""

    port: int
    unix_socket: str = ""

    def __str__(self) -> str:
        """As it crosses the wire: `PORT`, or `PORT PATH`."""
        return f"{self.port} {self.unix_socket}" if self.unix_socket else str(self.port)


def shards_to_texts(shards: Sequence[Shard]) -> Keys:
    """Return what `HelloReply.shards` says of these shards, in order."""
    return Keys([str(shard) for shard in shards])


def shards_from_texts(texts: Sequence[str]) -> tuple[Shard, ...]:
    """Return the shards of a `HelloReply`; none if the server has no others.

    Raises:
        ProtocolError: these are no shards, or too many.
    """
    if len(texts) > MOST_SHARDS:
        raise ProtocolError(f"the server says that it has {len(texts)} shards; at most {MOST_SHARDS} are possible")
    shards = tuple(_shard(text) for text in texts)
    if len({shard.port for shard in shards}) < len(shards):
        raise ProtocolError("the server gave the same port for two shards")
    return shards


def _shard(text: str) -> Shard:
    port, _, path = text.partition(" ")
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not is_number or not 0 < int(port) < 65536 or (path and not path.startswith("/")):
        raise ProtocolError(f"the server gave no address of a shard: {text[:80]!r}")
    return Shard(int(port), path)
