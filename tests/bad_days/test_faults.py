"""A fault in the middle of every operation, at many places, for every client.

Whatever happens, a call returns what is right or raises one typed error, in time; no
block is ever half a value; and the same store works again as soon as the fault is gone.
"""

from collections.abc import Awaitable

import pytest

from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.errors import ChecksumMismatch, DeadlineExceeded, StoreUnavailable
from infinistore.protocol.codec import HEADER_BYTES
from tests.bad_days.clients import each_in_turn, run_with_store
from tests.bad_days.faults import Action, Direction, Fault, Proxy
from tests.bad_days.operations import OLD, OPERATIONS, Operation, prepare, works_again
from tests.bad_days.striking import HASTY, NOT_STORED, UNKNOWN, broken, measure, strike

pytestmark = pytest.mark.usefixtures("quick_breaker")
LOOPS = ("trio", "blocking", "asyncio")
"""uvloop runs the code of asyncio: it goes through what has to do with waiting, here
and in the other modules.
"""


@each_in_turn("operation", OPERATIONS)
def test_a_connection_that_breaks_is_made_up_for_or_told(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    """What may be done twice is: the caller notices nothing. What may not says that its
    outcome is not known.
    """

    async def body(store: AsyncStore) -> None:
        lengths = await measure(store, operation, proxy, direct)
        for action in (Action.CUT, Action.END):
            for fault in broken(lengths, action):
                result, error = await strike(store, operation, fault, proxy, direct)
                if error is None:
                    assert result == operation.expected, fault
                else:
                    assert not operation.retried, f"{fault}: {error!r}"
                    assert isinstance(error, StoreUnavailable), fault
                    assert UNKNOWN in str(error), fault

    run_with_store(kind, proxy.url, body)


@each_in_turn("operation", OPERATIONS)
def test_a_peer_that_falls_silent_costs_the_deadline_and_no_more(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        lengths = await measure(store, operation, proxy, direct)
        for direction, length in lengths.items():
            fault = Fault(Action.STALL, direction, length - 1 if direction is Direction.REQUEST else 0)
            result, error = await strike(store, operation, fault, proxy, direct)
            assert isinstance(error, DeadlineExceeded), f"{fault}: {result!r}, {error!r}"
            if not operation.retried and UNKNOWN not in str(error):
                assert NOT_STORED in str(error), fault

    run_with_store(kind, proxy.url, body, **HASTY)


@each_in_turn("operation", OPERATIONS, LOOPS)
def test_bytes_that_come_one_by_one_are_put_together(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        for direction in Direction:
            fault = Fault(Action.TRICKLE, direction, 0)
            assert await strike(store, operation, fault, proxy, direct) == (operation.expected, None)

    run_with_store(kind, proxy.url, body)


@each_in_turn("operation", OPERATIONS, LOOPS)
def test_garbage_is_a_typed_error_never_a_value(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        lengths = await measure(store, operation, proxy, direct)
        for direction, length in lengths.items():
            for place in {0, 4, HEADER_BYTES, length // 2, length - 1}:
                fault = Fault(Action.GARBAGE, direction, place)
                result, error = await strike(store, operation, fault, proxy, direct)
                if operation.reads and direction is Direction.REPLY and error is None:
                    assert result == operation.expected, fault

    run_with_store(kind, proxy.url, body, **HASTY)


@each_in_turn("operation", OPERATIONS, LOOPS)
def test_a_reply_with_one_wrong_or_missing_byte_is_no_untyped_error_and_no_wrong_block(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        lengths = await measure(store, operation, proxy, direct)
        length = lengths[Direction.REPLY]
        header = (0, 4, 5, 6, 8, 12, 16)
        for place in {*header, *range(HEADER_BYTES, min(length, 128), 11), length // 2, length - 1}:
            fault = Fault(Action.CORRUPT, Direction.REPLY, place)
            result, error = await strike(store, operation, fault, proxy, direct)
            if error is None:
                # Replies without blocks have no checksum of their own: TCP's has to do
                # for them.
                assert result == operation.expected if operation.reads else isinstance(result, type(operation.expected))
        fault = Fault(Action.DROP, Direction.REPLY, length // 2)
        result, error = await strike(store, operation, fault, proxy, direct)
        assert error is not None

    run_with_store(kind, proxy.url, body, **HASTY)


@each_in_turn("operation", OPERATIONS, LOOPS)
def test_a_request_with_one_wrong_byte_is_no_untyped_error_and_no_wrong_block(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        lengths = await measure(store, operation, proxy, direct)
        length = lengths[Direction.REQUEST]
        header = (0, 5, 6, 8, 12, 16, 24)
        for place in {*header, *range(HEADER_BYTES, min(length, 128), 13), length // 2, length - 9, length - 1}:
            fault = Fault(Action.CORRUPT, Direction.REQUEST, place)
            await strike(store, operation, fault, proxy, direct)

    run_with_store(kind, proxy.url, body, **HASTY)


READS = [operation for operation in OPERATIONS if operation.reads]


@each_in_turn("operation", READS, LOOPS)
def test_a_payload_that_rots_on_its_way_is_a_checksum_mismatch_and_the_block_stays(
    kind: str, operation: Operation, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        length = (await measure(store, operation, proxy, direct))[Direction.REPLY]
        payload = 3000 + (2048 if "many" in operation.name else 0)
        for place in (length - payload, length - payload // 2, length - 1):
            fault = Fault(Action.CORRUPT, Direction.REPLY, place)
            _, error = await strike(store, operation, fault, proxy, direct)
            assert isinstance(error, ChecksumMismatch), fault
            assert "k" in str(error)
            assert await operation.call(store, None) == operation.expected  # the store's own bytes are sound

    run_with_store(kind, proxy.url, body)


def test_a_payload_that_rotted_before_it_was_stored_is_found_by_the_first_reader_and_missing_for_the_next(
    kind: str, proxy: Proxy, direct: BlockingStore
) -> None:
    put = OPERATIONS[0]

    async def body(store: AsyncStore) -> None:
        length = (await measure(store, put, proxy, direct))[Direction.REQUEST]
        for place in (length - 8 - 2500, length - 8 - 1, length - 1):  # first byte, last byte, checksum
            prepare(put, direct)
            proxy.arm(Fault(Action.CORRUPT, Direction.REQUEST, place))
            await put.call(store, None)
            with pytest.raises(ChecksumMismatch):
                await store.get("k0")
            assert await store.get_many(["k0", "k1"]) == [None, OLD["k1"]]

    run_with_store(kind, proxy.url, body)


def test_without_verification_the_bytes_are_the_callers_business(
    kind: str, proxy: Proxy, direct: BlockingStore
) -> None:
    get = next(operation for operation in OPERATIONS if operation.name == "get")

    async def body(store: AsyncStore) -> None:
        length = (await measure(store, get, proxy, direct))[Direction.REPLY]
        proxy.arm(Fault(Action.CORRUPT, Direction.REPLY, length - 1))
        assert await store.get("k0") == OLD["k0"][:-1] + b"\xef"

    run_with_store(kind, proxy.url, body, verify="never")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(action, direction, place)
        for action in (Action.CUT, Action.END)
        for direction in Direction
        for place in (0, 1, HEADER_BYTES, 60)
    ],
    ids=str,
)
def test_a_connection_that_breaks_in_its_hello_carried_nothing_so_every_call_is_tried_again(
    kind: str, fault: Fault, proxy: Proxy, direct: BlockingStore
) -> None:
    async def body(store: AsyncStore) -> None:
        for operation in OPERATIONS[::2]:
            argument = prepare(operation, direct)
            proxy.refuse()  # what was open is lost
            proxy.accept_again()
            proxy.arm(fault)
            assert await operation.call(store, argument) == operation.expected
            proxy.disarm()

    run_with_store(kind, proxy.url, body)


def test_a_call_in_vain_is_not_repeated_for_ever(kind: str, proxy: Proxy, direct: BlockingStore) -> None:
    prepare(OPERATIONS[0], direct)

    async def body(store: AsyncStore) -> None:
        proxy.arm(Fault(Action.CUT, Direction.REQUEST, 0, forever=True))
        for call in (store.get("k0"), store.exists("k0"), store.put("k0", b"x")):
            await _unavailable(call)
        proxy.disarm()
        await works_again(store)

    run_with_store(kind, proxy.url, body)


async def _unavailable(call: Awaitable[object]) -> None:
    with pytest.raises(StoreUnavailable):
        await call
