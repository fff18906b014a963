"""The asyncio and Trio clients against the blocking client: the same batches, the same
server, one run.

    python bench/asyncio_client.py [--quick] [--json]

Each figure is a rate as a part of the blocking client's, for 64 x 64 KiB with checksums
off and on. uvloop is measured too where it is installed.
"""

import argparse
import asyncio
import importlib
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import Any

import trio

import infinistore
import tcp
from infinistore import aio, blocking
from rounds import interleaved

CALLS = 8
COUNT, SIZE = 64, tcp.KIB * 64
Batch = list[tuple[str, memoryview]]


def call_often(store: blocking.BlockingStore, method: str, batch: Batch) -> None:
    """Make several calls."""
    call = getattr(store, method)
    for _ in range(CALLS):
        call(batch)


async def await_often(store: aio.AsyncStore, method: str, batch: Batch) -> None:
    """Make several calls: starting a loop for each would be what is measured."""
    call = getattr(store, method)
    for _ in range(CALLS):
        await call(batch)


def run_on(loop: asyncio.AbstractEventLoop, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function on a loop."""
    loop.run_until_complete(function())


def measure(url: str, verify: str, rounds: int) -> dict[str, float]:
    """Return medians in seconds of one batch, by client and method."""
    source = [(f"bench/{i}", block) for i, block in enumerate(tcp.blocks(COUNT, SIZE))]
    target = [(key, block) for (key, _), block in zip(source, tcp.blocks(COUNT, SIZE), strict=True)]
    batches = {"put": ("put_many", source), "get": ("get_many_into", target)}
    things: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:
        plain = stack.enter_context(blocking.open_store(f"{url}?verify={verify}"))
        for kind, (method, batch) in batches.items():
            things[f"blocking {kind}"] = partial(call_often, plain, method, batch)
        for name, loop in loops().items():
            stack.callback(loop.close)
            exits = AsyncExitStack()
            store = loop.run_until_complete(exits.enter_async_context(aio.open_store(f"{url}?verify={verify}")))
            stack.callback(partial(run_on, loop, exits.aclose))
            for kind, (method, batch) in batches.items():
                things[f"{name} {kind}"] = partial(run_on, loop, partial(await_often, store, method, batch))
        medians = interleaved(things, rounds=rounds, calls=1)
    return {name: seconds / CALLS for name, seconds in medians.items()}


def loops() -> dict[str, asyncio.AbstractEventLoop]:
    """Return one loop of each kind there is."""
    found = {"asyncio": asyncio.new_event_loop()}
    with suppress(ImportError):
        found["uvloop"] = importlib.import_module("uvloop").new_event_loop()
    return found


async def under_trio(url: str, verify: str, rounds: int) -> dict[str, float]:
    """Return medians of the Trio client, right after the others were."""
    source = [(f"bench/{i}", block) for i, block in enumerate(tcp.blocks(COUNT, SIZE))]
    target = [(key, block) for (key, _), block in zip(source, tcp.blocks(COUNT, SIZE), strict=True)]
    async with infinistore.open_store(f"{url}?verify={verify}") as store:
        times: dict[str, list[float]] = {"put": [], "get": []}
        for _ in range(rounds):
            for kind, method, batch in (("put", "put_many", source), ("get", "get_many_into", target)):
                start = trio.current_time()
                await await_often(store, method, batch)
                times[kind].append((trio.current_time() - start) / CALLS)
    return {f"trio {kind}": sorted(values)[len(values) // 2] for kind, values in times.items()}


def main() -> None:
    """Run, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rounds = 6 if arguments.quick else 30
    results: dict[str, float] = {}
    with tcp.servers() as (url, port):
        for verify, checked in (("never", "unchecked"), ("always", "checked")):
            medians = measure(url, verify, rounds) | trio.run(under_trio, url, verify, rounds)
            for name, seconds in medians.items():
                client, kind = name.split()
                if client != "blocking":
                    results[f"{client} {kind} {checked} / blocking"] = medians[f"blocking {kind}"] / seconds
        tcp.Raw(port).close()
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:40} {value:6.2f}")


if __name__ == "__main__":
    main()
