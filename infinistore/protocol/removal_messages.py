"""The messages by which a client follows which keys are removed, or copies a block
without bringing back a key that was deleted meanwhile.

`messages.py` has the tables of all messages.
"""

from typing import ClassVar

import attrs
from attrs import validators

from infinistore.protocol.fields import Keys, count
from infinistore.protocol.versions import Capability, NewerFields

__all__ = ["Mark", "Removed", "RemovedReply"]


@attrs.frozen
class Removed:
    """Ask which keys were removed since the removal with this number of this log.

    If there are none, the server waits up to `wait_us` for one. With `log` 0, it says
    at once where to begin.
    """

    KIND: ClassVar[int] = 0x1B
    CAPABILITY: ClassVar = Capability.REMOVALS
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    log: int = attrs.field(default=0, validator=count)
    number: int = attrs.field(default=0, validator=count)
    limit: int = attrs.field(default=10_000, validator=count)
    wait_us: int = attrs.field(default=0, validator=count)


@attrs.frozen
class RemovedReply:
    """Keys that were removed and are not there now, and where to go on.

    `missed` removals before these are not known any more; `MISSING` if nobody knows how
    many.
    """

    KIND: ClassVar[int] = 0x9B
    CAPABILITY: ClassVar = Capability.REMOVALS
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    log: int = attrs.field(validator=count)
    number: int = attrs.field(validator=count)
    keys: Keys
    missed: int = attrs.field(default=0, validator=count)


@attrs.frozen
class Mark:
    """Ask for a mark, which `Put.since` names.

    With `ends_earlier`, a put that names an earlier one stores nothing from now on.
    """

    KIND: ClassVar[int] = 0x1C
    CAPABILITY: ClassVar = Capability.COPIES
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    ends_earlier: bool = attrs.field(default=False, validator=validators.instance_of(bool))
