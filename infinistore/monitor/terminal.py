"""The terminal, and a live screen on it: Trio tasks that draw, read keys and handle
signals.

While entered, the terminal shows the alternate screen, hides the cursor, and passes on
keys one by one without echo. `leave` restores everything, however the screen ends: by a
key, a signal or an error. Writing never blocks the program, and only changed lines are
written, which suits slow links.

Each task of a live screen waits for one kind of event. What is shown, and what keys
mean, is up to a `Scene`.
"""

import os
import signal
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import trio
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from infinistore.monitor.controls import KeyParser

if TYPE_CHECKING:
    from types import TracebackType


_ENTER: Final = b"\x1b[?1049h\x1b[?25l\x1b[2J"  # alternate screen, no cursor, cleared
_LEAVE: Final = b"\x1b[m\x1b[?25h\x1b[?1049l"
_INPUT_FLAGS, _LOCAL_FLAGS, _CONTROL = 0, 3, 6  # where tcgetattr has them
_LAST_WORD_S: Final = 0.5


class Terminal:
    """A terminal to draw on and, unless `input_fd` is None, to read keys from.

    A context manager.
    """

    def __init__(self, output_fd: int, input_fd: int | None) -> None:
        self._output_fd = output_fd
        self._input_fd = input_fd
        self._own_fd: int | None = None
        self._before: list[Any] | None = None
        self._entered = False
        self._shown: list[Text] = []
        self._console = Console()  # knows whether to use colour
        self.size = (0, 0)

    def __enter__(self) -> Self:
        # A new descriptor can be made non-blocking; the given one is shared with the
        # shell.
        with suppress(OSError):
            self._own_fd = os.open(os.ttyname(self._output_fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            self.enter()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: "TracebackType | None",
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal and close it."""
        self.leave()
        if self._own_fd is not None:
            os.close(self._own_fd)
            self._own_fd = None

    def enter(self) -> None:
        """Take over the terminal; again after the program was stopped."""
        if self._input_fd is not None:
            if self._before is None:
                self._before = termios.tcgetattr(self._input_fd)
            termios.tcsetattr(self._input_fd, termios.TCSANOW, _key_by_key(self._before))
        self._entered = True
        self._write_now(_ENTER)
        self.resized()

    def leave(self) -> None:
        """Restore the state before `enter`, if it is not restored or gone."""
        if not self._entered:
            return
        self._entered = False
        with suppress(OSError):
            self._write_now(_LEAVE)
        if self._before is not None and self._input_fd is not None:
            with suppress(OSError, termios.error):
                termios.tcsetattr(self._input_fd, termios.TCSANOW, self._before)
            self._before = None

    def resized(self) -> None:
        """Update the size. The next lines are drawn from scratch."""
        self._shown = []
        try:
            columns, rows = os.get_terminal_size(self._output_fd)
        except OSError:
            columns = rows = 0
        # A terminal without a known size reports 0.
        self.size = (columns or 80, rows or 24)

    async def draw(self, lines: Sequence[Text]) -> None:
        """Show these lines from the top; write only changed ones.

        Raises:
            OSError: the terminal is gone.
        """
        width, _ = self.size
        shown, written = self._shown, bytearray() if self._shown else bytearray(b"\x1b[m\x1b[2J")
        for index, text in enumerate(lines):
            if index >= len(shown) or shown[index] != text:
                rest = b"\x1b[K" if text.cell_len < width else b""  # in the last column it would erase the character
                written += b"\x1b[%d;1H" % (index + 1) + self._encoded(text) + rest
        self._shown = list(lines)
        if written:
            await self._write(bytes(written))
        else:
            await trio.lowlevel.checkpoint()

    def _encoded(self, text: Text) -> bytes:
        parts = []
        for segment in text.render(self._console):
            style = segment.style or Style.null()
            if self._console.no_color:
                style = style.without_color
            parts.append(style.render(segment.text, color_system=ColorSystem.STANDARD))
        return "".join(parts).encode("utf-8", "replace")

    async def _write(self, data: bytes) -> None:
        """Write without blocking the program: a terminal may be slow, or stopped."""
        if self._own_fd is None:
            await trio.to_thread.run_sync(_write_all, self._output_fd, data, abandon_on_cancel=True)
            return
        while data:
            try:
                data = data[os.write(self._own_fd, data) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._own_fd)
            else:
                await trio.lowlevel.checkpoint()

    def _write_now(self, data: bytes) -> None:
        """Write a few bytes at once, and wait only briefly for the terminal."""
        if self._own_fd is None:
            _write_all(self._output_fd, data)
            return
        import select

        while data:
            try:
                data = data[os.write(self._own_fd, data) :]
            except BlockingIOError:
                if not select.select([], [self._own_fd], [], _LAST_WORD_S)[1]:
                    return


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _key_by_key(before: list[Any]) -> list[Any]:
    """Return settings for single keys without echo. Ctrl-C and Ctrl-Z stay signals."""
    settings = [*before[:_CONTROL], list(before[_CONTROL])]
    settings[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
    settings[_INPUT_FLAGS] &= ~termios.IXON  # Ctrl-S would freeze the screen
    settings[_CONTROL][termios.VMIN], settings[_CONTROL][termios.VTIME] = 1, 0
    return settings


_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEY_BYTES: Final = 1024


class Scene(Protocol):
    """The contents of a live screen."""

    @property
    def ended(self) -> bool:
        """Whether a key has ended it."""

    def press(self, key: str) -> bool:
        """Obey a key; return whether it changes anything."""

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return the current lines."""


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
