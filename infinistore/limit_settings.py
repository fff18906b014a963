"""Limits of a server as settings: how long keys are, and how much of the pool may be
kept from eviction.
"""

from typing import Any, Final

from infinistore.settings import declare, number, size
from infinistore.sizes import KIB

_LIMITS: Final = "Limits"


def _max_key_bytes() -> Any:
    """Declare the longest key."""
    return declare(
        "max_key_size",
        size(1, KIB, bare_unit_bytes=1, bare_unit="bytes"),
        "1024",
        "Maximum length of a key, in bytes of UTF-8",
        group=_LIMITS,
    )


def _max_protected_ratio() -> Any:
    """Declare what pinned keys may take of the pool."""
    return declare(
        "max_protected_ratio",
        number(0, 1, "FRACTION"),
        "0.25",
        "Maximum fraction of the pool that pinned keys may take together; they are never evicted",
        group=_LIMITS,
    )
