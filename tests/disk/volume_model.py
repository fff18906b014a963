"""What the user of a volume must see, and what a crash may leave.

The model knows, of each key, what is durable, and what was under way, lost or forgotten
since. After a crash, what the volume finds must be one of these.
"""

import random

import attrs

from infinistore.disk.volume import Durable, Lost
from tests.disk.volume_world import VolumeWorld

ABSENT = None


@attrs.define
class Known:
    """What the model knows of one key."""

    now: bytes | None = None
    """What `find` leads to."""
    durable: bytes | None = None
    """What a crash leaves, if nothing below counts."""
    perhaps: set[bytes | None] = attrs.field(factory=set)
    """What was lost or forgotten since, and may count after a crash."""
    may_be_gone: bool = False
    """Its segment may have been used again."""
    newest: int = 0
    """The token of the newest batch with this key; 0: forgotten since."""


class VolumeModel:
    """A volume on a simulated disk, beside what is known of it."""

    def __init__(self, world: VolumeWorld, keys: list[str]) -> None:
        self.world = world
        self.keys = keys
        self.count = 0
        self.puts: dict[str, set[bytes]] = {key: set() for key in keys}
        self.known = {key: Known() for key in keys}
        self.under_way: dict[int, dict[str, bytes]] = {}
        self.again: set[int] = set()
        """Batches of blocks that are appended again."""
        self.purges: set[int] = set()
        self.damaged = False
        """Something durable was changed behind the volume's back: any put may be found,
        or nothing."""
        self.recycled = 0
        self.snapshots = False
        """Snapshots were made: they know what was forgotten or replaced, so that it may
        be absent after a crash."""

    # What happens

    def snapshot(self) -> None:
        """Begin a snapshot."""
        self.snapshots = True
        self.world.volume.snapshot()
        self.run()

    def put(self, lengths: dict[str, int]) -> None:
        """Append a new block of each key, or a tombstone where the length is 0."""
        blocks = {}
        for key, length in lengths.items():
            self.count += 1
            blocks[key] = (
                (b"%s=%d;" % (key.encode(), self.count)).ljust(16, b".") * (length // 16 + 1) if length else b""
            )
            if length:
                self.puts[key].add(blocks[key])
        token = self.world.put(blocks)
        if token is not None:
            self.under_way[token] = blocks
            for key in blocks:
                self.known[key].now, self.known[key].newest = ABSENT, token
        self.run()

    def put_again(self, wanted: random.Random) -> None:
        """Append some of the blocks again that were offered, and let the rest go."""
        for offer in self.world.offers:
            found = {}
            for key, location in zip(offer.keys, offer.locations, strict=True):
                value = self.world.read(key, location) if wanted.random() < 0.5 else None
                if value is not None:
                    found[key] = value, location
            if found:
                blocks = {key: value for key, (value, _) in found.items()}
                token = self.world.put(blocks, [location for _, location in found.values()])
                if token is not None:
                    self.under_way[token] = blocks
                    self.again.add(token)
            self.world.volume.reclaimed(offer.segment)
        self.world.offers.clear()
        self.run()

    def forget(self, keys: list[str]) -> None:
        """Forget keys without a tombstone."""
        self.world.volume.forget(keys)
        for key in keys:
            known = self.known[key]
            known.now, known.newest = ABSENT, 0
            known.perhaps.add(ABSENT)

    def purge(self) -> None:
        """Purge the volume."""
        self.purges.add(self.world.volume.purge())
        for known in self.known.values():
            known.now, known.newest = ABSENT, 0
            known.perhaps.add(ABSENT)
        self.run()

    def run(self) -> None:
        """Start what the volume wants, and take its events."""
        self.world.start()
        self.learn()

    def finish(self, which: int) -> None:
        """Finish one job."""
        jobs = self.world.disk.under_way
        if jobs:
            self.world.finish(self.world.disk.finish(jobs[which % len(jobs)]))
            self.learn()

    def settle(self) -> None:
        """Finish all jobs."""
        self.world.settle()
        self.learn()

    def learn(self) -> None:
        """Take events, in the order of the log."""
        for token, event in sorted(self.world.ended.items()):
            if token in self.purges and isinstance(event, Durable):
                self.purges.remove(token)
                self.under_way |= {other: {} for other in self.under_way if other < token}  # void, however they end
                for key, known in self.known.items():
                    later = any(other > token for other, batch in self.under_way.items() if key in batch)
                    if not later and known.newest <= token:
                        known.durable, known.perhaps = ABSENT, set()
            again = token in self.again
            for key, value in self.under_way.pop(token, {}).items():
                known = self.known[key]
                if isinstance(event, Lost):
                    known.perhaps.add(value or ABSENT)
                    known.may_be_gone |= again
                elif again:
                    known.perhaps.add(value)  # it may have been left out
                else:
                    known.durable, known.perhaps, known.may_be_gone = value or ABSENT, set(), False
                    if known.newest == token:
                        known.now = value or ABSENT
                    else:
                        known.perhaps.add(ABSENT)
        self.world.ended.clear()
        recycled = self.world.volume.statistics().recycled_segments
        if recycled != self.recycled:
            self.recycled = recycled
            for known in self.known.values():
                known.may_be_gone = True

    # What must hold

    def possible(self, key: str) -> set[bytes | None]:
        """What a crash may leave of a key."""
        known = self.known[key]
        found = {known.durable, *known.perhaps}
        for batch in self.under_way.values():
            if key in batch:
                found.add(batch[key] or ABSENT)
        superseded = self.snapshots and known.now != known.durable
        if known.may_be_gone or self.purges or superseded:
            found.add(ABSENT)
        return found

    def check(self) -> None:
        """Compare what the volume finds now."""
        if self.world.volume.state == "recovering":
            return
        for key, known in self.known.items():
            value = self.world.get(key)
            assert value is None or value in self.puts[key], key
            assert self.damaged or value == known.now or (value is None and known.may_be_gone), key

    def check_lingers(self) -> None:
        """What does not linger is gone for good."""
        for key, lingers in zip(self.keys, self.world.volume.lingers(self.keys), strict=True):
            if not lingers and not self.damaged:
                known = self.known[key]
                assert not any(key in batch for batch in self.under_way.values()), key
                assert known.now is None or known.may_be_gone, key
                known.now, known.durable, known.perhaps = ABSENT, ABSENT, set()

    def crash(self, jobs: int = -1) -> None:
        """Lose power, once more after some jobs of the recovery, and compare."""
        self.world.crash()
        if jobs >= 0:
            self.world.start()
            for _ in range(jobs):
                if self.world.disk.under_way:
                    self.world.finish(self.world.disk.finish(self.world.chance.choice(self.world.disk.under_way)))
            self.world.crash()
        self.world.settle()
        self.check_after_restart()

    def check_after_restart(self) -> None:
        """Compare with what may be there, and go on from what is."""
        assert self.world.volume.state in ("open", "read-only")
        for key in self.keys:
            value = self.world.get(key)
            assert value is None or value in self.puts[key], key
            possible = self.possible(key)
            assert self.damaged or value in possible, key
            self.known[key] = Known(now=value, durable=value)
            if self.world.volume.statistics().abandoned_segments:
                self.known[key].perhaps = possible
        self.under_way.clear()
        self.snapshots = False
        self.again.clear()
        self.purges.clear()
        self.recycled = 0

    def restart(self) -> None:
        """End cleanly, and open the disk again."""
        self.snapshots = True
        self.settle()
        self.world.volume.close()
        self.settle()
        assert self.world.volume.state == "closed"
        self.world.reopen()
        self.world.settle()
        for key, known in self.known.items():
            value = self.world.get(key)
            assert value is None or value in self.puts[key], key
            assert self.damaged or value == known.now or (value is None and known.may_be_gone), key
            known.newest, known.now = 0, value
        self.recycled = 0
