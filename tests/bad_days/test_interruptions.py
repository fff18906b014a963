"""Ctrl-C between any two bytecodes of a blocking call: afterwards the store has its
slots, locks and connections, and the server keeps nothing for what was interrupted.

The signal is made to come when so many bytecodes were executed, and Python delivers it
where it delivers signals: only after some bytecodes, and never between a lock of C's
that was taken by `with` and the block. By default a sample of the moments is tried, the
same each time; EVERY_BYTECODE=1 tries all.
"""

import ctypes
import dis
import gc
import os
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from tests.clients.shared_serving import Shared, shared_serving
from tests.clients.stores import Loops

EVERY = os.environ.get("EVERY_BYTECODE") == "1"
SAMPLE = 20
LONG = {"a": bytes(100_000), "b": bytes(range(250)) * 400}
MAX_CONNECTIONS = 2

_interrupt = ctypes.PyDLL(None).PyErr_SetInterrupt  # as if SIGINT had come just now
_interrupt.restype = None


class Interruption:
    """Ctrl-C, when this thread has executed so many bytecodes inside `with`.

    `moments` has how many they are before each at whose end Python may deliver a
    signal.
    """

    def __init__(self, after: int) -> None:
        self._after = after
        self._executed = 0
        self._names: dict[CodeType, bytes] = {}
        self._now: dict[int, object] = defaultdict(_interrupt)
        self.moments: list[int] = []

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
        if self._executed == self._after:
            sys.settrace(None)  # or the signal would be delivered in the next call of this
            self._now[0]  # and not by a call, after which it would be delivered here
        elif self._after < 0:
            code = self._names.get(frame.f_code)
            if code is None:
                code = self._names[frame.f_code] = frame.f_code.co_code
            if code[frame.f_lasti] in _DELIVERING:
                self.moments.append(self._executed)
        return self._step


_DELIVERING = frozenset(
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "BEFORE_WITH", "SEND", "YIELD", "FOR_ITER"))
)


def interrupted(call: Callable[[], object], after: int) -> Interruption:
    """Carry out a call that is interrupted after so many bytecodes."""
    interruption = Interruption(after)
    try:
        with interruption:
            call()
        for _ in range(2):  # where the signal is delivered, if it has not been yet
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return interruption


def moments(call: Callable[[], object], name: str) -> Iterator[int]:
    """After how many bytecodes to interrupt a call."""
    found = interrupted(call, -1).moments
    yield from found if EVERY else sorted(random.Random(name).sample(found, min(SAMPLE, len(found))))


def lease(store: BlockingStore) -> None:
    with store.lease(["a", "missing", "b"]) as views:
        assert views[1] is None


def reserve(store: BlockingStore) -> None:
    with store.reserve({"new": 100_000}) as views:
        views[0][:3] = b"abc"


def asked(store: BlockingStore) -> None:
    """Forget what is known, so that the server is asked."""
    pool = store.calls.mapped_pool  # type: ignore[attr-defined]
    if pool is not None:
        pool.known.forget_all()


def lease_asking(store: BlockingStore) -> None:
    asked(store)
    lease(store)


def get_asking(store: BlockingStore) -> None:
    asked(store)
    store.get_many(["a", "b", "missing"])


def connect(store: BlockingStore) -> None:
    store.calls.pool.close_idle()  # type: ignore[attr-defined]
    store.exists("a")


CALLS: dict[str, Callable[[BlockingStore], object]] = {
    "put": lambda store: store.put("small", b"x"),
    "put_many": lambda store: store.put_many({"new": bytes(100_000), "newer": bytes(70_000)}),
    "put_many, not replacing": lambda store: store.put_many({"a": bytes(100_000), "newer": b"y"}, replace=False),
    "get": lambda store: store.get("a"),
    "get, asking": get_asking,
    "get_into": lambda store: store.get_into("a", bytearray(100_000)),
    "lease": lease,
    "lease, asking": lease_asking,
    "reserve": reserve,
    "exists": lambda store: store.exists("missing"),
    "match_prefix": lambda store: store.match_prefix(["a", "b"]),
    "delete": lambda store: store.delete(["new", "small"]),
    "keys": lambda store: store.keys(),
    "stats": lambda store: store.stats(),
    "connecting": connect,
}


@pytest.fixture(scope="module")
def serving() -> Iterator[Shared]:
    with Loops.running() as loops, shared_serving(loops, "threads") as shared:
        yield shared


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a finalizer is reported and lost; what is lost with it is what is
    tested here.
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def in_time(check: Callable[[], None], problem: str) -> None:
    """Run a check in a thread, which may hang."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            check()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(90)
    assert not thread.is_alive(), problem
    if errors:
        raise errors[0]


def check_undamaged(store: BlockingStore, shared: Shared, when: str) -> None:
    """All slots can be had, no lock is held, and the server keeps nothing and knows of
    no forgotten connection.
    """
    calls: Any = store

    def use() -> None:
        store.put_many(LONG)
        with store.lease(list(LONG)) as views:
            assert [bytes(view) for view in views if view is not None] == [*LONG.values()]
        assert store.exists("a")

    in_time(use, f"{when}, a call hung")
    assert (calls.payload_turns.free, calls.lookup_turns.free) == (MAX_CONNECTIONS, 2), when
    assert len(calls.calls.pool.connections) <= 2, when
    figures, connections = (0, 0, 0), 0
    for _ in range(50):
        now = shared.core_statistics()
        figures = (now.leases, now.reservations, now.pinned_bytes)
        connections = shared.look(lambda: len(shared.server.server.sessions))
        if not any(figures) and connections <= 2:
            return
        gc.collect()  # of what a traceback had
    raise AssertionError(f"{when}, the server kept {figures} and {connections} connections")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("path", ["tcp", "unix", "shm"])
def test_a_call_that_is_interrupted_anywhere_leaves_the_store_undamaged(path: str, name: str, serving: Shared) -> None:
    url = {"tcp": serving.server.url, "unix": f"unix://{serving.server.unix_path}", "shm": serving.url}[path]
    with blocking.open_store(url, max_connections=MAX_CONNECTIONS, deadline_s=60, spin_us=0) as store:
        store.put_many(LONG)
        store.get_many(list(LONG))
        for moment in moments(lambda: CALLS[name](store), f"{path}, {name}"):
            interrupted(lambda: CALLS[name](store), moment)
            check_undamaged(store, serving, f"after {name} by {path} was interrupted after {moment} bytecodes")
