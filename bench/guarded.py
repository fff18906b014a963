"""The operations whose instructions `guard.py` counts. It runs this under valgrind:

    guarded.py GROUP [--plant "NAME: 0.15"]

Most blocks are short, so that what is counted is the store's own work: how many
instructions a copy or a hash takes depends on the processor. Each operation has keys of its own, and
is counted when it has been called often enough to be in its stride. Work that it leaves
for later counts, too.
"""

import argparse
import gc
import json
import random
import struct
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from inspect import iscoroutine
from itertools import cycle, repeat
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

import infinistore
from callgrind import Counter
from infinistore.allocators import create_allocator
from infinistore.core import Client, Pool, StoreCore, create_arena
from infinistore.protocol.codec import HEADER_BYTES, decode_body, encode_head, parse_header
from infinistore.protocol.messages import Get, Keys, LeaseReply, Message, Numbers

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore
    from infinistore.config import ServerConfig

__all__ = ["CALIBRATION", "CALLS"]

KIB, MIB = 1024, 1024 * 1024
BLOCK_BYTES, LONG_BLOCK_BYTES = 512, 64 * KIB
CALLS = 64
"""How often each operation is called before it is counted, and how often while it is.
"""
CALIBRATION = "calibration"
CLUSTER = "cluster of one, socket"
TRIO = "Trio client"
LONG = ("put 64 KiB", "get 64 KiB", "get_into 64 KiB")


class Operation(NamedTuple):
    """What is counted: calls, and then what makes others do what those have left to be
    done.
    """

    call: Callable[[], object]
    settle: Callable[[], object] = bool


Operations = dict[str, Operation]


def names(count: int, kind: str) -> list[str]:
    """Keys as engines make them: a model's name and a hash."""
    return [f"llama-70b/tp0/{kind}/{number * 0x9E3779B97F4A7C15 % 2**128:032x}" for number in range(count)]


class _Step(NamedTuple):
    number: int
    view: memoryview


class _Machine:
    """Generators, named tuples, tables, views and msgpack, as the store uses them, and
    nothing of the store.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(4096))
        self._table = dict.fromkeys(names(16, "table"), (0, 64, 64, 2**63))
        self._header = struct.Struct("<4sBBHIIQQ")

    def run(self) -> int:
        steps = self._outer()
        step = next(steps)
        try:
            while True:
                step = steps.send(self._answer(step))
        except StopIteration as stop:
            return int(stop.value)

    def _outer(self) -> Generator[_Step, int, int]:
        total = 0
        for number, key in enumerate(self._table):
            found = self._table.get(key)
            if found is not None and not isinstance(key, int):
                total += yield from self._inner(number, found[1])
        sizes: list[int] = list(map(itemgetter(2), self._table.values()))
        body: bytes = msgpack.packb({"keys": list(self._table), "sizes": sizes})
        return total + len(msgpack.unpackb(body)) + sum(sizes)

    def _inner(self, number: int, size: int) -> Generator[_Step, int, int]:
        try:
            answer = yield _Step(number, self._memory[number * size : (number + 1) * size])
        finally:
            number += 1
        return min(answer, number)

    def _answer(self, step: _Step) -> int:
        head = self._header.pack(b"INFS", 1, 2, 0, step.number, len(step.view), 0, 0)
        step.view[: len(head)] = head
        return int(self._header.unpack_from(step.view)[4])


def calibration_operations(stack: ExitStack) -> Operations:
    """What depends on Python and its libraries alone: everything else is reported
    relative to it.
    """
    return {CALIBRATION: Operation(_Machine().run)}


def core_operations(stack: ExitStack) -> Operations:
    """The store without any transport."""
    stays, sums = names(256, "stays"), list(range(1, 257))

    def open_core(blocks: int) -> tuple[StoreCore, Client]:
        pool = Pool(create_allocator("bitmap", KIB))
        stack.callback(pool.close)
        pool.add_arena(create_arena(0, blocks * KIB))
        core = StoreCore(pool, clock=repeat(0.0).__next__)
        client = core.open_client("guard")
        core.commit(core.reserve(client, [KIB] * 256), stays, sums)
        return core, client

    roomy, client = open_core(2048)
    full, client_of_full = open_core(2048)
    fresh = names(CALLS * 64, "fresh")
    batches = cycle([fresh[start : start + 64] for start in range(0, len(fresh), 64)])

    def put(core: StoreCore, client: Client, keys: Sequence[str]) -> None:
        core.commit(core.reserve(client, [KIB] * 64), keys, sums[:64])

    def put_and_delete() -> None:
        put(roomy, client, fresh[:64])
        roomy.delete(fresh[:64])

    return {
        "core: put 64, replacing as many": Operation(partial(put, roomy, client, stays[:64])),
        "core: put 64, evicting as many": Operation(lambda: put(full, client_of_full, next(batches))),
        "core: lease and release 64": Operation(lambda: roomy.release(roomy.lease(client, stays[:64]))),
        "core: put and delete 64": Operation(put_and_delete),
        "core: exists 256": Operation(partial(roomy.exists, stays)),
        "core: match_prefix 256": Operation(partial(roomy.match_prefix, stays)),
    }


def protocol_operations(stack: ExitStack) -> Operations:
    """Messages to bytes and back."""
    sixty_four = Numbers(array("Q", range(2**63, 2**63 + 64)))
    sizes = Numbers(array("Q", [KIB] * 64))
    messages: list[Message] = [
        Get(Keys(names(64, "get")), sizes, checksums=True),
        LeaseReply(7, sizes, sixty_four, sixty_four, 99),
    ]

    def there_and_back(message: Message) -> None:
        head = memoryview(encode_head(message, request_id=1))
        header = parse_header(head, max_body_bytes=MIB, max_payload_bytes=0)
        decode_body(header.kind, head[HEADER_BYTES : HEADER_BYTES + header.body_bytes])

    return {f"protocol: {type(m).__name__} of 64": Operation(partial(there_and_back, m)) for m in messages}


def _all_operations(store: "BlockingStore", settle: Callable[[], object]) -> Iterator[tuple[str, Operation]]:
    """Yield what can be done with a store; each operation is ready to be called when it
    is yielded.
    """

    def stored(kind: str, count: int) -> list[str]:
        keys = names(count, kind)
        for start in range(0, count, 64):  # a socket takes little more while nobody reads
            store.put_many([(key, bytes(BLOCK_BYTES)) for key in keys[start : start + 64]])
        return keys

    def lease(keys: list[str]) -> None:
        with store.lease(keys) as views:
            assert len(views) == len(keys)

    def reserve(sizes: dict[str, int]) -> None:
        with store.reserve(sizes):
            pass

    def put_and_delete(pairs: list[tuple[str, bytes]]) -> None:
        store.put_many(pairs)
        store.delete([key for key, _ in pairs])

    calls: dict[str, Callable[[], object]] = {
        "put": partial(store.put, names(1, "put")[0], bytes(BLOCK_BYTES)),
        "put_many 64": partial(store.put_many, [(key, bytes(BLOCK_BYTES)) for key in names(64, "put_many")]),
        "get": partial(store.get, stored("get", 1)[0]),
        "get_into": partial(store.get_into, stored("get_into", 1)[0], bytearray(BLOCK_BYTES)),
        "get_many 64": partial(store.get_many, stored("get_many", 64)),
        "get_many_into 64": partial(
            store.get_many_into, [(key, bytearray(BLOCK_BYTES)) for key in stored("get_many_into", 64)]
        ),
        "lease 64": partial(lease, stored("lease", 64)),
        "reserve and commit 64": partial(reserve, dict.fromkeys(names(64, "reserve"), BLOCK_BYTES)),
        "exists": partial(store.exists, stored("exists", 1)[0]),
        "match_prefix 256": partial(store.match_prefix, stored("match_prefix", 256)),
        "put and delete 64": partial(put_and_delete, [(key, bytes(BLOCK_BYTES)) for key in names(64, "delete")]),
    }
    (long,) = names(1, "long")
    calls |= {
        "put 64 KiB": partial(store.put, long, bytes(LONG_BLOCK_BYTES)),
        "get 64 KiB": partial(store.get, long),
        "get_into 64 KiB": partial(store.get_into, long, bytearray(LONG_BLOCK_BYTES)),
    }
    for name, call in calls.items():
        yield name, Operation(call, settle)


def server_config(stack: ExitStack) -> "ServerConfig":
    """A server with a Unix socket in a folder of its own."""
    from infinistore.config import ServerConfig

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return ServerConfig(
        service_port=0,
        manage_port=None,
        unix_socket=f"{folder}/store.sock",
        prealloc_bytes=8 * MIB,
        minimal_allocate_bytes=KIB,
        spin_us=0,
    )


def remote_operations(stack: ExitStack, group: str, left_out: Sequence[str] = (), **options: Any) -> Operations:
    """A blocking client of a server, both in this thread."""
    from infinistore.blocking import open_store  # late: an import takes seconds under valgrind
    from stepped_server import stepped_server

    config = server_config(stack)
    stack.enter_context(stepped_server(config))
    scheme = "shm" if "inline_bytes" in options else "unix"
    url = f"{scheme}://{config.unix_socket}"
    options |= {"spin_us": 0, "copy_threads": 1}
    if group == CLUSTER:
        from infinistore.client.extension import Environment
        from infinistore.cluster.membership import Node, StaticMembership

        membership = StaticMembership([Node("one", url)])
        options["environment"] = Environment(membership=lambda _: membership)
        url = "infinistore+static://one"
    store = stack.enter_context(open_store(url, **options))
    # The server looks at what its clients did by themselves before it answers anything.
    found = _all_operations(store, partial(store.exists, "nothing"))
    return {f"{group}: {name}": operation for name, operation in found if name not in left_out}


def embedded_operations(stack: ExitStack) -> Operations:
    """A store in this process."""
    from infinistore.blocking import open_store

    store = stack.enter_context(open_store(pool_bytes=8 * MIB, minimal_allocate_bytes=KIB))
    chosen = ("put", "get_into", "get_many_into 64", "lease 64")
    return {f"embedded: {name}": operation for name, operation in _all_operations(store, bool) if name in chosen}


GROUPS: dict[str, Callable[[ExitStack], Operations]] = {
    "core": core_operations,
    "protocol": protocol_operations,
    "embedded": embedded_operations,
    "socket": lambda stack: remote_operations(stack, "socket"),
    CLUSTER: lambda stack: remote_operations(stack, CLUSTER, LONG),
    "shared memory": lambda stack: remote_operations(stack, "shared memory", inline_bytes=0),
    "shared memory, asking": lambda stack: remote_operations(
        stack,
        "shared memory, asking",
        ("exists", "match_prefix 256", "get", "get_many 64", *LONG),
        inline_bytes=0,
        known_blocks=0,
    ),
}


def counted(operations: Operations, planted: str, fraction: float) -> Iterator[Callable[[], Any]]:
    """Yield every call that is to be made before the next one is asked for; count those
    of each operation. Of the one that is planted, that fraction of the calls is made
    twice.
    """
    for operation in operations.values():
        yield from repeat(operation.call, CALLS)
        yield operation.settle
    for thread in threading.enumerate():
        if thread.name == "infinistore-populate":
            thread.join()
    gc.collect()
    gc.disable()
    counter = Counter()
    counter.begin()
    for name, (call, settle) in operations.items():
        yield call
        yield settle
        calls = CALLS + round(CALLS * fraction) if name == planted else CALLS
        counter.reset()
        yield from repeat(call, calls)
        yield settle
        counter.note(name)


def count(operations: Operations, planted: str, fraction: float) -> list[str]:
    """Count each operation; return their names."""
    for call in counted(operations, planted, fraction):
        call()
    return list(operations)


async def count_in_trio(stack: ExitStack, planted: str, fraction: float) -> list[str]:
    """Count what a Trio client takes, together with its server in the same loop."""
    import trio

    import infinistore
    from infinistore.server import serve

    config = server_config(stack)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(serve, config)
        async with (
            infinistore.open_store(f"tcp://127.0.0.1:{addresses.port}", spin_us=0) as by_tcp,
            infinistore.open_store(f"unix://{config.unix_socket}", spin_us=0) as by_unix,
        ):
            operations = calibration_operations(stack)
            operations |= trio_operations("TCP", by_tcp) | trio_operations("Unix socket", by_unix)
            for call in counted(operations, planted, fraction):
                if iscoroutine(made := call()):
                    await made
        nursery.cancel_scope.cancel()
    return list(operations)


def trio_operations(how: str, store: "AsyncStore") -> Operations:
    """What engines ask a Trio client for: what to await is what a call returns."""
    small, long = names(2, how)
    many = names(64, f"{how}/many")
    pairs = [(key, bytes(BLOCK_BYTES)) for key in many]
    targets = [(key, bytearray(BLOCK_BYTES)) for key in many]
    calls: dict[str, Callable[[], object]] = {
        "put": partial(store.put, small, bytes(BLOCK_BYTES)),
        "get": partial(store.get, small),
        "get_into": partial(store.get_into, small, bytearray(BLOCK_BYTES)),
        "exists": partial(store.exists, small),
        "put 64 KiB": partial(store.put, long, bytes(LONG_BLOCK_BYTES)),
        "get_into 64 KiB": partial(store.get_into, long, bytearray(LONG_BLOCK_BYTES)),
        "put_many 64": partial(store.put_many, pairs),
        "get_many_into 64": partial(store.get_many_into, targets),
    }
    return {f"{TRIO}, {how}: {name}": Operation(call) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("group", choices=[*GROUPS, TRIO])
    parser.add_argument("--plant", default="")
    arguments = parser.parse_args()
    planted, _, fraction = arguments.plant.rpartition(": ")
    # Nothing is late, and no timer is set again because a call took long: only the
    # server has a clock that goes.
    time.monotonic = repeat(time.monotonic()).__next__
    random.seed(0)
    with ExitStack() as stack:
        plant = planted, float(fraction or 0)
        if arguments.group == TRIO:
            import trio

            counted_names = trio.run(count_in_trio, stack, *plant)
        else:
            counted_names = count(calibration_operations(stack) | GROUPS[arguments.group](stack), *plant)
    of_packages = {name: version(name) for name in ("attrs", "bitarray", "msgpack", "trio", "xxhash")}
    package = str(Path(infinistore.__file__).parent)
    print(json.dumps({"package": package, "versions": of_packages, "names": counted_names}))


if __name__ == "__main__":
    main()
