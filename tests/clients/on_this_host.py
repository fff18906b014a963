"""Servers and clients that share memory on this host, in this process and in others,
and what a process has of them.
"""

import gc
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import infinistore
from tests import warm
from tests.bad_days.servers import ServerProcess
from tests.server.running import RunningServer, make_config, running_server

__all__ = ["best", "mapped_pools", "open_files", "run_client", "server_process", "serving", "shm", "way"]


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncGenerator[RunningServer, None]:
    async with running_server(make_config(unix_socket=str(folder / "store.sock"), **settings)) as server:
        yield server


@contextmanager
def server_process(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server that can be killed and comes back at the same port, with a Unix
    socket.
    """
    server = ServerProcess("--unix-socket", str(folder / "store.sock"), *flags)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def shm(folder: Path) -> str:
    """The URL of either by shared memory."""
    return f"shm://{folder}/store.sock"


def best(server: RunningServer | ServerProcess) -> str:
    """The URL that leaves the way open."""
    return server.url.replace("tcp://", "infinistore://")


async def way(url: str) -> tuple[str, str]:
    """Which transport a store takes, and why; a block goes there and back."""
    async with infinistore.open_store(url) as store:
        await store.put("way", block := bytes(range(256)) * 1024)  # more than goes inline
        assert await store.get("way") == block
        stats = await store.stats()
        return stats.transport, stats.transport_reason


def run_client(url: str, code: str) -> subprocess.Popen[bytes]:
    """A client in a process of its own; `code` has `store`, and says on standard output
    where it has come.
    """
    program = f"import sys\nfrom infinistore import blocking\nwith blocking.open_store({url!r}) as store:\n{code}"
    return warm.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def open_files() -> int:
    """How many descriptors this process has. What an earlier test has left to a thread
    may be closed at any time, so that there are fewer later.
    """
    return len(os.listdir("/proc/self/fd"))


def mapped_pools() -> int:
    """How many mappings of arenas and tables this process has, that of what is garbage
    not counted.
    """
    gc.collect()
    return Path("/proc/self/maps").read_text().count("infinistore-")
