"""Blocking work of asynchronous stores, in a thread, under Trio or asyncio."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar, cast

import trio

from infinistore.host import NO_THREAD

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a thread; here and now, if this process gets no more threads.

    A task that is cancelled waits for its end all the same: it uses the caller's
    memory.
    """
    begun = False
    at_work = threading.Lock()

    def once() -> _T | None:
        nonlocal begun
        with at_work:
            if begun:  # by who was told that there was no thread: asyncio keeps what it could not start for later
                return None
            begun = True
            return work()

    try:
        return cast("_T", await _aside(once))
    except NO_THREAD:
        with at_work:
            if begun:
                raise
            begun = True
        return work()


async def _aside(work: Callable[[], _T]) -> _T:
    if trio.lowlevel.in_trio_task():
        return await trio.to_thread.run_sync(work)
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:  # once more: still not before its end
                continue
        raise
