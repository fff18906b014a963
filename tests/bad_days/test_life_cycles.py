"""Servers that are started, drained and killed at one address, on a machine that has
just room enough.

Whatever clients hold: who was killed or drained is followed by another at the same
address, which finds memory for its pool and keeps its Unix socket; who is told to drain
ends, as soon as no request is under way; and what is leased stays.
"""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import Hello, Keys, Put, Statistics
from tests.bad_days.budgeted_servers import BudgetedServers, Refused, Running, budgeted_servers

MIB = 1024 * 1024
POOL_BYTES = 16 * MIB
ATTEMPTS = 100
"""How often a server may be refused before clients must have let go, and who drains of
its port: each takes some milliseconds."""
SLOW = Put(Keys(["slow"]), pack_u64([1000]), checksums=False)
which = st.integers(0, 2)


@attrs.define(eq=False)
class Generation:
    """A server, as long as it lives or something of it is leased."""

    running: Running
    alive: bool = True
    busy: socket.socket | None = None
    """A connection with half of a put."""
    leases: int = 0


@attrs.define(eq=False)
class User:
    """A client, and the lease that it has."""

    store: BlockingStore
    closing: ExitStack
    lease: ExitStack | None = None
    leased: memoryview | None = None
    value: bytes = b""
    of: Generation | None = None


class LifeCycles(RuleBasedStateMachine):
    """`servers` is set by the test."""

    servers: BudgetedServers

    @initialize()
    def begin(self) -> None:
        self.generations: list[Generation] = []
        self.serving: Generation | None = None
        self.count = 0
        self.users: list[User] = []
        self.start()
        for _ in range(3):
            stack = ExitStack()
            url = f"infinistore://127.0.0.1:{self.servers.port}"
            self.users.append(User(stack.enter_context(blocking.open_store(url, deadline_s=60)), stack))

    @precondition(lambda self: self.serving is None)
    @rule()
    def start(self) -> None:
        """There is room for one more pool than are in use, and for what goes
        with it.
        """
        self.generations = [old for old in self.generations if old.alive or old.leases]
        event(f"pools in use at a start: {len(self.generations)}")
        budget_bytes = (len(self.generations) + 1) * POOL_BYTES + POOL_BYTES // 2
        keepers = [os.getpid(), *(old.running.pid for old in self.generations if old.alive)]
        for attempt in range(ATTEMPTS):
            try:
                self.serving = Generation(self.servers.start(budget_bytes, keepers))
                break
            except Refused:
                if attempt == ATTEMPTS - 1:
                    raise
        assert self.serving is not None
        self.generations.append(self.serving)

    @precondition(lambda self: self.serving is not None)
    @rule()
    def drain(self) -> None:
        draining, self.serving = self.serving, None
        assert draining is not None
        draining.running.send(signal.SIGTERM)
        if draining.busy is None:
            assert draining.running.has_ended(), "a drain waits for somebody who asks for nothing"
            draining.alive = False

    @precondition(lambda self: any(found.alive for found in self.generations))
    @rule(latest=st.booleans())
    def kill(self, latest: bool) -> None:
        alive = [found for found in self.generations if found.alive]
        killed = alive[-1 if latest else 0]
        killed.running.send(signal.SIGKILL)
        assert killed.running.has_ended()
        killed.alive = False
        if killed.busy is not None:
            killed.busy.close()
            killed.busy = None
        if killed is self.serving:
            self.serving = None

    @precondition(lambda self: self.serving is not None and self.serving.busy is None)
    @rule()
    def begin_a_put(self) -> None:
        assert self.serving is not None
        busy = self.serving.busy = socket.create_connection(("127.0.0.1", self.servers.port))
        # What follows a request that is answered has been seen by then.
        busy.sendall(encode_head(Hello(name="busy"), request_id=1) + encode_head(Statistics(), request_id=2))
        busy.sendall(encode_head(SLOW, request_id=3, payload_bytes=1000) + bytes(500))
        for _ in range(2):
            head = read(busy, 32)
            body_bytes = int.from_bytes(head[12:16], "little")
            read(busy, (32 + body_bytes + 63) // 64 * 64 - 32)

    @precondition(lambda self: any(found.busy for found in self.generations))
    @rule()
    def end_a_put(self) -> None:
        generation = next(found for found in self.generations if found.busy is not None)
        assert generation.busy is not None
        with generation.busy as busy:
            generation.busy = None
            busy.sendall(bytes(500))
            assert read(busy, 6)[5] == 0x82  # the kind of a PutReply
        if generation is not self.serving:
            assert generation.running.has_ended(), "a drain goes on when nothing is under way"
            generation.alive = False

    @precondition(lambda self: self.serving is not None)
    @rule(number=which, puts=st.integers(1, 3), gets=st.integers(0, 2))
    def use(self, number: int, puts: int, gets: int) -> None:
        """From the second put on, room for the next one is reserved; the second get
        asks nobody.
        """
        store = self.users[number].store
        values = [self.next_value() for _ in range(puts)]
        for value in values:
            store.put(f"key {number}", value)
        for _ in range(gets):
            assert store.get(f"key {number}") == values[-1]
        assert store.stats().transport == "shm"

    @precondition(lambda self: self.serving is not None)
    @rule(number=which)
    def lease(self, number: int) -> None:
        user = self.users[number]
        if user.lease is None:
            user.value = self.next_value()
            user.store.put("leased", user.value)
            user.lease = ExitStack()
            (user.leased,) = user.lease.enter_context(user.store.lease(["leased"]))
            user.of = self.serving
            assert user.of is not None
            user.of.leases += 1

    @rule(number=which)
    def end_lease(self, number: int) -> None:
        user = self.users[number]
        if user.lease is not None and user.of is not None:
            user.leased = None
            user.lease.close()
            user.lease = None
            user.of.leases -= 1

    @invariant()
    def what_is_leased_stays(self) -> None:
        for user in self.users:
            assert user.leased is None or user.leased == user.value

    @invariant()
    def who_serves_can_be_found_on_this_host(self) -> None:
        if self.serving is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.servers.unix_socket))

    def next_value(self) -> bytes:
        self.count += 1
        return self.count.to_bytes(8, "little") * (MIB // 8)

    def teardown(self) -> None:
        for user in self.users:
            user.leased = None
            if user.lease is not None:
                user.lease.close()
            user.closing.close()
        for generation in self.generations:
            if generation.busy is not None:
                generation.busy.close()
        self.servers.end()
        self.servers.unix_socket.unlink(missing_ok=True)


def read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += sock.recv(count - len(data))
    return data


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BudgetedServers]:
    with budgeted_servers(tmp_path_factory.mktemp("servers") / "socket", POOL_BYTES) as started:
        yield started


@pytest.mark.process
@pytest.mark.nightly
def test_there_is_always_a_next_server_whatever_the_clients_of_the_last_one_hold(servers: BudgetedServers) -> None:
    machine: Any = type("Machine", (LifeCycles,), {"servers": servers})
    found = settings(max_examples=12, stateful_step_count=25, phases=[Phase.generate], report_multiple_bugs=False)
    run_state_machine_as_test(machine, settings=found)  # not made shorter: that would take its time with each failure
