"""Event loops in threads of their own, for tests that are not asynchronous themselves.

Hypothesis' rule machines, and blocking clients, live in the thread of the test. What
they talk to lives here: a whole Trio or asyncio loop that runs coroutines and keeps
asynchronous context managers open until the test leaves them.
"""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, ParamSpec, Protocol, Self, TypeVar, cast

import attrs
import trio

from infinistore.blocking import BlockingStore

__all__ = ["AsyncioThread", "LoopThread", "Loops", "TrioThread", "as_blocking", "under_asyncio"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def under_asyncio(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Run a test under asyncio: without this, tests run under Trio."""

    @functools.wraps(test)
    def run(*arguments: _P.args, **named: _P.kwargs) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class LoopThread(Protocol):
    """A loop that runs elsewhere."""

    def run(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Run an asynchronous function there, and wait for what it returns."""

    def run_sync(self, function: Callable[[], _T]) -> _T:
        """Run a plain function there."""


class TrioThread:
    """`with TrioThread() as loop`: Trio, in a thread."""

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, started), name="trio")
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.run_sync(self._stop.set)
        self._thread.join()

    async def _main(self, started: threading.Event) -> None:
        self._stop = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            started.set()
            await self._stop.wait()

    def run(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        return trio.from_thread.run(function, *arguments, trio_token=self._token)

    def run_sync(self, function: Callable[[], _T]) -> _T:
        return trio.from_thread.run_sync(function, trio_token=self._token)

    @contextmanager
    def entered(self, make: Callable[[], AbstractAsyncContextManager[_T]]) -> Iterator[_T]:
        """Keep an asynchronous context manager open there, in a task of its own."""
        leave, left = trio.Event(), trio.Event()

        async def keep(task_status: trio.TaskStatus[_T]) -> None:
            try:
                async with make() as value:
                    task_status.started(value)
                    await leave.wait()
            finally:
                left.set()

        value: _T = self.run(self._nursery.start, keep)
        try:
            yield value
        finally:
            self.run_sync(leave.set)
            self.run(left.wait)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep the loop from going on, as a stopped process: what comes to it waits."""
        here, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            here.set()
            go_on.wait()

        self._token.run_sync_soon(wait)
        here.wait()
        try:
            yield
        finally:
            go_on.set()


class AsyncioThread:
    """`with AsyncioThread() as loop`: asyncio, in a thread."""

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), name="asyncio")
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        started.set()
        await self._stop.wait()

    def run(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        async def call() -> _T:
            return await function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def run_sync(self, function: Callable[[], _T]) -> _T:
        async def call() -> _T:
            return function()

        return self.run(call)

    @contextmanager
    def entered(self, make: Callable[[], AbstractAsyncContextManager[_T]]) -> Iterator[_T]:
        """Keep an asynchronous context manager open there, in a task of its own."""

        async def start() -> "tuple[asyncio.Task[None], asyncio.Event, _T]":
            leave = asyncio.Event()
            entered: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

            async def keep() -> None:
                try:
                    async with make() as value:
                        entered.set_result(value)
                        await leave.wait()
                except Exception as error:
                    if entered.done():
                        raise
                    entered.set_exception(error)

            task = asyncio.create_task(keep())
            return task, leave, await entered

        async def finish() -> None:
            leave.set()
            await task

        task, leave, value = self.run(start)
        try:
            yield value
        finally:
            self.run(finish)


@attrs.frozen
class Loops:
    """The loops that stores and servers live in."""

    trio: TrioThread
    asyncio: AsyncioThread

    @classmethod
    @contextmanager
    def running(cls) -> Iterator["Loops"]:
        with TrioThread() as trio_thread, AsyncioThread() as asyncio_thread:
            yield cls(trio_thread, asyncio_thread)


class _AsBlocking:
    def __init__(self, store: Any, loop: LoopThread) -> None:
        self._store = store
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method
        if name in ("lease", "reserve"):
            return lambda *arguments, **options: _entered_in(self._loop, method(*arguments, **options))

        def call(*arguments: Any, **options: Any) -> Any:
            return self._loop.run(lambda: method(*arguments, **options))

        return call


@contextmanager
def _entered_in(loop: LoopThread, block: AbstractAsyncContextManager[_T]) -> Iterator[_T]:
    """The block of an asynchronous store, for `with`: it is entered and left in the
    loop of the store.
    """
    value = loop.run(block.__aenter__)
    try:
        yield value
    except BaseException as error:
        loop.run(block.__aexit__, type(error), error, error.__traceback__)
        raise
    loop.run(block.__aexit__, None, None, None)


def as_blocking(store: Any, loop: LoopThread) -> BlockingStore:
    """Return an asynchronous store as a blocking one: each call runs in its loop, and
    waits here.
    """
    return cast(BlockingStore, _AsBlocking(store, loop))
