"""Every kind of client behind one interface, so that a bad day is written once and
lived through by all of them.
"""

import asyncio
from collections import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar, cast

import pytest
import trio

from infinistore import aio, blocking, open_store
from infinistore.aio import AsyncStore

__all__ = ["KINDS", "Awaitable", "each_in_turn", "run_at_once", "run_with_store"]

_T = TypeVar("_T")
KINDS = ("trio", "blocking", "asyncio", "uvloop")


def each_in_turn(name: str, values: Sequence[Any], kinds: Sequence[str] = KINDS) -> pytest.MarkDecorator:
    """Parametrize by the kind of client and by something else: each value and each kind
    in turn, so that each is there once or more.

    What a call does is the same coroutine for every kind, and a driver carries out its
    effects (`client/connection/effects.py`): which of them a call has is seen with any
    kind, and how a driver carries them out with any call. All pairs are there at night.
    """
    both = min(len(values), len(kinds))
    pairs = [
        pytest.param(kind, value, marks=() if (at - turn) % both == 0 else pytest.mark.nightly)
        for at, value in enumerate(values)
        for turn, kind in enumerate(kinds)
    ]
    return pytest.mark.parametrize(("kind", name), pairs, ids=str)


class Awaitable:
    """A blocking store whose methods can be awaited; they block, all the same."""

    def __init__(self, store: blocking.BlockingStore) -> None:
        self.wrapped = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.wrapped, name)
        if name in ("lease", "reserve"):
            return lambda *arguments, **named: _as_async(method(*arguments, **named))

        async def call(*arguments: Any, **named: Any) -> Any:
            return method(*arguments, **named)

        return call


@asynccontextmanager
async def _as_async(block: AbstractContextManager[_T]) -> abc.AsyncGenerator[_T, None]:
    with block as value:
        yield value


def run_with_store(kind: str, url: str | None, body: Callable[[AsyncStore], abc.Awaitable[_T]], **options: Any) -> _T:
    """Open a store of this kind, run `body` with it in the loop that belongs to it, and
    return what it returns.
    """
    if kind == "blocking":
        with blocking.open_store(url, **options) as store:
            return run_at_once(body(cast(AsyncStore, Awaitable(store))))

    async def with_trio() -> _T:
        async with open_store(url, **options) as store:
            return await body(store)

    async def with_asyncio() -> _T:
        async with aio.open_store(url, **options) as store:
            return await body(store)

    if kind == "trio":
        return trio.run(with_trio)
    factory = None
    if kind == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(with_asyncio())


def run_at_once(awaitable: abc.Awaitable[_T]) -> _T:
    """Run what never waits for a loop."""
    try:
        next(awaitable.__await__())
    except StopIteration as stop:
        return cast(_T, stop.value)
    raise AssertionError("a blocking store waited for a loop")
