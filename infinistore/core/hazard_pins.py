"""Hazards: pins that clients set in shared memory, without a request.

The store scans them when it matters: before it uses space again, when somebody asks for
more than their share, and for the statistics. What it finds becomes pins of its own.

Clients are not trusted. A hazard counts if its block was committed and still has its
space: the block has a key, or is pinned, or is losing its key just now. So a block that
is pinned once stays pinned until the client takes the hazard away, whatever else the
client writes. All pins together never exceed the pool. Hazards for blocks that never
existed, or are long gone, are ignored.
"""

from collections import deque
from collections.abc import Callable

from infinistore.core.clients import Client, Hazard, entry_at
from infinistore.core.pins import PinTable
from infinistore.core.retired import Retired

__all__ = ["HazardPins"]

_MOST_CREDIT = 8192  # more than one client can have to read


class HazardPins:
    """The clients that may set hazards, and the blocks that these pin."""

    def __init__(self, pins: PinTable, retired: Retired) -> None:
        self._pins = pins
        self._retired = retired
        self.clients: deque[Client] = deque()
        """Those clients. Read it; change it only through `add` and `remove`."""
        self._credit = _MOST_CREDIT  # of `scan_in_turns`

    def add(self, client: Client, read_hazards: Callable[[], list[Hazard]], count_unread: Callable[[], int]) -> None:
        """Respect the hazards that `read_hazards` returns from now on."""
        client.read_hazards, client.count_unread = read_hazards, count_unread
        self.clients.append(client)

    def remove(self, client: Client) -> None:
        """Scan a client for the last time and drop its pins, if it may set hazards."""
        if client.read_hazards is not None:
            client.read_hazards()  # it also learns what the client has used meanwhile
            client.read_hazards = None
            self._set(client, [])
            self.clients.remove(client)
            self._retired.tidy()

    def scan(self, most_unread: int | None = None) -> None:
        """Update the pins of all clients, or of those that have at most `most_unread`
        hazards to read."""
        for client in self.clients:
            if most_unread is None or _unread(client) <= most_unread:
                self.scan_client(client)

    def unread(self, most: int) -> int:
        """Return about how many hazards `scan` would read; 0 if it would change
        nothing.

        It stops to count once they are more than `most`.
        """
        unread = 0
        for client in self.clients:
            unread += _unread(client)
            if unread > most:
                break
        return unread

    def scan_in_turns(self, asking: Client, most_unread: int) -> None:
        """Scan the client that makes a request, and others in turn, for a bounded cost.

        What clients have used has to count before the next eviction, and must not make
        this request expensive. So the others share `most_unread` hazards, and what
        earlier calls left of theirs.
        """
        self.scan_client(asking)
        if len(self.clients) == 1 and asking.read_hazards is not None:  # it is the only one
            return
        self._credit = min(self._credit + most_unread, _MOST_CREDIT)
        for _ in range(len(self.clients)):
            client = self.clients[0]
            unread = _unread(client)
            if unread > self._credit:
                return
            if unread:
                self._credit -= unread
                self.scan_client(client)
            self.clients.rotate(-1)

    def scan_client(self, client: Client) -> None:
        """Update the pins of one client."""
        if client.read_hazards is not None:
            hazards = client.read_hazards()
            # A hazard that did not count may name a block by now: a client sees its
            # block before we have committed it.
            if hazards != client.hazards or len(hazards) != len(client.hazard_pins):
                self._set(client, hazards)

    def _set(self, client: Client, hazards: list[Hazard]) -> None:
        stored = self._retired.stored
        assert stored is not None
        entries = [entry for row in hazards if (entry := entry_at(row)) in stored]
        before = client.hazard_pins
        client.hazards, client.hazard_pins = hazards, entries
        if entries == before:
            return
        footprint_bytes, footprint_bytes_before = map(self._pins.footprint, (entries, before))
        self._pins.add(entries, footprint_bytes)  # first, lest space be freed that is still pinned
        self._retired.take_pins(before, footprint_bytes_before)
        client.leased_bytes += footprint_bytes - footprint_bytes_before


def _unread(client: Client) -> int:
    # Hazards that did not count are looked up again each time.
    return client.count_unread() + len(client.hazards) - len(client.hazard_pins)
