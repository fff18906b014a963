"""Where a process hears who is in its cluster: the interface, and the static list.

A membership holds one view at a time and replaces it as a whole, so that any thread
may read it without a lock. Only a membership moves keys: that a node does not answer is
not news of one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from infinistore.cluster.view import Node, View

__all__ = ["Listener", "Membership", "StaticMembership"]

Listener = Callable[[View], None]
"""Called with each new view, in the membership's thread or task; it must not block."""


class Membership(Protocol):
    """Who is in a cluster, as far as this process has heard."""

    @property
    def view(self) -> View:
        """The newest view; one without nodes and with epoch -1 if there is none yet."""
        ...

    @property
    def age_s(self) -> float:
        """For how long nothing has confirmed the view, in seconds: 0 if it cannot
        change, infinite if there is none.
        """
        ...

    def wait_known(self, timeout_s: float) -> None:
        """Wait until there is a view. Blocking.

        Raises:
            StoreUnavailable: there is none in time. The message says why.
        """
        ...

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with each new view from now on. Returns what ends
        that.
        """
        ...

    def close(self) -> None:
        """Hear nothing more. The view stays. More calls have no effect."""
        ...


class StaticMembership:
    """A list of nodes that never changes."""

    def __init__(self, nodes: Sequence[Node], *, copies: int = 1) -> None:
        self.view = View(0, tuple(sorted(nodes, key=lambda node: node.id)), copies=copies)
        self.age_s = 0.0

    def wait_known(self, timeout_s: float) -> None:
        """There is a view."""

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """The listener will not be called."""
        return lambda: None

    def close(self) -> None:
        """There is nothing to end."""
