"""The peer of the raw sockets in `infinistore bench`: another process.

A request is nine bytes: `p` or `g` and a length. After `p` follow that many bytes,
which the peer receives and answers with one byte. `g` is answered with that many bytes.
The process listens on a free port of 127.0.0.1 or on a Unix socket, prints its address,
and ends with its standard input, so that it cannot outlive the benchmark.
"""

import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_REQUEST: Final = struct.Struct("<cQ")


class RawClient:
    """One blocking connection to the peer. Not thread-safe."""

    def __init__(self, address: str) -> None:
        self._socket = _connect(address)

    def put(self, data: memoryview) -> None:
        """Send `data`, and wait until the peer has received it."""
        self._socket.sendall(_REQUEST.pack(b"p", len(data)))
        self._socket.sendall(data)
        if not self._socket.recv(1):
            raise ConnectionError("the raw peer is gone")

    def get(self, buffer: memoryview) -> None:
        """Fill `buffer` from the peer."""
        self._socket.sendall(_REQUEST.pack(b"g", len(buffer)))
        _receive(self._socket, buffer)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@contextmanager
def raw_peer(*, unix: bool) -> Iterator[str]:
    """Run the peer in a separate process. Yields its address for `RawClient`."""
    arguments = [sys.executable, "-m", "infinistore.cli.raw_peer", "unix" if unix else "tcp"]
    # A session of its own: Ctrl-C is for the benchmark, which then ends the peer.
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.stdin.close()
            process.wait()  # after Ctrl-C, Popen would wait a quarter of a second at most


def _connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect("\0" + address.removeprefix("unix:"))
        return connection
    connection = socket.create_connection(("127.0.0.1", int(address)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        received = connection.recv_into(buffer[filled:])
        if not received:
            raise ConnectionError("the raw peer is gone")
        filled += received


def _answer(connection: socket.socket) -> None:
    header = bytearray(_REQUEST.size)
    room = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        while True:
            _receive(connection, memoryview(header))
            operation, length = _REQUEST.unpack(header)
            if length > len(room):
                room = mmap.mmap(-1, length)  # page-aligned, as the memory of a store is
            view = memoryview(room)[:length]
            if operation == b"p":
                _receive(connection, view)
                connection.sendall(b".")
            else:
                connection.sendall(view)
    except OSError:  # the benchmark is done with this connection
        connection.close()


def _listen(kind: str) -> tuple[socket.socket, str]:
    if kind == "unix":
        name = f"infinistore-bench-{os.getpid()}"  # in the abstract namespace: nothing to clean up
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen()
        return listener, f"unix:{name}"
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, str(listener.getsockname()[1])


def _accept_for_ever(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _main() -> None:
    listener, address = _listen(sys.argv[1])
    print(address, flush=True)
    threading.Thread(target=_accept_for_ever, args=(listener,), daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    _main()
