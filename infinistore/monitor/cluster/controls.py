"""The keys of a cluster's screen, as a pure function: state and key in, next state out.

While a node is open, its screen has the keys that the screen of a store always has.
"""

import enum
from collections.abc import Sequence
from typing import Final

import attrs

from infinistore.monitor import keys
from infinistore.monitor.controls import Controls

__all__ = ["HELP", "ClusterControls", "NodeOrder"]

_PAGE_ROWS: Final = 10
_STEPS: Final = {
    keys.UP: -1, keys.DOWN: 1, "k": -1, "j": 1, keys.PAGE_UP: -_PAGE_ROWS, keys.PAGE_DOWN: _PAGE_ROWS,
}  # fmt: skip

HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("up, down", "select a node; also k and j, page up and page down, home and end"),
    ("Enter", "the screen of the selected node; Esc or Backspace leads back"),
    ("s", "sort nodes by: name, requests, memory"),
    ("r", "reverse the order"),
    ("/", "show only nodes with a text in their name or address"),
    ("p, space", "pause the screen; samples are still taken"),
    ("+ -", "sample less often, more often"),
    ("?, h", "this help; any key leaves it"),
)


class NodeOrder(enum.Enum):
    """Sort orders of nodes; all except the name are descending."""

    NAME = "name"
    REQUESTS = "requests"
    MEMORY = "memory"


@attrs.frozen
class ClusterControls:
    """The user's choices. `screen` has those that every screen has."""

    screen: Controls = attrs.field(factory=Controls)
    order: NodeOrder = NodeOrder.NAME
    selected: str = ""
    """The id of a node; of one that is not shown, the next one by its name counts."""
    opened: str | None = None
    """The node whose screen is shown."""

    def place(self, shown: Sequence[str]) -> int:
        """Return which of the shown nodes is selected."""
        if self.selected in shown:
            return shown.index(self.selected)
        return max(0, min(len(shown) - 1, sum(one < self.selected for one in shown)))

    def press(self, key: str, shown: Sequence[str]) -> "ClusterControls":
        """Return the state after a key; `shown` are the nodes in order, by their id."""
        if self.screen.typing is not None or self.screen.help:
            return self._press_screen(key)
        if self.opened is not None:
            if key == keys.BACKSPACE or (key == keys.ESCAPE and not self.screen.filter):
                return attrs.evolve(self, opened=None, screen=attrs.evolve(self.screen, filter="", in_cluster=False))
            return self._press_screen(key)
        if key == keys.ENTER and shown:
            selected = shown[self.place(shown)]
            # A filter of nodes is none of clients and prefixes.
            screen = attrs.evolve(self.screen, filter="", in_cluster=True)
            return attrs.evolve(self, selected=selected, opened=selected, screen=screen)
        if key in _STEPS or key in (keys.HOME, keys.END):
            return self._move(key, shown)
        if key == "s":
            members = list(NodeOrder)
            return attrs.evolve(self, order=members[(members.index(self.order) + 1) % len(members)])
        return self._press_screen(key)

    def _move(self, key: str, shown: Sequence[str]) -> "ClusterControls":
        if not shown:
            return self
        place = {keys.HOME: 0, keys.END: len(shown) - 1}.get(key, self.place(shown) + _STEPS.get(key, 0))
        return attrs.evolve(self, selected=shown[max(0, min(len(shown) - 1, place))])

    def _press_screen(self, key: str) -> "ClusterControls":
        return attrs.evolve(self, screen=self.screen.press(key))
