"""What one disk has to write: what waits for it, and its batches under way."""

from collections import deque

import attrs

from infinistore.core import Lease
from infinistore.core.index import Entry, length_of
from infinistore.disk.admission import Run, run_of
from infinistore.disk.disks import Disk
from infinistore.disk.settings import MOST_BLOCKS_PER_GROUP

__all__ = ["Group", "Writer"]


@attrs.define(eq=False)
class Group:
    """Blocks that are written as one batch."""

    disk: Disk
    keys: list[str]
    entries: list[Entry]
    lease: Lease
    attempts: int
    checksums: list[int]
    own_checksums: list[bool]
    doubtful: list[str] = attrs.field(factory=list)
    """Keys of which another disk may have an older block, for all that is known."""
    token: int | None = None
    appended_at: float = 0.0

    @property
    def bytes(self) -> int:
        """The length of all blocks."""
        return sum(map(length_of, self.entries))


@attrs.define(eq=False)
class Writer:
    """What one disk has to write."""

    disk: Disk
    pending: deque[Run] = attrs.field(factory=deque)
    pending_bytes: int = 0
    pending_since: float = 0.0
    pending_entries: dict[str, Entry] = attrs.field(factory=dict)
    """Of what is pending, the newest entry of each key."""
    is_urgent: bool = False
    """Whether somebody waits for something that is pending."""
    ready: deque[Group] = attrs.field(factory=deque)
    """Leased and hashed, and not appended yet."""
    groups: dict[int, Group] = attrs.field(factory=dict)
    """Appended, by token."""
    hashing: int = 0
    durable_at: float = 0.0

    @property
    def under_way(self) -> int:
        """Batches that are leased."""
        return self.hashing + len(self.ready) + len(self.groups)

    def add(self, run: Run, now: float) -> None:
        """Queue what is due."""
        if not self.pending:
            self.pending_since = now
        self.pending.append(run)
        self._count(run)

    def _count(self, run: Run) -> None:
        self.pending_bytes += run.bytes
        self.pending_entries.update(zip(run.keys, run.entries, strict=True))
        self.is_urgent |= run.urgent

    def clear(self) -> list[Run]:
        """Return what is pending, and forget it."""
        runs = list(self.pending)
        self.pending.clear()
        self.pending_entries.clear()
        self.pending_bytes, self.is_urgent = 0, False
        return runs

    def take(self, most_bytes: int) -> tuple[list[str], list[Entry], int]:
        """Take leading blocks: keys, entries, and how often they were tried."""
        keys: list[str] = []
        entries: list[Entry] = []
        attempts = taken = 0
        while self.pending and len(keys) < MOST_BLOCKS_PER_GROUP and taken < most_bytes:
            run, rest = self.pending[0].split(most_bytes - taken, MOST_BLOCKS_PER_GROUP - len(keys))
            if keys and taken + run.bytes > most_bytes:
                break
            if rest is None:
                self.pending.popleft()
            else:
                self.pending[0] = rest
            keys += run.keys
            entries += run.entries
            attempts = max(attempts, run.attempts)
            taken += run.bytes
            self.pending_bytes -= run.bytes
        for key in keys:
            self.pending_entries.pop(key, None)
        self.is_urgent &= bool(self.pending)
        return keys, entries, attempts

    def put_back(self, keys: list[str], entries: list[Entry], attempts: int) -> None:
        """Queue blocks again, before all others, that were taken and did not fit."""
        if keys:
            run = run_of(keys, entries, attempts=attempts, urgent=True)
            self.pending.appendleft(run)
            self._count(run)
