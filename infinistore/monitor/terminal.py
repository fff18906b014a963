"""The terminal: all changes are undone, and writing never blocks the program.

While entered, it shows the alternate screen, hides the cursor, and passes on keys one
by one without echo. `leave` restores everything, however the program ends. Only changed
lines are written, which suits slow links.
"""

import os
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import trio
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Terminal"]

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
        """Take over the terminal. Idempotent; call it again after the program was
        stopped.
        """
        if self._input_fd is not None:
            if self._before is None:
                self._before = termios.tcgetattr(self._input_fd)
            termios.tcsetattr(self._input_fd, termios.TCSANOW, _key_by_key(self._before))
        self._entered = True
        self._write_now(_ENTER)
        self.resized()

    def leave(self) -> None:
        """Restore the state before `enter`. Idempotent; ignores a terminal that is
        gone.
        """
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
