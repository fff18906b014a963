"""The monitor: Trio tasks that sample, read keys, handle signals and draw.

Each task waits for one kind of event, and draws only changes. The terminal is restored
however the monitor ends: by a key, a signal or an error.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio
from rich.text import Text

from infinistore.errors import StoreUnavailable
from infinistore.monitor.controls import Controls
from infinistore.monitor.keys import KeyParser
from infinistore.monitor.lines import Glyphs
from infinistore.monitor.model import Model, Snapshot
from infinistore.monitor.sampling import Pace, Source, sample
from infinistore.monitor.terminal import Terminal
from infinistore.monitor.view import screen

__all__ = ["report", "still", "take_two", "watch"]

_FIGURES_ONLY: Final = 1  # a static screen does not need the line of keys
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEY_BYTES: Final = 1024


async def watch(source: Source, interval_s: float, *, output_fd: int, input_fd: int | None, glyphs: Glyphs) -> int:
    """Show the live screen. Returns the exit code: 0, or 128 plus a signal's number.

    Raises:
        InfiniStoreException: the server was never reached. The terminal is unchanged.
    """
    model, pace = Model(_shown_url(source.url)), Pace(interval_s)
    live = _Live(model, pace, glyphs, has_keyboard=input_fd is not None)
    async with trio.open_nursery() as sampling:
        await sampling.start(sample, source, pace, model, live.sampled)
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
    kept = [text for before, text in zip(["", *(one.plain for one in lines)], lines, strict=False) if before or text]
    return kept if not kept or kept[-1].plain else kept[:-1]


def _shown_url(url: str) -> str:
    """The URL without its options, which may be confidential."""
    return url.partition("?")[0]


class _Live:
    """The state of a live screen, and the tasks that change it."""

    def __init__(self, model: Model, pace: Pace, glyphs: Glyphs, *, has_keyboard: bool) -> None:
        self.exit_code = 0
        self._model = model
        self._pace = pace
        self._glyphs = glyphs
        self._controls = Controls(interval_s=pace.interval_s, has_keyboard=has_keyboard)
        self._frozen: Snapshot | None = None
        self._changed = trio.Event()
        self._changed.set()  # there is a first screen to draw
        self._scope = trio.CancelScope()

    def sampled(self) -> None:
        """Mark the screen as changed, unless it is paused."""
        if self._frozen is None:
            self._changed.set()

    async def run(self, terminal: Terminal, input_fd: int | None) -> None:
        """Run until a key, a signal, or the end of the terminal."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._obey_signals, terminal)
                if input_fd is not None:
                    nursery.start_soon(self._read_keys, input_fd)
                nursery.start_soon(self._draw, terminal)

    async def _draw(self, terminal: Terminal) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            width, height = terminal.size
            snapshot = self._frozen or self._model.snapshot()
            try:
                await terminal.draw(screen(snapshot, self._controls, width, height, self._glyphs))
            except OSError:
                self._end(128 + signal.SIGHUP)  # the terminal is gone, as the signal will say

    async def _read_keys(self, input_fd: int) -> None:
        parser = KeyParser()
        while True:
            await trio.lowlevel.wait_readable(input_fd)
            try:
                data = os.read(input_fd, _KEY_BYTES)
            except OSError:
                data = b""
            if not data:
                self._end(128 + signal.SIGHUP)
                return
            for key in parser.feed(data):
                self._press(key)

    def _press(self, key: str) -> None:
        before, self._controls = self._controls, self._controls.press(key)
        if self._controls == before:
            return
        if self._controls.quit:
            self._end(0)
        if self._controls.paused != before.paused:
            self._frozen = self._model.snapshot() if self._controls.paused else None
        if self._controls.interval_s != before.interval_s:
            self._pace.interval_s = self._controls.interval_s
        self._changed.set()

    def _end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._scope.cancel()

    async def _obey_signals(self, terminal: Terminal, *, task_status: trio.TaskStatus[None]) -> None:
        watched = (*_STOP_SIGNALS, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
        with trio.open_signal_receiver(*watched) as signals:
            task_status.started()
            async for number in signals:
                if number in _STOP_SIGNALS:
                    self._end(128 + number)
                elif number == signal.SIGTSTP:
                    terminal.leave()
                    with _default_action(signal.SIGTSTP):
                        os.kill(os.getpid(), signal.SIGTSTP)  # the program stops here until it is continued
                    terminal.enter()
                elif number == signal.SIGCONT:
                    terminal.enter()  # another program may have used the terminal
                else:
                    terminal.resized()
                self._changed.set()


@contextmanager
def _default_action(number: int) -> Iterator[None]:
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, handler)
