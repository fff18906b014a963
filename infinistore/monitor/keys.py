"""Decodes the bytes of a terminal to keys.

A key is a printable character, or one of the names below. Other keys (function keys)
are recognised as a whole and ignored, so that their parts never count as keys.
"""

import codecs
from collections.abc import Iterator
from typing import Final

ENTER: Final = "enter"
ESCAPE: Final = "escape"
BACKSPACE: Final = "backspace"
UP: Final = "up"
DOWN: Final = "down"
PAGE_UP: Final = "page up"
PAGE_DOWN: Final = "page down"
HOME: Final = "home"
END: Final = "end"

_NAMED: Final = {"\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\x08": BACKSPACE}
_SEQUENCES: Final = {
    "A": UP, "B": DOWN, "H": HOME, "F": END, "1~": HOME, "4~": END, "5~": PAGE_UP, "6~": PAGE_DOWN, "7~": HOME,
    "8~": END,
}  # fmt: skip
_LONGEST_SEQUENCE: Final = 64


class KeyParser:
    """Decodes bytes in pieces of any length.

    A lone escape is the escape key; an escape with further bytes in the same piece
    starts a sequence. Terminals send them like this, so no clock is needed.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sequence = ""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the keys in `data`."""
        for character in self._decoder.decode(data):
            if self._sequence:
                self._sequence += character
                if self._ends_sequence(character):
                    named = _SEQUENCES.get(self._sequence[2:]) if self._sequence[1] in "[O" else None
                    self._sequence = ""
                    if named is not None:
                        yield named
            elif character == "\x1b":
                self._sequence = character
            elif character in _NAMED:
                yield _NAMED[character]
            elif character.isprintable():
                yield character
        if self._sequence == "\x1b":
            self._sequence = ""
            yield ESCAPE

    def _ends_sequence(self, character: str) -> bool:
        """Whether this ends an escape sequence (ECMA-48): ESC x, ESC O x, ESC [ ...
        @-~.
        """
        if len(self._sequence) == 2:
            return character not in "[O"
        return self._sequence[1] == "O" or "@" <= character <= "~" or len(self._sequence) >= _LONGEST_SEQUENCE
