"""What somebody may do."""

import enum
from collections.abc import Iterable
from typing import Final

__all__ = ["ALL_ROLES", "BLOCK_ROLES", "DEFAULT_ROLES", "Role", "in_words"]


class Role(enum.Enum):
    """A permission. A tenant has it for what is its own."""

    READ = "read"
    """Look keys up, list them, and read blocks."""
    WRITE = "write"
    """Put and delete blocks, and make them durable."""
    MONITOR = "monitor"
    """See statistics."""
    ADMIN = "admin"
    """Purge and evict."""


ALL_ROLES: Final = frozenset(Role)
BLOCK_ROLES: Final = frozenset((Role.READ, Role.WRITE))
"""The roles that concern blocks."""
DEFAULT_ROLES: Final = BLOCK_ROLES
"""The roles of a tenant whose entry names none."""


def in_words(roles: Iterable[Role], between: str = ", ") -> str:
    """Return the names of roles, always in the same order."""
    named = frozenset(roles)
    return between.join(role.value for role in Role if role in named)
