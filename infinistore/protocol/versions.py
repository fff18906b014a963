"""Version numbers and capabilities, and the offer of both that each end makes.

The major version is in every header. Ends with different major versions do not
communicate. The minor version grows with every release that adds a field to a message.
A capability is a group of messages, or a behavior, that an implementation may lack.
Each end offers its minor version and its capabilities in the header of the first frame
that it sends, in place of a deadline. The last release made no offers: it sends a
deadline there, and ignores what it receives there.
"""

import enum
from typing import NamedTuple

MAJOR = 1
MINOR = 1
_OFFER_FLAG = 1 << 63  # no deadline is above 2**63 us
_MINOR_BITS = 16
_MINOR_MASK = (1 << _MINOR_BITS) - 1


class Capability(enum.Flag):
    """What an end may be able to do.

    The value is its bit in the offer, which is never reused.
    """

    SHARED_MEMORY = 1
    """The client maps arenas, and reserves and leases blocks."""
    TABLES = 2
    """The client reads known blocks without a request."""
    COMMIT_WORD = 4
    """The client makes a batch visible without a reply."""
    RDMA = 8
    """The server's RDMA device moves blocks."""
    LIVENESS_PIPE = 16
    """A pipe comes with `MapArenasReply` that hangs up when the server ends."""
    DISK = 32
    """The client makes blocks durable, and has blocks on disk read ahead."""
    TAKE_OVER = 64
    """A server says when another process takes its place, and hands its pool over."""
    RETENTION = 128
    """The client pins keys, and says after what time blocks end."""
    REMOVALS = 256
    """The client follows which keys are removed."""
    STATE_SECTIONS = 512
    """A process that takes over reads the state of a pool in format 3."""
    TIMED_PINS = 1024
    """The client says after what time pins end."""
    OWNERSHIP = 2048
    """A process that takes over serves if it could take the ownership of the pool."""
    COPIES = 4096
    """A put says that it is a copy, of a block that may have been deleted meanwhile."""


class NewerFields(enum.Enum):
    """What becomes of an unknown field from a peer with a newer minor version."""

    IGNORED = "ignored"
    """The known fields mean the same without it."""
    REFUSED = "refused"
    """Without it, the wrong thing could be stored, deleted or exposed."""


class Offer(NamedTuple):
    """What one end can do: its minor version and its capabilities."""

    minor: int
    capabilities: Capability

    def to_number(self) -> int:
        """Return this offer as the number in a header."""
        return _OFFER_FLAG | self.capabilities.value << _MINOR_BITS | self.minor

    def shared_with(self, own: "Offer") -> "Offer":
        """Return what both the peer and an end with the offer `own` can do."""
        return Offer(self.minor, self.capabilities & own.capabilities)

    @classmethod
    def from_number(cls, number: int) -> "Offer":
        """Return a peer's offer, from its first header, without unknown capabilities.

        A number that is not an offer, such as a deadline, comes from the last release.
        """
        minor = number & _MINOR_MASK
        if number <= _OFFER_FLAG or not minor:
            return LAST_RELEASE
        bits = (number & ~_OFFER_FLAG) >> _MINOR_BITS
        return cls(minor, Capability(bits & _EVERYTHING.value))


_EVERYTHING = ~Capability(0)
OFFER = Offer(MINOR, _EVERYTHING)
"""What this release can do."""
LAST_RELEASE = Offer(0, Capability.SHARED_MEMORY | Capability.TABLES | Capability.COMMIT_WORD | Capability.RDMA)
"""What an end that makes no offer can do: one of the last release."""
