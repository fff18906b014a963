"""What `match_prefix` and `removals` of a store return.

The iterators that `removals` returns never end by themselves. A server that is gone is
asked again and again, with the pauses of its circuit breaker; meanwhile batches say why
it is not asked. Only closing the store ends the iteration.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

from infinistore.client.requests import Followed, FollowRemovalsOfNodes, Place, RemovedKeys
from infinistore.cluster.membership import View
from infinistore.errors import DeadlineExceeded, StoreUnavailable


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


class _Following:
    """Where an iteration is. `call` carries out a request."""

    def __init__(self, call: Callable[..., Any], wait_s: float) -> None:
        if not 0 < wait_s <= 3600:  # NaN is not, either
            raise ValueError(f"wait_s is a number of seconds above 0, at most 3600, not {wait_s!r}")
        self._call = call
        self._wait_s = wait_s
        self._places: Mapping[str, Place] = {}
        self._view: View | None = None

    def _request(self) -> FollowRemovalsOfNodes:
        return FollowRemovalsOfNodes(self._places, self._wait_s, self._view)

    def _take(self, followed: Followed) -> RemovedKeys:
        self._places, self._view = followed.places, followed.view
        return followed.removed


class AsyncRemovals(_Following):
    """Batches of removed keys, for `async for`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RemovedKeys:
        try:
            return self._take(await self._call(self._request()))
        except (StoreUnavailable, DeadlineExceeded) as error:
            if _is_final(error):
                raise
            return RemovedKeys(problem=str(error))


class BlockingRemovals(_Following):
    """Batches of removed keys, for `for`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RemovedKeys:
        try:
            return self._take(self._call(self._request()))
        except (StoreUnavailable, DeadlineExceeded) as error:
            if _is_final(error):
                raise
            return RemovedKeys(problem=str(error))


def _is_final(error: StoreUnavailable | DeadlineExceeded) -> bool:
    """Whether the store is closed, so that no later step succeeds."""
    return isinstance(error, StoreUnavailable) and error.store_is_closed
