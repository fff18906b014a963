"""Asks the server, again and again: what it says goes into a model, and so does that it said nothing.

The connection is made anew after every failure, so that a server that comes back is found with the next sample and not
when the client's own, longer pauses are over.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import attrs
import trio

from infinistore.client import open_store
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.monitor.model import Model

__all__ = ["Pace", "Source", "sample"]

_WAIT_STEP_S = 0.1


@attrs.frozen
class Source:
    """The server to watch. `wait_s`: how long it may take until it is up for the first time."""

    url: str
    token: str | None = attrs.field(default=None, repr=False)
    deadline_s: float | None = None
    wait_s: float = 0.0
    name: str = "monitor"

    def options(self) -> dict[str, Any]:
        """What `open_store` is to be told besides the URL. What is not given may stand in the URL."""
        given = {"token": self.token, "deadline_s": self.deadline_s, "name": self.name}
        return {name: value for name, value in given.items() if value is not None}


class Pace:
    """When the next sample is due: every `interval_s`, which may change at any time."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = trio.current_time()
        self._changed = trio.Event()

    @property
    def interval_s(self) -> float:
        """Seconds from one sample to the next."""
        return self._interval_s

    @interval_s.setter
    def interval_s(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._changed.set()
        self._changed = trio.Event()

    async def next(self) -> None:
        """Wait for the next sample's time. One that took longer than the interval puts off those that follow."""
        while trio.current_time() < (due := self._last_s + self._interval_s):
            with trio.move_on_at(due):
                await self._changed.wait()
        self._last_s = max(due, trio.current_time() - self._interval_s)


async def sample(
    source: Source,
    pace: Pace,
    model: Model,
    on_change: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Sample for ever, and call `on_change` after each sample or failure. Started when there is a first sample.

    Raises:
        InfiniStoreException: there is no server to begin with. Once there was one, failures go into the model instead.
        ConfigError: a URL that cannot be used.
    """
    give_up_s = trio.current_time() + source.wait_s
    while True:
        try:
            async with open_store(source.url, **source.options()) as store:
                while True:
                    stats = await store.stats(details=True)
                    first = not model.answered
                    model.observe(stats, now_s=trio.current_time(), at=_now())
                    if first:
                        task_status.started()
                    on_change()
                    await pace.next()
        except InfiniStoreException as error:
            if not model.answered:
                may_come = isinstance(error, StoreUnavailable | DeadlineExceeded)
                if not may_come or trio.current_time() >= give_up_s:
                    raise
                await trio.sleep(min(_WAIT_STEP_S, pace.interval_s))
                continue
            model.lose(str(error) or type(error).__name__, now_s=trio.current_time(), at=_now())
        on_change()
        await pace.next()


def _now() -> datetime:
    return datetime.now().astimezone()
