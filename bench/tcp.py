"""The blocking client over TCP, against raw blocking sockets that move the same bytes
in the same pattern.

    python bench/tcp.py [--quick] [--json]

The server of the store and the raw server are processes of their own, on loopback. A
raw put sends the blocks in one sendmsg and waits for 64 bytes; a raw get sends 64 bytes
and receives into the same buffers. The raw server walks through a span of memory as
large as the pool, so that both have the same caches. Ratios are rates: store / raw, 1.0
is as fast.
"""

import argparse
import json
import mmap
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from infinistore.blocking import BlockingStore, open_store
from rounds import interleaved, taking_turns

POOL_BYTES = 512 * 1024 * 1024
KIB, MIB = 1024, 1024 * 1024
_HEAD = struct.Struct("<cQ55x")
_RAW_SERVER = """
import mmap, socket, struct, sys
head = struct.Struct("<cQ55x")
pool = memoryview(mmap.mmap(-1, int(sys.argv[1])))
pool[:] = bytes(len(pool))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
at = 0
request = bytearray(64)
echo = memoryview(bytearray(1 << 20))
while sock.recv_into(request, 64, socket.MSG_WAITALL):
    kind, count = head.unpack(request)
    if kind == b"e":
        sock.recv_into(echo, count, socket.MSG_WAITALL)
        sock.sendall(echo[:count])
        continue
    if at + count > len(pool):
        at = 0
    if kind == b"p":
        done = 0
        while done < count:
            done += sock.recv_into(pool[at + done : at + count])
        sock.sendall(request)
    else:
        sock.sendall(pool[at : at + count])
    at += count
"""


class Raw:
    """The yardstick: a plain socket to the raw server."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reply = bytearray(64)

    def put(self, views: list[memoryview]) -> None:
        """Send the blocks, wait for the reply."""
        count = sum(map(len, views))
        sent = self._sock.sendmsg([_HEAD.pack(b"p", count), *views])
        assert sent == 64 + count
        self._sock.recv_into(self._reply, 64, socket.MSG_WAITALL)

    def get(self, views: list[memoryview]) -> None:
        """Ask for the blocks, receive them."""
        count = sum(map(len, views))
        self._sock.sendall(_HEAD.pack(b"g", count))
        got = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        assert got == count

    def echo(self, data: bytes) -> None:
        """Send bytes and receive them back."""
        self._sock.sendall(_HEAD.pack(b"e", len(data)) + data)
        received = 0
        buffer = bytearray(len(data))
        while received < len(data):
            received += self._sock.recv_into(memoryview(buffer)[received:])

    def close(self) -> None:
        """Hang up, which ends the raw server."""
        self._sock.close()


@contextmanager
def servers() -> Iterator[tuple[str, int]]:
    """Start the store's server and the raw one; give the URL of the one and the port of
    the other.
    """
    store = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "0", "--unix-socket", "off"]
    store += ["--prealloc-size", str(POOL_BYTES // MIB) + "MiB", "--log-level", "warning"]
    with (
        subprocess.Popen(store, stdout=subprocess.PIPE, text=True) as ours,
        subprocess.Popen(
            [sys.executable, "-c", _RAW_SERVER, str(POOL_BYTES)], stdout=subprocess.PIPE, text=True
        ) as raw,
    ):
        try:
            assert ours.stdout is not None and raw.stdout is not None
            line = next(line for line in ours.stdout if "tcp://" in line)
            yield "tcp://" + line.split("tcp://")[1].split()[0].rstrip(",;"), int(raw.stdout.readline())
        finally:
            ours.terminate()
            raw.terminate()


def blocks(count: int, size: int) -> list[memoryview]:
    """Make page-aligned blocks."""
    memory = memoryview(mmap.mmap(-1, count * size))
    memory[:] = bytes(range(256)) * (count * size // 256)
    return [memory[i * size : (i + 1) * size] for i in range(count)]


def batches(store: BlockingStore, raw: Raw, count: int, size: int, rounds: int) -> dict[str, float]:
    """Measure put_many and get_many_into of one batch; returns medians in seconds."""
    source, target = blocks(count, size), blocks(count, size)
    room = POOL_BYTES // 2 // (count * size)  # half of the pool, so that nothing is evicted
    keys = [[f"bench/{size}/{number}/{i}" for i in range(count)] for number in range(room)]
    # Made beforehand: what is measured begins with a list of pairs.
    puts = [list(zip(batch, source, strict=True)) for batch in keys]
    gets = [list(zip(batch, target, strict=True)) for batch in keys]
    for put in puts:
        store.put_many(put)
    return interleaved(
        {
            "raw put": lambda: raw.put(source),
            "put": taking_turns(store.put_many, puts),
            "raw get": lambda: raw.get(target),
            "get": taking_turns(store.get_many_into, gets),
        },
        rounds=rounds,
        calls=max(2, 32 * MIB // (count * size)),
    )


def lookups(store: BlockingStore, raw: Raw, rounds: int) -> dict[str, float]:
    """Measure look-ups of 1,000 keys of 40 bytes; returns medians in seconds."""
    keys = [f"model/qwen2.5-7b/chunk/{i:017d}" for i in range(1000)]
    assert {len(key) for key in keys} == {40}
    for first in range(0, 1000, 100):
        store.put_many([(key, b"x" * 64) for key in keys[first : first + 100]])
    assert store.match_prefix(keys) == 1000
    data = b"k" * 42_000  # what the keys take on the wire
    return interleaved(
        {
            "raw echo": lambda: raw.echo(data),
            "match_prefix": lambda: store.match_prefix(keys),
            "exists_many": lambda: store.exists_many(keys),
        },
        rounds=rounds,
        calls=50,
    )


def main() -> None:
    """Run, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else 25
    results: dict[str, float] = {}
    with servers() as (url, port):
        raw = Raw(port)
        for verify in ("never", "always"):
            with open_store(f"{url}?verify={verify}") as store:
                for count, size, name in ((64, 64 * KIB, "64 x 64 KiB"), (16, MIB, "16 x 1 MiB")):
                    medians = batches(store, raw, count, size, rounds)
                    checked = "checked" if verify == "always" else "unchecked"
                    for kind in ("put", "get"):
                        results[f"{kind} {name} {checked} / raw"] = medians[f"raw {kind}"] / medians[kind]
                        results[f"{kind} {name} {checked} GB/s"] = count * size / medians[kind] / 1e9
                    store.purge()
                if verify == "never":
                    medians = lookups(store, raw, rounds)
                    results["raw echo us"] = medians["raw echo"] * 1e6
                    for kind in ("match_prefix", "exists_many"):
                        above_s = medians[kind] - medians["raw echo"]
                        results[f"{kind} of 1,000 keys, us above the echo"] = above_s * 1e6
        raw.close()
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:55} {value:8.2f}")


if __name__ == "__main__":
    main()
