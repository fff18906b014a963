"""Blocking work of asynchronous stores, in a thread, under Trio or asyncio."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import trio

__all__ = ["in_thread"]

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a thread. A task that is cancelled waits for its end all the same: it uses the caller's memory."""
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
