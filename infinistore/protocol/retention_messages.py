"""The messages about how long keys stay: pinned ones, and those that end at a time.

`messages.py` has the tables of all messages. `Put`, `Commit` and `RdmaPut` say how long
their blocks live.
"""

from typing import ClassVar

import attrs
from attrs import validators

from infinistore.protocol.fields import Keys, Numbers, count
from infinistore.protocol.versions import Capability, NewerFields

__all__ = ["Pin", "PinReply", "TimesLeft", "TimesLeftReply"]


@attrs.frozen
class Pin:
    """Protect keys from eviction, or with `pinned` false, protect them no more.

    If `ttl_us` is not 0, the protection ends after that many microseconds. What is
    protected for longer stays so.
    """

    KIND: ClassVar[int] = 0x0F
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    pinned: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    ttl_us: int = attrs.field(default=0, validator=count, metadata={"since": 1})


@attrs.frozen
class PinReply:
    """One byte for each key: 1 if it is pinned now, or was before it was unpinned."""

    KIND: ClassVar[int] = 0x8F
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    pinned: bytes = attrs.field(validator=validators.instance_of(bytes))


@attrs.frozen
class TimesLeft:
    """Ask when keys end."""

    KIND: ClassVar[int] = 0x1A
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys


@attrs.frozen
class TimesLeftReply:
    """After how many microseconds each key ends.

    0 for a key that does not, `MISSING` for one that is not in memory.
    """

    KIND: ClassVar[int] = 0x9A
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    times: Numbers
