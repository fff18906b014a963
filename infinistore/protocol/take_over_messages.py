"""The messages by which a process takes the place of a server.

`messages.py` has the tables of all messages.
"""

import enum
from typing import ClassVar

import attrs

from infinistore.protocol.fields import Keys, Numbers, count
from infinistore.protocol.versions import Capability, NewerFields

__all__ = ["TakeOver", "TakeOverReply", "TakeOverStep"]


class TakeOverStep(enum.IntEnum):
    """How far the process is that takes over."""

    BEGIN = 0
    """It asks for the sockets that the server listens on."""
    HAND_OVER = 1
    """It is ready: the server ends its service and tells what its pool has."""
    END = 2
    """It has all it needs. Only a server without `Capability.OWNERSHIP` is asked, which
    ends and never serves again."""


@attrs.frozen
class TakeOver:
    """One step on the way to take the server's place; see `TakeOverStep`.

    `first` is the number of the first descriptor that is wanted: one reply carries only
    so many.
    """

    KIND: ClassVar[int] = 0x19
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.TAKE_OVER
    step: int = attrs.field(validator=count)
    first: int = attrs.field(default=0, validator=count)


@attrs.frozen
class TakeOverReply:
    """Descriptors from number `first` on come with the first byte.

    `names` says what all descriptors of the step are, and `numbers` has a number for
    each: the length of an arena, else 0.
    """

    KIND: ClassVar[int] = 0x99
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    CAPABILITY: ClassVar = Capability.TAKE_OVER
    names: Keys
    numbers: Numbers
