"""The messages about blocks on disk: making blocks durable, and reading ahead.

`messages.py` has the tables of all messages.
"""

from typing import ClassVar

import attrs

from infinistore.protocol.fields import Keys, count
from infinistore.protocol.versions import Capability, NewerFields

__all__ = ["Flush", "Prefetch", "PrefetchReply"]


@attrs.frozen
class Flush:
    """Write blocks to disk now, and wait until they are durable.

    The count in the reply is the number of keys whose blocks are.
    """

    KIND: ClassVar[int] = 0x0D
    CAPABILITY: ClassVar = Capability.DISK
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys


@attrs.frozen
class Prefetch:
    """Begin to read blocks from disk into memory, the first ones first.

    If `hold_us` is not 0, a hold protects what is there from eviction for that many
    microseconds.
    """

    KIND: ClassVar[int] = 0x0E
    CAPABILITY: ClassVar = Capability.DISK
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    hold_us: int = attrs.field(default=0, validator=count)


@attrs.frozen
class PrefetchReply:
    """How many blocks are being read, and the id of the hold.

    `skipped` counts those on disk that are not read, because reading ahead has a
    bounded part of the pool. `hold` is 0 if none was requested, or nothing is there.
    """

    KIND: ClassVar[int] = 0x8E
    CAPABILITY: ClassVar = Capability.DISK
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    reading: int = attrs.field(validator=count)
    skipped: int = attrs.field(default=0, validator=count)
    hold: int = attrs.field(default=0, validator=count)
