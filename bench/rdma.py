"""RDMA: what a work request costs in Python, and what is left of the device's own
speed.

The first part needs no device: the server's path from a batch's places to posted work
and back, over a queue pair that completes at once. Work requests are pyverbs' own where
it can be imported. The cost is given for each block and for each request: of blocks
that touch on both sides, many make one request.

The second part runs where there is a device, `make test-rdma` shows how: 64 blocks of
64 KiB are got into registered memory, and `ib_write_bw` writes messages of that size,
as many at a time, in the same run and in turns.

    python bench/rdma.py [--rounds N] [--server-device rxe0 --client-device rxe1 [--peer 10.77.0.1]]
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import trio

import infinistore
from infinistore import ServerConfig, serve
from infinistore.core import create_arena
from infinistore.server.movers.rdma import RdmaPool
from infinistore.transports.rdma.ibverbs import CHAIN, WorkRequests, load_pyverbs
from infinistore.transports.rdma.plan import Piece, Placement, plan_transfer
from infinistore.transports.rdma.requester import Requester
from infinistore.transports.rdma.verbs import Completion, DeviceLimits, Endpoint, NoRdma, Operation
from rounds import interleaved

BLOCKS = 1024
SIZE = 64 * 1024
BATCH = 64


class StubQueue:
    """Sets work requests up as a real queue pair does, and says at once that they are
    done.
    """

    def __init__(self, work: WorkRequests) -> None:
        self.fd = -1
        self.endpoint = Endpoint(1, 1, "0" * 32, 0, 4096, 1)
        self._work = work
        self._done: list[Completion] = []
        self.requests = 0

    def connect(self, peer: Endpoint, *, dead_after_s: float) -> None: ...
    def post(self, operation: Operation, pieces: Sequence[Piece], batch: int) -> None:
        self._work.fill(pieces, batch)
        self.requests += len(pieces)
        self._done.append(Completion(batch, 0))

    def poll(self) -> Sequence[Completion]:
        done, self._done = self._done, []
        return done

    def arm(self) -> None: ...
    def take_events(self) -> None: ...
    def close(self) -> None: ...


class StubDevice:
    name, link, place = "stub", "Ethernet", "stub"
    limits = DeviceLimits(4 * CHAIN, 1 << 30)

    def register(self, address: int, length: int, *, remote: bool, writable: bool = True) -> Any:
        return SimpleNamespace(local_key=7, remote_key=7, close=lambda: None)

    def create_queue(self, *, serves: bool) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...
    def abandon(self) -> None: ...
    def describe(self) -> str:
        return "stub"


def work_requests() -> WorkRequests:
    try:
        pyverbs = load_pyverbs()
        print("work requests: pyverbs'")
        return WorkRequests(pyverbs, pyverbs.enums.IBV_WR_RDMA_WRITE)
    except NoRdma:
        print("work requests: plain objects, because pyverbs cannot be imported")

        class Span:
            def __init__(self, *_: int) -> None: ...

        class Request:
            def __init__(self, **_: Any) -> None: ...
            def set_wr_rdma(self, key: int, address: int) -> None: ...

        stub: Any = SimpleNamespace(
            wr=SimpleNamespace(SGE=Span, SendWR=Request), enums=SimpleNamespace(IBV_SEND_SIGNALED=2)
        )
        return WorkRequests(stub, 0)


def python_cost(rounds: int) -> bool:
    """Print what it costs; True if merged blocks cost at most 1 us each."""
    arena = create_arena(0, 1 << 20)
    device: Any = StubDevice()
    pool = RdmaPool(device, dead_after_s=1)
    pool.add_arena(arena)
    queue = StubQueue(work_requests())
    things: dict[str, Callable[[], object]] = {}
    requests: dict[str, int] = {}
    for run in (BLOCKS, 16, 1):
        gap = SIZE // 2
        offsets = [i * SIZE + (i // run) * gap for i in range(BLOCKS)]
        extents = [(0, offset, SIZE) for offset in offsets]
        remote = Placement([(1 << 40) + offset for offset in offsets], [9] * BLOCKS)
        lengths = [SIZE] * BLOCKS

        async def move(
            extents: list[tuple[int, int, int]] = extents, remote: Placement = remote, lengths: list[int] = lengths
        ) -> None:
            mover = Requester(queue, device.limits.depth, "stub")
            pieces = plan_transfer(pool.placement(extents), remote, lengths, longest_bytes=device.limits.longest_bytes)
            await mover.move(Operation.WRITE, pieces)

        name = f"{run:5} blocks in one request"
        before = queue.requests
        trio.run(move)
        requests[name] = queue.requests - before
        things[name] = lambda move=move: [trio.run(move)]  # type: ignore[misc]

    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    things["starting Trio"] = lambda: trio.run(nothing)
    times = interleaved(things, rounds=rounds, calls=5)
    start_s = times.pop("starting Trio")
    print(f"{BLOCKS} blocks of {SIZE // 1024} KiB in one batch: planning, posting, completing; the device excluded")
    for name, seconds in times.items():
        cost_us = (seconds - start_s) * 1e6
        print(f"  {name}: {cost_us / BLOCKS:5.2f} us a block, {cost_us / requests[name]:7.2f} us a work request")
    arena.close()
    best = (times[f"{BLOCKS:5} blocks in one request"] - start_s) * 1e6 / BLOCKS
    merged = (times[f"{16:5} blocks in one request"] - start_s) * 1e6 / BLOCKS
    return max(best, merged) <= 1.0


def write_bandwidth(server: str, client: str, peer: str) -> float:
    """What `ib_write_bw` moves between the devices, in bytes per second."""
    options = ["-s", str(SIZE), "-n", "500", "-t", str(BATCH)]
    listener = subprocess.Popen(["ib_write_bw", "-d", client, *options], stdout=subprocess.DEVNULL)
    command = ["ib_write_bw", "-d", server, *options, peer]
    found = None
    try:
        while found is None and listener.poll() is None:  # it does not say when it listens
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            found = re.search(rf"^\s*{SIZE}\s+\d+\s+[\d.]+\s+([\d.]+)", output, re.MULTILINE)
    finally:
        listener.kill()
        listener.wait()
    if found is None:
        raise SystemExit("ib_write_bw does not work between these devices")
    return float(found[1]) * 1024 * 1024


async def beside_the_device(rounds: int, server_device: str, client_device: str, peer: str) -> None:
    """Print how a get compares with `ib_write_bw`, round by round and in turns."""
    config = ServerConfig(
        service_port=0,
        manage_port=None,
        unix_socket="off",
        prealloc_bytes=16 << 20,
        dev_name=server_device,
        require_rdma=True,
    )
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(serve, config)
        address = f"rdma://127.0.0.1:{addresses.port}?device={client_device}"
        for verify in ("always", "never"):
            ratios = []
            async with infinistore.open_store(f"{address}&verify={verify}", deadline_s=300) as store:
                memory = memoryview(bytearray(BATCH * SIZE))
                await store.register(memory)
                items = [(f"{verify}/{i}", memory[i * SIZE : (i + 1) * SIZE]) for i in range(BATCH)]
                await store.put_many(items)
                await store.get_many_into(items)
                for _ in range(rounds):
                    device = write_bandwidth(server_device, client_device, peer)
                    start = time.perf_counter()
                    for _ in range(4):
                        await store.get_many_into(items)
                    ours = 4 * BATCH * SIZE / (time.perf_counter() - start)
                    ratios.append(ours / device)
                    print(f"  get {ours / 1e6:7.1f} MB/s, ib_write_bw {device / 1e6:7.1f} MB/s", flush=True)
            ratio = statistics.median(ratios)
            print(f"get of {BATCH} x {SIZE // 1024} KiB, checksums {verify}: {ratio:.2f} of ib_write_bw", flush=True)
        nursery.cancel_scope.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-device")
    parser.add_argument("--client-device")
    parser.add_argument("--peer", default="127.0.0.1", help="where ib_write_bw's two sides meet by TCP")
    options = parser.parse_args()
    if options.server_device is None:
        met = python_cost(options.rounds)
        print(f"merged blocks cost {'at most' if met else 'MORE THAN'} 1 us")
        print("no device was named, so that the second part is left out: --server-device, --client-device")
        return 0
    if shutil.which("ib_write_bw") is None:
        print("ib_write_bw is missing: apt-get install perftest", file=sys.stderr)
        return 1
    trio.run(
        beside_the_device,
        options.rounds,
        options.server_device,
        options.client_device or options.server_device,
        options.peer,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
