"""The pins that clients set by themselves: a store looks at them when it matters, and takes them for its own then.

It matters before room is used again, when somebody asks for more than they may hold, and for the statistics. What a
client tells is not believed: what cannot be a block of the pool is passed over, and who tells of more than the pool
has pins nothing.
"""

from collections.abc import Callable

from infinistore.core.clients import Client, OwnRead
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool
from infinistore.core.room import Room

__all__ = ["OwnPins"]


class OwnPins:
    """The clients that may pin by themselves, and what they pin."""

    def __init__(self, pool: Pool, pins: PinTable, room: Room) -> None:
        self._pool = pool
        self._pins = pins
        self._room = room
        self._clients: list[Client] = []

    def add(self, client: Client, look: Callable[[], list[OwnRead]]) -> None:
        """Have what `look` tells respected from now on."""
        client.look = look
        self._clients.append(client)

    def remove(self, client: Client) -> None:
        """Look a last time, and let go of what a client pins, if it is one that may."""
        if client.look is not None:
            client.look()  # for what it tells meanwhile
            client.look = None
            self._set(client, [])
            self._clients.remove(client)

    def look(self) -> None:
        """Bring up to date what all of them pin."""
        for client in self._clients:
            self.look_at(client)

    def look_at(self, client: Client) -> None:
        """Bring up to date what one client pins."""
        if client.look is not None:
            reading = client.look()
            if reading != client.reading:
                self._set(client, reading)

    def _set(self, client: Client, reading: list[OwnRead]) -> None:
        lengths = [arena.length for arena in self._pool.arenas]
        entries = [
            (arena, offset, length, checksum)
            for arena, offset, length, checksum, _ in reading
            if arena < len(lengths) and length and offset + length <= lengths[arena]
        ]
        if sum(length for _, _, length, _ in set(entries)) > self._pool.capacity_bytes:
            entries = []
        before = client.own_pins
        client.reading, client.own_pins = reading, entries
        footprint_bytes, footprint_bytes_before = map(self._pins.footprint, (entries, before))
        self._pins.add(entries, footprint_bytes)  # first, lest room be freed that is still pinned
        self._room.unpin(before, footprint_bytes_before)
        client.leased_bytes += footprint_bytes - footprint_bytes_before
