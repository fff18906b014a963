"""Copying with several threads: the same bytes and hashes as by one, and nobody at work
when it is over.
"""

import os
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from infinistore.client.environment import Environment
from infinistore.client.memory import copying as copy_threads
from infinistore.client.memory.copying import LEAST_BATCH_BYTES, CopyThreads, copy_blocks
from infinistore.client.movers.shm.mapped_pool import Machine
from infinistore.errors import ChecksumMismatch
from infinistore.protocol.effects import Exchange, Pause
from tests.bad_days.test_fork import in_child
from tests.clients.conftest import Remotes
from tests.clients.stores import damage
from tests.server.running import MIB

_T = TypeVar("_T")
PATIENCE_S = 60  # for what must happen; reached only by a test that fails
SHARED = ("shm-threads", "shm-trio", "shm-asyncio")


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it have helpers on a machine with one core, too."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def run(exchange: Exchange[_T]) -> _T:
    """Carry out what asks for nothing but pauses."""
    try:
        while True:
            assert isinstance(exchange.send(None), Pause)
    except StopIteration as stop:
        result: _T = stop.value
        return result


def views_of(memory: bytes | bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Cut memory into blocks of these sizes."""
    whole, views, start = memoryview(memory), [], 0
    for size in sizes:
        views.append(whole[start : start + size])
        start += size
    return views


def copy(
    copier: CopyThreads, source: bytes, target: bytearray, sizes: Sequence[int], *, hash_targets: bool = False
) -> Exchange[list[int]]:
    sources, targets = views_of(source, sizes), views_of(target, sizes)
    return copier.copy(iter(sources), iter(targets), sizes, sum(sizes), hash_targets=hash_targets)


def check_copy(copier: CopyThreads, data: bytes, sizes: Sequence[int], *, hash_targets: bool = False) -> None:
    """Copy blocks, which arrive, and nobody keeps their memory."""
    target = bytearray(len(data))
    hashes = run(copy(copier, data, target, sizes, hash_targets=hash_targets))
    assert len(hashes) == len(sizes) * hash_targets
    assert target == data
    target.append(0)  # which no view of it allows


def catch_up(copier: CopyThreads) -> None:
    """Wait until whatever was asked of the threads has been looked at by one of
    them.
    """
    all_here = threading.Barrier(len(copier.helpers) + 1)

    def come_here() -> None:
        all_here.wait(PATIENCE_S)

    for _ in copier.helpers:
        copier.work.put(come_here)
    come_here()


@contextmanager
def threads(count: int, least_batch_bytes: int = 1) -> Iterator[CopyThreads]:
    """So many threads that share whatever has two blocks."""
    copier = CopyThreads(count, least_batch_bytes=least_batch_bytes, least_block_bytes=1)
    try:
        check_copy(copier, bytes(1 + least_batch_bytes), [1, least_batch_bytes])  # which makes the threads
        catch_up(copier)  # one has loaded numpy
        yield copier
    finally:
        copier.close()


class FakeNumpy:
    """Copies as numpy does. The copies of the caller and of its helper wait for each
    other: a batch of two is shared.

    The helper's copy ends when the caller waits for it; `CallersLock` says so.
    """

    uint8 = None

    def __init__(self) -> None:
        self.caller = threading.current_thread()
        self.helping = threading.Event()
        self.let_go = threading.Event()
        self.at_work = 0
        self.copies = 0
        self.caller_fails: BaseException | None = None
        self.helper_fails: BaseException | None = None

    def frombuffer(self, view: memoryview, _: None) -> memoryview:
        return view

    def copyto(self, target: memoryview, source: memoryview) -> None:
        self.at_work += 1
        self.copies += 1
        try:
            if threading.current_thread() is self.caller:
                assert self.helping.wait(PATIENCE_S)
                error = self.caller_fails
            else:
                self.helping.set()
                assert self.let_go.wait(PATIENCE_S)
                error = self.helper_fails
            if error is not None:
                raise error
            target[:] = source
        finally:
            self.at_work -= 1


class CallersLock:
    """A lock that tells `numpy` when the caller waits for it, and before that raises an
    error a few times.
    """

    numpy: FakeNumpy
    interruptions = 0

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if threading.current_thread() is self.numpy.caller:
            if CallersLock.interruptions:
                CallersLock.interruptions -= 1
                raise KeyboardInterrupt
            self.numpy.let_go.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> FakeNumpy:
    """What the copier takes for numpy."""
    fake = FakeNumpy()
    monkeypatch.setattr(CallersLock, "numpy", fake, raising=False)
    monkeypatch.setattr(CallersLock, "interruptions", 0)
    return fake


@pytest.fixture(name="copier")
def copier_with_one_helper(numpy: FakeNumpy, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyThreads]:
    """One helper, which copies with the fake."""
    with threads(2) as copier:
        copier.numpy = numpy
        monkeypatch.setattr(copy_threads, "threading", SimpleNamespace(Lock=CallersLock))
        yield copier
        numpy.let_go.set()


# The same as by one thread


@given(
    st.lists(st.integers(1, 3000), max_size=24),
    st.integers(1, 4),
    st.integers(1, 20_000),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_batch_arrives_with_the_hashes_that_one_thread_makes(
    sizes: list[int], count: int, least: int, hash_targets: bool, generator: random.Random
) -> None:
    data = generator.randbytes(sum(sizes))
    alone, together = bytearray(len(data)), bytearray(len(data))
    expected = run(copy_blocks(views_of(data, sizes), views_of(alone, sizes), hash_targets=hash_targets))
    with threads(count, least) as copier:
        assert run(copy(copier, data, together, sizes, hash_targets=hash_targets)) == expected
    assert together == alone == data


def test_callers_share_the_helpers() -> None:
    sizes = [1000, 1, 77, 5000] * 5

    def call(seed: int) -> None:
        data = random.Random(seed).randbytes(sum(sizes))
        expected = [xxh3_64_intdigest(view) for view in views_of(data, sizes)]
        for _ in range(20):
            target = bytearray(len(data))
            assert run(copy(copier, data, target, sizes, hash_targets=True)) == expected
            assert target == data

    with threads(3, 4000) as copier, ThreadPoolExecutor(4) as callers:
        list(callers.map(call, range(4)))


# Who takes part


def test_a_helper_copies_while_the_caller_does(copier: CopyThreads, numpy: FakeNumpy) -> None:
    check_copy(copier, b"abcdefgh", [4, 4], hash_targets=True)  # the caller's ends when the helper's has begun
    assert (numpy.copies, numpy.at_work) == (2, 0)


def test_blocks_that_are_each_longer_than_a_part_are_shared_too(numpy: FakeNumpy) -> None:
    with threads(2, least_batch_bytes=10) as copier:
        copier.numpy = numpy
        numpy.let_go.set()
        exchange = copy(copier, bytes(400), bytearray(400), [100] * 4)
        assert isinstance(exchange.send(None), Pause)
        assert numpy.copies == 2
        assert run(exchange) == []


@pytest.mark.parametrize(
    ("sizes", "threads"),
    [
        ([LEAST_BATCH_BYTES], 2),
        ([LEAST_BATCH_BYTES // 2, LEAST_BATCH_BYTES // 2 - 1], 2),
        ([LEAST_BATCH_BYTES // 64] * 64, 2),
        ([LEAST_BATCH_BYTES // 2] * 2, 1),
    ],
    ids=["one block", "a short batch", "short blocks", "one thread"],
)
def test_what_is_not_worth_it_makes_no_thread(sizes: list[int], threads: int) -> None:
    copier = CopyThreads(threads)
    check_copy(copier, random.Random(1).randbytes(sum(sizes)), sizes)
    assert not copier.helpers


def test_there_are_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    with threads(16) as copier:
        assert len(copier.helpers) == 1


def no_numpy(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}")


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "refused"),
    [(copy_threads, "importlib", SimpleNamespace(import_module=no_numpy)), (threading.Thread, "start", no_thread)],
    ids=["numpy", "threads"],
)
def test_without_numpy_or_threads_the_caller_copies_alone(
    owner: object, name: str, refused: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, refused)
    copier = CopyThreads(2, least_batch_bytes=1, least_block_bytes=1)
    for _ in range(2):
        check_copy(copier, b"abcd", [1, 3], hash_targets=True)
        for thread in copier.helpers:
            thread.join()
    copier.close()


# Nobody is at work when it is over


@pytest.mark.parametrize(("who", "copies"), [("caller", 2), ("helper", 3)])
def test_an_error_of_either_is_raised_when_nobody_is_at_work(
    copier: CopyThreads, numpy: FakeNumpy, who: str, copies: int
) -> None:
    error = MemoryError(f"in the {who}")
    setattr(numpy, f"{who}_fails", error)
    with pytest.raises(MemoryError) as raised:
        run(copy(copier, bytes(12), bytearray(12), [4, 4, 4]))
    assert raised.value is error
    assert "copyto" in [entry.name for entry in raised.traceback]
    assert (numpy.copies, numpy.at_work) == (copies, 0)
    setattr(numpy, f"{who}_fails", None)  # and the threads go on
    check_copy(copier, b"abcdefgh", [4, 4])


@pytest.mark.parametrize("interruptions", [1, 2, 5])
def test_ctrl_c_while_the_caller_waits_is_raised_when_nobody_is_at_work(
    copier: CopyThreads, numpy: FakeNumpy, interruptions: int
) -> None:
    CallersLock.interruptions = interruptions
    with pytest.raises(KeyboardInterrupt):
        run(copy(copier, bytes(8), bytearray(8), [4, 4]))
    assert CallersLock.interruptions == 0
    assert (numpy.copies, numpy.at_work) == (2, 0)


def test_ctrl_c_at_any_step_waits_for_the_helper(copier: CopyThreads, numpy: FakeNumpy) -> None:
    work = copier.work

    class EagerQueue(queue.SimpleQueue[Any]):
        """A share that is put there is begun at once: the helper is at work from then
        on.
        """

        def put(self, item: Any, *_: Any) -> None:
            work.put(item)
            if isinstance(item, partial):
                assert numpy.helping.wait(PATIENCE_S)

        def get(self, *_: Any) -> Any:
            return work.get()

    copier.work = EagerQueue()

    def call() -> None:
        run(copy(copier, bytes(12), bytearray(12), [4, 4, 4], hash_targets=True))

    steps = 0
    for steps in range(1000):
        numpy.helping.clear()
        numpy.let_go.clear()
        interrupted = is_interrupted_at(steps, call)
        assert numpy.at_work == 0, f"a thread was at work when Ctrl-C had come at step {steps}"
        copies = numpy.copies
        catch_up(copier)
        assert numpy.copies == copies
        if not interrupted:
            break
    assert 10 < steps < 999


def is_interrupted_at(step: int, call: Callable[[], None]) -> bool:
    """Raise a KeyboardInterrupt in a call, at a step of the copier's own; False if it
    has fewer steps.

    A step is where the interpreter looks for signals: a Python function begins, or a C
    function has returned.
    """
    left = step

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename == copy_threads.__file__:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    try:
        sys.setprofile(profile)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


FAULTS: dict[str, Callable[[list[memoryview], list[memoryview]], object]] = {
    "released source": lambda sources, targets: sources[2].release(),
    "read-only target": lambda sources, targets: targets.insert(2, targets.pop(2).toreadonly()),
    "other length": lambda sources, targets: sources.insert(2, sources.pop(2)[:1]),
    "other count": lambda sources, targets: sources.pop(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_cannot_be_copied_is_an_error_and_nobody_keeps_it(fault: str) -> None:
    memory = bytearray(16)
    sources, targets = views_of(bytes(16), [4] * 4), views_of(memory, [4] * 4)
    FAULTS[fault](sources, targets)
    with threads(2) as copier:
        with pytest.raises(ValueError) as raised:  # noqa: PT011  # numpy's own words
            run(copier.copy(sources, targets, [4] * 4, 16, hash_targets=True))
        catch_up(copier)
        del raised, targets
        memory.append(0)  # which no view of it allows


def test_who_gives_up_at_a_pause_leaves_nobody_at_work() -> None:
    target = bytearray(80)
    with threads(2, least_batch_bytes=20) as copier:
        exchange = copy(copier, b"x" * 80, target, [10] * 8)
        exchange.send(None)
        exchange.close()
        target.append(0)
        catch_up(copier)
        assert target == b"x" * 20 + bytes(61)


def test_a_helper_that_comes_late_touches_nothing(numpy: FakeNumpy) -> None:
    with threads(2) as copier:
        helper_queue, late = copier.work, queue.SimpleQueue[Any]()
        copier.work = late
        target = bytearray(6)
        run(copy(copier, b"abcdef", target, [3, 3]))
        assert target == b"abcdef"
        target.append(0)
        target[:3] = b"new"
        copier.work = helper_queue
        helper_queue.put(late.get_nowait())
        catch_up(copier)
        assert target == b"newdef\0"


# The end


def test_close_ends_the_threads_and_the_caller_copies_alone() -> None:
    with threads(4) as copier:
        helpers = list(copier.helpers)
        assert len(helpers) == 3
        for _ in range(2):
            copier.close()
            assert not any(thread.is_alive() for thread in helpers)
            check_copy(copier, b"abcd", [1, 3])
        assert not copier.helpers


def test_close_during_a_copy_lets_it_end(copier: CopyThreads, numpy: FakeNumpy) -> None:
    (helper,) = copier.helpers
    closer = threading.Thread(target=copier.close)

    class Closing(FakeNumpy):
        def copyto(self, target: memoryview, source: memoryview) -> None:
            if threading.current_thread() is self.caller:
                closer.start()
            super().copyto(target, source)

    copier.numpy = CallersLock.numpy = Closing()
    check_copy(copier, b"abcdefgh", [4, 4])
    closer.join()
    assert not helper.is_alive()


@pytest.mark.process
def test_a_child_that_is_forked_during_a_copy_copies_alone_and_the_parent_goes_on(
    copier: CopyThreads, numpy: FakeNumpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        monkeypatch.setattr(copy_threads, "threading", threading)
        copier.let_go()
        check_copy(copier, b"abcdef", [3, 3])
        copier.close()

    class Forking(FakeNumpy):
        def copyto(self, target: memoryview, source: memoryview) -> None:
            if threading.current_thread() is self.caller:
                assert self.helping.wait(PATIENCE_S)
                in_child(check)
            super().copyto(target, source)

    copier.numpy = CallersLock.numpy = Forking()
    check_copy(copier, b"abcdef", [3, 3])
    catch_up(copier)


# In a store

COUNT = 10  # of 1 MiB, which is a long batch


class Copiers:
    """Those that stores with this environment have made, and how often they shared a
    batch.
    """

    def __init__(self) -> None:
        self.made: list[CopyThreads] = []
        self.shared = 0
        copiers = self

        class Watched(CopyThreads):
            def __init__(self, threads: int) -> None:
                super().__init__(threads)
                copiers.made.append(self)

            def copy_together(self, *arguments: Any) -> Exchange[list[int]]:
                copiers.shared += 1
                return super().copy_together(*arguments)

        self.environment = Environment(machine=Machine(make_copier=Watched))


@pytest.fixture
def copiers() -> Copiers:
    return Copiers()


def long_batch(seed: int) -> dict[str, bytes]:
    """Blocks that differ, and are not all of the same length."""
    return {f"{seed}/{i}": random.Random(seed + i).randbytes(MIB + i) for i in range(COUNT)}


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("remotes", SHARED, indirect=True)
def test_a_long_batch_goes_there_and_back(remotes: Remotes, copiers: Copiers, verify: str) -> None:
    store = remotes.open({"verify": verify, "environment": copiers.environment}, prealloc_bytes=32 * MIB).store
    first, batch = long_batch(1), long_batch(100)
    store.put_many(first)
    (copier,) = copiers.made
    catch_up(copier)
    store.purge()
    copiers.shared = 0
    store.put_many(batch)
    assert copiers.shared == 1
    found = store.get_many(batch)
    buffers = {key: bytearray(MIB + COUNT) for key in batch}
    lengths = store.get_many_into(buffers)
    assert copiers.shared == 3
    assert [bytes(value or b"") for value in found] == [*batch.values()]
    assert lengths == [*map(len, batch.values())]
    assert [bytes(buffer[: len(batch[key])]) for key, buffer in buffers.items()] == [*batch.values()]
    for buffer in (*found, *buffers.values()):
        assert buffer is not None
        buffer.append(0)


@pytest.mark.parametrize("remotes", SHARED, indirect=True)
def test_a_damaged_block_of_a_long_batch_is_found(remotes: Remotes, copiers: Copiers) -> None:
    opened = remotes.open({"environment": copiers.environment}, prealloc_bytes=16 * MIB)
    batch = long_batch(1)
    opened.store.put_many(batch)
    catch_up(copiers.made[0])
    copiers.shared = 0
    opened.look(lambda: damage(opened.core, "1/7", byte=-1))
    with pytest.raises(ChecksumMismatch, match="1/7"):
        opened.store.get_many(batch)
    assert copiers.shared == 1
    assert opened.store.get_many(["1/6", "1/7"]) == [batch["1/6"], None]


@pytest.mark.parametrize("remotes", SHARED[:1], indirect=True)
def test_a_store_with_one_copy_thread_makes_no_other(remotes: Remotes, copiers: Copiers) -> None:
    store = remotes.open({"copy_threads": 1, "environment": copiers.environment}, prealloc_bytes=16 * MIB).store
    batch = long_batch(1)
    for _ in range(2):
        store.put_many(batch)
        assert [bytes(value or b"") for value in store.get_many(batch)] == [*batch.values()]
    assert not copiers.made[0].helpers
