"""The keys: how the bytes of a terminal become keys, and what each does, as a pure
function: state and key in, next state out.

A key is a printable character, or one of the names below. Other keys (function keys)
are recognised as a whole and ignored, so that their parts never count as keys.
"""

import codecs
import enum
from collections.abc import Iterator
from typing import Final, TypeVar

import attrs

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
        """Whether this ends an escape sequence (ECMA-48)."""
        if len(self._sequence) == 2:
            return character not in "[O"
        return self._sequence[1] == "O" or "@" <= character <= "~" or len(self._sequence) >= _LONGEST_SEQUENCE


_INTERVALS_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_LONGEST_FILTER: Final = 60

HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("s", "sort clients by: traffic, requests, pinned bytes, errors, name"),
    ("S", "sort prefixes by: bytes, keys, name"),
    ("r", "reverse both orders"),
    ("/", "show only clients and prefixes with a text in their name"),
    ("t", "the tenants, and back (with --manage-url)"),
    ("p, space", "pause the screen; samples are still taken"),
    ("+ -", "sample less often, more often"),
    ("?, h", "this help; any key leaves it"),
)


class ClientOrder(enum.Enum):
    """Sort orders of clients; all except the name are descending."""

    TRAFFIC = "traffic"
    REQUESTS = "requests"
    PINNED = "pinned"
    ERRORS = "errors"
    NAME = "name"


class PrefixOrder(enum.Enum):
    """Sort orders of prefixes; all except the name are descending."""

    BYTES = "bytes"
    KEYS = "keys"
    NAME = "name"


@attrs.frozen
class Controls:
    """The user's choices."""

    interval_s: float = 1.0
    client_order: ClientOrder = ClientOrder.TRAFFIC
    prefix_order: PrefixOrder = PrefixOrder.BYTES
    reversed: bool = False
    filter: str = ""
    typing: str | None = None
    """The filter that is being typed, or None."""
    paused: bool = False
    tenants: bool = False
    """Whether the tenants are shown."""
    help: bool = False
    quit: bool = False
    has_keyboard: bool = True
    in_cluster: bool = False
    """Whether this is the screen of a node, from which there is a way back."""

    def press(self, key: str) -> "Controls":
        """Return the state after a key; an unknown key has no effect."""
        if self.typing is not None:
            return self._type(self.typing, key)
        if key in ("q", "Q"):
            return attrs.evolve(self, quit=True)
        if self.help:
            return attrs.evolve(self, help=False)
        if key == ESCAPE:
            return attrs.evolve(self, filter="")
        return self._choose(key)

    def _type(self, typed: str, key: str) -> "Controls":
        if key == ENTER:
            return attrs.evolve(self, filter=typed, typing=None)
        if key == ESCAPE:
            return attrs.evolve(self, typing=None)
        if key == BACKSPACE:
            return attrs.evolve(self, typing=typed[:-1])
        if len(key) > 1:
            return self
        return attrs.evolve(self, typing=(typed + key)[:_LONGEST_FILTER])

    def _choose(self, key: str) -> "Controls":
        match key:
            case "?" | "h":
                return attrs.evolve(self, help=True)
            case "s":
                return attrs.evolve(self, client_order=following(self.client_order))
            case "S":
                return attrs.evolve(self, prefix_order=following(self.prefix_order))
            case "r":
                return attrs.evolve(self, reversed=not self.reversed)
            case "t" if not self.in_cluster:
                return attrs.evolve(self, tenants=not self.tenants)
            case "p" | " ":
                return attrs.evolve(self, paused=not self.paused)
            case "/":
                return attrs.evolve(self, typing=self.filter)
            case "+" | "=":
                longer = (step for step in _INTERVALS_S if step > self.interval_s)
                return attrs.evolve(self, interval_s=next(longer, self.interval_s))
            case "-" | "_":
                shorter = (step for step in reversed(_INTERVALS_S) if step < self.interval_s)
                return attrs.evolve(self, interval_s=next(shorter, self.interval_s))
        return self

    def shows(self, name: str) -> bool:
        """Whether the filter, even an unfinished one, matches. Ignores case."""
        wanted = self.filter if self.typing is None else self.typing
        return wanted.lower() in name.lower()


_Order = TypeVar("_Order", bound=enum.Enum)


def following(order: _Order) -> _Order:
    """Return the next member; after the last, the first."""
    members = list(type(order))
    return members[(members.index(order) + 1) % len(members)]
