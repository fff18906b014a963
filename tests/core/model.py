"""The reference model: what any InfiniStore does with keys, bytes, recency and room,
said as plainly as possible.

It knows nothing of sockets, clients or addresses, so it checks the core directly, and
checks a server through its clients as well: there, `put` and `get` are all that is
needed, and the finer calls (`reserve`, `pin`) stay unused.

Everything that can be derived is derived, by adding up. The only state is the blocks,
their order and their pins.
"""

from collections.abc import Callable, Sequence

import attrs


class NoRoom(Exception):
    """The batch does not fit beside what is pinned and reserved. Nothing was evicted
    for it.
    """


@attrs.define(eq=False)
class Block:
    """One stored value. It outlives its key while it is pinned."""

    data: bytes
    footprint: int
    leases: int = 0
    holds: int = 0
    protected: bool = False
    protected_until: float = float("inf")
    """When it is protected no more, if it is."""
    end: float = float("inf")
    """When its key ends."""

    @property
    def pinned(self) -> bool:
        return self.leases + self.holds + self.protected > 0


@attrs.define
class ReferenceStore:
    """`capacity` and footprints in bytes; `footprint(size)` is the allocator's;
    watermarks are parts of the capacity.

    `extra_steps` is how many blocks a reservation may look at on the way down from the
    high to the low watermark.
    """

    capacity: int
    footprint: Callable[[int], int]
    low: float
    high: float
    extra_steps: int
    blocks: dict[str, Block] = attrs.field(factory=dict)
    """Key to block, coldest first."""
    condemned: list[Block] = attrs.field(factory=list)
    """Blocks that lost their key while pinned."""
    reserved: int = 0
    """Bytes that unfinished writes take."""
    most_protected: float = 0.0
    """The part of the capacity that protected keys may take."""
    draining: bool = False

    # What follows from the state

    @property
    def used(self) -> int:
        return self.reserved + sum(block.footprint for block in [*self.blocks.values(), *self.condemned])

    @property
    def pinned(self) -> int:
        return sum(block.footprint for block in [*self.blocks.values(), *self.condemned] if block.pinned)

    @property
    def held(self) -> int:
        return sum(block.footprint for block in [*self.blocks.values(), *self.condemned] if block.holds)

    @property
    def protected(self) -> int:
        return sum(block.footprint for block in self.blocks.values() if block.protected)

    def footprints(self, sizes: Sequence[int]) -> int:
        return sum(self.footprint(size) for size in sizes)

    # What clients see

    def put(self, items: Sequence[tuple[str, bytes]], *, replace: bool = True) -> list[str]:
        """Write a batch; return the keys that were skipped because they exist (only
        with replace=False).
        """
        room = self.reserve([len(data) for _, data in items])
        return self.commit(room, items, replace=replace)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        blocks = self.find(keys)
        return [None if block is None else block.data for block in blocks]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def match_prefix(self, keys: Sequence[str]) -> int:
        count = self.count_prefix(keys)
        self.touch(keys[:count])
        return count

    def delete(self, keys: Sequence[str]) -> int:
        return sum(self.unlink(key) for key in keys)

    def purge(self, max_keys: int | None = None) -> int:
        return self.delete(list(self.blocks)[:max_keys])

    def evict(self, low: float, high: float) -> int:
        if self.used <= high * self.capacity:
            return 0
        return self.evict_bytes(self.used - low * self.capacity)

    def keys(self, prefix: str, limit: int, after: str) -> list[str]:
        return sorted(key for key in self.blocks if key.startswith(prefix) and key > after)[:limit]

    # Steps of a put

    def reserve(self, sizes: Sequence[int]) -> int:
        """Make room for a batch and take it; return its bytes."""
        wanted = self.footprints(sizes)
        self.make_room(wanted)
        self.reserved += wanted
        return wanted

    def make_room(self, wanted: int) -> None:
        if wanted > self.capacity - self.pinned - self.reserved:
            raise NoRoom
        high = self.high * self.capacity - wanted
        if self.used > high:
            self.draining = True
            self.evict_bytes(self.used - high)
        if self.draining:
            low = self.low * self.capacity - wanted
            self.evict_bytes(self.used - low, self.extra_steps)
            self.draining = self.used > low and any(not block.pinned for block in self.blocks.values())

    def commit(self, room: int, items: Sequence[tuple[str, bytes]], *, replace: bool = True) -> list[str]:
        self.reserved -= room
        skipped = [key for key, _ in items if key in self.blocks and not replace]
        moved: list[Block] = []
        for key, data in items:
            if key not in skipped:
                before = self.blocks.get(key)
                protected = before is not None and before.protected
                self.unlink(key)
                self.blocks[key] = new = Block(data, self.footprint(len(data)))
                if before is not None and protected:
                    new.protected_until = before.protected_until
                    moved.append(new)
        for block in moved:
            block.protected = self.protected + block.footprint <= int(self.most_protected * self.capacity)
        self.touch([key for key, _ in items])
        return skipped

    def abort(self, room: int) -> None:
        self.reserved -= room

    # Steps of a get

    def find(self, keys: Sequence[str]) -> list[Block | None]:
        """Return the blocks and touch them; duplicates and missing keys are allowed."""
        found = [self.blocks.get(key) for key in keys]
        self.touch([key for key in keys if key in self.blocks])
        return found

    def count_prefix(self, keys: Sequence[str]) -> int:
        count = 0
        while count < len(keys) and keys[count] in self.blocks:
            count += 1
        return count

    def unpinned(self) -> None:
        """To be called after pins were taken away: room returns with the last one."""
        self.condemned = [block for block in self.condemned if block.pinned]

    # How long keys stay

    def protect(self, keys: Sequence[str], until: float = float("inf")) -> list[bool]:
        """Protect those that are there, or for longer; NoRoom if that is too much."""
        fresh = {key for key in keys if key in self.blocks and not self.blocks[key].protected}
        more = sum(self.blocks[key].footprint for key in fresh)
        if fresh and self.protected + more > int(self.most_protected * self.capacity):
            raise NoRoom
        for key in set(keys).intersection(self.blocks):
            block = self.blocks[key]
            block.protected_until = until if key in fresh else max(until, block.protected_until)
            block.protected = True
        return self.exists(keys)

    def unprotect(self, keys: Sequence[str]) -> list[bool]:
        were = [key in self.blocks and self.blocks[key].protected for key in keys]
        for key in keys:
            if key in self.blocks:
                self.blocks[key].protected = False
        return were

    def expire(self, now: float) -> int:
        """Remove the keys whose time is over; return how many. End such protection."""
        for block in self.blocks.values():
            block.protected &= block.protected_until > now
        return self.delete([key for key, block in self.blocks.items() if block.end <= now])

    # Order and room

    def touch(self, keys: Sequence[str]) -> None:
        """Make keys the warmest, from last to first."""
        for key in reversed(keys):
            self.blocks[key] = self.blocks.pop(key)

    def unlink(self, key: str) -> bool:
        block = self.blocks.pop(key, None)
        if block is not None:
            block.protected = False
        if block is not None and block.pinned:
            self.condemned.append(block)
        return block is not None

    def evict_bytes(self, wanted: float, max_steps: int | None = None) -> int:
        """Evict the coldest unpinned blocks until `wanted` bytes are free, or none is
        left; return how many.
        """
        evicted = freed = steps = 0
        while freed < wanted and any(not block.pinned for block in self.blocks.values()) and steps != max_steps:
            steps += 1
            key, block = next(iter(self.blocks.items()))
            del self.blocks[key]
            if block.pinned:
                self.blocks[key] = block
            else:
                evicted += 1
                freed += block.footprint
        return evicted

    def evict_blocks(self, count: int) -> None:
        """Evict the `count` coldest unpinned blocks: what only the allocator knows the
        need for.
        """
        while count:
            count -= self.evict_bytes(1)
