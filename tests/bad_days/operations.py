"""Every public operation as one case: what is there before, the call, and what it may
return.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import attrs

from infinistore.aio import AsyncStore, Prefetched, PrefixMatch
from infinistore.blocking import BlockingStore
from infinistore.errors import ChecksumMismatch, InfiniStoreException

__all__ = ["NEW", "OPERATIONS", "Operation", "check_contents", "outcome", "prepare", "works_again"]

OLD = {"k0": b"\x10" * 3000, "k1": bytes(range(256)) * 8, "k2": b"\x33"}
NEW = {"k0": b"\xee" * 2500, "k1": b"\xdd" * 100, "new": b"\x5c" * 4000}
ADDED = {"k3": b"\x07" * 700, "new": NEW["new"]}


@attrs.frozen
class Operation:
    """`call` does it, given what `prepare` returned; `expected` is what it returns on a
    good day.

    `retried`: a connection that breaks in the middle of it is not noticed by the
    caller.
    """

    name: str
    call: Callable[[AsyncStore, Any], Awaitable[Any]]
    expected: Any
    retried: bool = True
    reads: bool = False
    """It returns blocks, so that their checksums find every wrong byte."""
    prepare: Callable[[BlockingStore], Any] = lambda _: None
    varies: bool = False
    """Its reply is as long as the figures in it, so that a fault near its end may find
    nothing to strike.
    """

    def __str__(self) -> str:
        return self.name


async def _get_into(store: AsyncStore, _: object) -> tuple[int, bytes]:
    buffer = bytearray(4000)
    length = await store.get_into("k0", buffer)
    return length, bytes(buffer[:length])


async def _get_many_into(store: AsyncStore, _: object) -> tuple[list[int | None], list[bytes]]:
    buffers = [bytearray(3000), bytearray(10), bytearray(2048)]
    lengths = await store.get_many_into(zip(["k0", "missing", "k1"], buffers, strict=True))
    return lengths, [bytes(buffer[: length or 0]) for buffer, length in zip(buffers, lengths, strict=True)]


async def _stats(store: AsyncStore, _: object) -> int:
    return (await store.stats()).store.keys


async def _lease(store: AsyncStore, _: object) -> list[bytes | None]:
    async with store.lease(["k0", "missing", "k1"]) as views:
        return [None if view is None else bytes(view) for view in views]


async def _reserve(store: AsyncStore, _: object) -> None:
    async with store.reserve({key: len(value) for key, value in NEW.items()}) as views:
        for view, value in zip(views, NEW.values(), strict=True):
            view[:] = value


def _put_not_replacing(store: AsyncStore, _: object) -> Awaitable[list[str]]:
    return store.put_many({"k0": NEW["k0"], **ADDED}, replace=False)


OPERATIONS = [
    Operation("put", lambda store, _: store.put("k0", NEW["k0"]), None, retried=False),
    Operation("put_many", lambda store, _: store.put_many(NEW), [], retried=False),
    Operation("put_many without replacing", _put_not_replacing, ["k0"], retried=False),
    Operation("get", lambda store, _: store.get("k0"), OLD["k0"], reads=True),
    Operation(
        "get_many",
        lambda store, _: store.get_many(["k0", "missing", "k1"]),
        [OLD["k0"], None, OLD["k1"]],
        reads=True,
    ),
    Operation("get_into", _get_into, (3000, OLD["k0"]), reads=True),
    Operation("get_many_into", _get_many_into, ([3000, None, 2048], [OLD["k0"], b"", OLD["k1"]]), reads=True),
    Operation("lease", _lease, [OLD["k0"], None, OLD["k1"]], reads=True),
    Operation("reserve", _reserve, None, retried=False),
    Operation("exists", lambda store, _: store.exists("k2"), True),
    Operation("exists_many", lambda store, _: store.exists_many(["k2", "missing"]), [True, False]),
    Operation("match_prefix", lambda store, _: store.match_prefix(["k0", "k1", "missing", "k2"]), PrefixMatch(2)),
    Operation(
        "match_prefix with a hold", lambda store, _: store.match_prefix(["k0", "missing"], hold_s=1), PrefixMatch(1)
    ),
    Operation("prefetch", lambda store, _: store.prefetch(["k0", "missing"]), Prefetched(0)),
    Operation("flush", lambda store, _: store.flush(["k0", "missing"]), 0),
    Operation(
        "release_hold",
        lambda store, hold: store.release_hold(hold),
        True,
        retried=False,
        prepare=lambda direct: direct.match_prefix(["k0"], hold_s=60).hold,
    ),
    Operation("put that ends", lambda store, _: store.put("k0", NEW["k0"], ttl_s=3600), None, retried=False),
    Operation("pin", lambda store, _: store.pin(["k0", "missing"]), 1, retried=False),
    Operation(
        "unpin",
        lambda store, _: store.unpin(["k0", "k1"]),
        1,
        retried=False,
        prepare=lambda direct: direct.pin(["k0"]),
    ),
    Operation("delete", lambda store, _: store.delete(["k0", "missing"]), 1, retried=False),
    Operation("keys", lambda store, _: store.keys("k"), ["k0", "k1", "k2"]),
    Operation("evict", lambda store, _: store.evict(0.0, 0.0), 3, retried=False),
    Operation("purge", lambda store, _: store.purge(), 3, retried=False),
    Operation("stats", _stats, 3, varies=True),
]


def prepare(operation: Operation, direct: BlockingStore) -> Any:
    """Bring the store to where the operation begins, past every fault; return what its
    call wants.
    """
    direct.purge()
    direct.put_many(OLD)
    return operation.prepare(direct)


def check_contents(direct: BlockingStore) -> None:
    """Each key has one complete value that was put there, or is missing. Bytes that
    rotted on their way are found out, and the next reader misses them."""
    for key in OLD | NEW | ADDED:
        possible = [values[key] for values in (OLD, NEW, ADDED) if key in values]
        try:
            value = direct.get_many([key])[0]
        except ChecksumMismatch:
            value = direct.get_many([key])[0]
            assert value is None
        assert value is None or value in possible, key


async def outcome(call: Awaitable[Any]) -> tuple[Any, InfiniStoreException | None]:
    """What a call returns, or the one kind of error that it may raise."""
    try:
        return await call, None
    except InfiniStoreException as error:
        return None, error


async def works_again(store: AsyncStore, tries: Iterable[object] | None = None) -> None:
    """The store answers, now or once its breaker has let a probe through.

    By default it may take as long as a test may: a server that is stopped for a while
    is refused thousands of times meanwhile.
    """
    error: InfiniStoreException | None = None
    for _ in itertools.count() if tries is None else tries:
        _, error = await outcome(store.exists_many(list(OLD)))
        if error is None:
            return
    raise AssertionError("the store did not recover") from error
