"""The programming interface of the original against the asyncio store that it stands
on: what the addresses cost.

    python bench/dropin.py [--quick] [--json]

Each figure is a rate as a part of the asyncio store's, in the same run, by the best
path there is on this host.
"""

import argparse
import asyncio
import ctypes
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tcp
from infinistore import TYPE_RDMA, ClientConfig, InfinityConnection, aio
from one_server import serving
from rounds import interleaved

CALLS = 16
CASES = ((1, 64 * tcp.KIB), (1, 4 * tcp.MIB), (64, 64 * tcp.KIB))


@contextmanager
def server() -> Iterator[int]:
    """A server with a Unix socket; gives its port."""
    with serving("--manage-port", "0", "--prealloc-size", "256MiB", "--log-level", "warning") as address:
        yield int(address.rpartition(":")[2])


async def often(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Make several calls: entering the loop for each would be what is measured."""
    for _ in range(CALLS):
        await call()


def measure(
    connection: InfinityConnection, store: aio.AsyncStore, runner: asyncio.Runner, rounds: int
) -> dict[str, float]:
    """Return the rates of the connection, as parts of the store's."""
    results: dict[str, float] = {}
    for count, size in CASES:
        views = tcp.blocks(count, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(views[0]))
        connection.register_mr(address, count * size)
        keys = [f"bench/{count}/{size}/{number}" for number in range(count)]
        offsets = [(key, number * size) for number, key in enumerate(keys)]
        pairs = list(zip(keys, views, strict=True))
        calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "write": partial(connection.rdma_write_cache_async, offsets, size, address),
            "put": partial(store.put_many, pairs),
            "read": partial(connection.rdma_read_cache_async, offsets, size, address),
            "get": partial(store.get_many_into, pairs),
        }
        things = {name: partial(lambda call: runner.run(often(call)), call) for name, call in calls.items()}
        medians = interleaved(things, rounds=rounds, calls=1)
        for ours, theirs in (("write", "put"), ("read", "get")):
            results[f"{ours} {count} x {size // tcp.KIB} KiB / {theirs}"] = medians[theirs] / medians[ours]
    return results


def main() -> None:
    """Run, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with server() as port, asyncio.Runner() as runner:
        config = ClientConfig(host_addr="127.0.0.1", service_port=port, connection_type=TYPE_RDMA)
        opening = aio.open_store(f"infinistore://127.0.0.1:{port}")
        store = runner.run(opening.__aenter__())
        with InfinityConnection(config) as connection:
            connection.connect()
            path = connection.transport
            results = measure(connection, store, runner, rounds=6 if arguments.quick else 30)
        runner.run(opening.__aexit__(None, None, None))
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(f"by {path}")
        for name, value in results.items():
            print(f"{name:32} {value:6.2f}")


if __name__ == "__main__":
    main()
