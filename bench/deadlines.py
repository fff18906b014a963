"""How long calls run beyond their deadline, for every client and everything that they
can wait for.

    python bench/deadlines.py [--quick] [--json]

The peers are listeners on loopback that accept nobody, say nothing, or stop reading.
Printed are milliseconds beyond the deadline, median and worst, and the worst of a plain
sleep of the same length, measured in between: what the machine itself is late by. The
promise is 50 ms on an idle machine.
"""

import argparse
import asyncio
import importlib.util
import json
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import trio

from infinistore import DeadlineExceeded, aio, blocking, open_store
from infinistore.protocol.codec import encode_head
from infinistore.protocol.messages import HelloReply

DEADLINE_S = 0.25
PROMISED_MS = 50.0
MIB = 1024 * 1024
_LARGE = bytes(64 * MIB)
_HELLO = HelloReply("bench", "0", MIB, 1000, 1 << 30, 1 << 30)


@contextmanager
def silent() -> Iterator[str]:
    """A server that lets the kernel accept, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def blackhole() -> Iterator[str]:
    """A listener whose backlog is full: who connects gets no answer."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def polite() -> Iterator[str]:
    """A server that answers the hello, and then neither reads nor says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        open_sockets: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    open_sockets.append(sock)
                    sock.recv(4096)
                    sock.sendall(encode_head(_HELLO, request_id=1))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in open_sockets:
                sock.close()


def overshoot_ms(start: float) -> float:
    """Milliseconds beyond the deadline of a call that began at `start`."""
    return (time.perf_counter() - start - DEADLINE_S) * 1000


async def late(call: Callable[[], Awaitable[object]]) -> float:
    """Await a call that runs into its deadline; return by how much it was late."""
    start = time.perf_counter()
    try:
        await call()
    except DeadlineExceeded:
        return overshoot_ms(start)
    raise AssertionError("the call came back before its deadline")


class _Awaitable:
    def __init__(self, store: blocking.BlockingStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any) -> Any:
            return getattr(self._store, name)(*arguments)

        return call


Body = Callable[[Any], Awaitable[float]]


async def _nothing(_: object) -> float:
    raise AssertionError("the store opened")


def run(kind: str, url: str, body: Body) -> float:
    """Open a store of this kind and run `body` in its loop; an opening that is late is
    what is measured.
    """
    start = time.perf_counter()
    try:
        if kind == "blocking":
            with blocking.open_store(url, deadline_s=DEADLINE_S) as store:
                try:
                    body(_Awaitable(store)).__await__().send(None)
                except StopIteration as stop:
                    return float(stop.value)
                raise AssertionError("a blocking store waited for a loop")

        async def in_trio() -> float:
            async with open_store(url, deadline_s=DEADLINE_S) as store:
                return await body(store)

        async def in_asyncio() -> float:
            async with aio.open_store(url, deadline_s=DEADLINE_S) as store:
                return await body(store)

        if kind == "trio":
            return trio.run(in_trio)
        factory = importlib.import_module("uvloop").new_event_loop if kind == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(in_asyncio())
    except DeadlineExceeded:
        return overshoot_ms(start)


PEERS: dict[str, tuple[Callable[[], Any], Body]] = {
    "connect to a blackhole": (blackhole, _nothing),
    "hello that never comes": (silent, _nothing),
    "get without an answer": (polite, lambda store: late(lambda: store.get("key"))),
    "exists without an answer": (polite, lambda store: late(lambda: store.exists("key"))),
    "put into full buffers": (polite, lambda store: late(lambda: store.put("key", _LARGE))),
}


def main() -> None:
    """Run, and print a line for each client and peer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else 15
    kinds = ["trio", "blocking", "asyncio"] + (["uvloop"] if importlib.util.find_spec("uvloop") else [])
    measured: dict[str, list[float]] = {}
    sleeps: list[float] = []
    for _ in range(rounds):
        for what, (peer, body) in PEERS.items():
            for kind in kinds:
                with peer() as url:
                    measured.setdefault(f"{kind}: {what}", []).append(run(kind, url, body))
        start = time.perf_counter()
        time.sleep(DEADLINE_S)
        sleeps.append(overshoot_ms(start))
    results = {
        name: {"median_ms": statistics.median(late_ms), "worst_ms": max(late_ms)} for name, late_ms in measured.items()
    }
    results["a plain sleep"] = {"median_ms": statistics.median(sleeps), "worst_ms": max(sleeps)}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"milliseconds beyond a deadline of {DEADLINE_S * 1000:g} ms, {rounds} rounds")
    for name, figures in results.items():
        late_ms = figures["worst_ms"]
        verdict = "" if late_ms <= PROMISED_MS else f"   over the promised {PROMISED_MS:g}"
        print(f"{name:36} median {figures['median_ms']:7.1f}   worst {late_ms:7.1f}{verdict}")


if __name__ == "__main__":
    main()
