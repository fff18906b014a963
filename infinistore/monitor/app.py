"""The monitor of one store, or of one router: samples it periodically, records the
results and failures in a model, and shows its screen.

Each failure is followed by a new connection, so that a server that is back is found
with the next sample, and not after the longer pauses of the client.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import attrs
import trio
from rich.text import Text

from infinistore.client import open_store
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.host import NO_THREAD
from infinistore.monitor import router
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import Glyphs
from infinistore.monitor.model import Model, Snapshot
from infinistore.monitor.tenants import TenantsModel, tenant_lines
from infinistore.monitor.terminal import LiveScreen, Terminal
from infinistore.monitor.view import screen

_WAIT_STEP_S = 0.1
AnyModel: TypeAlias = Model | router.RouterModel
AnySnapshot: TypeAlias = Snapshot | router.RouterSnapshot


@attrs.frozen
class Source:
    """What to watch. `wait_s` is how long to wait for its start."""

    url: str
    token: str | None = attrs.field(default=None, repr=False)
    deadline_s: float | None = None
    wait_s: float = 0.0
    name: str = "monitor"
    tenants: Callable[[], Any] | None = attrs.field(default=None, repr=False)
    """Asks the management API for the tenants, blocking; None without them."""
    engines: Callable[[], Any] | None = attrs.field(default=None, repr=False)
    """Asks a router for its engines, blocking; None: this is a store."""

    def options(self) -> dict[str, Any]:
        """The options for `open_store`; others may be in the URL."""
        given = {"token": self.token, "deadline_s": self.deadline_s, "name": self.name}
        return {name: value for name, value in given.items() if value is not None}

    def model(self) -> AnyModel:
        """Return a model of it, without samples. It does not know the options in the
        URL, which may be confidential.
        """
        return (Model if self.engines is None else router.RouterModel)(self.url.partition("?")[0])

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Callable[[bool], Awaitable[Any]]]:
        """Within the block, the function asks for a sample, with details or without."""
        if self.engines is not None:
            yield partial(self._ask_router, self.engines)
            return
        async with open_store(self.url, **self.options()) as store:
            yield lambda details: store.stats(details=details)

    async def _ask_router(self, ask: Callable[[], Any], details: bool) -> Any:
        # A socket's timeout is for each step, and there is none for names.
        with trio.move_on_after(math.inf if self.deadline_s is None else self.deadline_s):
            try:
                return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
            except NO_THREAD as error:
                raise StoreUnavailable(str(error) or type(error).__name__) from None
        raise StoreUnavailable(f"{self.url}: the router has not answered within {self.deadline_s:g} s")


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
    model: AnyModel,
    on_change: Callable[[], None],
    *,
    with_details: Callable[[], bool] = lambda: True,
    may_be_away: bool = False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Sample forever, and call `on_change` after each sample or failure.

    The task has started when the first sample is taken.

    Raises:
        InfiniStoreException: the server was never reached, and may not be away. Other
            failures go into the model instead.
        ConfigError: the URL is invalid.
    """
    give_up_s = trio.current_time() + source.wait_s
    while True:
        try:
            async with source.opened() as ask:
                while True:
                    answer = await ask(with_details())
                    first = model.answered_s is None
                    if source.tenants is not None and isinstance(model, Model):
                        model.tenants = model.tenants or TenantsModel()
                        await _ask_for_tenants(source.tenants, model.tenants, may_fail=not first)
                    model.observe(answer, now_s=trio.current_time(), at=now())
                    if first:
                        task_status.started()
                    on_change()
                    await pace.next()
        except InfiniStoreException as error:
            if model.answered_s is None and not may_be_away:
                may_come = isinstance(error, StoreUnavailable | DeadlineExceeded)
                if not may_come or trio.current_time() >= give_up_s:
                    raise
                await trio.sleep(min(_WAIT_STEP_S, pace.interval_s))
                continue
            model.lose(str(error) or type(error).__name__, now_s=trio.current_time(), at=now())
        on_change()
        await pace.next()


async def _ask_for_tenants(ask: Callable[[], Any], tenants: TenantsModel, *, may_fail: bool) -> None:
    """Ask once. A failure is shown; the first one is raised."""
    try:
        told = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        tenants.observe(told, trio.current_time())
    except (InfiniStoreException, ValueError, *NO_THREAD) as error:
        if not may_fail:
            raise
        tenants.lose(str(error) or type(error).__name__)


def now() -> datetime:
    """The time on the screen: local, with its zone."""
    return datetime.now().astimezone()


_FIGURES_ONLY: Final = 1  # a static screen does not need the line of keys


async def watch(source: Source, interval_s: float, *, output_fd: int, input_fd: int | None, glyphs: Glyphs) -> int:
    """Show the live screen. Returns the exit code: 0, or 128 plus a signal's number.

    Raises:
        InfiniStoreException: the server was never reached. The terminal is unchanged.
    """
    model, pace = source.model(), Pace(interval_s)
    scene = _Scene(model, pace, Controls(interval_s=interval_s, has_keyboard=input_fd is not None), glyphs)
    live = LiveScreen(scene)
    async with trio.open_nursery() as sampling:
        await sampling.start(sample, source, pace, model, scene.sampled(live.changed))
        with Terminal(output_fd, input_fd) as terminal:
            await live.run(terminal, input_fd)
        sampling.cancel_scope.cancel()
    return live.exit_code


async def take_two(source: Source, interval_s: float) -> AnySnapshot:
    """Take two samples. Returns their snapshot.

    Raises:
        InfiniStoreException: the server was not reached.
        StoreUnavailable: the server was lost between the samples.
    """
    model, pace = source.model(), Pace(interval_s)
    taken = trio.Event()

    async with trio.open_nursery() as nursery:
        await nursery.start(sample, source, pace, model, lambda: taken.set() if model.has_two else None)
        await taken.wait()
        nursery.cancel_scope.cancel()
    snapshot = model.snapshot()
    if snapshot.lost is not None:
        raise StoreUnavailable(snapshot.lost.reason)
    return snapshot


async def report(source: Source, interval_s: float, write: Callable[[Any], None]) -> None:
    """Call `write` after each sample and each failure. Never returns."""
    model, pace = source.model(), Pace(interval_s)
    await sample(source, pace, model, lambda: write(model.snapshot()))


def still(snapshot: AnySnapshot, interval_s: float, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Return the screen for printing, without the line of keys and blank lines."""
    if not isinstance(snapshot, Snapshot):
        height = max(height, len(snapshot.engines) + router.LINES_AROUND)
    lines = _screen(snapshot, Controls(interval_s=interval_s), width, height + _FIGURES_ONLY, glyphs)[:-_FIGURES_ONLY]
    if isinstance(snapshot, Snapshot) and snapshot.tenants is not None:
        lines += [
            Text(end=""),
            *tenant_lines(snapshot.tenants, Controls(), width, len(snapshot.tenants.rows) + 2, glyphs),
        ]
    return without_gaps(lines)


def without_gaps(lines: Sequence[Text]) -> list[Text]:
    """Return these lines; of blank ones in a row one, and none at the ends."""
    kept = [text for before, text in zip(["", *(one.plain for one in lines)], lines, strict=False) if before or text]
    return kept if not kept or kept[-1].plain else kept[:-1]


def _screen(snapshot: AnySnapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    if isinstance(snapshot, Snapshot):
        return screen(snapshot, controls, width, height, glyphs)
    return router.screen(snapshot, controls, width, height, glyphs)


class _Scene:
    """The screen of one store, or one router, which may be paused."""

    def __init__(self, model: AnyModel, pace: Pace, controls: Controls, glyphs: Glyphs) -> None:
        self._model = model
        self._pace = pace
        self._controls = controls
        self._glyphs = glyphs
        self._frozen: AnySnapshot | None = None

    @property
    def ended(self) -> bool:
        return self._controls.quit

    def sampled(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Return a callback for samples, which draws unless the screen is paused."""
        return lambda: None if self._controls.paused else changed()

    def lines(self, width: int, height: int) -> list[Text]:
        return _screen(self._frozen or self._model.snapshot(), self._controls, width, height, self._glyphs)

    def press(self, key: str) -> bool:
        before, self._controls = self._controls, self._controls.press(key)
        if self._controls.paused != before.paused:
            self._frozen = self._model.snapshot() if self._controls.paused else None
        self._pace.interval_s = self._controls.interval_s
        return self._controls != before
