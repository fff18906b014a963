"""The monitor of one store: samples it, and shows its screen."""

from collections.abc import Callable
from typing import Final

import trio
from rich.text import Text

from infinistore.errors import StoreUnavailable
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import Glyphs
from infinistore.monitor.model import Model, Snapshot
from infinistore.monitor.sampling import Pace, Source, sample
from infinistore.monitor.tenants import tenant_lines
from infinistore.monitor.terminal import LiveScreen, Terminal
from infinistore.monitor.view import screen

__all__ = ["report", "still", "take_two", "watch"]

_FIGURES_ONLY: Final = 1  # a static screen does not need the line of keys


async def watch(source: Source, interval_s: float, *, output_fd: int, input_fd: int | None, glyphs: Glyphs) -> int:
    """Show the live screen. Returns the exit code: 0, or 128 plus a signal's number.

    Raises:
        InfiniStoreException: the server was never reached. The terminal is unchanged.
    """
    model, pace = Model(_shown_url(source.url)), Pace(interval_s)
    scene = _StoreScene(model, pace, Controls(interval_s=interval_s, has_keyboard=input_fd is not None), glyphs)
    live = LiveScreen(scene)
    async with trio.open_nursery() as sampling:
        await sampling.start(sample, source, pace, model, scene.sampled(live.changed))
        with Terminal(output_fd, input_fd) as terminal:
            await live.run(terminal, input_fd)
        sampling.cancel_scope.cancel()
    return live.exit_code


async def take_two(source: Source, interval_s: float) -> Snapshot:
    """Take two samples. Returns their snapshot.

    Raises:
        InfiniStoreException: the server was not reached.
        StoreUnavailable: the server was lost between the samples.
    """
    model, pace = Model(_shown_url(source.url)), Pace(interval_s)
    taken = trio.Event()

    def sampled() -> None:
        if model.snapshot().history or model.snapshot().lost is not None:
            taken.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(sample, source, pace, model, sampled)
        await taken.wait()
        nursery.cancel_scope.cancel()
    snapshot = model.snapshot()
    if snapshot.lost is not None:
        raise StoreUnavailable(snapshot.lost.reason)
    return snapshot


async def report(source: Source, interval_s: float, write: Callable[[Snapshot], None]) -> None:
    """Call `write` after each sample and each failure. Never returns."""
    model, pace = Model(_shown_url(source.url)), Pace(interval_s)
    await sample(source, pace, model, lambda: write(model.snapshot()))


def still(snapshot: Snapshot, interval_s: float, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Return the screen for printing, without the line of keys and extra blank
    lines.
    """
    lines = screen(snapshot, Controls(interval_s=interval_s), width, height + _FIGURES_ONLY, glyphs)[:-_FIGURES_ONLY]
    if snapshot.tenants is not None:
        lines += [
            Text(end=""),
            *tenant_lines(snapshot.tenants, Controls(), width, len(snapshot.tenants.rows) + 2, glyphs),
        ]
    kept = [text for before, text in zip(["", *(one.plain for one in lines)], lines, strict=False) if before or text]
    return kept if not kept or kept[-1].plain else kept[:-1]


def _shown_url(url: str) -> str:
    """The URL without its options, which may be confidential."""
    return url.partition("?")[0]


class _StoreScene:
    """The screen of one store, which may be paused."""

    def __init__(self, model: Model, pace: Pace, controls: Controls, glyphs: Glyphs) -> None:
        self._model = model
        self._pace = pace
        self._controls = controls
        self._glyphs = glyphs
        self._frozen: Snapshot | None = None

    @property
    def ended(self) -> bool:
        return self._controls.quit

    def sampled(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Return what to call after a sample: it changes the screen unless it is
        paused.
        """
        return lambda: None if self._controls.paused else changed()

    def lines(self, width: int, height: int) -> list[Text]:
        return screen(self._frozen or self._model.snapshot(), self._controls, width, height, self._glyphs)

    def press(self, key: str) -> bool:
        before, self._controls = self._controls, self._controls.press(key)
        if self._controls.paused != before.paused:
            self._frozen = self._model.snapshot() if self._controls.paused else None
        self._pace.interval_s = self._controls.interval_s
        return self._controls != before
