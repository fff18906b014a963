"""A fork between any two bytecodes of a blocking call: the child is refused, and opens
a store of its own; the parent's call ends as if nothing had been.

The child is forked by the thread that makes the call, as a handler of a signal might,
or by another one while the call stands there, with whatever locks it has: by default at
a moment that is the same each time, by another thread where a lock has just been taken;
EVERY_BYTECODE=1 tries all. `test_fork_locks.py` holds each lock there is.
"""

import dis
import faulthandler
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, TypeAlias

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.client.api.results import PrefixMatch
from infinistore.errors import StoreUnavailable
from tests.bad_days.clients import Awaitable
from tests.bad_days.servers import ServerProcess, running_server_process
from tests.bad_days.test_fork import SMALL_POOL, forking, refuse_everything

EVERY = os.environ.get("EVERY_BYTECODE") == "1"
AT_ONCE_S = 90
"""What a child may take for everything, where many things run; a deadline is longer."""
OLD = {"a": bytes(range(250)) * 400, "b": b"b" * 70_000, "short": b"x"}


pytestmark = pytest.mark.process
Descriptors: TypeAlias = set[tuple[str, str]]
"""Numbers, and what they stand for."""


class _Unwind(BaseException):
    """Raised in a child in the middle of the call that its parent was in."""


class Moment:
    """Calls `act`, with tracing off, when this thread has executed so many bytecodes
    inside `with`; never, if `after` is negative.

    `places` has each bytecode that was executed then, and whether a lock, say, has just
    been taken by `with` before it.
    """

    def __init__(self, after: int, act: Callable[[], None]) -> None:
        self._after = after
        self._act = act
        self._executed = 0
        self._entering = False
        self.places: list[tuple[CodeType, int, bool]] = []

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode":
            return self._step
        self._executed += 1
        if self._after < 0:
            code, at = frame.f_code, frame.f_lasti
            self.places.append((code, at, self._entering))
            self._entering = dis.opname[code.co_code[at]] == "BEFORE_WITH"
        elif self._executed == self._after:
            sys.settrace(None)
            self._act()
        return self._step


class Children:
    """Children that are forked in the middle of a call, and what they have found."""

    def __init__(self, check: Callable[[Descriptors], None], *, in_another_thread: bool) -> None:
        self._check = check
        self._in_another_thread = in_another_thread
        self._writer: int | None = None  # in a child
        self.report = ""
        self.forked = 0
        self.inherited: set[str] = set()
        """What the last child had at its start, besides what others make there: libuv
        makes its pipes anew.
        """

    def call(self, call: Callable[[], object], after: int) -> object:
        """Make a call, with a child that is forked after so many bytecodes."""
        try:
            with Moment(after, self._fork_in_another_thread if self._in_another_thread else self._fork):
                return call()
        except BaseException as error:
            if self._writer is None:
                raise
            # What is raised in a finalizer is lost, and the child goes on with the
            # call.
            if not isinstance(error, _Unwind | StoreUnavailable):
                self._fail()
        finally:
            if self._writer is not None:
                self._end_child()
        return None

    def _fork_in_another_thread(self) -> None:
        thread = threading.Thread(target=self._fork)
        thread.start()
        thread.join()

    def _fork(self) -> None:
        reader, writer = os.pipe()
        self.inherited = {target for _, target in descriptors()}
        with forking():
            child = os.fork()
        if child == 0:
            os.close(reader)
            self._begin_child(writer)
        os.close(writer)
        with open(reader, "rb") as report:
            self.report = report.read().decode()
        status = os.waitpid(child, 0)[1]
        if status and not self.report:
            self.report = f"the child ended with {os.waitstatus_to_exitcode(status)}"
        self.forked += 1

    def _begin_child(self, writer: int) -> None:
        self._writer = writer
        faulthandler.dump_traceback_later(AT_ONCE_S, exit=True, file=writer)
        self._check_once()
        if self._in_another_thread:
            os._exit(0)
        raise _Unwind

    def _end_child(self) -> None:
        self._check_once()
        os._exit(0)

    def _check_once(self) -> None:
        try:
            self._check({(str(self._writer), os.readlink(f"/proc/self/fd/{self._writer}"))})
        except BaseException:  # noqa: BLE001  # the child must not go on as a second pytest
            self._fail()

    def _fail(self) -> None:
        assert self._writer is not None
        os.write(self._writer, traceback.format_exc().encode()[-4000:])
        os._exit(1)


def moments(call: Callable[[], object], name: str, tried: set[tuple[CodeType, int]] | None) -> list[int]:
    """After how many bytecodes to fork: where a lock is taken that no other call has
    tried, or anywhere.
    """
    moment = Moment(-1, lambda: None)
    for _ in range(2):
        if not moment.places:  # Python 3.12 tells of no bytecodes the first time that a process asks
            with moment:
                call()
    chosen = []
    for number, (code, at, locked) in enumerate(moment.places, 1):
        if EVERY:
            chosen.append(number)
        elif locked and tried is not None and (code, at) not in tried:
            tried.add((code, at))
            return [number]
    return chosen or [random.Random(name).randint(1, len(moment.places))]


def descriptors() -> Descriptors:
    """What this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def get_many_into(store: BlockingStore) -> object:
    buffers = [bytearray(100_000), bytearray(10), bytearray(70_000)]
    lengths = store.get_many_into(list(zip(["a", "missing", "b"], buffers, strict=True)))
    return lengths, [bytes(buffer) for buffer in buffers]


def lease(store: BlockingStore) -> object:
    with store.lease(["a", "missing", "b"]) as views:
        return [None if view is None else bytes(view) for view in views]


def reserve(store: BlockingStore) -> object:
    with store.reserve({"new": 100_000}) as views:
        views[0][:] = OLD["a"]
    return store.get("new")


def put(store: BlockingStore) -> object:
    store.put("new", OLD["b"])
    return store.get("new")


def delete(store: BlockingStore) -> object:
    store.put("gone", b"x")
    return store.delete(["gone", "missing"])


def asking(call: Callable[[BlockingStore], object]) -> Callable[[BlockingStore], object]:
    """A call by a store that has forgotten where blocks lie, so that it asks."""

    def called(store: BlockingStore) -> object:
        calls = getattr(store, "calls", None)
        if calls is not None and calls.mapped_pool is not None:
            calls.mapped_pool.known.forget_all()
        return call(store)

    return called


def connect(store: BlockingStore) -> object:
    if hasattr(store, "calls"):
        store.calls.pool.close_idle()
    return store.exists("a")


def open_another(store: Any) -> object:
    url, options = (str(store.calls.address), {}) if hasattr(store, "calls") else (None, SMALL_POOL)
    with blocking.open_store(url, **options) as another:
        return another.exists("missing")


BOTH = [OLD["a"], None, OLD["b"]]
CALLS: dict[str, tuple[Callable[[BlockingStore], object], object]] = {
    "put": (put, OLD["b"]),
    "get": (lambda store: store.get("a"), OLD["a"]),
    "get, asking": (asking(lambda store: store.get("a")), OLD["a"]),
    "get_many_into": (get_many_into, ([100_000, None, 70_000], [OLD["a"], bytes(10), OLD["b"]])),
    "lease": (lease, BOTH),
    "lease, asking": (asking(lease), BOTH),
    "reserve": (reserve, OLD["a"]),
    "exists": (lambda store: store.exists("short"), True),
    "match_prefix": (lambda store: store.match_prefix(["a", "b", "missing"]), PrefixMatch(2)),
    "delete": (delete, 1),
    "connecting": (connect, True),
    "opening": (open_another, False),
}
MAKING = ("connecting", "opening")


def check_child(store: Any, url: str | None, inherited: set[str], others: Descriptors, *, making: bool) -> None:
    """The inherited store is refused, and has nothing open, but for a connection that
    was just being made; another one works."""
    left = [target for _, target in descriptors() - others if target in inherited]
    assert not left or (making and len([target for target in left if target.startswith("socket:")]) <= 1), left
    refuse_everything(Awaitable(store))  # type: ignore[arg-type]
    (store if url else store.embedded).close()
    with blocking.open_store(url, **({} if url else SMALL_POOL)) as own:
        for _ in range(2):  # the second time with nothing to ask, by shared memory
            own.put("own", OLD["b"])
            assert own.get("own") == OLD["b"]
        assert url is None or own.get("a") == OLD["a"]


def kept(store: BlockingStore) -> tuple[int, ...]:
    """What the server, or the core, keeps for its clients, but for one connection to
    each of this store's.
    """
    stats = store.stats()
    now = stats.store
    connections = 0 if stats.server is None else stats.server.connections_open - len(store.calls.pool.connections)  # type: ignore[attr-defined]
    return now.leases, now.reservations, now.pinned_bytes, connections


def check_undamaged(store: Any, when: str) -> None:
    found = kept(store)
    for _ in range(1000):  # the server has not seen the end of each child
        found = kept(store) if any(found) else found
    assert not any(found), f"{when}, these are left: {found}"
    if hasattr(store, "payload_turns"):
        assert (store.payload_turns.free, store.lookup_turns.free) == (1, 2), when
        assert len(store.calls.pool.connections) <= 2, when


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of its own: what others have left pinned there would be seen."""
    with running_server_process(unix_socket=tmp_path_factory.mktemp("server") / "socket") as started:
        yield started


@pytest.fixture(scope="module")
def tried() -> set[tuple[CodeType, int]]:
    """Where a fork was tried when a lock had been taken."""
    return set()


WAYS = [(place, another) for place in ("tcp", "shm", "embedded") for another in (False, True)]


@pytest.mark.parametrize(
    ("place", "in_another_thread", "name"),
    [
        pytest.param(
            *way,
            name,
            id=f"{way[0]}-{'another' if way[1] else 'same'} thread-{name}",
            marks=() if (at - turn) % len(WAYS) == 0 else pytest.mark.nightly,
        )
        for turn, way in enumerate(WAYS)
        for at, name in enumerate(CALLS)
    ],
)
def test_a_child_forked_anywhere_in_a_call_is_refused_and_the_call_goes_on(
    place: str, in_another_thread: bool, name: str, server: ServerProcess, tried: set[tuple[CodeType, int]]
) -> None:
    call, expected = CALLS[name]
    url = {"tcp": server.url, "shm": f"shm://{server.unix_socket}"}.get(place)
    others = descriptors()
    options: dict[str, Any] = {"max_connections": 1, "deadline_s": 600, "spin_us": 0} if url else SMALL_POOL
    with blocking.open_store(url, **options) as store:
        store.put_many(OLD)
        assert call(store) == call(store) == expected
        making = name in MAKING
        children = Children(
            lambda report: check_child(store, url, children.inherited, others | report, making=making),
            in_another_thread=in_another_thread,
        )
        due = moments(lambda: call(store), f"{place}, {name}", tried if in_another_thread else None)
        for moment in due:
            when = f"a child was forked after {moment} bytecodes of {name} by {place}"
            assert children.call(lambda: call(store), moment) == expected, when
            assert not children.report, f"{when}: {children.report}"
            if not children.forked and moment > 1:
                due.append(moment // 2)  # a call that need not wait has fewer
        assert children.forked, name
        check_undamaged(store, f"after forks in {name} by {place}")
