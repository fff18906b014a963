"""Each row of "What is not known after an error" is tried: a `put` or a `delete` fails
that way, and has done what the row says, and the store is usable afterwards.

A row whose outcome is not known has a scenario for either outcome.
"""

import errno
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import attrs
import pytest
import trio
from trio.testing import MockClock

from infinistore import errors, open_store
from infinistore.client.api.store import AsyncStore
from infinistore.client.extension import Environment as ClientEnvironment
from infinistore.client.options import StoreUrl
from infinistore.disk.jobs import Job, ReadInto
from infinistore.disk_io.store_disks import StoreDisks, open_disks
from infinistore.disk_settings import DiskPlace
from infinistore.errors import StoreUnavailable
from infinistore.server.environment import Environment
from tests.disk_io.faulty_runner import Fail, Fault, FaultyRunner, Hang
from tests.server.running import KIB, MIB, RunningServer, make_config, running_server, simulated_server
from tests.server.tenants_files import TOKENS, text_of, write
from tests.transports.memory_network import MemoryStream

PAGE = Path(__file__).parents[2] / "docs" / "promises.md"
OLD, NEW = b"old", b"new"
Scenario: TypeAlias = Callable[[Path, MockClock], Awaitable["list[Outcome]"]]
"""Tries a row, with a folder, and a clock that stands still until it is told to jump:
as long as threads are at work.
"""


def rows() -> list[tuple[str, str]]:
    """The rows of the table: what a call raised, and what is known then."""
    section = PAGE.read_text().split("\n## What is not known after an error\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(error.strip(), known.strip()) for error, known in lines[1:]]


class Stream:
    """The end of a store, to which a fault may happen. It has no descriptor."""

    def __init__(self, network: "Network", host: str, inner: MemoryStream) -> None:
        self._network = network
        self.host = host
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send_now(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        return views

    async def send_all(self, views: Sequence[memoryview], *rest: Any) -> None:
        fault = self._network.fault_of(self.host)
        self._network.sends += 1
        if fault == "cut before":
            self._inner.cut()
        if fault not in ("silent before", "spoilt before"):
            await self._inner.send_all(views, *rest)

    async def receive_into(self, views: Sequence[memoryview], *rest: Any) -> int:
        fault = self._network.fault_of(self.host)
        if fault.endswith("after"):
            await self._inner.receive_into([memoryview(bytearray(4 * KIB))], *rest)
        if fault == "cut after":
            self._inner.cut()
        if fault.startswith("spoilt"):
            views[0][:] = b"!" * len(views[0])
            return len(views[0])
        return await self._inner.receive_into(views, *rest)


@attrs.define
class Network:
    """What goes wrong between a store and its servers, by their hosts: the connection
    is cut, the other end falls silent, or what comes is spoilt, before a request or
    after it.
    """

    servers: dict[str, RunningServer]
    fault: str = ""
    faulty: str = "one"
    """The host to which it happens."""
    sends: int = 0
    streams: list[Stream] = attrs.field(factory=list)

    def fault_of(self, host: str) -> str:
        return self.fault if host == self.faulty else ""

    def cut(self) -> None:
        """Cut the connections to the faulty host."""
        for stream in self.streams:
            if stream.host == self.faulty:
                stream.cut()

    async def connect(self, address: StoreUrl, *_: object) -> Any:
        fault = self.fault_of(address.host)
        if fault == "unreachable":
            raise StoreUnavailable("nobody listens")
        if fault == "no way":
            await trio.sleep_forever()
        listener = self.servers[address.host].listener
        assert listener is not None
        self.streams.append(Stream(self, address.host, listener.connect_stream()))
        return self.streams[-1]

    def environment(self) -> ClientEnvironment:
        return ClientEnvironment(connect=self.connect)


@attrs.frozen
class Outcome:
    """How a call ended, and what it has done all the same."""

    raised: str
    text: str
    carried_out: bool


def _value(found: bytearray | None) -> bytes | None:
    return None if found is None else bytes(found)


async def tried(
    mock_clock: MockClock,
    store: AsyncStore,
    begin: Callable[[], Awaitable[object]],
    end: Callable[[], Awaitable[object]],
    new: bytes = NEW,
    *,
    methods: str = "put delete",
    cancel: bool = False,
) -> list[Outcome]:
    """Let calls fail while something is so, and see what they have done by then; the
    same store tells."""
    mock_clock.autojump_threshold = 0
    outcomes = []
    for method in methods.split():
        await store.put("key", OLD)
        await begin()
        raised = text = ""
        with trio.CancelScope(deadline=trio.current_time() + 1.0 if cancel else math.inf) as scope:
            try:
                await (store.put("key", new) if method == "put" else store.delete(["key"]))
            except (errors.InfiniStoreException, ValueError) as error:
                raised, text = type(error).__name__, str(error)
        assert raised or scope.cancelled_caught, f"{method} did not fail"
        await end()
        await trio.sleep(60.0)
        found = _value(*await store.get_many(["key"]))
        assert found in (OLD, new if method == "put" else None)
        outcomes.append(Outcome(raised or "cancellation", text, found != OLD))
    return outcomes


@asynccontextmanager
async def place(hosts: str = "one", **settings: Any) -> AsyncGenerator[tuple[Network, AsyncStore]]:
    """Servers in memory, and a store of them."""
    async with AsyncExitStack() as stack:
        names = hosts.split()
        servers = {name: await stack.enter_async_context(simulated_server(make_config(**settings))) for name in names}
        network = Network(servers)
        url = f"tcp://{hosts}" if len(names) == 1 else f"infinistore+static://{','.join(f'{name}:1' for name in names)}"
        store = open_store(url, environment=network.environment(), deadline_s=60.0)
        yield network, await stack.enter_async_context(store)


def by(*faults: str, cancel: bool = False) -> Scenario:
    """Calls during faults of the network."""

    async def scenario(folder: Path, mock_clock: MockClock) -> list[Outcome]:
        outcomes = []
        for fault in faults:
            async with place() as (network, store):

                async def set_to(fault: str, network: Network = network) -> None:
                    if fault in ("unreachable", "no way"):
                        network.cut()
                    network.fault = fault
                    await trio.lowlevel.checkpoint()

                outcomes += await tried(mock_clock, store, partial(set_to, fault), partial(set_to, ""), cancel=cancel)
        return outcomes

    return scenario


async def wrong_arguments(folder: Path, mock_clock: MockClock) -> list[Outcome]:
    outcomes = []
    async with place() as (network, store):
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put("key", b""),
            lambda: store.put("key", 5),  # type: ignore[arg-type]
            lambda: store.put_many({"other": NEW, "": NEW}),
            lambda: store.delete(["key", ""]),
        ]
        await store.put("key", OLD)
        before = network.sends
        for call in calls:
            with pytest.raises((ValueError, TypeError)) as caught:
                await call()
            assert network.sends == before
            outcomes.append(Outcome(caught.type.__name__, str(caught.value), _value(await store.get("key")) != OLD))
            before = network.sends
    return outcomes


async def refused(folder: Path, mock_clock: MockClock) -> list[Outcome]:
    """Too large, no room, no place, no role; and what was done of a split batch."""
    outcomes = []
    settings: dict[str, Any] = {"max_value_bytes": 128 * KIB, "max_batch_keys": 2, "max_connections": 1}
    async with place(prealloc_bytes=64 * KIB, **settings) as (network, store):
        server = network.servers["one"]
        outcomes += await tried(
            mock_clock, store, trio.lowlevel.checkpoint, trio.lowlevel.checkpoint, bytes(129 * KIB), methods="put"
        )
        parts = {"1": NEW, "2": NEW, "key": bytes(40 * KIB), "3": bytes(40 * KIB)}
        with pytest.raises(errors.OutOfMemory) as full:
            await store.put_many(parts)
        outcomes.append(Outcome(full.type.__name__, str(full.value), _value(await store.get("key")) != OLD))
        assert await store.exists_many(parts) == [True, True, True, False]

        async def take_the_place() -> None:
            network.cut()
            await server.quiet()
            await server.peer()

        outcomes += await tried(mock_clock, store, take_the_place, server.left_by_all)
    text = text_of(ann={"roles": "[read]"})
    mock_clock.autojump_threshold = math.inf
    async with (
        running_server(make_config(tenants=write(folder, text))) as running,
        open_store(running.url, token=TOKENS["ann"]) as store,
    ):
        with pytest.raises(errors.PermissionDenied) as caught:
            await store.put("key", NEW)
        outcomes.append(Outcome(caught.type.__name__, str(caught.value), await store.exists("key")))
    return outcomes


async def a_stranger(folder: Path, mock_clock: MockClock) -> list[Outcome]:
    async with running_server(make_config(tenants=write(folder, text_of(ann={})))) as running:
        async with open_store(running.url, token=TOKENS["ben"], lazy=True) as store:
            with pytest.raises(errors.AuthenticationFailed) as caught:
                await store.put("key", NEW)
        async with open_store(running.url, token=TOKENS["ann"]) as store:
            return [Outcome(caught.type.__name__, str(caught.value), await store.exists("key"))]


def on_disk(fault: Fault) -> Scenario:
    """Deletes that a disk does not take."""

    async def scenario(folder: Path, mock_clock: MockClock) -> list[Outcome]:
        runners: list[FaultyRunner] = []
        fails = False

        def of(job: Job) -> Fault | None:
            return fault if fails and not isinstance(job, ReadInto) else None

        def open_faulty(places: Sequence[DiskPlace], random: Random) -> StoreDisks:
            opened = open_disks(places, random)
            runners.append(FaultyRunner(opened.runner, of))
            return attrs.evolve(opened, runner=runners[-1])

        config = make_config(disks=(DiskPlace(folder / "disk", 64 * MIB),), disk_admission="eager")
        async with (
            running_server(config, Environment(open_disks=open_faulty)) as running,
            open_store(running.url, deadline_s=60.0) as store,
        ):
            await store.put("key", OLD)
            assert await store.flush(["key"]) == 1
            fails = True
            mock_clock.autojump_threshold = 0 if isinstance(fault, Hang) else math.inf
            with pytest.raises((errors.DeadlineExceeded, errors.DiskFailed)) as caught:
                await store.delete(["key"])
            found = await store.exists("key")
            await store.put("other", NEW)
            assert await store.get("other") == NEW
            fails = False
            runners[-1].end_hangs()
            return [Outcome(caught.type.__name__, str(caught.value), not found)]

    return scenario


async def a_lost_node(folder: Path, mock_clock: MockClock) -> list[Outcome]:
    """Each key is where the error has it."""
    mock_clock.autojump_threshold = 0
    outcomes, keys = [], [f"key {number}" for number in range(16)]
    async with place("one two") as (network, store):
        for fault, lost in (("cut before", "unknown"), ("cut after", "unknown"), ("unreachable", "failed")):
            await store.put_many(dict.fromkeys(keys, OLD))
            network.fault, network.faulty = fault, "two"
            if fault == "unreachable":
                network.cut()
            with pytest.raises(errors.PartialPut) as caught:
                await store.put_many(dict.fromkeys(keys, NEW))
            error, network.fault = caught.value, ""
            await trio.sleep(60.0)
            found = dict(zip(keys, map(_value, await store.get_many(keys)), strict=True))
            assert sorted([*error.stored, *error.failed, *error.unknown]) == sorted(keys)
            assert error.stored and getattr(error, lost)
            assert {found[key] for key in error.stored} == {NEW}
            assert {found[key] for key in error.failed} <= {OLD}
            assert {found[key] for key in error.unknown} <= ({NEW} if fault == "cut after" else {OLD})
            outcomes.append(Outcome(caught.type.__name__, str(error), carried_out=found[keys[0]] == NEW))
    return outcomes


SCENARIOS: dict[str, Scenario] = {
    "`ValueError`, `TypeError`": wrong_arguments,
    "`OutOfMemory`, `ValueTooLarge`, `LimitExceeded`, `PermissionDenied`": refused,
    "`StoreUnavailable` with the text that the outcome is not known": by("cut before", "cut after"),
    "`StoreUnavailable` otherwise": by("unreachable"),
    "`DeadlineExceeded`, *no answer from*": by("silent before", "silent after"),
    "`DeadlineExceeded`, *a disk did not make it durable*": on_disk(Hang()),
    "`DeadlineExceeded` otherwise": by("no way"),
    "`DiskFailed`": on_disk(Fail(errno.EROFS)),
    "`PartialPut`, of a cluster": a_lost_node,
    "`ProtocolError`": by("spoilt before", "spoilt after"),
    "`AuthenticationFailed`": a_stranger,
    "cancellation": by("silent before", "silent after", cancel=True),
}


def test_every_row_has_a_scenario_and_every_scenario_a_row() -> None:
    assert [error for error, _ in rows()] == list(SCENARIOS)


@pytest.mark.parametrize(("error", "known"), rows(), ids=[error.replace("`", "") for error, _ in rows()])
async def test_a_call_that_fails_has_done_what_its_row_says(
    error: str, known: str, tmp_path: Path, mock_clock: MockClock
) -> None:
    outcomes = await SCENARIOS[error](tmp_path, mock_clock)
    assert {one.raised for one in outcomes} == set(re.findall("`([A-Za-z]+)`", error) or [error])
    texts = re.findall(r"\*(.+)\*", error)
    assert all(text in one.text for text in texts for one in outcomes)
    lost = [one for one in outcomes if one.raised in ("StoreUnavailable", "DeadlineExceeded")]
    assert all(("is not known" in one.text) == known.startswith("may") for one in lost)
    done = {one.carried_out for one in outcomes}
    expected = {"not": {False}, "carried": {True}, "may": {False, True}, "the": done}
    assert done == expected[known.split(maxsplit=1)[0]], outcomes
