"""Batches over TLS against the same batches in the clear, by the blocking client; and
against the TLS of redis-server, if it is installed.

    python bench/tls.py [--quick] [--json]

All servers are processes of their own, on loopback, and take turns. Redis gets MSET and
MGET from a bare `ssl.SSLSocket` that sends each block from where it lies and receives
into buffers: less work than any client library does. The store runs as users run it,
with checksums. Ratios are rates: 1.0 is as fast.
"""

import argparse
import json
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import trustme

from infinistore.blocking import BlockingStore, open_store
from rounds import interleaved, taking_turns
from tcp import KIB, MIB, POOL_BYTES, blocks

_HOST = "127.0.0.1"


class Redis:
    """A connection to redis-server that does nothing more than it must."""

    def __init__(self, port: int, ca: Path) -> None:
        context = ssl.create_default_context(cafile=str(ca))
        self._sock = context.wrap_socket(socket.create_connection((_HOST, port)), server_hostname=_HOST)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(64 * MIB))

    def put(self, pairs: Sequence[tuple[bytes, memoryview]]) -> None:
        """MSET."""
        head = b"*%d\r\n$4\r\nMSET\r\n" % (1 + 2 * len(pairs))
        for key, view in pairs:
            self._sock.sendall(head + b"$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(view)))
            self._sock.sendall(view)
            head = b"\r\n"
        self._sock.sendall(b"\r\n")
        answer = self._sock.recv(5)
        assert answer == b"+OK\r\n", answer

    def get(self, keys: Sequence[bytes], size: int) -> None:
        """MGET of blocks of one size."""
        request = b"*%d\r\n$4\r\nMGET\r\n" % (1 + len(keys))
        self._sock.sendall(request + b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys))
        one = len(b"$%d\r\n" % size) + size + 2
        left = len(b"*%d\r\n" % len(keys)) + one * len(keys)
        at = 0
        while left:
            count = self._sock.recv_into(self._buffer[at : at + left])
            assert count
            at += count
            left -= count


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a server."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.terminate()


@contextmanager
def store_server(*more: str) -> Iterator[int]:
    """Start a server of the store; give its port."""
    command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
    command += ["--unix-socket", "off", "--prealloc-size", f"{POOL_BYTES // MIB}MiB", "--log-level", "warning", *more]
    with process(command) as server:
        assert server.stdout is not None
        url: str = json.loads(server.stdout.readline())["listening"][0]
        yield int(url.rpartition(":")[2])


@contextmanager
def redis_server(folder: Path) -> Iterator[Redis | None]:
    """Start Redis with TLS; None if it is not installed."""
    if shutil.which("redis-server") is None:
        yield None
        return
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    command = ["redis-server", "--port", "0", "--tls-port", str(port), "--save", "", "--bind", _HOST]
    command += ["--tls-cert-file", f"{folder}/server.pem", "--tls-key-file", f"{folder}/server.key"]
    command += ["--tls-ca-cert-file", f"{folder}/ca.pem", "--tls-auth-clients", "no", "--dir", str(folder)]
    with process(command):
        yield _when_ready(port, folder / "ca.pem")


def _when_ready(port: int, ca: Path) -> Redis:
    for _ in range(100):
        try:
            return Redis(port, ca)
        except OSError:
            time.sleep(0.1)
    raise SystemExit("redis-server does not listen; has it TLS?")


def measure(plain: BlockingStore, secure: BlockingStore, redis: Redis | None, *, shape: Any, rounds: int) -> Any:
    """Measure one shape of batch; returns medians in seconds."""
    count, size = shape
    source, target = blocks(count, size), blocks(count, size)
    room = POOL_BYTES // 4 // (count * size)
    keys = [[f"bench/{size}/{number}/{i}" for i in range(count)] for number in range(room)]
    puts = [list(zip(batch, source, strict=True)) for batch in keys]
    gets = [list(zip(batch, target, strict=True)) for batch in keys]
    things: dict[str, Any] = {}
    for name, store in (("plain", plain), ("TLS", secure)):
        for put in puts:
            store.put_many(put)
        things[f"put {name}"] = taking_turns(store.put_many, puts)
        things[f"get {name}"] = taking_turns(store.get_many_into, gets)
    if redis is not None:
        pairs = [[(key.encode(), view) for key, view in put] for put in puts]
        names = [[key.encode() for key in batch] for batch in keys]
        for pair in pairs:
            redis.put(pair)
        things["put Redis"] = taking_turns(redis.put, pairs)
        things["get Redis"] = taking_turns(lambda batch: redis.get(batch, size), names)
    return interleaved(things, rounds=rounds, calls=max(2, 16 * MIB // (count * size)))


def main() -> None:
    """Run, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results: dict[str, float] = {}
    with ExitStack() as until_end:
        folder = Path(until_end.enter_context(tempfile.TemporaryDirectory()))
        authority = trustme.CA()
        made = authority.issue_cert(_HOST)
        made.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
        made.private_key_pem.write_to_path(str(folder / "server.key"))
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        plain_port = until_end.enter_context(store_server())
        files = ("--tls-cert", f"{folder}/server.pem", "--tls-key", f"{folder}/server.key")
        secure_port = until_end.enter_context(store_server(*files))
        redis = until_end.enter_context(redis_server(folder))
        plain = until_end.enter_context(open_store(f"tcp://{_HOST}:{plain_port}"))
        secure = until_end.enter_context(open_store(f"infinistores://{_HOST}:{secure_port}?ca={folder}/ca.pem"))
        for count, size, name in ((64, 64 * KIB, "64 x 64 KiB"), (16, MIB, "16 x 1 MiB"), (64, 4 * KIB, "64 x 4 KiB")):
            medians = measure(plain, secure, redis, shape=(count, size), rounds=5 if arguments.quick else 25)
            for kind in ("put", "get"):
                for other in ("plain", "Redis"):
                    if f"{kind} {other}" in medians:
                        results[f"{kind} {name}, TLS / {other}"] = medians[f"{kind} {other}"] / medians[f"{kind} TLS"]
                results[f"{kind} {name}, TLS GB/s"] = count * size / medians[f"{kind} TLS"] / 1e9
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:45} {value:8.2f}")


if __name__ == "__main__":
    main()
