"""What `match_prefix` returns."""

from typing import Self

__all__ = ["PrefixMatch"]


class PrefixMatch(int):
    """The number of leading keys that exist: an int, with an optional hold.

    `hold` is a token for `release_hold`, of this store or of any other store that is
    connected to the same server, in any process. It is empty without a hold.
    `in_memory` says how many of the keys are in memory. The others are on disk, and a
    read waits for them.
    """

    hold: str
    in_memory: int

    def __new__(cls, matched: int, hold: str = "", on_disk: int = 0) -> Self:
        """Create one from a count, a token, and how many are on disk only."""
        self = super().__new__(cls, matched)
        self.hold = hold
        self.in_memory = matched - on_disk
        return self

    def __reduce__(self) -> tuple[type["PrefixMatch"], tuple[int, str, int]]:
        """Pickle counts and token."""
        return PrefixMatch, (int(self), self.hold, self - self.in_memory)
