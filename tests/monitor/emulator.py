"""As much of a terminal as the monitor needs. What it does not know is an error:
nothing else may be sent.
"""

import codecs
import re
from typing import Final

_SEQUENCE: Final = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")
_CUT_OFF: Final = re.compile(r"\x1b(\[\??[\d;]*)?(?=\x1b)")
"""At Ctrl-Z the system throws away what is on its way to a terminal, also a part of a
sequence. A terminal forgets that when another sequence begins."""


class Emulator:
    """A screen of characters, without colours."""

    def __init__(self, width: int, height: int) -> None:
        self.resize(width, height)
        self.alternate = False
        self.cursor_visible = True
        self.printed = ""
        """What was written while the usual screen was shown."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def resize(self, width: int, height: int) -> None:
        """Become another size, with nothing on the screen."""
        self.width, self.height = width, height
        self._clear()

    @property
    def lines(self) -> list[str]:
        """What is shown."""
        return ["".join(row).rstrip() for row in self._rows]

    @property
    def text(self) -> str:
        """What is shown, as one text."""
        return "\n".join(self.lines)

    def feed(self, data: bytes) -> None:
        """Take what a program wrote."""
        text = self._pending + self._decoder.decode(data)
        self._pending = ""
        while text:
            if text[0] != "\x1b":
                self._put(text[0])
                text = text[1:]
            elif match := _SEQUENCE.match(text):
                self._obey(match[1], match[2])
                text = text[match.end() :]
            elif match := _CUT_OFF.match(text):
                text = text[match.end() :]
            elif len(text) < 20:
                self._pending, text = text, ""
            else:
                raise AssertionError(f"not a sequence that a terminal knows: {text[:20]!r}")

    def _clear(self) -> None:
        self._rows = [[" "] * self.width for _ in range(self.height)]
        self._row = self._column = 0

    def _put(self, character: str) -> None:
        if not self.alternate:
            self.printed += character
            return
        assert character.isprintable(), f"a control character: {character!r}"
        if self._row < self.height and self._column < self.width:  # else it was written before a resize was heard of
            self._rows[self._row][self._column] = character
        self._column += 1

    def _obey(self, arguments: str, final: str) -> None:
        match arguments, final:
            case "?1049", "h" | "l":
                self.alternate = final == "h"
                self._clear()
            case "?25", "h" | "l":
                self.cursor_visible = final == "h"
            case "2", "J":
                self._clear()
            case _, "H":
                row, column = (int(number) for number in arguments.split(";"))
                self._row, self._column = row - 1, column - 1
            case "", "K":
                if self._row < self.height:
                    self._rows[self._row][self._column :] = [" "] * (self.width - self._column)
            case _, "m":
                pass
            case _:
                raise AssertionError(f"not a sequence that this terminal knows: ESC [ {arguments} {final}")
