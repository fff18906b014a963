"""A server process, and clients that are killed in the middle of what they do: real
processes, sockets, signals.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.core import StoreStatistics
from infinistore.errors import StoreUnavailable
from tests import warm
from tests.end_to_end.conftest import SERVER, started

MIB = 1024 * 1024

# Sends the head of a put and half of its payload, says so, and waits to be killed.
_HALF_A_PUT = """
import socket, sys
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import Hello, Keys, Put

host, port = sys.argv[1].removeprefix("tcp://").split(":")
sock = socket.create_connection((host, int(port)))
sock.sendall(encode_head(Hello("victim"), request_id=1))
assert sock.recv(65536)
size = 8 << 20
sock.sendall(encode_head(Put(Keys(["half"]), pack_u64([size]), checksums=False), request_id=2, payload_bytes=size))
sock.sendall(bytes(size // 2))
print("half", flush=True)
sys.stdin.read()
"""

# Puts and gets for ever, and says when it has begun.
_BUSY = """
import sys
from infinistore import blocking

with blocking.open_store(sys.argv[1]) as store:
    number = 0
    while True:
        number += 1
        store.put_many({f"busy/{i}": bytes([number % 256]) * (1 << 20) for i in range(4)})
        store.get_many([f"busy/{i}" for i in range(4)])
        if number == 3:
            print("busy", flush=True)
"""


@contextmanager
def client(script: str, url: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a client in a process, wait until it says that it has begun; it is killed in
    the end.
    """
    with warm.Popen(
        [sys.executable, "-P", "-c", script, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def wait_until(store: BlockingStore, reached: Callable[[StoreStatistics], bool]) -> None:
    """Ask the server until it is so; pytest's timeout bounds it."""
    while not reached(store.stats().store):
        pass


def test_a_client_that_is_killed_in_the_middle_of_a_put_leaves_nothing(url: str) -> None:
    with blocking.open_store(url) as store:
        store.put("canary", b"canary" * 1000)
        free = store.stats().store.used_bytes
        with client(_HALF_A_PUT, url) as process:
            wait_until(store, lambda statistics: statistics.reservations == 1)
            assert store.stats().store.used_bytes == free + 8 * MIB
            process.send_signal(signal.SIGKILL)
            wait_until(store, lambda statistics: statistics.reservations == 0)
        assert store.stats().store.used_bytes == free
        assert store.keys() == ["canary"]
        assert store.get("canary") == b"canary" * 1000
        store.purge()


def test_clients_that_are_killed_while_busy_leave_no_pins_and_no_torn_values(url: str) -> None:
    with blocking.open_store(url) as store:
        store.put("canary", b"canary" * 1000)
        for _ in range(3):
            with client(_BUSY, url) as process:
                process.send_signal(signal.SIGKILL)
            wait_until(store, lambda statistics: statistics.clients <= 2)
            statistics = store.stats().store
            assert (statistics.reservations, statistics.leases, statistics.pinned_bytes) == (0, 0, 0)
            values = store.get_many([f"busy/{i}" for i in range(4)])
            assert len({bytes(value) for value in values if value is not None}) == 1  # one batch, whole
        assert store.get("canary") == b"canary" * 1000
        store.purge()


def test_a_server_that_is_told_to_stop_says_goodbye_and_ends_well(tmp_path: Path) -> None:
    with started(*SERVER, "--prealloc-size", "16MiB", "--log-level", "error") as server:
        assert server.stdout is not None
        address = re.search(r"tcp://[\d.]+:\d+", server.stdout.readline())
        assert address is not None
        with blocking.open_store(address.group(), deadline_s=60) as store:
            store.put("a", b"abc")
            server.send_signal(signal.SIGTERM)
            assert server.wait() == 0
            with pytest.raises(StoreUnavailable):
                store.put("b", b"abc")


def test_a_server_that_comes_back_is_found_by_the_clients_that_it_had(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    command = [*SERVER[:-1], str(socket), "--prealloc-size", "16MiB", "--log-level", "error"]
    with started(*command) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with blocking.open_store(f"unix://{socket}") as store:
            store.put("a", b"abc")
            server.send_signal(signal.SIGKILL)  # what it listened on stays there, dead
            server.wait()
            with started(*command) as successor:
                assert successor.stdout is not None
                successor.stdout.readline()
                assert store.get_many(["a"]) == [None]
                store.put("a", b"again")
                assert store.get("a") == b"again"
