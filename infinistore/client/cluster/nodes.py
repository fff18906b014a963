"""The nodes of a cluster as a client sees them: one store for each, how long its
answers took lately, and which view applies.

A call uses one view from its beginning to its end. The stores of nodes that have left,
or whose server is another run now, are closed when the last call that may use them is
over.

Answer times tell which answer is late. They go by the size of the request, for a batch
of a thousand keys takes longer than one key. The mean and the mean deviation are those
of TCP's retransmission timer (RFC 6298), which follows a change within a few answers.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from infinistore.client.options import StoreUrl, parse_url
from infinistore.client.requests import store_closed_error
from infinistore.cluster.membership import Membership, Node, NodeState, View
from infinistore.cluster.placement import Placement
from infinistore.cluster.reading import Reader, ReadOrder
from infinistore.errors import ConfigError
from infinistore.host import FORKED, let_go_in_child
from infinistore.protocol.messages import Exists, Keys

_MEAN_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
_DEVIATIONS: Final = 4


class AnswerTimes:
    """Of one node. Any thread may use it; a lost update changes little."""

    def __init__(self) -> None:
        self._known: dict[tuple[type[Any], int], tuple[float, float]] = {}

    def note(self, kind: type[Any], count: int, seconds: float) -> None:
        """Note how long an answer to a request for so many keys took, at least."""
        size = kind, count.bit_length()
        known = self._known.get(size)
        if known is None:
            self._known[size] = seconds, seconds / 2
            return
        mean, deviation = known
        off = seconds - mean
        self._known[size] = mean + _MEAN_GAIN * off, deviation + _DEVIATION_GAIN * (abs(off) - deviation)

    def usual_s(self, kind: type[Any], count: int) -> float:
        """Return the mean time of an answer; 0 if nothing is known."""
        known = self._of(kind, count)
        return 0.0 if known is None else known[0]

    def late_s(self, kind: type[Any], count: int) -> float | None:
        """Return after how long an answer is late; None if nothing is known."""
        known = self._of(kind, count)
        return None if known is None else known[0] + _DEVIATIONS * known[1]

    def _of(self, kind: type[Any], count: int) -> tuple[float, float] | None:
        """Return what is known of requests for so many keys, or of the next larger."""
        size = count.bit_length()
        if (known := self._known.get((kind, size))) is not None:
            return known
        larger = [(bits, known) for (one, bits), known in list(self._known.items()) if one is kind and bits > size]
        return min(larger)[1] if larger else None


_log = logging.getLogger("infinistore.client")
PING: Final = Exists(Keys(["infinistore/is the node there?"]))
"""What every server answers at once."""
_Store = TypeVar("_Store", bound="OpenStore")
_Cut = TypeVar("_Cut", bound=Any)


class OpenStore(Protocol):
    """What the store of a node has, under Trio, asyncio and threads alike."""

    @property
    def calls(self) -> Any:
        """Its `Calls`."""

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return its pool as far as it is mapped into this process."""

    def close(self) -> None:
        """Close it."""


class NodeStore(Generic[_Store]):
    """A node, and the store that reaches it; None if its address cannot be one."""

    def __init__(self, node: Node, make: Callable[[StoreUrl, str], _Store]) -> None:
        self.node = node
        self.problem = ""
        self.store: _Store | None = None
        try:
            self.store = make(parse_url(node.address), node.instance)
        except ConfigError as error:
            self.problem = str(error)
        self.probing = False
        """Whether somebody asks it again and again until it answers."""
        self.closed = False
        self.takes_copies = True
        """Whether it may make marks for this store: it has not refused one yet."""
        self.answers = AnswerTimes()

    @property
    def lost(self) -> bool:
        """Whether it did not answer lately, so that nothing is sent to it."""
        return self.store is None or self.store.calls.breaker.open_until is not None

    @property
    def silent(self) -> bool:
        """Whether it did not answer the last time, or is lost."""
        return self.store is None or self.store.calls.breaker.failures > 0

    @property
    def ask_again_at(self) -> float:
        """When a lost node may be asked again, on the clock of its store."""
        at: float | None = None if self.store is None else self.store.calls.breaker.open_until
        return 0.0 if at is None else at

    def close(self) -> None:
        """Close the store."""
        self.closed = True
        if self.store is not None:
            self.store.close()

    def __str__(self) -> str:
        return f"the node {self.node.id} at {self.node.address}"


class ViewInUse(Generic[_Store]):
    """One view, who owns what in it, and the stores of its nodes by their index."""

    def __init__(self, view: View, placement: Placement, nodes: list[NodeStore[_Store]], reader: Reader) -> None:
        self.view = view
        self.placement = placement
        self.read_order = ReadOrder(placement, reader)
        self.nodes = nodes
        self.calls = 0
        """How many calls use it."""
        self.moves_blocks = any(node.state is not NodeState.SERVING for node in view.nodes)
        """Whether nodes join or drain, so that blocks are copied from node to node."""
        self.has_one_place = view.copies == 1 and not self.moves_blocks
        """Whether each key has exactly one place."""
        self._has_sole_node = self.has_one_place and len(nodes) == 1 and view.nodes[0].weight > 0

    def parts(self, keys: Sequence[str]) -> "list[tuple[int, Sequence[int]]]":
        """Return the nodes to write to, each with the positions of its keys.

        Raises:
            StoreUnavailable: no node takes blocks.
        """
        return [(0, range(len(keys)))] if self._has_sole_node else self.placement.split(keys)


def parts_of(request: _Cut, parts: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, _Cut]]:
    """Return for nodes, with the positions of their keys, what to ask them: the request
    itself, if these are all of its keys.
    """
    count = len(request.keys)
    return [(index, request if len(positions) == count else request.at(positions)) for index, positions in parts]


class Nodes(Generic[_Store]):
    """The nodes of a cluster. Any thread may use it.

    `make` makes the store for an address and the run of its server, empty for any.
    `reader` says where the client is.
    """

    def __init__(
        self, membership: Membership, make: Callable[[StoreUrl, str], _Store], reader: Reader | None = None
    ) -> None:
        self.membership = membership
        self.reader = reader or Reader()
        self.closed = ""
        """Why nothing can be done any more; empty while it is open."""
        self._make = make
        self._told_of_numpy = False
        self._lock = threading.Lock()
        self._stores: dict[tuple[str, str, str], NodeStore[_Store]] = {}
        self._current: ViewInUse[_Store] | None = None
        self._former: list[ViewInUse[_Store]] = []  # which calls still use
        let_go_in_child(self)

    def check_open(self) -> None:
        """Raise `StoreUnavailable` if the store was closed, or opened before a fork."""
        if self.closed:
            raise store_closed_error(self.closed)

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the mapped pools of all nodes; empty if one is not mapped."""
        current = self._current
        mapped = [] if current is None else [node.store and node.store.mapped_arenas() for node in current.nodes]
        return [arena for arenas in mapped for arena in arenas or ()] if all(mapped) else []

    def begin(self) -> ViewInUse[_Store]:
        """Return the newest view, for one call, which says `end` afterwards.

        Raises:
            StoreUnavailable: the store was closed.
        """
        self.check_open()
        gone: Sequence[NodeStore[_Store]] = ()
        with self._lock:
            current = self._current
            if current is None or current.view is not self.membership.view:
                current, gone = self._renew(current)
            current.calls += 1
        for node in gone:
            node.close()
        return current

    def end(self, used: ViewInUse[_Store]) -> None:
        """Say that a call that has begun is over."""
        with self._lock:
            used.calls -= 1
            if used is self._current or used.calls:
                return
            self._former = [one for one in self._former if one is not used]
            gone = self._take_unused()
        for node in gone:
            node.close()

    def _renew(self, former: ViewInUse[_Store] | None) -> tuple[ViewInUse[_Store], list[NodeStore[_Store]]]:
        """Take the newest view; return it and the stores to be closed."""
        view = self.membership.view
        if former is not None and view == former.view:
            return former, []
        nodes = []
        for node in view.nodes:
            run = node.id, node.address, node.instance
            known = self._stores.get(run)
            if known is None:
                known = self._stores[run] = NodeStore(node, self._make)
            known.node = node
            nodes.append(known)
        current = ViewInUse(view, Placement(view, None if former is None else former.placement), nodes, self.reader)
        self._current = current
        if current.placement.lacks_numpy and not self._told_of_numpy:
            self._told_of_numpy = True
            _log.warning(
                "the cluster has %d nodes: without numpy, finding the owners of many keys for the first time "
                "keeps the caller waiting; install numpy",
                len(nodes),
            )
        if former is not None and former.calls:
            self._former.append(former)
        return current, self._take_unused()

    def _take_unused(self) -> list[NodeStore[_Store]]:
        """Take out the stores that no view has that is current or in use."""
        used = {id(node) for view in (self._current, *self._former) if view is not None for node in view.nodes}
        gone = {run: node for run, node in self._stores.items() if id(node) not in used}
        for run in gone:
            del self._stores[run]
        return list(gone.values())

    def close(self) -> None:
        """Close the stores. Calls under way end as those of a single store do."""
        if self.closed == FORKED:
            return
        self.closed = self.closed or "this store is closed; open another one"
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for node in stores:
            node.close()
        self.membership.close()

    def let_go(self) -> None:
        """In a forked child: refuse everything. The stores let go of what they have."""
        self.closed = FORKED
        self._lock = threading.Lock()  # another thread of the parent may have held it
