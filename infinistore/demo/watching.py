"""Shows how full the pool and the disk are, while others work."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio

from infinistore.demo.display import Display
from infinistore.errors import InfiniStoreException

if TYPE_CHECKING:
    from infinistore.client import AsyncStore

__all__ = ["watched"]

_WATCH_INTERVAL_S = 0.1


@asynccontextmanager
async def watched(store: "AsyncStore", display: Display) -> AsyncIterator[None]:
    """Show the usage within the `async with` statement, or until the server is lost,
    which others find out and report.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, store, display)
        yield
        nursery.cancel_scope.cancel()


async def _watch(store: "AsyncStore", display: Display) -> None:
    with suppress(InfiniStoreException):
        while True:
            display.usage(await store.stats())
            await trio.sleep(_WATCH_INTERVAL_S)
