"""Who is in a cluster: its nodes, the view that one process has of them, and where it
hears of them; the interface, and the static list.

A membership holds one view at a time and replaces it as a whole, so that any thread may
read it without a lock. Only a membership moves keys: that a node does not answer is not
news of one.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
from attrs.validators import ge, in_, le

DEFAULT_WEIGHT = 100
MOST_WEIGHT = 10_000
MOST_COPIES = 8


class NodeState(enum.Enum):
    """What a node says of itself."""

    JOINING = "joining"
    """It serves, its weight grows, and its blocks are still with their former
    owners.
    """
    SERVING = "serving"
    DRAINING = "draining"
    """It is about to leave: it is read, and nothing more is written to it."""


@attrs.frozen
class Node:
    """One server of a cluster."""

    id: str
    address: str
    """The URL of its server: `infinistore://HOST:PORT`."""
    instance: str = ""
    """The random identity of its process; empty if the membership does not know it."""
    generation: int = 0
    """Grows when another process registers under the same id."""
    weight: int = attrs.field(default=DEFAULT_WEIGHT, validator=[ge(0), le(MOST_WEIGHT)])
    """Its share of the keys, relative to the other nodes' weights; 0 for none."""
    capacity_bytes: int = 0
    state: NodeState = NodeState.SERVING
    zone: str = ""
    host: str = ""
    """The name of its machine."""
    protocol: int = 0
    """The newest version of the protocol that it speaks; 0 if that is not known."""
    founding: bool = attrs.field(default=False, eq=False)
    """Whether it came lately, when nobody was there but such nodes. For those who
    register: two views that differ in this alone are the same."""


def _in_order_of_id(view: "View", attribute: object, nodes: tuple[Node, ...]) -> None:
    ids = [node.id for node in nodes]
    if ids != sorted(set(ids)):
        raise ValueError(f"the nodes of a view must be in order of their ids, each once, not {ids}")


@attrs.frozen
class View:
    """The nodes of a cluster and what its configuration says."""

    epoch: int
    """Which of two views of one membership is newer."""
    nodes: tuple[Node, ...] = attrs.field(default=(), validator=_in_order_of_id)
    copies: int = attrs.field(default=1, validator=in_(range(1, MOST_COPIES + 1)))
    """How many nodes have each block."""
    purged_revision: int = 0
    """Blocks that were put before this revision are not to be found again."""
    drains: tuple[str, ...] = ()
    """The ids of nodes that drain, or have drained, because somebody asked for it, in
    order. Those that have are not among the nodes."""


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
        """Seconds since the view was confirmed: 0 if fixed, infinite without one."""
        ...

    def wait_known(self, timeout_s: float) -> None:
        """Wait until there is a view. Blocking.

        Raises:
            StoreUnavailable: there is none in time. The message says why.
        """
        ...

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with each new view from now on. Returns what ends that."""
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
