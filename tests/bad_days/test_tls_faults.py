"""Faults below TLS, for every client: connections that are cut, that fall silent, whose
bytes come one by one, or change on their way.

TLS keeps what the plain connection cannot: whoever changes or leaves out a byte causes
an error, and never another value, with or without checksums. A connection that ends
without the end of TLS has lost what was not whole.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from infinistore import blocking
from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from tests.bad_days.clients import each_in_turn, run_with_store
from tests.bad_days.faults import Action, Direction, Fault, Proxy, running_proxy
from tests.bad_days.operations import ADDED, NEW, OLD, OPERATIONS, Operation, outcome, prepare, works_again
from tests.bad_days.servers import running_server_here
from tests.bad_days.striking import NOT_STORED, UNKNOWN, measure, strike
from tests.transports.certificates import issue

pytestmark = pytest.mark.usefixtures("quick_breaker")
HASTY_S = 0.2
HASTY: dict[str, Any] = {"deadline_s": HASTY_S, "lazy": True}
LOOPS = ("trio", "blocking", "asyncio")
RECORD_HEADER_BYTES = 5  # type, version, length
NO_FAULT = Fault(Action.CUT, Direction.REQUEST, 2**60)
SOME = [
    operation for operation in OPERATIONS if operation.name in ("put_many", "get_many_into", "reserve", "match_prefix")
]


@attrs.frozen
class Encrypted:
    """A server with TLS, behind a proxy that does not understand it."""

    proxy: Proxy
    direct: BlockingStore
    options: str

    @property
    def url(self) -> str:
        return f"infinistores://127.0.0.1:{self.proxy.port}{self.options}"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    files = issue(tmp_path_factory.mktemp("tls"))
    options = f"?ca={files.ca}"
    with (
        running_server_here(tls_cert=files.cert, tls_key=files.key) as server,
        running_proxy(("127.0.0.1", server.port)) as proxy,
        blocking.open_store(f"infinistores://127.0.0.1:{server.port}{options}") as direct,
    ):
        yield Encrypted(proxy, direct, options)


def check_contents(direct: BlockingStore) -> None:
    """Each key has one complete value that was put there, or is missing. No byte rots
    on its way.
    """
    for key in OLD | NEW | ADDED:
        value = direct.get_many([key])[0]
        assert value is None or value in [values[key] for values in (OLD, NEW, ADDED) if key in values], key


def check_outcome(operation: Operation, fault: Fault, result: object, error: InfiniStoreException | None) -> None:
    """A call did what it says, or says that this is not known, or that it did not."""
    if error is None:
        assert result == operation.expected, fault
    else:
        assert isinstance(error, StoreUnavailable | DeadlineExceeded), f"{fault}: {error!r}"
        assert operation.retried or UNKNOWN in str(error) or NOT_STORED in str(error), f"{fault}: {error!r}"


WHERE = {
    Action.CUT: (0, 4, RECORD_HEADER_BYTES, 0.5, -1),
    Action.END: (0, 4, RECORD_HEADER_BYTES, 0.5, -1),
    Action.CORRUPT: (0, 1, RECORD_HEADER_BYTES, 0.5, -1),
    Action.GARBAGE: (3, 0.5),
    Action.REPLACE: (3,),
    Action.DROP: (0.5,),
}
"""In the header of the first record, in what it carries, in the middle of all, in the
last tag. A length that is too long, or a byte too few, is waited for until the
deadline.
"""


async def strike_everywhere(encrypted: Encrypted, store: AsyncStore, operation: Operation, action: Action) -> int:
    """Let a fault strike at many places; return how many calls noticed."""
    proxy, direct = encrypted.proxy, encrypted.direct
    noticed = 0
    for direction, length in (await measure(store, operation, proxy, direct)).items():
        for where in WHERE[action]:
            place = int(where * length) if isinstance(where, float) else where % length
            fault = Fault(action, direction, place, data=b"\x40\x00")
            result, error = await strike(store, operation, fault, proxy, direct, check=check_contents)
            check_outcome(operation, fault, result, error)
            noticed += error is not None
    return noticed


@each_in_turn("operation", SOME, LOOPS)
def test_a_connection_that_is_cut_is_made_up_for_or_told(kind: str, operation: Operation, encrypted: Encrypted) -> None:
    async def body(store: AsyncStore) -> None:
        for action in (Action.CUT, Action.END):
            noticed = await strike_everywhere(encrypted, store, operation, action)
            assert not (operation.retried and noticed)

    run_with_store(kind, encrypted.url, body)


@each_in_turn("operation", SOME, LOOPS)
def test_a_changed_or_missing_byte_is_a_typed_error_and_never_a_value(
    kind: str, operation: Operation, encrypted: Encrypted
) -> None:
    """Also for a client that verifies no checksums."""

    async def body(store: AsyncStore) -> None:
        for action in (Action.CORRUPT, Action.GARBAGE, Action.REPLACE, Action.DROP):
            await strike_everywhere(encrypted, store, operation, action)

    run_with_store(kind, encrypted.url, body, verify="never", **HASTY)


@each_in_turn("operation", SOME, LOOPS)
def test_a_peer_that_falls_silent_costs_the_deadline_and_bytes_one_by_one_cost_nothing(
    kind: str, operation: Operation, encrypted: Encrypted
) -> None:
    proxy, direct = encrypted.proxy, encrypted.direct

    async def silent(store: AsyncStore) -> None:
        for direction, length in (await measure(store, operation, proxy, direct)).items():
            fault = Fault(Action.STALL, direction, length - 1 if direction is Direction.REQUEST else 3)
            result, error = await strike(store, operation, fault, proxy, direct, check=check_contents)
            assert isinstance(error, DeadlineExceeded), f"{fault}: {result!r}, {error!r}"

    async def slow(store: AsyncStore) -> None:
        for direction in Direction:
            fault = Fault(Action.TRICKLE, direction, 0)
            assert await strike(store, operation, fault, proxy, direct) == (operation.expected, None)

    run_with_store(kind, encrypted.url, silent, **HASTY)
    run_with_store(kind, encrypted.url, slow)


def records(stream: bytes) -> list[int]:
    """Where each record of TLS ends."""
    ends, at = [], 0
    while at < len(stream):
        at += RECORD_HEADER_BYTES + int.from_bytes(stream[at + 3 : at + 5], "big")
        ends.append(at)
    assert at == len(stream), "these are no whole records"
    return ends


def test_a_reply_that_ends_after_any_record_without_the_end_of_tls_is_no_reply(kind: str, encrypted: Encrypted) -> None:
    """Each record by itself is sound: only the length of the frame tells what is
    missing.
    """
    proxy = encrypted.proxy
    value = bytes(range(256)) * 400

    async def read(store: AsyncStore) -> None:
        """Read it; on a busy machine, not before the store has had time for that."""
        while True:
            await works_again(store)  # by a connection that the next call takes, too
            proxy.arm(NO_FAULT, keep=True)
            found, error = await outcome(store.get("k0"))
            if error is None:
                assert found == value
                return

    async def body(store: AsyncStore) -> None:
        await read(store)
        ends = records(proxy.kept(Direction.REPLY))
        assert len(ends) > len(value) >> 14
        for end in [0, *ends[:-1]]:
            for action in (Action.END, Action.CUT):
                proxy.arm(Fault(action, Direction.REPLY, end, forever=True))
                _, error = await outcome(store.get("k0"))
                assert isinstance(error, StoreUnavailable | DeadlineExceeded), (action, end)
                proxy.disarm()
                await works_again(store)
        await read(store)

    encrypted.direct.put("k0", value)
    run_with_store(kind, encrypted.url, body, verify="never", **HASTY)


HANDSHAKE = [(Direction.REQUEST, place) for place in (0, 3, 60, 300)]
HANDSHAKE += [(Direction.REPLY, place) for place in (0, 3, 60, 130, 500, 900)]


@pytest.mark.parametrize("action", [Action.CUT, Action.END, Action.CORRUPT, Action.TRICKLE], ids=lambda one: one.name)
def test_a_handshake_that_fails_carried_nothing_so_every_call_is_tried_again(
    kind: str, action: Action, encrypted: Encrypted
) -> None:
    proxy = encrypted.proxy

    async def body(store: AsyncStore) -> None:
        for number, (direction, place) in enumerate(HANDSHAKE):
            operation = SOME[number % len(SOME)]
            argument = prepare(operation, encrypted.direct)
            proxy.refuse()  # what was open is lost
            proxy.accept_again()
            proxy.arm(Fault(action, direction, place))
            assert await operation.call(store, argument) == operation.expected, (direction, place)
            assert proxy.struck.is_set()
            proxy.disarm()

    run_with_store(kind, encrypted.url, body)


@pytest.mark.parametrize("action", [Action.CUT, Action.END, Action.STALL, Action.GARBAGE], ids=lambda one: one.name)
def test_who_opens_a_store_is_told_in_one_line_that_the_handshake_failed(
    kind: str, action: Action, encrypted: Encrypted
) -> None:
    proxy = encrypted.proxy

    async def body(store: AsyncStore) -> None:
        raise AssertionError("it was opened")

    deadline_s = HASTY_S if action is Action.STALL else 600.0
    for direction, place in ((Direction.REQUEST, 60), (Direction.REPLY, 0), (Direction.REPLY, 500)):
        proxy.arm(Fault(action, direction, place))
        with pytest.raises((StoreUnavailable, DeadlineExceeded)) as failed:
            run_with_store(kind, encrypted.url, body, deadline_s=deadline_s)
        proxy.disarm()
        assert "\n" not in str(failed.value)
        assert isinstance(failed.value, DeadlineExceeded) is (action is Action.STALL)
