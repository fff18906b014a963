"""The messages of management: listing keys, emptying a store, eviction and statistics.

`messages.py` has the tables of all messages.
"""

from typing import ClassVar

import attrs

from infinistore.protocol.fields import Keys, Tree, count, ratio, text
from infinistore.protocol.versions import NewerFields

__all__ = ["Evict", "KeysReply", "ListKeys", "Purge", "Statistics", "StatisticsReply"]


@attrs.frozen
class ListKeys:
    """Request one page of keys with `prefix`, after `after`, in code point order."""

    KIND: ClassVar[int] = 0x08
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    prefix: str = attrs.field(default="", validator=text)
    after: str = attrs.field(default="", validator=text)
    limit: int = attrs.field(default=1000, validator=count)


@attrs.frozen
class KeysReply:
    """One page of keys.

    `limit` is the limit that the server used. A page with fewer keys is the last.
    """

    KIND: ClassVar[int] = 0x88
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    keys: Keys
    limit: int = attrs.field(validator=count)


@attrs.frozen
class Purge:
    """Delete everything. The count in the reply says how many keys existed."""

    KIND: ClassVar[int] = 0x09
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED


@attrs.frozen
class Evict:
    """If more than `high` of the pool is in use, evict blocks until at most `low` is.

    The count in the reply is the number of evicted blocks.
    """

    KIND: ClassVar[int] = 0x0A
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    low: float = attrs.field(converter=float, validator=ratio)
    high: float = attrs.field(converter=float, validator=ratio)


@attrs.frozen
class Statistics:
    """Request the statistics; with `details`, also what takes longer to collect."""

    KIND: ClassVar[int] = 0x0B
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    details: bool = False


@attrs.frozen
class StatisticsReply:
    """The statistics as nested maps, with the names of `infinistore.statistics.Stats`.

    The maps are "server", "store" and, on request, "details". No other message has
    lists.
    """

    KIND: ClassVar[int] = 0x8B
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    statistics: Tree
