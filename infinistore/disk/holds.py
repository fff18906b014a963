"""Holds over both tiers: what is in memory is held there, the rest on disk.

A hold keeps segments from being overwritten, and blocks that come up from them in
memory. It is bounded as the core's holds are, in time and in bytes.
"""

import heapq
import random
from collections.abc import Sequence

import attrs

from infinistore.core import Client, StoreCore
from infinistore.disk.disks import Disks, Place
from infinistore.errors import LimitExceeded
from infinistore.sizes import in_units

_MOST_HELD_RATIO = 1 / 8


@attrs.define(eq=False)
class _Hold:
    """One hold: by the core, and on disk."""

    end: float
    core_ids: list[int]
    places: dict[str, Place]
    bytes: int


class TierHolds:
    """The holds of one tier that are not the core's alone. Ids are random."""

    def __init__(self, core: StoreCore, client: Client, disks: Disks, chance: random.Random) -> None:
        self.bytes = 0
        """What is held on disks; a block held twice counts twice."""
        self._core = core
        self._client = client
        self._disks = disks
        self._random = chance
        self._holds: dict[int, _Hold] = {}
        self._by_key: dict[str, list[_Hold]] = {}
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, in_memory: Sequence[str], on_disk: dict[str, Place], hold_s: float, now: float) -> int:
        """Hold these keys; return the id. Errors are those of
        `StoreCore.hold_prefix`."""
        held_bytes = sum(place.location.length for place in on_disk.values())
        bound_bytes = int(_MOST_HELD_RATIO * sum(disk.volume.statistics().capacity_bytes for disk in self._disks))
        if on_disk and self.bytes + held_bytes > bound_bytes:
            raise LimitExceeded(
                f"all holds together would keep {in_units(self.bytes + held_bytes)} on disk, and"
                f" {_MOST_HELD_RATIO:g} of its capacity is {in_units(bound_bytes)}; release holds sooner, or hold a"
                " shorter prefix"
            )
        # The core checks the time even if nothing is held in memory.
        _, core_id = self._core.hold_prefix(self._client, in_memory, hold_s)
        if not on_disk:
            return core_id
        hold = _Hold(now + hold_s, [core_id] if core_id else [], dict(on_disk), held_bytes)
        hold_id = 0
        while not hold_id or hold_id in self._holds:
            hold_id = self._random.getrandbits(63)
        self._holds[hold_id] = hold
        heapq.heappush(self._ends, (hold.end, hold_id))
        self.bytes += held_bytes
        for key, place in on_disk.items():
            self._by_key.setdefault(key, []).append(hold)
            place.disk.volume.pin([place.location])
        return hold_id

    def release(self, hold_id: int) -> bool:
        """End a hold; False if there is none with this id here."""
        hold = self._holds.pop(hold_id, None)
        if hold is None:
            return False
        self.bytes -= hold.bytes
        for core_id in hold.core_ids:
            self._core.release_hold(core_id)
        for key, place in hold.places.items():
            place.disk.volume.unpin([place.location])
            others = self._by_key[key]
            others.remove(hold)
            if not others:
                del self._by_key[key]
        return True

    def expire(self, now: float) -> None:
        """End the holds whose time is over."""
        while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._holds):
            self.release(heapq.heappop(self._ends)[1])

    def next_deadline(self) -> float | None:
        """Return when the next hold ends."""
        return self._ends[0][0] if self._ends else None

    def promoted(self, keys: Sequence[str], now: float) -> None:
        """Hold keys that came up in memory, too, as far as the core's bounds allow."""
        by_hold: dict[_Hold, list[str]] = {}
        for key in keys:
            for hold in self._by_key.get(key, ()):
                by_hold.setdefault(hold, []).append(key)
        for hold, held in by_hold.items():
            if hold.end > now:
                try:
                    _, core_id = self._core.hold_prefix(self._client, held, hold.end - now)
                except LimitExceeded:
                    continue  # they stay held on disk
                if core_id:
                    hold.core_ids.append(core_id)
