"""Calls to a cluster: from a request to the requests for its nodes.

Written once for Trio, asyncio and threads. A node that does not answer is *lost*: the
circuit breaker of its store opens after two silences, and from then on nothing is sent
to it, except a question in the background whether it is there again. What a lost node
has is missing. Nothing here moves a key to another node: only a membership does that.

A budget says how much may be asked for twice: where everything is slow, more requests
make it slower.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import attrs

from infinistore.client.cluster.nodes import PING, Nodes, NodeStore, ViewInUse
from infinistore.client.connection.effects import (
    Background,
    ClusterCall,
    InThread,
    LatePart,
    Outcome,
    Part,
    Sleep,
    Together,
)
from infinistore.client.memory.buffers import Registration
from infinistore.client.movers.rdma import StoreRdma, register
from infinistore.client.options import Options
from infinistore.client.requests import ReleaseHolds
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Exists, Mark, MatchPrefix, Prefetch, StoreRequest
from infinistore.transports.cuda import DeviceMemory

_PART: Final = 0.05
"""How many keys may be asked for again, of all that are asked for."""
_MOST_SAVED: Final = 64.0


class Budget:
    """How many keys may be asked for twice. In threads, a lost update is harmless."""

    def __init__(self) -> None:
        self.left = _MOST_SAVED
        """Below 0 after a large batch."""

    def earn(self, count: int) -> None:
        """Note that so many keys are asked for."""
        self.left = min(_MOST_SAVED, self.left + _PART * count)

    def spend(self, count: int) -> bool:
        """Whether so many keys may be asked for again, now or never."""
        if self.left <= 0:
            return False
        self.left -= count
        return True


_T = TypeVar("_T")
LOST: Final = (StoreUnavailable, DeadlineExceeded)
"""What says that a node does not answer. Any other error is an answer."""
_LATE_S: Final = 2.0
"""Whoever asks a lost node in the background should have done so by then."""
_LOOKUPS: Final = frozenset((Exists, Mark, MatchPrefix, Prefetch, ReleaseHolds))
"""What a server answers at once, and is asked in vain if it takes longer."""


def is_lost(outcome: Outcome) -> bool:
    """Whether a part has met a lost node."""
    return isinstance(outcome, KeptError) and issubclass(outcome.kind, LOST)


class NodeHedge(LatePart, Protocol):
    """The hedge of what a node is asked."""

    node: NodeStore[Any]
    won: bool
    """Whether other nodes answered for it."""


@attrs.define
class Counters:
    """What a store has seen of its cluster since it was opened."""

    lost_reads: int = 0
    """Keys that count as missing because their node was lost."""
    lost_copies: int = 0
    """Keys that a put stored on fewer nodes than it should."""
    hedges: int = 0
    """Parts of reads that were late, so that other copies were asked."""
    hedges_won: int = 0
    """How often these answered first."""
    warmed: int = 0
    """Blocks copied to a node that had joined."""
    warming_bytes: int = 0
    """What is being copied now."""


def error_of(node: NodeStore[Any], outcome: KeptError) -> BaseException:
    """Return the error of a node, to be raised: it names the node."""
    error = outcome.again()
    error.args = (naming(str(error), [node]),)
    return error


def naming(text: str, nodes: Iterable[NodeStore[Any]]) -> str:
    """Return the text with those of these nodes behind it that it does not name."""
    names = dict.fromkeys(map(str, nodes))
    missing = ", ".join(name for name in names if name not in text)
    return f"{text} ({missing})" if missing else text


class CallInView:
    """One call, the view that it uses, and when it ends at the latest: the deadline is
    for all that it asks, at the same time or one after the other.
    """

    def __init__(self, calls: "ClusterCalls", view: ViewInUse[Any], deadline: float) -> None:
        self.calls = calls
        self.view = view
        self.deadline = deadline
        """On the clock of the nodes' stores."""
        self.counters = calls.counters

    @property
    def left_s(self) -> float:
        """How long it may still take."""
        return self.deadline - self.calls.clock()

    def places(self, keys: Sequence[str]) -> list[Sequence[int]]:
        """Return for each key the nodes that may have it, in the order of reading."""
        return self.view.read_order.places(keys, self.calls.reads)

    async def ask(self, parts: Sequence[tuple[int, StoreRequest[Any]]], *, patiently: bool = False) -> list[Outcome]:
        """Send requests to nodes, named by their index, at the same time.

        An outcome is a result, or a `KeptError` for which `is_lost` is true. Any other
        error is raised, when all parts are over. `patiently`, a lookup may take as long
        as any call, unless the node says nothing at all.
        """
        outcomes = await self.ask_all(parts, patiently=patiently)
        for (index, _), outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, KeptError) and not is_lost(outcome):
                raise self.error(index, outcome)
        return outcomes

    async def ask_all(
        self,
        parts: Sequence[tuple[int, StoreRequest[Any]]],
        hedges: Sequence[NodeHedge | None] = (),
        *,
        patiently: bool = False,
        is_last: bool = True,
        reserve_s: float = 0.0,
    ) -> list[Outcome]:
        """Do the same, and leave all errors to the caller. Each part may have a hedge.
        If these are not the last places to ask, half of the time is left for others, or
        `reserve_s`.
        """
        calls = self.calls
        nodes = self.view.nodes
        left_s = self.left_s - reserve_s if is_last else self.left_s / 2
        outcomes: list[Outcome] = [None] * len(parts)
        sent: list[Part] = []
        places: list[int] = []
        for place, (index, request) in enumerate(parts):
            node = nodes[index]
            if node.lost and not calls.may_ask(node):
                outcomes[place] = KeptError(StoreUnavailable(node.problem or f"{node} does not answer"))
            elif left_s <= 0:
                outcomes[place] = KeptError(DeadlineExceeded(f"no time is left to ask {node}; nothing was sent to it"))
            else:
                within_s = min(calls.lookup_s, left_s) if type(request) in _LOOKUPS and not patiently else left_s
                sent.append(Part(node.store, request, within_s, hedges[place] if hedges else None))
                places.append(place)
        for place, outcome in zip(places, await Together(sent), strict=True):
            outcomes[place] = outcome
            if isinstance(outcome, KeptError):
                await calls.watch(nodes[parts[place][0]])
        for hedge in hedges:
            if hedge is not None and hedge.won:
                await calls.watch(hedge.node, is_late=True)
        return outcomes

    async def ask_in_turns(self, turns: Sequence[Sequence[tuple[int, StoreRequest[Any]]]]) -> list[Outcome]:
        """Send the requests of each turn when those of the turn before are over, also
        if one has failed, and do the same as `ask` with all outcomes, in that order.

        All nodes must do their part, so the first turn may take most of the time: only
        that of a lookup is left for each later one.
        """
        outcomes: list[Outcome] = []
        for turn, parts in enumerate(turns):
            later = len(turns) - 1 - turn
            reserve_s = later * min(self.calls.lookup_s, self.left_s / (later + 1))
            outcomes += await self.ask_all(parts, reserve_s=reserve_s)
        for (index, _), outcome in zip((part for parts in turns for part in parts), outcomes, strict=True):
            if isinstance(outcome, KeptError) and not is_lost(outcome):
                raise self.error(index, outcome)
        return outcomes

    def error(self, index: int, outcome: KeptError) -> BaseException:
        """Return an error to be raised, which names its node."""
        return error_of(self.view.nodes[index], outcome)


class ClusterCalls:
    """Makes calls to the nodes of a cluster.

    A lookup that a node has not answered within `lookup_s` seconds finds nothing
    there. `clock` is that of the nodes' stores.
    """

    def __init__(self, nodes: Nodes[Any], handlers: "Handlers", options: Options, clock: Callable[[], float]) -> None:
        self.nodes = nodes
        self.lookup_s = options.lookup_deadline_s
        self._deadline_s = options.deadline_s
        self.clock = clock
        self.counters = Counters()
        self._handlers = handlers
        self.hedges = options.hedged_reads
        """Whether reads are hedged where there are copies."""
        self.budget = Budget()
        self.reads = 0
        """How many reads have begun. In threads, a lost update is harmless."""
        self.verifies = options.verify == "always"
        """Whether what was read is what was put, as far as its checksum says."""

    async def call(self, request: StoreRequest[_T]) -> _T:
        """Carry out a request."""
        deadline = self.clock() + self._deadline_s
        view = self.nodes.begin()
        if view.view.epoch < 0:
            view = await self._know(view)
        try:
            result: _T = await self._handlers[type(request)](CallInView(self, view, deadline), request)
            return result
        finally:
            self.nodes.end(view)

    async def check(self) -> None:
        """Ask all nodes whether they are there, with more patience than a lookup has: a
        machine that has just started much else is busy, and a first packet may be lost.

        Raises:
            StoreUnavailable: none of them answers.
        """
        deadline = self.clock() + self._deadline_s
        view = self.nodes.begin()
        if view.view.epoch < 0:
            view = await self._know(view)
        try:
            call = CallInView(self, view, deadline)
            outcomes = await call.ask([(index, PING) for index in range(len(view.nodes))], patiently=True)
            if not outcomes:
                raise StoreUnavailable("the cluster has no nodes; start one")
            if all(map(is_lost, outcomes)):
                raise outcomes[0].again()
        finally:
            self.nodes.end(view)

    async def _know(self, view: ViewInUse[Any]) -> ViewInUse[Any]:
        """Wait for the first view of the cluster, which ends the use of `view`."""
        self.nodes.end(view)
        await InThread(lambda: self.nodes.membership.wait_known(self._deadline_s))
        return self.nodes.begin()

    def may_ask(self, node: NodeStore[Any]) -> bool:
        """Whether a call may try a lost node again: if nobody else does."""
        patience_s = _LATE_S if node.probing else 0.0
        return node.store is not None and self.clock() >= node.ask_again_at + patience_s

    def register(self, rdma: StoreRdma, memory: memoryview | DeviceMemory) -> Registration:
        """Register memory of the caller's, once for all nodes."""
        self.nodes.check_open()
        return register(rdma, memory)

    async def watch(self, node: NodeStore[Any], *, is_late: bool = False) -> None:
        """If a node was lost just now, have it asked in the background. One that is
        late may be lost: whoever asked it did not wait until that was known.
        """
        if (node.lost or is_late) and not node.probing:
            node.probing = True
            if not await Background(self._ask_until_there(node)):
                node.probing = False

    async def _ask_until_there(self, node: NodeStore[Any]) -> None:
        try:
            while not node.closed and not self.nodes.closed:
                await Sleep(max(0.0, node.ask_again_at - self.clock()))
                await Together([Part(node.store, PING, self.lookup_s)])
                if not node.silent:
                    return
        finally:
            node.probing = False


Handlers = Mapping[type[Any], Callable[[CallInView, Any], ClusterCall[Any]]]
"""What carries out each kind of request."""
