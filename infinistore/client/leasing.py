"""What `lease` and `reserve` of a store return: blocks of code in which memory is looked at, or written, in place.

Once for asynchronous stores and once for blocking ones. What happens in between is the same: see `in_place`.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from infinistore.client.in_place import Kept, Leased, ReservedRoom
from infinistore.client.operations import Operations

__all__ = ["AsyncLease", "AsyncReservation", "BlockingLease", "BlockingReservation"]


class _Lease:
    """The keys of a lease, and, inside the block, what was leased."""

    def __init__(self, call: Callable[..., Any], keys: list[str], verify: bool) -> None:
        self._call = call
        self._keys = keys
        self._verify = verify
        self._leased: Leased | None = None

    def _enter(self) -> Any:
        """Call the store."""
        if self._leased is not None:
            raise RuntimeError("this lease was entered already; call `lease` again for another one")
        return self._call(lambda operations: operations.lease(self._keys, self._verify), payload=True, pinning=True)

    def _entered(self, leased: Leased) -> list[memoryview | None]:
        self._leased = leased
        return leased.handed

    def _leave(self, error: type[BaseException] | None) -> None:
        assert self._leased is not None
        leased, self._leased = self._leased, None
        leased.leave(quietly=error is not None, stacklevel=3)


class AsyncLease(_Lease):
    """`async with` gives the views."""

    async def __aenter__(self) -> list[memoryview | None]:
        return self._entered(await self._enter())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(kind)


class BlockingLease(_Lease):
    """`with` gives the views."""

    def __enter__(self) -> list[memoryview | None]:
        return self._entered(self._enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(kind)


class _Reservation:
    """The keys and sizes of a reservation, and, inside the block, its room."""

    def __init__(self, call: Callable[..., Any], keys: list[str], sizes: list[int]) -> None:
        self._call = call
        self._keys = keys
        self._sizes = sizes
        self._room: ReservedRoom | None = None
        self._kept = Kept()

    def _enter(self) -> Any:
        """Call the store."""
        if self._room is not None:
            raise RuntimeError("this reservation was entered already; call `reserve` again for another one")

        return self._call(lambda operations: operations.reserve(self._keys, self._sizes), payload=True, kept=self._kept)

    def _entered(self, room: ReservedRoom) -> list[memoryview]:
        self._room = room
        return room.handed

    def _commit(self) -> Any:
        """Call the store."""
        room = self._room
        assert room is not None
        room.take_back()

        def commit(operations: Operations) -> Any:
            return operations.commit(room)

        return self._call(commit, idempotent=False, payload=True, kept=self._kept)

    def _leave(self, *, quietly: bool) -> None:
        """Let go of everything; what was not committed goes back when nothing of its memory is alive any more."""
        room, self._room = self._room, None
        assert room is not None
        room.take_back()
        try:
            room.leave(quietly=quietly, stacklevel=3)
        finally:
            self._kept.let_go()


class AsyncReservation(_Reservation):
    """`async with` gives the views."""

    async def __aenter__(self) -> list[memoryview]:
        try:
            return self._entered(await self._enter())
        except BaseException:
            self._kept.let_go()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        committed = False
        try:
            if kind is None:
                await self._commit()
                committed = True
        finally:
            self._leave(quietly=not committed)


class BlockingReservation(_Reservation):
    """`with` gives the views."""

    def __enter__(self) -> list[memoryview]:
        try:
            return self._entered(self._enter())
        except BaseException:
            self._kept.let_go()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        committed = False
        try:
            if kind is None:
                self._commit()
                committed = True
        finally:
            self._leave(quietly=not committed)
