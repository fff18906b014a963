"""The keys, as a pure function: state and key in, next state out."""

import enum
from typing import Final, TypeVar

import attrs

from infinistore.monitor import keys

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
        if key == keys.ESCAPE:
            return attrs.evolve(self, filter="")
        return self._choose(key)

    def _type(self, typed: str, key: str) -> "Controls":
        if key == keys.ENTER:
            return attrs.evolve(self, filter=typed, typing=None)
        if key == keys.ESCAPE:
            return attrs.evolve(self, typing=None)
        if key == keys.BACKSPACE:
            return attrs.evolve(self, typing=typed[:-1])
        if len(key) > 1:
            return self
        return attrs.evolve(self, typing=(typed + key)[:_LONGEST_FILTER])

    def _choose(self, key: str) -> "Controls":
        match key:
            case "?" | "h":
                return attrs.evolve(self, help=True)
            case "s":
                return attrs.evolve(self, client_order=_following(self.client_order))
            case "S":
                return attrs.evolve(self, prefix_order=_following(self.prefix_order))
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
        """Whether the filter, even an unfinished one, matches this name.
        Ignores case.
        """
        wanted = self.filter if self.typing is None else self.typing
        return wanted.lower() in name.lower()


_Order = TypeVar("_Order", bound=enum.Enum)


def _following(order: _Order) -> _Order:
    members = list(type(order))
    return members[(members.index(order) + 1) % len(members)]
