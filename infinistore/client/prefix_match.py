"""What `match_prefix` returns."""

from typing import Self

__all__ = ["PrefixMatch"]


class PrefixMatch(int):
    """How many leading keys are in the store: an int, with the hold that was asked for.

    `hold` is a text that `release_hold` takes, on this store or on another one that is connected to the same server,
    in any process; it is empty if there is no hold.
    """

    hold: str

    def __new__(cls, matched: int, hold: str = "") -> Self:
        """Make one from a count and a token."""
        self = super().__new__(cls, matched)
        self.hold = hold
        return self

    def __reduce__(self) -> tuple[type["PrefixMatch"], tuple[int, str]]:
        """Pickle count and token."""
        return PrefixMatch, (int(self), self.hold)
