"""What a call to an embedded store asks of its driver besides a pause: to wait for a
disk, or for a removal.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from infinistore.client.requests import Followed, Place, Removed, RemovedKeys
from infinistore.core.removals import RemovalLog, Told

__all__ = ["AwaitDisk", "await_removal"]


class AwaitDisk(NamedTuple):
    """Wait until the future is done; the result is nothing.

    Without `within_s` it ends by itself, in time; with it, the wait ends after so many
    seconds at the latest. A call that is given up just forgets it.
    """

    done: "Future[None]"
    within_s: float | None = None

    def __await__(self) -> Generator["AwaitDisk", None, None]:
        yield self


async def await_removal(
    lock: AbstractContextManager[Any], log: RemovalLog, look: Callable[[Place], Told], request: Removed
) -> Followed:
    """Ask a store which keys were removed, and wait for one; `look` answers, under the
    lock."""
    place = request.places.get("", (0, 0))
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # nobody can cancel it from here on
    wake = partial(done.set_result, None)
    with lock:
        told = look(place)
        is_over = told.place != place or bool(told.keys)
        if not is_over:
            log.waiting.append(wake)
    if not is_over:
        try:
            await AwaitDisk(done, request.wait_s)
        finally:
            with lock:
                log.stop_waiting(wake)
        with lock:
            told = look(place)
    return Followed({"": told.place}, RemovedKeys(told.keys, told.missed))
