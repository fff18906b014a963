"""Samples a server periodically, and records the results and failures in a model.

Each failure is followed by a new connection, so that a server that is back is found
with the next sample, and not after the longer pauses of the client.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import attrs
import trio

from infinistore.client import open_store
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.host import NO_THREAD
from infinistore.monitor.model import Model

__all__ = ["Pace", "Source", "sample"]

_WAIT_STEP_S = 0.1


@attrs.frozen
class Source:
    """The server to watch. `wait_s` is how long to wait for its start."""

    url: str
    token: str | None = attrs.field(default=None, repr=False)
    deadline_s: float | None = None
    wait_s: float = 0.0
    name: str = "monitor"
    tenants: Callable[[], Any] | None = attrs.field(default=None, repr=False)
    """Asks the management API for the tenants, blocking; None if nobody wants to know.
    """

    def options(self) -> dict[str, Any]:
        """The options for `open_store`; others may be in the URL."""
        given = {"token": self.token, "deadline_s": self.deadline_s, "name": self.name}
        return {name: value for name, value in given.items() if value is not None}


class Pace:
    """The times of samples: every `interval_s`, which may change at any time."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = trio.current_time()
        self._changed = trio.Event()

    @property
    def interval_s(self) -> float:
        """Seconds between two samples."""
        return self._interval_s

    @interval_s.setter
    def interval_s(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._changed.set()
        self._changed = trio.Event()

    def hurry(self) -> None:
        """Let the next sample be taken now."""
        self._last_s = trio.current_time() - self._interval_s
        self._changed.set()
        self._changed = trio.Event()

    async def next(self) -> None:
        """Wait for the next sample's time. A slow sample delays the following ones."""
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
    """Sample forever, and call `on_change` after each sample or failure.

    The task has started when the first sample is taken.

    Raises:
        InfiniStoreException: the server was never reached. Later failures go into the
            model instead.
        ConfigError: the URL is invalid.
    """
    give_up_s = trio.current_time() + source.wait_s
    while True:
        try:
            async with open_store(source.url, **source.options()) as store:
                while True:
                    stats = await store.stats(details=True)
                    first = not model.answered
                    if source.tenants is not None:
                        await _ask_for_tenants(source.tenants, model, may_fail=not first)
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


async def _ask_for_tenants(ask: Callable[[], Any], model: Model, *, may_fail: bool) -> None:
    """Ask once; what fails is shown, unless it is the first time: then it is most
    likely asked in a wrong way.
    """
    try:
        told = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        model.observe_tenants(told, now_s=trio.current_time())
    except (InfiniStoreException, ValueError, *NO_THREAD) as error:
        if not may_fail:
            raise
        model.lose_tenants(str(error) or type(error).__name__)


def _now() -> datetime:
    return datetime.now().astimezone()
