"""A process takes over a server while a client writes, and something goes wrong at any
step of any task: an end dies, or is so slow that every deadline passes, another process
takes over, too, or the store is purged.

Whatever happens, never do two serve; one does, unless an end died. What was
acknowledged is there, or gone with an end that died or by the purge, and nothing older
is there again.
"""

import itertools
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinistore import open_store
from infinistore.client.api.store import AsyncStore
from infinistore.config import ServerConfig
from infinistore.errors import ConfigError, InfiniStoreException
from infinistore.server import Server
from infinistore.server.composition import run_server
from infinistore.server.environment import Environment
from tests.examples import examples
from tests.server.running import make_config

FAULTS = ("giver dies", "taker dies", "slow", "another", "purge")
LONGEST_S = 1000.0
"""Longer than any end waits for the other."""


async def here(work: Callable[..., Any], *args: Any) -> Any:
    """Do at once what a server would do in a thread, so that virtual time waits."""
    await trio.lowlevel.checkpoint()
    return work(*args)


@attrs.define(eq=False)
class Process:
    """A server that runs, will, or did."""

    config: ServerConfig
    server: Server | None = None
    problem: str = ""
    died: bool = False
    settled: trio.Event = attrs.field(factory=trio.Event)
    """Set once it listens or has ended."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self) -> None:
        def on_listening(server: Server) -> None:
            self.server = server
            self.settled.set()

        try:
            with self.scope:
                await run_server(self.config, environment=Environment(run_in_thread=here), on_listening=on_listening)
        except ConfigError as error:
            self.problem = str(error)
        self.ended.set()
        self.settled.set()

    def die(self) -> None:
        """End in the middle of whatever it does."""
        if not self.ended.is_set():
            self.died = True
            self.scope.cancel()

    @property
    def serves(self) -> bool:
        """Whether it answers requests now."""
        if self.server is None or self.died or self.ended.is_set():
            return False
        giving = self.server.context.giving
        assert giving is not None
        return not giving.wanted.is_set()


class World(trio.abc.Instrument):
    """A take-over, with faults after so many steps since it began."""

    def __init__(self, folder: str, faults: list[tuple[str, int]], clock: trio.testing.MockClock) -> None:
        self.faults = faults
        self.steps = 0
        self._clock = clock
        self._url = f"unix://{folder}/socket"
        self._config = make_config(unix_socket=f"{folder}/socket", manage_port=None)
        self._giver = Process(self._config)
        self._takers = [self._make_taker()]
        self._purges = False
        self._purged = False
        self._acknowledged = 0
        self._two_served = False

    def _make_taker(self) -> Process:
        return Process(attrs.evolve(self._config, take_over=True, host="127.0.0.1"))

    @property
    def processes(self) -> list[Process]:
        return [self._giver, *self._takers]

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._two_served |= sum(process.serves for process in self.processes) > 1
        self.steps += 1
        for kind, step in self.faults:
            if step == self.steps:
                self._bring_about(kind)

    def _bring_about(self, kind: str) -> None:
        if kind == "giver dies":
            self._giver.die()
        elif kind == "taker dies":
            self._takers[0].die()
        elif kind == "slow":
            self._clock.jump(LONGEST_S)
        elif kind == "another":
            self._takers.append(self._make_taker())
            self._nursery.start_soon(self._takers[-1].run)
        else:
            self._purges = True
            self._nursery.start_soon(self._purge)

    async def _purge(self) -> None:
        for process in self.processes:
            if process.server is not None and not process.died and not process.ended.is_set():
                await process.server.purge()
                if not process.died:
                    self._purged = True
                return

    async def _write(self, store: AsyncStore) -> None:
        """Go on until the process serves, or does not."""
        for version in itertools.count(2):
            try:
                await store.put("key", b"%d" % version)
            except InfiniStoreException:
                await trio.sleep(1.0)
            else:
                self._acknowledged = version
            if self._takers[0].settled.is_set():
                return

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._giver.run)
            await self._giver.settled.wait()
            async with open_store(self._url) as store:
                for version in (0, 1):
                    await store.put_many({"key": b"%d" % version, "deleted": b"0"})
                self._acknowledged = 1
                await store.put("kept", b"0")
                await store.delete(["deleted"])
                trio.lowlevel.add_instrument(self)
                async with trio.open_nursery() as writing:
                    writing.start_soon(self._write, store)
                    self._nursery.start_soon(self._takers[0].run)
                    await self._takers[0].settled.wait()
                await trio.sleep(LONGEST_S)
                self.faults = []  # a jump of the clock may have ended that sleep in the middle of something
                await trio.sleep(LONGEST_S)
                trio.lowlevel.remove_instrument(self)
            await self._check()
            self._nursery.cancel_scope.cancel()

    async def _check(self) -> None:
        told = [(process.died, process.problem, process.serves) for process in self.processes]
        assert not self._two_served, told
        serving = [process for process in self.processes if process.serves]
        died = any(process.died for process in self.processes)
        assert len(serving) == 1 or (died and not serving), told
        if not serving:
            return
        async with open_store(self._url) as store:
            key, kept, deleted = await store.get_many(["key", "kept", "deleted"])
        assert deleted is None, told
        assert kept is None or not self._purged, told
        assert (key is not None and kept is not None) or died or self._purges, told
        assert key is None or int(bytes(key)) >= self._acknowledged, (key, self._acknowledged, told)


def take_over(*faults: tuple[str, int]) -> World:
    """Let it happen; return what the world was like."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    with TemporaryDirectory() as folder:
        world = World(folder, list(faults), clock)
        trio.run(world.run, clock=clock)
        return world


STEPS = 100
"""More than a take-over has, with the writes beside it."""
BAD_LUCK = st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(1, STEPS)), max_size=2)


def test_without_a_fault_the_process_that_takes_over_serves() -> None:
    world = take_over()
    assert [process.serves for process in world.processes] == [False, True]
    assert world.steps < STEPS


@given(faults=BAD_LUCK)
@example(faults=[("giver dies", 36)])
@example(faults=[("slow", 17), ("another", 58), ("purge", 79)])
@settings(max_examples=examples(40))
def test_whatever_goes_wrong_one_serves_what_was_acknowledged(faults: list[tuple[str, int]]) -> None:
    take_over(*faults)


@pytest.mark.nightly
@given(faults=BAD_LUCK)
@settings(max_examples=examples(600))
def test_of_many_faults_none_makes_two_serve_or_brings_old_values_back(faults: list[tuple[str, int]]) -> None:
    take_over(*faults)
