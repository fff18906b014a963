"""A service with shards is started again: each shard goes on with what the service
manager has kept for it, and with nothing else.
"""

import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.config import ServerConfig
from infinistore.server.shards.shard import LONGEST_BYTES, MOST_KEPT, Start
from infinistore.service_manager import ServiceManager
from tests.asking import until
from tests.end_to_end.kept_descriptors import Manager
from tests.end_to_end.test_take_over import POOL_BYTES, there_of, value_of
from tests.ports import own_ports

from .conftest import HOST, RunningShards

pytestmark = pytest.mark.process

KEYS = [f"{n}" for n in range(60)]
PARTS = {f"shard-{shard}-of-2-{name}" for shard in (0, 1) for name in ("arena-0", "lifeline", "state")}


class Service:
    """A service of a manager, with shards."""

    def __init__(self, manager: Manager, folder: Path) -> None:
        self.manager = manager
        self.path = str(folder / "socket")
        (self.port,) = own_ports(1)
        self.flags = ["--host", HOST, "--service-port", "0", "--manage-port", str(self.port), "--log-level", "warning"]
        self.flags += ["--unix-socket", self.path, "--prealloc-size", f"{POOL_BYTES}B", "--minimal-allocate-size", "1"]

    def start(self, shards: int) -> RunningShards:
        process = self.manager.start(*self.flags, "--shards", str(shards))
        return RunningShards(process, 0, f"http://127.0.0.1:{self.port}")

    def stop(self) -> None:
        process = self.manager.processes[-1]
        process.terminate()
        assert process.wait(60) == 0

    def open(self, transport: str = "shm") -> AbstractContextManager[BlockingStore]:
        return blocking.open_store(f"{transport}://{self.path}", deadline_s=60)

    def fill(self) -> None:
        with self.open() as store:
            store.put_many({key: value_of(key, 0) for key in KEYS})

    def there(self) -> int:
        """How many of the blocks are there; none is wrong."""
        with self.open() as store:
            return there_of(store, KEYS)

    def kept(self) -> set[str]:
        """The names of what the manager has, but for connections."""
        return {name.removeprefix("infinistore-") for name in self.manager.kept if "-stream-" not in name}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    manager = Manager(tmp_path)
    try:
        yield Service(manager, tmp_path)
    finally:
        manager.close()


def but_sockets(names: set[str]) -> set[str]:
    return {name for name in names if "-socket-" not in name}


def test_clients_find_the_blocks_of_all_shards_in_the_next_run_and_in_the_one_after(service: Service) -> None:
    """Also if a start fails before that."""
    service.start(2)
    service.fill()
    with service.open("unix") as before:
        for wrong in (["--host", "nowhere.invalid", "--insecure"], []):
            service.stop()
            if wrong:
                assert service.manager.spawn(*service.flags, "--shards", "2", *wrong).wait(60) != 0
            assert but_sockets(service.kept()) == PARTS
            service.start(2)
            assert service.there() == len(KEYS)
            until(lambda: there_of(before, KEYS) == len(KEYS))  # it has found both again
            assert not service.kept()
    assert "WARN" not in service.manager.log


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_shards_starts_empty_and_has_nothing_kept(service: Service, before: int, after: int) -> None:
    service.start(before)
    service.fill()
    service.stop()
    assert service.kept()
    service.start(after)
    assert service.there() == 0
    assert not but_sockets(service.kept())
    assert "another number of shards" in service.manager.log


def test_a_shard_that_ends_alone_keeps_nothing_for_its_next_process_or_for_the_next_run(service: Service) -> None:
    """Also if the service manager does not forget what it kept for the run before."""
    service.start(2)
    service.fill()
    service.stop()
    service.manager.forgets = False
    running = service.start(2)
    shard = running.shards()[1]
    os.kill(shard["pid"], signal.SIGTERM)
    running.wait_for_restart(1, 1)
    left = service.there()
    assert 0 < left < len(KEYS)
    running.process.send_signal(signal.SIGKILL)  # the manager still has all of the first run
    running.process.wait()
    service.start(2)
    assert service.there() == 0


def test_the_names_of_what_is_kept_fit_one_message() -> None:
    names = {f"infinistore-shard-100-of-128-stream-{number}": number for number in range(MOST_KEPT)}
    manager = ServiceManager(kept=names).of_part("shard-100-of-128", "/" + "a" * 100)
    assert len(manager.kept) == MOST_KEPT
    start = Start(100, ServerConfig(), None, None, 1.0, manager)
    assert len(pickle.dumps(start)) < LONGEST_BYTES
