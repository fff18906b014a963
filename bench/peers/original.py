"""The original InfiniStore: how it is called. Its server needs an RDMA device.

It is imported by the same name as this store, so that it is in an environment of its
own, and its clients run there. This store's drop-in client has the same API.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peers.clients import Call, Client
from peers.work import Shape

PYTHON = Path(__file__).resolve().parents[2] / ".venvs" / "original" / "bin" / "python"


class RdmaDevice(NamedTuple):
    """A device as the original is told of it."""

    name: str
    link_type: str


def rdma_device() -> RdmaDevice | None:
    """Return the first RDMA device of this machine."""
    for folder in sorted(Path("/sys/class/infiniband").glob("*")):
        layer = (folder / "ports" / "1" / "link_layer").read_text().strip()
        return RdmaDevice(folder.name, "Ethernet" if layer == "Ethernet" else "IB")
    return None


def installed() -> str | None:
    """Return the name and version of the package, if it is there."""
    found = PYTHON.parents[1].glob("lib/python3*/site-packages/infinistore-*.dist-info")
    return next((folder.name.removesuffix(".dist-info").replace("-", " ") for folder in found), None)


def said_of_its_end(log: Iterable[str]) -> str:
    """Return what a server wrote of its end: its errors, and its last line."""
    lines = [line.strip() for line in log if line.strip()]
    errors = [line.rpartition("] ")[2] for line in lines if "[error]" in line]
    return "; ".join([*errors, *lines[-1:]]) or "it says nothing"


class Original(Client):
    """The original InfiniStore, by RDMA."""

    def _connect(self, address: str) -> None:
        import infinistore

        host, _, port = address.rpartition(":")
        device = rdma_device() or RdmaDevice("", "Ethernet")
        config = infinistore.ClientConfig(
            host_addr=host,
            service_port=int(port),
            connection_type=infinistore.TYPE_RDMA,
            ib_port=1,
            link_type=device.link_type,
            dev_name=device.name,
            log_level="error",
        )
        self._loop = asyncio.new_event_loop()
        self._connection: Any = infinistore.InfinityConnection(config)
        self._connection.connect()
        self._written = np.array(np.frombuffer(self._source, np.uint8))  # what may only be read cannot be registered
        self._read = np.frombuffer(self._target, np.uint8)
        for memory in (self._written, self._read):
            self._connection.register_mr(memory.ctypes.data, len(memory))

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        blocks = [(key, place.start) for key, place in zip(keys, places, strict=True)]
        size, start = places[0].stop - places[0].start, self._written.ctypes.data
        write = self._connection.rdma_write_cache_async
        return lambda: self._loop.run_until_complete(write(blocks, size, start))

    def get(self, keys: Sequence[str], size: int) -> Call:
        blocks = [(key, number * size) for number, key in enumerate(keys)]
        start, read = self._read.ctypes.data, self._connection.rdma_read_cache_async
        return lambda: self._loop.run_until_complete(read(blocks, size, start))

    def blocks(self, result: object, shape: Shape) -> list[bytes]:
        return self._read_into_target(shape)

    def exists(self, key: str) -> Call | None:
        return lambda: self._connection.check_exist(key)

    def remove(self, keys: Sequence[str]) -> None:
        self._connection.delete_keys(list(keys))

    def close(self) -> None:
        self._connection.close()
        self._loop.close()
