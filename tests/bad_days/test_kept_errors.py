"""A call that failed keeps nothing of its caller: no frame, and nothing that a frame
has in its hands.

Not until its error is forgotten, which may be late, and not until the garbage collector
comes, which may be later.
"""

import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from tests.bad_days.clients import each_in_turn, run_with_store
from tests.bad_days.faults import Action, Direction, Fault, Proxy
from tests.bad_days.held import held_after, no_error_kept
from tests.bad_days.operations import OPERATIONS, Operation, outcome, prepare, works_again
from tests.bad_days.servers import ServerProcess
from tests.bad_days.striking import HASTY, measure

pytestmark = [pytest.mark.usefixtures("quick_breaker"), pytest.mark.process]
PLACES = ["tcp://127.0.0.1:{port}", "infinistore://localhost:{port}", "unix://{folder}/none", "tcp://no.such.invalid:1"]


@pytest.fixture
def server(server_process: ServerProcess) -> ServerProcess:
    """One in another process: what a server keeps is its own business."""
    return server_process


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port of this machine at which nobody listens, and will not."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.mark.parametrize("place", PLACES)
def test_calls_to_a_store_that_cannot_be_reached(kind: str, place: str, tmp_path: Path, deaf_port: int) -> None:
    async def body(store: AsyncStore) -> None:
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: store.get("key"),
            lambda: store.put("key", b"value"),
            lambda: store.match_prefix(["key"], hold_s=1),
            store.stats,
        ]
        with no_error_kept():
            for call in calls * 2:
                assert (await outcome(call()))[1] is not None

    url = place.format(port=deaf_port, folder=tmp_path)
    run_with_store(kind, url, body, lazy=True, deadline_s=2)  # real time: every call fails, late or not


@pytest.mark.parametrize("place", PLACES)
def test_a_thread_that_finds_no_store_keeps_nothing(place: str, tmp_path: Path, deaf_port: int) -> None:
    url = place.format(port=deaf_port, folder=tmp_path)
    with blocking.open_store(url, lazy=True, deadline_s=2) as store:  # real time: every call fails, late or not
        calls: list[Callable[[], Any]] = [lambda: store.get("key"), lambda: store.put("key", b"value"), store.stats]
        assert held_after(*calls * 3) == 0


@each_in_turn("operation", OPERATIONS, ("trio", "blocking", "asyncio"))
def test_calls_in_the_middle_of_which_something_breaks(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        lengths = await measure(store, operation, proxy, direct)
        with no_error_kept():
            for action, direction in [(Action.CUT, Direction.REQUEST), (Action.GARBAGE, Direction.REPLY)]:
                argument = prepare(operation, direct)
                await works_again(store)
                proxy.arm(Fault(action, direction, lengths[direction] // 2))
                await outcome(operation.call(store, argument))
                proxy.disarm()

    run_with_store(kind, proxy.url, body, **HASTY)
