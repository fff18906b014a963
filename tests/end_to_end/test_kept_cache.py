"""A service is restarted under load: the service manager keeps its memory meanwhile, so
clients go on without an error, no block is lost, and none is wrong. After any other end
the cache starts empty.
"""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from infinistore.blocking import BlockingStore
from tests.end_to_end.kept_descriptors import Manager
from tests.end_to_end.test_take_over import BLOCK_BYTES, POOL_BYTES, Load, open_at, there_of, value_of
from tests.ports import own_ports

KEYS = [f"{n}" for n in range(50)]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (port,) = own_ports(1)
    flags = ["--host", "127.0.0.1", "--service-port", str(port), "--manage-port", "off"]
    flags += ["--unix-socket", str(tmp_path / "socket"), "--prealloc-size", f"{POOL_BYTES}B"]
    return [*flags, "--minimal-allocate-size", "1", "--log-level", "warning"]


def open_store_of(flags: list[str], transport: str) -> AbstractContextManager[BlockingStore]:
    return open_at(transport, int(flags[3]), flags[7])


def fill(flags: list[str]) -> None:
    with open_store_of(flags, "unix") as store:
        store.put_many({key: value_of(key, 0) for key in KEYS})


def there(flags: list[str]) -> int:
    """How many of the blocks are there; none is wrong."""
    with open_store_of(flags, "shm") as store:
        return there_of(store, KEYS)


@pytest.mark.nightly
@pytest.mark.parametrize("activated", [False, True])
def test_a_service_is_restarted_twice_under_load(manager: Manager, flags: list[str], activated: bool) -> None:
    with ExitStack() as stack:
        if activated:
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(flags[7])
            unix.listen(100)
            manager.activated = [stack.enter_context(socket.create_server(("127.0.0.1", int(flags[3])))), unix]
        restart_under_load(manager, flags, lambda transport: stack.enter_context(open_store_of(flags, transport)))


def restart_under_load(manager: Manager, flags: list[str], opened: Callable[[str], BlockingStore]) -> None:
    process = manager.start(*flags)
    loads = [Load(f"{transport}{n}", opened(transport)) for n in (1, 2) for transport in ("tcp", "unix", "shm")]
    holder = opened("shm")
    holder.put_many({f"leased {n}": value_of("leased", n) for n in range(10)})
    for load in loads:
        load.start()
    try:
        with holder.lease([f"leased {n}" for n in range(10)]) as views:
            for _ in range(2):
                rounds = [load.rounds for load in loads]
                process.terminate()
                assert process.wait(60) == 0
                process = manager.start(*flags)
                while any(load.rounds < before + 3 for load, before in zip(loads, rounds, strict=True)):
                    if any(load.faults for load in loads):
                        break
                    loads[0].store.stats()
                assert holder.stats().store.quarantined_bytes >= 10 * BLOCK_BYTES
                assert [bytes(view or b"") for view in views] == [value_of("leased", n) for n in range(10)]
            del views
    finally:
        for load in loads:
            load.stop()
    assert [load.faults for load in loads] == [[]] * len(loads)
    for load in loads:
        load.check()
    assert [load.faults for load in loads] == [[]] * len(loads)
    assert sum(load.unknown for load in loads) <= 4  # of two loads by commit word, at the very moment of either
    assert not manager.kept
    assert "WARN" not in manager.log


def test_after_a_crash_the_cache_starts_empty(manager: Manager, flags: list[str]) -> None:
    """Also if the service manager has not heard that it is to forget what it kept."""
    manager.forgets = False
    manager.start(*flags)
    fill(flags)
    manager.processes[-1].terminate()
    assert manager.processes[-1].wait(60) == 0
    process = manager.start(*flags)
    assert there(flags) == len(KEYS)
    assert manager.kept
    process.send_signal(signal.SIGKILL)
    process.wait()
    manager.start(*flags)
    assert there(flags) == 0
    assert "the cache starts empty" in manager.log
    assert "the last run of the service did not end in order" in manager.log


def test_a_start_that_fails_loses_nothing_and_the_next_may_listen_elsewhere(manager: Manager, flags: list[str]) -> None:
    manager.start(*flags)
    fill(flags)
    manager.processes[-1].terminate()
    assert manager.processes[-1].wait(60) == 0
    assert manager.spawn(*flags, "--host", "nowhere.invalid", "--insecure").wait(60) != 0
    old, flags[3] = flags[3], str(own_ports(2)[1])
    manager.start(*flags)
    assert there(flags) == len(KEYS)
    with open_store_of(flags, "tcp") as store:
        assert store.exists(KEYS[0])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(old))):
        pass
    assert not manager.kept
