"""A server is upgraded under load: clients go on without an error, no block is lost,
and none is wrong.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import IO

import attrs
import pytest
import trio

from infinistore import blocking
from infinistore.access.tenants import digest_of, make_token
from infinistore.allocators import create_allocator
from infinistore.blocking import BlockingStore
from infinistore.config import ServerConfig
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.errors import StoreUnavailable
from infinistore.server.take_over.memory import OneStore, PoolLost
from infinistore.server.take_over.taking import begin_taking
from tests import warm
from tests.ports import own_ports

KEYS = 24
BLOCK_BYTES = 20_000
POOL_BYTES = 32 << 20


@attrs.define
class Servers:
    """Processes that serve, one after the other, at the same place."""

    folder: Path
    port: int = attrs.field(factory=lambda: own_ports(1)[0])
    flags: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    processes: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    @property
    def socket(self) -> str:
        return str(self.folder / "socket")

    def spawn(self, *flags: str, stderr: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-W", "error", "-m", "infinistore", "serve", "--host", self.host]
        command += ["--service-port", str(self.port), "--manage-port", "0", "--unix-socket", self.socket]
        command += ["--prealloc-size", f"{POOL_BYTES}B", "--minimal-allocate-size", "1", "--log-level", "warning"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
        process = warm.Popen([*command, *self.flags, *flags], stdout=subprocess.PIPE, stderr=stderr, env=environment)
        self.processes.append(process)
        return process

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        process = self.spawn(*flags)
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert re.search(rf"tcp://{re.escape(self.host)}:{self.port}\b", line), line
        return process

    def open(self, transport: str, token: str = "") -> "BlockingStore":
        return self.stack.enter_context(open_at(transport, self.port, self.socket, token, self.host))

    stack: ExitStack = attrs.field(factory=ExitStack)

    def close(self) -> None:
        self.stack.close()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    try:
        yield made
    finally:
        made.close()


def open_at(
    transport: str, port: int, path: str, token: str = "", host: str = "127.0.0.1"
) -> AbstractContextManager[BlockingStore]:
    """Open a store of the server that is there, by TCP, by its Unix socket, or by
    shared memory."""
    url = f"tcp://{host}:{port}" if transport == "tcp" else f"{transport}://{path}"
    return blocking.open_store(url, token=token, deadline_s=60)


def value_of(key: str, version: int) -> bytes:
    seed = hashlib.sha256(f"{key}/{version}".encode()).digest()
    return seed * (BLOCK_BYTES // len(seed))


def there_of(store: BlockingStore, keys: Sequence[str]) -> int:
    """How many of these blocks are there; none is wrong."""
    found = 0
    for start in range(0, len(keys), 100):
        some = keys[start : start + 100]
        for key, value in zip(some, store.get_many(some), strict=True):
            assert value is None or bytes(value) == value_of(key, 0)
            found += value is not None
    return found


class Load:
    """Puts and reads keys of its own until it is stopped; `faults` says what was
    wrong."""

    def __init__(self, name: str, store: BlockingStore, owner: str = "") -> None:
        self.store = store
        self.owner = owner
        self.keys = [f"{name} {number}" for number in range(KEYS)]
        self.versions = {key: [0] for key in self.keys}
        self.faults: list[str] = []
        self.unknown = 0
        self.rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.store.put_many({key: self.value_of(key, 0) for key in self.keys})

    def value_of(self, key: str, version: int) -> bytes:
        return value_of(f"{self.owner}{key}", version)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.rounds += 1
                self._put(self.keys[self.rounds % KEYS : self.rounds % KEYS + 3])
                self.check()
        except Exception as error:  # noqa: BLE001 - the test shows it
            self.faults.append(repr(error))

    def _put(self, keys: list[str]) -> None:
        new = {key: max(self.versions[key]) + 1 for key in keys}
        try:
            self.store.put_many({key: self.value_of(key, version) for key, version in new.items()})
        except StoreUnavailable as error:
            if not error.outcome_is_unknown:
                raise
            self.unknown += 1
            for key in keys:
                self.versions[key].append(new[key])
        else:
            for key in keys:
                self.versions[key] = [new[key]]

    def check(self) -> None:
        """Read everything; each block is the last that was put."""
        for key, value in zip(self.keys, self.store.get_many(self.keys), strict=True):
            if value is None:
                self.faults.append(f"{key} is lost")
            elif bytes(value) not in [self.value_of(key, version) for version in self.versions[key]]:
                self.faults.append(f"{key} is wrong")
        if self.store.exists_many(self.keys) != [True] * KEYS:
            self.faults.append("a key is not there")


def test_a_server_is_upgraded_twice_under_load(servers: Servers) -> None:
    process = servers.start()
    upgrade_twice(servers, process, loads_of(servers), servers.open("shm"))


@pytest.mark.nightly
def test_a_server_with_tenants_is_upgraded_twice_under_load(servers: Servers) -> None:
    """Two tenants, each in a trust group of its own, have blocks of the same keys."""
    tokens = give_tenants(servers)
    process = servers.start()
    upgrade_twice(servers, process, loads_of_tenants(servers, tokens), servers.open("shm", tokens["ann"]))


def loads_of(servers: Servers) -> list[Load]:
    return [Load(f"{transport}{n}", servers.open(transport)) for n in (1, 2) for transport in ("tcp", "unix", "shm")]


def give_tenants(servers: Servers) -> dict[str, str]:
    """Have the servers serve two tenants; return their tokens."""
    tokens = {name: make_token(name, os.urandom) for name in ("ann", "ben")}
    entries = (f"  {name}: {{group: of-{name}, tokens: [{digest_of(tokens[name])}]}}\n" for name in tokens)
    tenants = servers.folder / "tenants.yaml"
    tenants.write_text("groups: {of-ann: 16MiB, of-ben: 16MiB}\ntenants:\n" + "".join(entries))
    tenants.chmod(0o600)
    servers.flags = ("--tenants", str(tenants))
    return tokens


def loads_of_tenants(servers: Servers, tokens: Mapping[str, str]) -> list[Load]:
    return [
        Load(transport, servers.open(transport, token), name)
        for name, token in tokens.items()
        for transport in ("tcp", "unix", "shm")
    ]


def upgrade_twice(servers: Servers, process: subprocess.Popen[bytes], loads: list[Load], holder: BlockingStore) -> None:
    holder.put_many({f"leased {n}": value_of("leased", n) for n in range(10)})
    for load in loads:
        load.start()
    with holder.lease([f"leased {n}" for n in range(10)]) as views:
        for _ in range(2):
            rounds = [load.rounds for load in loads]
            following = servers.start("--take-over")
            assert process.wait(60) == 0
            process = following
            while any(load.rounds < before + 3 for load, before in zip(loads, rounds, strict=True)):
                if any(load.faults for load in loads):
                    break
                loads[0].store.exists("key")
            assert [bytes(view or b"") for view in views] == [value_of("leased", n) for n in range(10)]
        del views
    for load in loads:
        load.stop()
    assert [load.faults for load in loads] == [[]] * len(loads)
    for load in loads:
        load.check()
    assert [load.faults for load in loads] == [[]] * len(loads)
    assert sum(load.unknown for load in loads) <= 4  # of two loads by commit word, at the very moment of either
    process.terminate()
    assert process.wait(60) == 0
    assert not Path(servers.socket).exists()


def test_a_successor_that_is_killed_costs_nothing(servers: Servers) -> None:
    process = servers.start()
    store = servers.open("shm")
    store.put("key", b"value")
    for _ in range(3):
        successor = servers.spawn("--take-over")
        successor.send_signal(signal.SIGKILL)
        successor.wait()
        assert store.get("key") == b"value"
    assert process.poll() is None
    servers.start("--take-over")
    assert process.wait(60) == 0
    assert store.get("key") == b"value"


@pytest.mark.nightly
def test_of_two_successors_at_once_one_serves(servers: Servers) -> None:
    process = servers.start()
    store = servers.open("tcp")
    store.put("key", b"value")
    both = [servers.spawn("--take-over") for _ in range(2)]
    assert process.wait(60) == 0
    # The other one found that somebody takes over already, or took over from the first.
    assert store.get("key") == b"value"
    ended = [one for one in both if one.poll() is not None]
    assert len(ended) < 2


@pytest.mark.nightly
def test_signals_during_a_take_over_leave_one_server_or_none(servers: Servers) -> None:
    process = servers.start()
    store = servers.open("tcp")
    store.put("key", b"value")
    successor = servers.spawn("--take-over")
    while process.poll() is None:
        process.send_signal(signal.SIGHUP)
        store.exists("key")
    assert successor.stdout is not None
    assert successor.stdout.readline()
    assert store.get("key") == b"value"


def test_a_server_with_a_disk_hands_it_over_closed(servers: Servers, tmp_path: Path) -> None:
    servers.flags = ("--disk", f"{tmp_path / 'disk'}:64MiB")
    process = servers.start()
    store = servers.open("shm")
    store.put_many({f"{n}": value_of("disk", n) for n in range(50)})
    store.flush(["1"])
    servers.start("--take-over")
    assert process.wait(60) == 0
    assert [bytes(value or b"") for value in store.get_many([f"{n}" for n in range(50)])] == [
        value_of("disk", n) for n in range(50)
    ]
    assert store.delete(["1"]) == 1
    assert store.get_many(["1"]) == [None]
    store.put("new", b"new")
    assert store.flush(["new"]) == 1


def test_a_pool_of_several_arenas_goes_over(servers: Servers) -> None:
    servers.flags = ("--auto-increase", "--max-pool-size", f"{2 * POOL_BYTES}B")
    process = servers.start()
    store = servers.open("shm")
    keys: list[str] = []

    def put_more() -> None:
        more = [f"{len(keys) + n}" for n in range(100)]
        store.put_many({key: value_of(key, 0) for key in more})
        keys.extend(more)

    while store.stats().store.capacity_bytes < 2 * POOL_BYTES:  # it grows beside the puts, which evict until it has
        put_more()
    for _ in range(2 * POOL_BYTES // BLOCK_BYTES // 100):
        put_more()
    there = there_of(store, keys)
    assert there > POOL_BYTES // BLOCK_BYTES
    arenas = store.stats().store.arenas
    assert arenas > 1
    servers.start("--take-over")
    assert process.wait(60) == 0
    assert store.stats().store.arenas == arenas
    assert there_of(store, keys) == there


@pytest.mark.parametrize("told", [False, True])
async def test_a_server_that_dies_in_the_middle(servers: Servers, told: bool) -> None:
    """Before it has told what the pool has, nobody may use that memory; afterwards the
    other process has all of it."""
    process = await trio.to_thread.run_sync(servers.start)
    with blocking.open_store(f"unix://{servers.socket}") as store:
        store.put("key", b"value")
    config = ServerConfig(
        service_port=servers.port,
        unix_socket=servers.socket,
        take_over=True,
        prealloc_bytes=POOL_BYTES,
        minimal_allocate_bytes=1024,
    )
    with ExitStack() as resources:
        taking = await begin_taking(config, "", resources)
        assert taking is not None
        pool = Pool(create_allocator("bitmap", 1024))
        resources.callback(pool.close)
        await taking.add_arenas(pool, create_arena, trio.to_thread.run_sync, size_bytes=POOL_BYTES)
        core = StoreCore(pool, clock=trio.current_time)
        if told:
            await taking.take(OneStore(core), resources)
        process.kill()
        if told:
            await taking.end()
            assert core.exists(["key"]) == b"\1"
        else:
            with pytest.raises(PoolLost, match="died"):
                await taking.take(OneStore(core), resources)
