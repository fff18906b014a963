"""The server that the demonstration starts, with a disk or without one, and restarts.

A disk lies in a temporary folder that nobody else may enter, and that is removed at the
end.
"""

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import trio

from infinistore.demo.messages import DemoError
from infinistore.demo.processes import ServerProcess, start_server
from infinistore.demo.settings import DISK_RATIO
from infinistore.disk_settings import DiskPlace
from infinistore.errors import InfiniStoreException
from infinistore.sizes import MIB

__all__ = ["OwnServer", "own_server"]

_SMALLEST_DISK_BYTES = 256 * MIB


class OwnServer:
    """A server that runs, and the disk that it has, if any. Make one with
    `own_server`.
    """

    def __init__(self, nursery: trio.Nursery, pool_bytes: int, disk: DiskPlace | None) -> None:
        self.disk = disk
        self._nursery = nursery
        self._pool_bytes = pool_bytes
        self._process: ServerProcess

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it listens: the same after a restart."""
        return self._process.url

    async def start(self, port: int = 0) -> None:
        """Start it; raises `DemoError` if it does not start, and in the nursery if it
        ends.
        """
        self._process = await start_server(self._nursery, self._pool_bytes, port=port, disk=self.disk)
        self._nursery.start_soon(self._process.raise_when_ended)

    async def restart(self) -> None:
        """Stop it in an orderly way, and start another one at the same address."""
        await self._process.stop()
        await self.start(int(self.url.rpartition(":")[2]))

    async def raise_if_ended(self) -> None:
        """Raise `DemoError` if it has ended or is ending."""
        await self._process.raise_if_ended()


@asynccontextmanager
async def own_server(pool_bytes: int, *, disk: bool) -> AsyncIterator[OwnServer]:
    """Run a server, and end it. If it ends before, that is the error that is raised,
    whatever went wrong in consequence.
    """
    with ExitStack() as folders:
        place = None
        if disk:
            folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="infinistore-demo-"))
            place = DiskPlace(Path(folder, "disk"), max(DISK_RATIO * pool_bytes, _SMALLEST_DISK_BYTES))
        async with trio.open_nursery() as nursery:
            server = OwnServer(nursery, pool_bytes, place)
            await server.start()
            try:
                yield server
            except* (DemoError, InfiniStoreException):
                await server.raise_if_ended()
                raise
            nursery.cancel_scope.cancel()  # ends the server
