"""How much may be asked for twice: where everything is slow, more requests make it
slower.
"""

from typing import Final

__all__ = ["Budget"]

_PART: Final = 0.05
"""How many keys may be asked for again, of all that are asked for."""
_MOST_SAVED: Final = 64.0


class Budget:
    """How many keys may be asked for twice. Any thread may use it; a lost update
    changes little.
    """

    def __init__(self) -> None:
        self.left = _MOST_SAVED
        """Below 0 after a large batch."""

    def earn(self, count: int) -> None:
        """Note that so many keys are asked for."""
        self.left = min(_MOST_SAVED, self.left + _PART * count)

    def spend(self, count: int) -> bool:
        """Whether so many keys may be asked for again, now or never."""
        if self.left <= 0:
            return False
        self.left -= count
        return True
