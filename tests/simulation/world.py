"""The world of one run: its time, its chance, its trace, and what it consists of.

Everything that happens in a run follows from its seed. `World.generator` hands out a
generator for each purpose, so that a change of one does not disturb the others.
`World.run` runs a function with Trio's scheduler made deterministic, and guards against
every other source of time, chance and threads.

A `Plug` is a part of the world that is not a client, a server or a network: a disk, or
the memory that processes of one host share.
"""

import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import trio

from infinistore.config import ServerConfig
from infinistore.core import StoreCore
from infinistore.server.environment import Environment
from infinistore.server.movers.base import Mover
from tests.simulation.clock import VirtualClock
from tests.simulation.guard import guarded
from tests.simulation.trace import Trace

if TYPE_CHECKING:
    from tests.simulation.history import Call
    from tests.simulation.network import Listener
    from tests.simulation.nodes import ServerNode

__all__ = ["Plug", "World"]

_COLLECT_EVERY_S = 5.0


@contextmanager
def _frozen() -> Iterator[None]:
    """Let collections look only at what the run makes, so that they take little."""
    of_the_process = gc.get_freeze_count()  # if it has done so for all its runs, that stays so
    gc.freeze()
    try:
        yield
    finally:
        if not of_the_process:
            gc.unfreeze()


class Plug:
    """Another part of the world. It is told what happens to the servers."""

    def start(self, world: "World") -> None:
        """The world begins. Called in `World.run`, before any server starts."""

    def config(self, server: "ServerNode", config: ServerConfig) -> ServerConfig:
        """Return the configuration of a server that starts."""
        return config

    def environment(self, server: "ServerNode", environment: Environment) -> Environment:
        """Return what a server that starts takes from its machine."""
        return environment

    def movers(
        self, server: "ServerNode", core: StoreCore, environment: Environment, resources: ExitStack
    ) -> Sequence[Mover]:
        """Return movers of a server that starts, to be asked before the inline one.
        What `resources` has ends with the server.
        """
        return ()

    def listeners(self, server: "ServerNode") -> "Sequence[Listener]":
        """Return where else a server that starts listens. The server closes them."""
        return ()

    def kill(self, server: "ServerNode") -> None:
        """A server is about to crash: nothing that it does now has an effect."""

    def crash(self, server: "ServerNode", *, keeps_disk: bool) -> None:
        """A server has crashed; its machine has lost its memory, and perhaps more."""

    def note_losses(self, server: "ServerNode") -> None:
        """Note what a server has lost, while it runs."""

    def heal(self) -> None:
        """Faults are over."""

    def check(self) -> list[str]:
        """Return what is wrong, at the end, when nothing happens any more."""
        return []

    def end(self) -> None:
        """The world has ended."""


class World:
    """One run. `seed` decides everything in it."""

    def __init__(self, seed: int, plugs: Sequence[Plug] = ()) -> None:
        self.seed = seed
        self.clock = VirtualClock()
        self.trace = Trace(self.clock)
        self.plugs = plugs
        self.violations: list[str] = []
        """What was found wrong, in the order in which it was found."""
        self.faults: Counter[str] = Counter()
        """How many faults there were of each kind."""
        self.calls: dict[trio.lowlevel.Task, Call] = {}
        """The call that a task of a client is making."""
        self._collected = -1
        """How many events there were when garbage was collected last."""

    def generator(self, name: str) -> random.Random:
        """Return the generator of one purpose."""
        return random.Random(f"{self.seed}/{name}")

    def call_of_task(self, task: trio.lowlevel.Task) -> "Call | None":
        """Return the call that a task is making, or carries out a part of."""
        of: trio.lowlevel.Task | None = task
        while of is not None:
            if of in self.calls:
                return self.calls[of]
            of = None if of.parent_nursery is None else of.parent_nursery.parent_task
        return None

    def fault(self, kind: str, where: str, *details: Any) -> None:
        """Note a fault that the world brings about."""
        self.faults[kind] += 1
        self.trace.add(where, kind, *details)

    def violation(self, what: str) -> None:
        """Note that a promise was broken."""
        self.trace.add("checker", "violation", what)
        self.violations.append(what)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run a function, and everything that it starts, to its end."""

        async def begin() -> None:
            for plug in self.plugs:
                plug.start(self)
            await main()

        gc.collect()
        with guarded(self.generator("scheduler")), _frozen():
            self.clock.after(_COLLECT_EVERY_S, self._collect)
            try:
                trio.run(begin, clock=self.clock)
            finally:
                for plug in self.plugs:
                    plug.end()

    def _collect(self) -> None:
        # Finalizers of what is part of a cycle run here, and at no moment that depends
        # on the process. A world at rest makes no garbage that anybody waits for.
        if self.trace.events != self._collected:
            self._collected = self.trace.events
            gc.collect()
        self.clock.after(_COLLECT_EVERY_S, self._collect)
