"""A forked child waits for no lock that a thread of its parent held: nobody would ever
release it there.

All locks are looked for, those of modules and those of stores, so that a new one is
tested with the others.
"""

import gc
import importlib
import math
import pkgutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

import infinistore
from infinistore import blocking
from infinistore.client.operations.embedded import EmbeddedOperations
from tests.bad_days.clients import Awaitable
from tests.bad_days.servers import ServerProcess
from tests.bad_days.test_fork import SMALL_POOL, in_child, refuse_everything

pytestmark = pytest.mark.process
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
HUNG_S = 90
OUR_MODULES = [
    module.name
    for module in pkgutil.walk_packages(infinistore.__path__, "infinistore.", onerror=lambda _: None)
    if not module.name.startswith(("infinistore.integrations", "infinistore.__main__"))
]


def module_locks() -> dict[str, Any]:
    """The locks that are global in our modules."""
    return {
        f"{name}.{attribute}": value
        for name in OUR_MODULES
        for attribute, value in vars(importlib.import_module(name)).items()
        if isinstance(value, LOCKS)
    }


def is_free(lock: Any) -> bool:
    if lock.acquire(blocking=False):
        lock.release()
        return True
    return False


@contextmanager
def held_by_another_thread(locks: list[Any]) -> Iterator[None]:
    """Hold locks, in a thread that no child has."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_no_lock_of_a_module_is_held_in_a_child() -> None:
    locks = module_locks()
    assert "infinistore.protocol.shared_tables._fence_lock" in locks

    def check() -> None:
        assert [name for name, lock in module_locks().items() if not is_free(lock)] == []

    with held_by_another_thread([*locks.values()]):
        in_child(check)


def locks_of(store: Any) -> list[Any]:
    """The locks that can be reached from a store, by what it is made of."""
    found: list[Any] = []
    seen: set[int] = set()
    left: list[Any] = [store]
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, ModuleType | type | FunctionType | threading.Thread):
            continue
        seen.add(id(thing))
        if isinstance(thing, LOCKS):
            found.append(thing)
        elif isinstance(thing, dict | list | tuple | set) or type(thing).__module__.startswith("infinistore"):
            left += gc.get_referents(thing)
    return found


def or_fail(check: Callable[[], None]) -> Callable[[], None]:
    """`check` for a child, that fails if it hangs."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"the child hung for {HUNG_S} s")

    def checked() -> None:
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(HUNG_S)
        check()
        signal.alarm(0)

    return checked


@pytest.mark.parametrize("place", ["tcp", "shm", "cluster", "embedded"])
def test_locks_of_a_store_that_are_held_at_the_fork_keep_no_child_waiting(
    place: str, server_process: ServerProcess
) -> None:
    cluster = f"infinistore+static://{server_process.url.partition('://')[2]}"
    url = {"tcp": server_process.url, "shm": f"shm://{server_process.unix_socket}", "cluster": cluster}.get(place)
    with blocking.open_store(url, **({} if url else SMALL_POOL)) as store:
        store.put("long", bytes(100_000))
        store.get("long")
        inherited: Any = store
        with store.lease(["long"]):  # so that one connection has pins
            locks = locks_of(store)
            assert locks

            def check() -> None:
                refuse_everything(Awaitable(store))  # type: ignore[arg-type]
                (inherited if url else inherited.embedded).close()

            with held_by_another_thread(locks):
                in_child(or_fail(check))
        assert store.get("long") == bytes(100_000)


def test_a_child_forked_within_a_call_leaves_it_though_another_thread_held_the_lock_of_the_core() -> None:
    with blocking.open_store(**SMALL_POOL) as store:
        inner: Any = store
        operations = EmbeddedOperations(inner.embedded, verify=True)
        with held_by_another_thread([inner.embedded.lock]):
            in_child(or_fail(operations.close))
        operations.close()


def test_a_child_leaves_the_rdma_device_of_a_cluster_to_its_parent(server_process: ServerProcess) -> None:
    url = f"infinistore+static://{server_process.url.partition('://')[2]}"
    with blocking.open_store(url) as store:
        inherited: Any = store
        done: list[str] = []
        device = SimpleNamespace(abandon=lambda: done.append("abandoned"), close=lambda: done.append("closed"))
        inherited.rdma.device = device

        def check() -> None:
            assert done == ["abandoned"]
            inherited.close()
            assert done == ["abandoned"]

        with held_by_another_thread(locks_of(inherited.rdma)):
            in_child(or_fail(check))
        assert inherited.rdma.device is device
        inherited.rdma.device = None


def test_a_child_is_refused_at_once_when_all_connections_were_in_use(server_process: ServerProcess) -> None:
    with blocking.open_store(server_process.url, deadline_s=600) as store:
        inherited: Any = store

        def check() -> None:
            refuse_everything(Awaitable(store))  # type: ignore[arg-type]

        with all_in_use(inherited):
            in_child(or_fail(check))


@contextmanager
def all_in_use(store: Any) -> Iterator[None]:
    """Take every turn of a store, as that many calls would."""
    with ExitStack() as stack:
        for turns in (store.payload_turns, store.lookup_turns):
            for _ in range(turns.free):
                turn = stack.enter_context(_locked())
                turns.begin(turn, SimpleNamespace(deadline=math.inf))
        yield


@contextmanager
def _locked() -> Iterator[threading.Lock]:
    lock = threading.Lock()
    with lock:
        yield lock
