"""Whether a descriptor is still that of a file: its number may be another thread's by
now.
"""

import os
from contextlib import suppress

__all__ = ["is_still"]


def is_still(file: os.stat_result, descriptor: int) -> bool:
    """Whether the descriptor is open, and of this file."""
    with suppress(OSError):
        return os.path.samestat(file, os.fstat(descriptor))
    return False
