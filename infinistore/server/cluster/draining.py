"""The task of a node that drains on request: it passes blocks on, and says how far it
is.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from infinistore.cluster.documents import Drain
from infinistore.statistics import DrainStatistics

__all__ = ["Drainer"]

_log = logging.getLogger("infinistore.cluster")
_TELL_S: Final = 2.0
"""How often others are told how far it is."""


class Drainer:
    """Drains one node whenever that is wanted.

    `push` passes blocks on, and calls what it is called with each time that it is
    further. `tell` hears now and then how far it is, and once that it is done.
    """

    def __init__(
        self, push: Callable[[Callable[[Drain], None]], Awaitable[None]], tell: Callable[[Drain], None]
    ) -> None:
        self._push = push
        self._tell = tell
        self._wanted = trio.Event()
        self._undisturbed = trio.Event()
        self._undisturbed.set()
        self._scope = trio.CancelScope()
        self._drain = Drain()
        self._before = Drain()
        """What earlier drains of this process have moved."""
        self._told_at = -math.inf

    def want(self, wanted: bool) -> None:
        """Drain from now on, or no longer."""
        self._scope.cancel()
        self._next()
        if wanted:
            self._wanted.set()
        else:
            self._unset()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Pass nothing on within the block; then begin again, if that was under way."""
        self._undisturbed = trio.Event()
        self._scope.cancel()
        try:
            yield
        finally:
            self._undisturbed.set()

    async def run(self) -> None:
        """Drain whenever it is wanted, until cancelled."""
        while True:
            await self._wanted.wait()
            await self._undisturbed.wait()
            self._next()
            with trio.CancelScope() as self._scope:
                try:
                    await self._push(self._note)
                except Exception:  # noqa: BLE001  # a fault of ours here must not end the server
                    _log.exception("internal error; what is left is not passed on")
            if not self._scope.cancel_called:
                self._unset()
                self._drain = attrs.evolve(self._drain, done=True)
                self._tell(self._drain)

    def statistics(self) -> DrainStatistics:
        """How far it is, and what it has moved since the process began."""
        drain, before = self._drain, self._before
        state = "drained" if drain.done else "draining" if self._wanted.is_set() else "none"
        return DrainStatistics(
            state=state,
            groups=drain.groups,
            moved_groups=drain.moved_groups,
            skipped_groups=drain.skipped_groups,
            failed_groups=drain.failed_groups,
            moved_groups_total=before.moved_groups + drain.moved_groups,
            moved_bytes_total=before.moved_bytes + drain.moved_bytes,
            size_bytes=drain.size_bytes,
            done_bytes=drain.done_bytes,
            elapsed_s=drain.elapsed_s,
            left_s=None if drain.done else drain.left_s,
        )

    def _unset(self) -> None:
        if self._wanted.is_set():  # else `run` may be waiting for it
            self._wanted = trio.Event()

    def _next(self) -> None:
        """Begin to count anew."""
        drain, before = self._drain, self._before
        self._before = Drain(
            moved_groups=before.moved_groups + drain.moved_groups, moved_bytes=before.moved_bytes + drain.moved_bytes
        )
        self._drain = Drain()

    def _note(self, drain: Drain) -> None:
        self._drain = drain
        if trio.current_time() >= self._told_at + _TELL_S:
            self._told_at = trio.current_time()
            self._tell(drain)
