"""Context managers that `lease` and `reserve` of an asynchronous store return."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from infinistore.client.memory.views import Kept, Leased, ReservedRoom
from infinistore.client.requests import Commit, Lease, Reserve


class AsyncLease:
    """Entering it returns read-only views, None for each key that does not exist."""

    def __init__(self, call: Callable[..., Any], keys: list[str], verify: bool) -> None:
        self._call = call
        self._keys = keys
        self._verify = verify
        self._leased: Leased | None = None

    async def __aenter__(self) -> list[memoryview | None]:
        if self._leased is not None:
            raise RuntimeError("this lease was entered already; call `lease` again for another one")
        leased: Leased = await self._call(Lease(self._keys, self._verify))
        self._leased = leased
        return leased.handed

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._leased is not None
        leased, self._leased = self._leased, None
        leased.leave(quietly=kind is not None, stacklevel=2)


class AsyncReservation:
    """Entering it returns writable views; a normal exit commits them as one batch."""

    def __init__(self, call: Callable[..., Any], keys: list[str], sizes: list[int], ttl_us: int) -> None:
        self._call = call
        self._keys = keys
        self._sizes = sizes
        self._ttl_us = ttl_us
        self._reserved: ReservedRoom | None = None
        self._kept = Kept()

    async def __aenter__(self) -> list[memoryview]:
        if self._reserved is not None:
            raise RuntimeError("this reservation was entered already; call `reserve` again for another one")
        try:
            reserved: ReservedRoom = await self._call(Reserve(self._keys, self._sizes, self._kept))
        except BaseException:
            self._kept.let_go()
            raise
        self._reserved = reserved
        return reserved.handed

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reserved, self._reserved = self._reserved, None
        assert reserved is not None
        committed = False
        try:
            if kind is None:
                reserved.take_back()
                await self._call(Commit(reserved, self._kept, self._ttl_us))
                committed = True
        finally:  # what was not committed goes back when none of its memory is in use any more
            try:
                if not committed:
                    reserved.take_back()
                reserved.leave(quietly=not committed, stacklevel=2)
            finally:
                self._kept.let_go()
