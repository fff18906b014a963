"""The stores, and how their servers are started: each a process of its own on loopback,
with the same amount of memory.
"""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from peers import original
from peers.work import MIB, POOL_BYTES, SOURCE_BYTES

HERE = "127.0.0.1"
SHARDS = (2, 4, 8, 16)
_START_S = 20.0


class Missing(Exception):
    """A store that is not installed, or does not start; the text says what helps."""


class Server(NamedTuple):
    """A server that runs: where clients find it, and its processes."""

    address: str
    processes: Sequence[int] = ()
    pool_bytes: int = 0
    """What it has taken from the start, whether there are blocks or not."""


class System(NamedTuple):
    """A store as one of its clients sees it."""

    name: str
    client: str
    """Its class in `clients.py`."""
    server: str
    """What is started for it; those with the same share it."""
    address: Callable[[str], str] = lambda address: address
    operations: Sequence[str] = ("put", "get", "mix", "exists")
    batches_only: bool = False
    most_clients: int = 64
    ours: bool = False
    python: str = sys.executable
    """What runs its clients."""
    limit: bool = False
    """It does less than any store: what could be reached at best."""
    shards: int = 1


def _with(**options: str) -> Callable[[str], str]:
    return lambda address: address + "".join(f"{'&' if '?' in address else '?'}{k}={v}" for k, v in options.items())


SYSTEMS = (
    System("TCP", "InfiniStore", "tcp", ours=True),
    System("TCP, objects", "InfiniStoreObjects", "tcp", operations=("get",), ours=True),
    *(System(f"TCP, {n} shards", "InfiniStore", f"shards {n}", ours=True, shards=n) for n in SHARDS),
    System("Unix socket", "InfiniStore", "unix", ours=True),
    System("shared memory", "InfiniStore", "shm", ours=True),
    System("shared memory, asking", "InfiniStore", "shm", _with(known_blocks="0"), ("get", "exists"), ours=True),
    System("shared memory, objects", "InfiniStoreObjects", "shm", operations=("get",), ours=True),
    System("lease", "InfiniStoreLease", "shm", operations=("get",), ours=True),
    System("embedded", "InfiniStore", "none", most_clients=1, ours=True),
    System("cluster of 3, TCP", "InfiniStore", "cluster", ours=True),
    System("Redis", "Redis", "redis"),
    System("Redis, pipeline", "RedisPipeline", "redis", operations=("put", "get", "mix"), batches_only=True),
    System("memcached, pymemcache", "Pymemcache", "memcached", operations=("put", "get", "mix")),
    System("memcached, pylibmc", "Pylibmc", "memcached", operations=("put", "get", "mix")),
    System("Mooncake", "Mooncake", "mooncake"),
    System("the original", "Original", "original", operations=("put", "get", "exists"), python=str(original.PYTHON)),
    System("raw sockets", "RawSockets", "raw", operations=("put", "get", "exists"), limit=True),
    System("memcpy", "Memcpy", "none", operations=("put", "get"), limit=True),
)


@contextmanager
def servers(names: set[str], folder: Path) -> Iterator[tuple[dict[str, Server], dict[str, str]]]:
    """Start these servers; give where they are, and why those that are missing are."""
    running: dict[str, Server] = {}
    missing: dict[str, str] = {}
    with ExitStack() as until_end:
        for name in sorted(names):
            try:
                running[name] = until_end.enter_context(_START[name](folder))
            except Missing as error:
                missing[name] = str(error)
        yield running, missing


@contextmanager
def _none(_: Path) -> Iterator[Server]:
    yield Server("")


@contextmanager
def _infinistore(folder: Path, scheme: str) -> Iterator[Server]:
    path = folder / f"{scheme}.sock"
    flags = ["--unix-socket", "off"] if scheme == "tcp" else ["--unix-socket", str(path)]
    with _one_infinistore(*flags) as (port, process):
        yield Server(f"tcp://{HERE}:{port}" if scheme == "tcp" else f"{scheme}://{path}", [process.pid], POOL_BYTES)


@contextmanager
def _one_infinistore(*flags: str, pool_bytes: int = POOL_BYTES) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
    command += ["--prealloc-size", f"{pool_bytes // MIB}MiB", "--minimal-allocate-size", "4KiB"]
    command += ["--log-level", "warning", *flags]
    with _process(command) as process:
        assert process.stdout is not None
        listening = json.loads(process.stdout.readline())["listening"]
        yield int(next(url for url in listening if url.startswith("tcp:")).rpartition(":")[2]), process


@contextmanager
def _shards(_: Path, count: int) -> Iterator[Server]:
    with _one_infinistore("--unix-socket", "off", "--shards", str(count)) as (port, process):
        files = Path(f"/proc/{process.pid}/task").glob("*/children")
        shards = [int(child) for file in files for child in file.read_text().split()]
        yield Server(f"tcp://{HERE}:{port}", [process.pid, *shards], POOL_BYTES)


@contextmanager
def _cluster(folder: Path) -> Iterator[Server]:
    """Three servers, which clients know by a list."""
    with ExitStack() as until_end:
        nodes = [
            until_end.enter_context(_one_infinistore("--unix-socket", "off", pool_bytes=POOL_BYTES // 2))
            for _ in range(3)
        ]
        addresses = ",".join(f"{HERE}:{port}" for port, _ in nodes)
        yield Server(f"infinistore+static://{addresses}", [process.pid for _, process in nodes], 3 * (POOL_BYTES // 2))


@contextmanager
def _redis(folder: Path) -> Iterator[Server]:
    _module("redis", "make compare")
    program = _program("redis-server", "apt-get install redis-server")
    port = free_port()
    command = [program, "--port", str(port), "--bind", HERE, "--save", "", "--dir", str(folder)]
    command += ["--maxmemory", str(POOL_BYTES), "--maxmemory-policy", "allkeys-lru"]
    with _process(command) as process:
        _wait_for(port, process)
        yield Server(f"{HERE}:{port}", [process.pid])


@contextmanager
def _memcached(_: Path) -> Iterator[Server]:
    _module("pymemcache", "make compare")
    program = _program("memcached", "apt-get install memcached")
    port = free_port()
    command = [program, "-l", HERE, "-p", str(port), "-U", "0", "-m", str(POOL_BYTES // MIB), "-I", "64m", "-u", "root"]
    with _process(command) as process:
        _wait_for(port, process)
        yield Server(f"{HERE}:{port}", [process.pid])


@contextmanager
def _mooncake(_: Path) -> Iterator[Server]:
    """A master, and a process that has the memory."""
    spec = _module("mooncake", "make compare")
    assert spec.submodule_search_locations is not None
    master = Path(next(iter(spec.submodule_search_locations))) / "mooncake_master"
    port = free_port()
    command = [str(master), f"--rpc_port={port}", f"--metrics_port={free_port()}", "--default_kv_lease_ttl=1000"]
    segment = (
        "import sys; from mooncake.store import MooncakeDistributedStore as Store; store = Store(); "
        f"failed = store.setup('{HERE}', 'P2PHANDSHAKE', {POOL_BYTES}, 64 << 20, 'tcp', '', '{HERE}:{port}'); "
        "print(failed, flush=True); sys.stdin.read(); store.close()"
    )
    with _process(command) as leader:
        _wait_for(port, leader)
        with _process([sys.executable, "-c", segment], stdin=subprocess.PIPE) as process:
            assert process.stdout is not None
            if (answer := _last_line(process)) != "0":
                raise Missing(f"Mooncake's store answered {answer}")
            yield Server(f"{HERE}:{port}", [leader.pid, process.pid])


@contextmanager
def _original(folder: Path) -> Iterator[Server]:
    installed = original.installed()
    if installed is None:
        raise Missing("it is not installed: make compare, with Python 3.12 at most, on x86-64")
    device = original.rdma_device()
    port, manage_port = free_port(), free_port()
    # -P: nothing from the folder that this was started in, which may have this store under that name.
    command = [str(original.PYTHON), "-P", "-m", "infinistore.server", "--service-port", str(port), "--host", HERE]
    command += ["--manage-port", str(manage_port), "--prealloc-size", str(POOL_BYTES // (1024 * MIB))]
    command += ["--minimal-allocate-size", "16"]  # KiB: it takes no less
    if device is not None:
        command += ["--dev-name", device.name, "--link-type", device.link_type]
    with (folder / "original.log").open("w+") as log, _process(command, log=log) as process:
        try:
            _wait_for(manage_port, process)  # the other one listens before the server looks for a device
        except Missing as error:
            log.seek(0)
            raise Missing(f"the server of {installed} does not start: {original.said_of_its_end(log)}") from error
        yield Server(f"{HERE}:{port}", [process.pid])


_RAW_SERVER = """
import mmap, socket, struct, sys, threading
import numpy as np
head = struct.Struct("<cQQ47x")
length = int(sys.argv[1])
with open(sys.argv[2], "rb") as file:
    stored = memoryview(bytearray(file.read()))
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    room = memoryview(mmap.mmap(-1, length))
    request, at = bytearray(64), 0
    while sock.recv_into(request, 64, socket.MSG_WAITALL):
        kind, first, count = head.unpack(request)
        if kind == b"g":
            while count:
                sent = sock.send(stored[first : first + count])
                first, count = (first + sent) % len(stored), count - sent
        else:
            at = at if at + count <= length else 0
            done = 0
            while done < count:
                done += sock.recv_into(room[at + done : at + count])
            at += count
            sock.sendall(request)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@contextmanager
def _raw(folder: Path) -> Iterator[Server]:
    with _process([sys.executable, "-c", _RAW_SERVER, str(SOURCE_BYTES), str(folder / "source")]) as process:
        yield Server(f"{HERE}:{_last_line(process)}", [process.pid])


_START: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    **{f"shards {count}": partial(_shards, count=count) for count in SHARDS},
    "none": _none,
    "tcp": lambda folder: _infinistore(folder, "tcp"),
    "unix": lambda folder: _infinistore(folder, "unix"),
    "shm": lambda folder: _infinistore(folder, "shm"),
    "cluster": _cluster,
    "redis": _redis,
    "memcached": _memcached,
    "mooncake": _mooncake,
    "original": _original,
    "raw": _raw,
}


@contextmanager
def _process(
    command: list[str], stdin: int | None = subprocess.DEVNULL, log: IO[str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """Run a server, which writes to a log or else to a pipe."""
    out, err = (subprocess.PIPE, subprocess.DEVNULL) if log is None else (log, subprocess.STDOUT)
    with subprocess.Popen(command, stdin=stdin, stdout=out, stderr=err, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def _last_line(process: "subprocess.Popen[str]") -> str:
    """Return the first line that is a number: libraries write to standard output, too."""
    assert process.stdout is not None
    return next((text for line in process.stdout if (text := line.strip()).lstrip("-").isdigit()), "nothing")


def process_cpu_s(process: int) -> float:
    """Return the processor time that all threads of a process have used."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(schedule.read_text().split()[0]) for schedule in threads) / 1e9


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server((HERE, 0)) as free:
        return int(free.getsockname()[1])


def _wait_for(port: int, process: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection((HERE, port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise Missing(f"{process.args} does not listen")  # type: ignore[str-bytes-safe] # a list


def _program(name: str, remedy: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Missing(f"{name} is not installed: {remedy}")
    return found


def _module(name: str, remedy: str) -> importlib.machinery.ModuleSpec:
    found = importlib.util.find_spec(name)
    if found is None:
        raise Missing(f"{name} is not installed here: {remedy}")
    return found
