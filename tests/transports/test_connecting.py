"""Connecting fails alike under Trio, asyncio and in threads: with the address, and what
to look at.
"""

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets import asyncio_streams, blocking_streams, trio_streams
from infinistore.transports.sockets.spin import Spinner


@attrs.frozen
class Library:
    """How one library connects."""

    name: str
    tcp: Callable[[str, int], object]
    unix: Callable[[str], object]


def deadline() -> float:
    return time.monotonic() + 1e6  # real time: never reached


LIBRARIES = [
    Library(
        "Trio",
        lambda host, port: trio.run(partial(trio_streams.connect_tcp, host, port)),
        lambda path: trio.run(partial(trio_streams.connect_unix, path)),
    ),
    Library(
        "asyncio",
        lambda host, port: asyncio.run(asyncio_streams.connect_tcp(host, port, Spinner())),
        lambda path: asyncio.run(asyncio_streams.connect_unix(path, Spinner())),
    ),
    Library(
        "threads",
        lambda host, port: blocking_streams.connect_tcp(host, port, deadline()),
        lambda path: blocking_streams.connect_unix(path, deadline()),
    ),
]
each_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)


@each_library
def test_connecting_where_nobody_listens_says_what_to_look_at(library: Library, tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(StoreUnavailable) as refused:
            library.tcp("127.0.0.1", port)
        said = f"cannot connect to 127.0.0.1:{port}: Connection refused; is the server running there?"
        assert str(refused.value) == said
    with pytest.raises(StoreUnavailable, match="is the server running there"):
        library.unix(str(tmp_path / "nothing"))
    with pytest.raises(StoreUnavailable):
        library.unix("/" + "long/" * 50)


@each_library
def test_a_client_out_of_descriptors_is_told_so(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(StoreUnavailable, match=r"Too many open files; .*ulimit -n"):
        library.unix("/nothing")


@each_library
@pytest.mark.parametrize("host", ["a" * 300, "name.invalid", "..", "a..b", "[", "\u2024", "-"])
def test_a_host_name_that_is_none_is_an_unavailable_store(library: Library, host: str) -> None:
    with pytest.raises(StoreUnavailable):
        library.tcp(host, 1)
