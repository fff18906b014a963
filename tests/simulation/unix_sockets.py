"""Unix sockets: streams that pass descriptors between processes of one host.

Nothing cuts or corrupts them. They end when one of their ends is closed, by its process
or with it: that is what a server relies on that shares memory with its clients.
"""

import math
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from tests.simulation.network import Network, NetworkSettings
from tests.simulation.processes import Processes
from tests.simulation.streams import Connection, Pipe, SimulatedStream
from tests.simulation.world import World

__all__ = ["UnixNetwork"]

_LEAST_FOR_NOTICES = 4096


class UnixStream(SimulatedStream):
    """One end: an `infinistore.transports.base.DescriptorStream`, and as much of a
    socket as clients use.
    """

    passes_descriptors = True

    def __init__(self, connection: Connection, outgoing: Pipe, incoming: Pipe, *, from_client: bool) -> None:
        super().__init__(connection, outgoing, incoming, from_client=from_client)
        if from_client:
            # As many notices as are sent at once: the kernel has room for a thousand
            # times as many.
            outgoing.capacity_bytes = max(outgoing.capacity_bytes, _LEAST_FOR_NOTICES)

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send all of these views, in order. A system call is a fence."""
        self._unix.processes.fence()
        await super().send_all(views, within_s)

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Wait for at least one byte. Descriptors that come with it are lost."""
        found: list[int] = []
        count = await self.receive_descriptors(views, found, deadline)
        _close(found)
        return count

    async def send_descriptors(
        self, views: Sequence[memoryview], descriptors: Sequence[int], within_s: float = math.inf
    ) -> None:
        """Do as `send_all`, with descriptors attached to the first byte."""
        self._check()
        pipe = self.outgoing
        self._unix.passed.setdefault(pipe, []).append((pipe.taken_bytes, [os.dup(one) for one in descriptors]))
        await self.send_all(views, within_s)

    async def receive_descriptors(
        self, views: Sequence[memoryview], descriptors: list[int], deadline: float = math.inf
    ) -> int:
        """Do as `receive_into`, and append the descriptors that come with the bytes."""
        count = await super().receive_into(views, deadline)
        passed = self._unix.passed.pop(self.incoming, [])
        for ahead, found in passed:
            if ahead < count:
                descriptors += found
            else:
                self._unix.passed.setdefault(self.incoming, []).append((ahead - count, found))
        return count

    def stay_awake(self, seconds: float) -> None:
        """Do nothing: nobody sleeps deeply here."""

    def close(self) -> None:
        """Close this end."""
        super().close()
        for _, found in self._unix.passed.pop(self.incoming, []):
            _close(found)

    # As a socket, for clients

    def fileno(self) -> int:
        """Say that there is no descriptor."""
        return -1

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        """Tell the process, user and group of the other end."""
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("@iII", 1, os.geteuid(), os.getegid())

    def send(self, data: bytes, flags: int) -> int:
        """Send notices as a whole, or not at all."""
        assert flags == socket.MSG_DONTWAIT
        if self.closed or self.broken:
            raise BrokenPipeError
        pipe = self.outgoing
        if pipe.capacity_bytes - pipe.taken_bytes < len(data):
            raise BlockingIOError
        self._unix.processes.fence()
        network = self.connection.network
        network.world.trace.add(f"connection {self.connection.number}", "notices", len(data))
        self._send(pipe, data)
        return len(data)

    @property
    def _unix(self) -> "UnixNetwork":
        network = self.connection.network
        assert isinstance(network, UnixNetwork)
        return network


class UnixNetwork(Network):
    """The Unix sockets of one host."""

    stream_class = UnixStream

    def __init__(self, world: World, settings: NetworkSettings, processes: Processes) -> None:
        super().__init__(world, settings)
        self.processes = processes
        self.passed: dict[Any, list[tuple[int, list[int]]]] = {}
        """Descriptors on their way, and how many bytes are read before them."""

    def end(self, node: str) -> None:
        """A process has ended: the kernel closes its ends."""
        for connection in list(self.connections.values()):
            for end, owner in ((connection.client_end, connection.client), (connection.server_end, connection.server)):
                if owner == node:
                    end.close()

    def close(self) -> None:
        """Close the descriptors that nobody has taken."""
        for passed in self.passed.values():
            for _, found in passed:
                _close(found)
        self.passed.clear()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
