"""A server with shards takes the place of another one: with the caches of all shards,
or not at all.
"""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from infinistore.blocking import BlockingStore
from infinistore.server.shards.succession import place_of
from infinistore.server.take_over.memory import take_ownership
from tests.asking import until
from tests.end_to_end.test_take_over import Servers, there_of, value_of
from tests.limits import descendants

from .conftest import HOST

pytestmark = pytest.mark.process

SHARDS = 2
KEYS = [f"{n}" for n in range(60)]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, port=20_000, flags=("--shards", str(SHARDS)), host=HOST)
    try:
        yield made
    finally:
        made.close()


@attrs.frozen
class Filled:
    """Servers of which the first one runs, and a client that has put all keys."""

    servers: Servers
    store: BlockingStore

    def has_all(self) -> bool:
        return there_of(self.store, KEYS) == len(KEYS)

    def go_over(self) -> None:
        """Start another server, which takes the place of the last one."""
        before = next(one for one in reversed(self.servers.processes) if one.poll() is None)
        self.servers.start("--take-over")
        assert before.wait(60) == 0
        until(self.has_all)


@pytest.fixture
def filled(servers: Servers) -> Filled:
    servers.start()
    store = servers.open("shm")
    store.put_many({key: value_of(key, 0) for key in KEYS})
    return Filled(servers, store)


class Taker:
    """A process that takes over, as far as it likes."""

    def __init__(self, servers: Servers) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(place_of(Path(servers.socket))))
        self.descriptors: dict[str, int] = {}

    def ask(self, request: bytes = b'{"shards": 2}\n') -> dict[str, Any]:
        self.sock.sendall(request)
        line = b""
        numbers: list[int] = []
        while not line.endswith(b"\n"):
            data, more, _, _ = socket.recv_fds(self.sock, 1 << 16, 200)
            if not data:
                return {}
            line, numbers = line + data, numbers + more
        told: dict[str, Any] = json.loads(line)
        self.descriptors |= zip(told.get("names", ()), numbers, strict=True)
        return told

    def take_all(self) -> None:
        while self.ask()["left"]:
            pass

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def test_clients_find_the_blocks_of_all_shards_and_keep_what_they_have_leased(filled: Filled) -> None:
    """Twice; then nothing is left in the folder."""
    servers, others = filled.servers, [filled.servers.open(transport) for transport in ("tcp", "unix")]
    with filled.store.lease(KEYS) as views:
        for _ in range(2):
            filled.go_over()
            until(lambda: all(there_of(store, KEYS) == len(KEYS) for store in others))
            filled.store.put_many({f"new {n}": value_of("new", n) for n in range(40)})
        assert [bytes(view or b"") for view in views] == [value_of(key, 0) for key in KEYS]
        del views
    servers.processes[-1].terminate()
    assert servers.processes[-1].wait(60) == 0
    assert list(servers.folder.iterdir()) == []


def asks_for_another_number(taker: Taker) -> None:
    assert re.match(r"the server has 2 shards; .*--shards 2", taker.ask(b'{"shards": 3}\n')["refusal"])


def says_nothing_that_can_be_read(taker: Taker) -> None:
    assert taker.ask(b"[1]\n") == {}


def goes_at_once(taker: Taker) -> None:
    taker.sock.sendall(b'{"shards": 2}\n')


def goes_when_it_has_all(taker: Taker) -> None:
    taker.take_all()


def test_who_does_not_take_the_place_costs_nothing(filled: Filled) -> None:
    for does in (asks_for_another_number, says_nothing_that_can_be_read, goes_at_once, goes_when_it_has_all):
        taker = Taker(filled.servers)
        does(taker)
        taker.close()
        until(filled.has_all)
    filled.go_over()


def test_a_server_whose_cache_nobody_can_go_on_with_refuses_and_serves_on(servers: Servers) -> None:
    first = servers.start("--shm-writes", "off")
    taker = Taker(servers)
    assert "--shm-writes off" in taker.ask()["refusal"]
    taker.close()
    assert not servers.open("unix").exists("key")
    assert first.poll() is None


def test_only_one_of_two_has_the_place_whoever_is_late(servers: Servers) -> None:
    first = servers.start()
    late = Taker(servers)
    late.take_all()
    first.terminate()  # it waits no longer for the other one
    assert first.wait(60) == 0
    assert not take_ownership(late.descriptors["ownership"])
    late.close()

    second = servers.start()
    quick = Taker(servers)
    quick.take_all()
    assert take_ownership(quick.descriptors["ownership"])
    quick.close()
    assert second.wait(60) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--prealloc-size", "4MiB"],
        pytest.param(["--allocator", "jemalloc"], marks=pytest.mark.nightly),
        pytest.param(["--manage-host", "nowhere.invalid"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_server_that_cannot_start_leaves_the_other_its_place_and_its_cache(filled: Filled, flags: list[str]) -> None:
    successor = filled.servers.spawn("--take-over", *flags, stderr=subprocess.PIPE)
    _, said = successor.communicate(timeout=60)
    assert successor.returncode == 2
    assert re.search(rb"shard \d: --take-over: (its pool has 16 MiB|the allocator)|--manage-host", said), said
    until(filled.has_all)
    filled.go_over()


@pytest.mark.parametrize("has_shards", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_successor_that_is_killed_before_it_serves_costs_nothing(filled: Filled, has_shards: bool) -> None:
    (first,) = filled.servers.processes
    successor = filled.servers.spawn("--take-over")
    until(lambda: not has_shards or any(descendants(successor.pid)))
    successor.kill()
    successor.wait()
    until(lambda: first.poll() is not None or filled.has_all())
    if first.poll() is None:  # else it has served already
        filled.go_over()


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_one_process_and_several_do_not_take_over_from_each_other(servers: Servers, first: int, second: int) -> None:
    servers.start("--shards", str(first))
    successor = servers.spawn("--take-over", "--shards", str(second), stderr=subprocess.PIPE)
    _, said = successor.communicate(timeout=60)
    assert successor.returncode != 0
    assert re.search(rb"--take-over: the server (has several shards|on .* has one process)", said), said
    assert servers.processes[0].poll() is None


@pytest.mark.nightly
def test_where_no_server_is_the_cache_starts_empty(servers: Servers) -> None:
    servers.start("--take-over")
    assert there_of(servers.open("unix"), KEYS) == 0
