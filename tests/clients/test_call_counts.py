"""How many Python functions a blocking client calls for one operation: layers cost."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from tests.clients.shared_serving import Shared

OVER_THE_SOCKET = bytes(4096)
IN_THE_POOL = bytes(64 * 1024 + 1)


def calls_of(operation: Callable[[], object]) -> int:
    """Return how many Python functions an operation calls, waiting aside.

    A coroutine that goes on after an effect is the same call. What waits for a reply is
    left out: how often it looks is up to the other side.
    """

    def count() -> int:
        frames: dict[int, FrameType] = {}

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_name != "_wait" and not code.co_filename.endswith("spin.py"):
                frames[id(frame)] = frame  # kept, so that no other gets its id

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            operation()
        finally:
            sys.setprofile(before)
        return len(frames)

    for _ in range(300):  # until every page of the pool was touched once, which takes calls of its own
        operation()
    return min(count() for _ in range(30)) - 1  # the operation is a function of this test


@pytest.mark.parametrize(
    ("scheme", "operation", "most"),
    [
        ("tcp", lambda store: store.put("a", OVER_THE_SOCKET), 45),
        ("tcp", lambda store: store.get("a"), 55),
        ("infinistore", lambda store: store.put("b", IN_THE_POOL), 66),
        ("infinistore", lambda store: store.get("b"), 80),
    ],
    ids=["put by TCP", "get by TCP", "put by shared memory", "get of a known block"],
)
def test_an_operation_takes_few_calls(
    one_kind: Shared, scheme: str, operation: Callable[[BlockingStore], object], most: int
) -> None:
    with blocking.open_store(one_kind.server.url.replace("tcp", scheme)) as store:
        store.put("a", OVER_THE_SOCKET)
        store.put("b", IN_THE_POOL)
        assert calls_of(lambda: operation(store)) - 1 <= most
