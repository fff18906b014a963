"""One fault in the middle of one operation, and what must hold after it."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.errors import InfiniStoreException
from infinistore.protocol.codec import HEADER_BYTES
from tests.bad_days.faults import Action, Direction, Fault, Proxy
from tests.bad_days.operations import Operation, check_contents, outcome, prepare, works_again

__all__ = ["HASTY", "HASTY_S", "NOT_STORED", "UNKNOWN", "broken", "measure", "strike"]

UNKNOWN = "it is not known whether the request was carried out"
NOT_STORED = "had not come in time"
"""What a server says that gave up waiting for the payload of a put: then it is known.
"""
HASTY_S = 0.12
"""A deadline for calls of which some get no answer. On a busy machine it may end before
the fault has struck: then `strike` tries again.
"""
HASTY: Final[dict[str, Any]] = {"deadline_s": HASTY_S, "lazy": True}
"""A store with that deadline. It is opened without a connection, for which there may be
no time.
"""
_ATTEMPTS = 50


async def measure(store: AsyncStore, operation: Operation, proxy: Proxy, direct: BlockingStore) -> dict[Direction, int]:
    """Do it once on a good day; return how many bytes went either way.

    What was too late may still be carried out, once, when the next try has begun: that
    one finds its blocks.
    """
    error: InfiniStoreException | None = None
    late = 0
    for _ in range(100):  # a hasty store may be too late on a busy machine
        argument = prepare(operation, direct)
        await works_again(store)
        proxy.arm(Fault(Action.CUT, Direction.REQUEST, 2**60))
        result, error = await outcome(operation.call(store, argument))
        if error is not None:
            late += 1
        elif result == operation.expected:
            return proxy.disarm()
        else:
            assert late, (result, operation.expected)
            late -= 1
    raise AssertionError("there was no good day") from error


async def strike(
    store: AsyncStore,
    operation: Operation,
    fault: Fault,
    proxy: Proxy,
    direct: BlockingStore,
    *,
    check: Callable[[BlockingStore], None] = check_contents,
) -> tuple[object, InfiniStoreException | None]:
    """Live through one fault; return the outcome. Then the store works again, and
    nothing is half stored: `check` looks.

    A call that waits without end is ended by the time that a test may take.
    """
    for _ in range(_ATTEMPTS):
        argument = prepare(operation, direct)
        await works_again(store)
        proxy.arm(fault)
        result, error = await outcome(operation.call(store, argument))
        proxy.disarm()
        await works_again(store)
        check(direct)
        if proxy.struck.is_set() or (operation.varies and error is None):
            return result, error
    raise AssertionError(f"{operation}: there was no {fault}")


def places(length: int) -> list[int]:
    """Where faults strike: in the header, in the body, in the payload, at every end."""
    chosen = {0, 1, HEADER_BYTES - 1, HEADER_BYTES, 64, length // 2, length - 1, length}
    return sorted(place for place in chosen if 0 <= place <= length)


def broken(lengths: dict[Direction, int], action: Action) -> Iterable[Fault]:
    return (Fault(action, direction, place) for direction, length in lengths.items() for place in places(length))
