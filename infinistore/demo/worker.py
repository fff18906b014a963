"""The frame of a worker process: orders come in on standard input, events go out on
standard output.

A worker ends with exit status 0 when its input ends, and with 1 after a `Failed` event.
It does not act on Ctrl-C, which a terminal sends to all its processes: the
demonstration hears it too and ends its workers in an orderly way.
"""

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

import infinistore
from infinistore.demo.messages import (
    DemoError,
    Failed,
    Finished,
    Job,
    LineReader,
    Ready,
    Setup,
    decode_order,
    expected_error,
    send_event,
)

if TYPE_CHECKING:
    from infinistore.client import AsyncStore

__all__ = ["run_worker"]

Work = Callable[["AsyncStore", Setup, Job], Awaitable[Finished]]


def run_worker(work: Work) -> None:
    """Be a worker that does `work` for every job, until there are no more; does not
    return.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trio.run(_serve_orders, work)
    except BaseExceptionGroup as group:
        if (error := expected_error(group)) is None:
            raise
        _fail(error)
    except (DemoError, infinistore.InfiniStoreException) as error:
        _fail(error)
    sys.exit(0)


async def _serve_orders(work: Work) -> None:
    # trio.lowlevel.FdStream closes what it is given, and standard input is not ours to
    # close.
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as standard_input:
        orders = LineReader(standard_input)
        setup = await _next_order(orders)
        if not isinstance(setup, Setup):
            raise DemoError("the first order of a worker must be its setup")
        async with infinistore.open_store(setup.url) as store:
            statistics = await store.stats()
            send_event(Ready(os.getpid(), statistics.transport))
            while isinstance(job := await _next_order(orders), Job):
                send_event(await work(store, setup, job))


async def _next_order(orders: LineReader) -> Setup | Job | None:
    line = await orders.next_line()
    return None if line is None else decode_order(line)


def _fail(error: BaseException) -> None:
    send_event(Failed(" ".join(str(error).split()) or type(error).__name__))
    sys.exit(1)
