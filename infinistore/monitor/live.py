"""A live screen: Trio tasks that draw, read keys and handle signals.

Each task waits for one kind of event, and only changes are drawn. What is shown, and
what keys mean, is up to a `Scene`. The terminal is restored however the screen ends: by
a key, a signal or an error.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import trio
from rich.text import Text

from infinistore.monitor.keys import KeyParser
from infinistore.monitor.terminal import Terminal

__all__ = ["LiveScreen", "Scene"]

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEY_BYTES: Final = 1024


class Scene(Protocol):
    """What a live screen shows."""

    @property
    def ended(self) -> bool:
        """Whether a key has ended it."""

    def press(self, key: str) -> bool:
        """Obey a key; return whether it changes anything."""

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return what to show now."""


class LiveScreen:
    """A scene on a terminal, and the tasks that change it."""

    def __init__(self, scene: Scene) -> None:
        self.exit_code = 0
        self._scene = scene
        self._changed = trio.Event()
        self._changed.set()  # there is a first screen to draw
        self._scope = trio.CancelScope()

    def changed(self) -> None:
        """Have the scene drawn again."""
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
            try:
                await terminal.draw(self._scene.lines(width, height))
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
        if self._scene.press(key):
            if self._scene.ended:
                self._end(0)
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
