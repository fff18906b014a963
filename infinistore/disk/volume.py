"""Volume: one disk as a log-structured map from keys to blocks, without I/O.

A volume is a log in segments (`log`), an index of what the log has (`records`), and the
bytes of both (`format`). It says which jobs a disk should run and takes their results,
so a simulated disk drives it as a real one does. docs/disk-format.md describes what is
on the disk.

What it promises:

- A record counts only when its batch is durable: written and flushed. Batches become
  durable in the order of `append`. After a crash, the newest durable record of each key
  wins. A batch that was not durable yet may survive, too, record by record.
- A tombstone that is durable hides every older record of its key for good, also after a
  crash: the log only ever loses its oldest segment, and never a tombstone before what
  the tombstone hides.
- A location from `find` leads to the bytes of that key, or to bytes that do not have
  the checksum of the location: whoever reads a block verifies it. Two keys with the
  same 128-bit fingerprint are never confused, other than with a chance of 2**-128.
- No call takes longer than a few milliseconds; longer work is done in `step`.
- A write or flush that failed is never repeated. Its segment is abandoned: what was
  durable there stays readable, and nothing more is written to it.

What it leaves to others: to run jobs and say how they ended; to read blocks and verify
them; to decide what is worth writing or keeping; deadlines, and when a disk with errors
is given up.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from infinistore.disk.batches import Batches
from infinistore.disk.format import Superblock, decode_superblocks
from infinistore.disk.jobs import ALIGNMENT_BYTES, Flush, Job, Result, Steps
from infinistore.disk.log import (
    SESSION_SHIFT,
    Durable,
    Event,
    Location,
    Log,
    Lost,
    Reclaim,
    Segment,
    Segments,
    SegmentState,
    Shrunk,
    default_segment_bytes,
    locations_of,
    segments_within,
)
from infinistore.disk.records import MOST_SEGMENT_BYTES, Records, fingerprints
from infinistore.disk.recovery import recover
from infinistore.disk.upkeep import Upkeep
from infinistore.errors import ConfigError
from infinistore.sizes import in_units

__all__ = ["Durable", "Event", "Location", "Lost", "Reclaim", "Shrunk", "Volume", "VolumeState", "VolumeStatistics"]


VolumeState: TypeAlias = Literal["recovering", "open", "read-only", "closing", "closed"]


@attrs.frozen(kw_only=True)
class VolumeStatistics:
    """What a volume is and has done; sizes in bytes."""

    state: VolumeState
    capacity_bytes: int
    """The room of all segments that it may have. It shrinks when the disk is full."""
    allocated_bytes: int
    """The room of the segments that exist."""
    used_bytes: int
    """The part of these that holds batches, dead ones included."""
    segments: int
    quarantined_segments: int
    """Abandoned segments, unused until a write that hangs has returned."""
    records: int
    """Keys that `find` finds."""
    index_bytes: int
    appended_blocks: int
    appended_bytes: int
    """The bytes of these blocks, without padding."""
    reinserted_bytes: int
    """The part of these that was appended again (`sources`)."""
    written_bytes: int
    """All that was written: blocks, padding, tables, footers, snapshots."""
    tombstones: int
    lost_batches: int
    abandoned_segments: int
    recycled_segments: int
    damaged_batches: int
    """Found by recovery: batches lost to bit rot, or torn by a crash."""
    snapshots: int


class Volume:
    """One disk. Make one with `create` or `open`.

    Whoever drives it starts the jobs that `jobs` returns, hands every result in with
    `done`, and calls `step` while it returns True, with pauses for other work. After
    each of these, and after `append`, `unpin`, `reclaimed` and the calls that end
    something, there may be new jobs, steps and events.
    """

    def __init__(self, number: int, superblock: Superblock, *, capacity_bytes: int, most: int, slots: int) -> None:
        segments = Segments(superblock.segment_bytes, most)
        records = Records(most * (superblock.segment_bytes // ALIGNMENT_BYTES), slots)
        self.number = number
        """The number of the disk in its tier, and in all jobs."""
        self.name = f"disk {number}"
        """What the log calls it."""
        self.compresses = False
        """Whether blocks are appended compressed. To be set before the first step: the
        superblock says so before such a block is written."""
        self.state: VolumeState = "recovering"
        self.reinsertion_bytes = superblock.segment_bytes // 5
        """The most that should be appended again of one segment."""
        self._capacity_bytes = capacity_bytes
        self._log = Log(number, superblock, segments, records)
        self._batches = Batches(self._log, self._seal)
        self._upkeep = Upkeep(self._log, self._batches, writable=self._is_writable, stop=self._stop)
        self._unrestored = False
        self._purging = 0
        self.errno = 0
        """Why the volume stopped to write, if the disk refused it."""

    @classmethod
    def create(
        cls,
        number: int,
        *,
        capacity_bytes: int,
        uuid: bytes,
        seed: int,
        store: bytes = bytes(16),
        membership: int = 0,
        segment_bytes: int | None = None,
    ) -> "Volume":
        """Make a new volume on an empty disk.

        `uuid` (16 bytes) and `seed` (64 bits, secret) are random; `store` names the
        set of disks that belong together, the same for all of them. ConfigError: the
        capacity has no room for two segments.
        """
        length = default_segment_bytes(capacity_bytes) if segment_bytes is None else segment_bytes
        if length % ALIGNMENT_BYTES or not 0 < length <= MOST_SEGMENT_BYTES:
            raise ValueError(f"segments are whole pages of {in_units(ALIGNMENT_BYTES)}, not {in_units(length)}")
        most = segments_within(capacity_bytes, length)
        superblock = Superblock(0, uuid, store, seed, 0, 0, length, 0, membership, 0)
        volume = cls(number, superblock, capacity_bytes=capacity_bytes, most=most, slots=most)
        volume._log.begin_session(1, 0)
        volume._log.tasks.start(volume._start(copies=2))
        return volume

    @classmethod
    def open(
        cls, number: int, *, superblock: bytes, files: Mapping[str, int], capacity_bytes: int, name: str = "the disk"
    ) -> "Volume":
        """Open the volume of a disk; the index comes back by `jobs`, `done`, `step`.

        `superblock` is all of the file `disk`; `files` the length in bytes of each
        other file by name (`segments/0`, `snapshot`); `name` is for messages.

        ConfigError: the disk is not a volume, has another version, is damaged in both
        copies of its superblock, or has more segments than the capacity. Nothing was
        touched; the message says what to do.
        """
        found = decode_superblocks(superblock, name)
        numbers = [int(name.removeprefix("segments/")) for name in files if name.startswith("segments/")]
        most = segments_within(capacity_bytes, found.segment_bytes)
        if len(numbers) > most:
            raise ConfigError(
                f"{name} has {len(numbers)} segments of {in_units(found.segment_bytes)}, and a capacity of"
                f" {in_units(capacity_bytes)} has room for {most}: give it more, or wipe it (infinistore disk wipe)"
            )
        volume = cls(
            number, found, capacity_bytes=capacity_bytes, most=most, slots=max([most, *(one + 1 for one in numbers)])
        )
        volume._unrestored = True
        volume._log.tasks.start(volume._restore(files))
        return volume

    # Beginning

    def _restore(self, files: Mapping[str, int]) -> Steps[None]:
        yield from recover(self._log, files)
        self._unrestored = False
        yield from self._start(copies=1)

    def _start(self, copies: int) -> Steps[None]:
        """Mark the disk as in use, give footers to segments without one, and open."""
        log = self._log
        session = log.settled >> SESSION_SHIFT
        compressed = int(self.compresses or log.superblock.compressed)
        # No older copy is to count again that does not say so.
        for _ in range(2 if compressed > log.superblock.compressed else copies):
            errno = yield from log.write_superblock(session=session, clean=0, compressed=compressed)
            if errno:
                self._stop(errno)
                return
        for segment in list(log.segments.in_log()):
            if segment.state is SegmentState.FULL:
                [result] = yield [Flush(log.number, segment.file)]
                if result.errno:
                    self._batches.abandon(segment, result.errno)
                else:
                    yield from self._upkeep.write_footer(segment)
        if self.state == "recovering":
            self.state = "open"
        log.tasks.start(self._upkeep.keep_spare())

    # Driving

    def jobs(self) -> list[Job]:
        """Return the jobs to start now. Reads of blocks are not among them."""
        found = [*self._log.tasks.jobs, *self._batches.jobs]
        self._log.tasks.jobs, self._batches.jobs = [], []
        return found

    def done(self, result: Result) -> None:
        """Take the result of a job from `jobs`."""
        if not self._log.tasks.done(result) and self._batches.done(result):
            self._log.tasks.poke()

    def step(self) -> bool:
        """Do a few milliseconds of longer work: recovery, snapshots, tidying.

        Returns whether there is more to do now. False does not mean that the work is
        done: it may wait for the results of jobs.
        """
        return self._log.tasks.step()

    def events(self) -> list[Event]:
        """Take what happened since the last call, in order."""
        found, self._log.events = self._log.events, []
        return found

    def _seal(self, segment: Segment) -> None:
        self._log.tasks.start(self._upkeep.seal(segment))

    def _is_writable(self) -> bool:
        return self.state == "open"

    def _stop(self, errno: int) -> None:
        """Write nothing more, because the disk refuses it."""
        self.errno = errno
        self.stop_writing()

    # Looking up

    def find(self, keys: Sequence[str]) -> list[Location | None]:
        """Return where the block of each key is; None: the disk does not have it.

        While the volume recovers, it has nothing.
        """
        if self._unrestored or not keys:
            return [None] * len(keys)
        records = self._log.records
        marks = fingerprints(keys, self._log.seed)
        slots = records.find(marks.low)
        live = records.live(slots)
        rows = records.rows(slots[live])
        numbers = rows.segment.tolist()
        segments = self._log.segments
        incarnations = {number: segments[number].incarnation for number in set(numbers)}
        locations = locations_of(
            numbers,
            map(incarnations.__getitem__, numbers),
            (rows.page.astype(np.int64) * ALIGNMENT_BYTES).tolist(),
            rows.length.tolist(),
            (rows.seal ^ marks.high[live]).tolist(),
            rows.own.tolist(),
            rows.saved.tolist(),
        )
        if len(numbers) == len(keys):
            return list(locations)
        return [next(locations) if there else None for there in live.tolist()]

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether `find` finds it, at less cost."""
        if self._unrestored or not keys:
            return [False] * len(keys)
        answer: list[bool] = self._log.records.live(self._slots(keys)).tolist()
        return answer

    def note_reads(self, keys: Sequence[str]) -> None:
        """Count a read of each of these keys: such blocks are worth re-insertion."""
        if keys and not self._unrestored:
            self._log.records.note_reads(self._slots(keys))

    def _slots(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        return self._log.records.find(fingerprints(keys, self._log.seed).low)

    def pin(self, locations: Sequence[Location]) -> None:
        """Keep the segments of these locations from being overwritten, until `unpin`.

        A pin counts for each location. A location whose segment has been overwritten
        already, or is about to be, is ignored. Pins on the oldest segment stop all
        writing when the disk is full, so bound how long they last.
        """
        self._add_pins(locations, 1)

    def unpin(self, locations: Sequence[Location]) -> None:
        """Take pins back, one for each location given to `pin`."""
        self._add_pins(locations, -1)
        self._log.tasks.poke()

    def _add_pins(self, locations: Sequence[Location], count: int) -> None:
        for location in locations:
            segment = self._log.segments.get(location.segment)
            if segment is not None and segment.incarnation == location.incarnation:
                segment.pins += count

    # Changing

    def room(self) -> int:
        """Return how many bytes of blocks, with padding, `append` takes now, at most.

        0: none, because the volume is not open, or waits for a segment. It changes
        after `done`, `step`, `unpin` and `reclaimed`. Very many small blocks need a
        larger table than this allows for; they go to the next segment.
        """
        return self._batches.room() if self._is_writable() else 0

    def fitting(self, keys: Sequence[str], lengths: Sequence[int]) -> int:
        """Count the leading blocks of these lengths that one batch has room for."""
        return self._batches.fitting(keys, lengths)

    def append(
        self,
        keys: Sequence[str],
        lengths: Sequence[int],
        checksums: Sequence[int],
        views: Sequence[memoryview],
        *,
        own_checksums: Sequence[bool] | None = None,
        sources: Sequence[Location | None] | None = None,
    ) -> int | None:
        """Append a batch to the log; return its token, or None if there is no room.

        Keys of length 0 are tombstones: their view is empty. Every block has a
        checksum. The views are of the blocks' bytes, or of a compressed block, which
        takes fewer pages than its length, and belong to the volume until an event names
        the token: `Durable` or `Lost`. ValueError: more than `fitting`.

        A record with a source is a block that is appended again. It is left out if its
        key is not there any more when the batch is appended. No key may be in the
        batch twice.
        """
        if not self._is_writable() or not keys:
            return None
        return self._batches.append(keys, lengths, checksums, views, own_checksums=own_checksums, sources=sources)

    def forget(self, keys: Sequence[str]) -> None:
        """Let the disk not have these keys, from now on until they are appended again.

        Nothing is written: after a crash, they may be back. Append tombstones to make
        it last.
        """
        if keys and not self._unrestored:
            self._batches.forget(keys)
            self._log.records.make_stale(self._slots(keys))

    def lingers(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether a crash could bring it back without a tombstone.

        That is so for keys that are there, were forgotten, or are in a batch under way
        or one that was lost. It may be so for any key while the volume recovers or
        purges, a part of the disk cannot be read, or a segment was given up, and no
        batch since is durable."""
        log = self._log
        if self._unrestored or log.unread or self._purging or log.floor > log.durable_floor:
            return [True] * len(keys)
        return self.is_known(keys)

    def is_known(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it lingers, and not only because any key may."""
        on_disk = (self._slots(keys) >= 0).tolist() if keys and not self._unrestored else [False] * len(keys)
        return [there or self._batches.under_way(key) for there, key in zip(on_disk, keys, strict=True)]

    def drop(self, key: str, location: Location) -> bool:
        """Forget a key whose block is damaged, if it is still here; return whether."""
        log = self._log
        segment = log.segments.get(location.segment)
        if segment is None or segment.incarnation != location.incarnation:
            return False
        slots = self._slots([key])
        page = np.array([location.offset // ALIGNMENT_BYTES])
        here = slots[log.records.at(slots, np.array([location.segment]), page)]
        log.records.make_stale(here)
        return bool(here.size)

    def purge(self) -> int:
        """Forget everything, also batches under way; return a token.

        `Durable` names it when nothing can come back after a crash, `Lost` when the
        disk failed before.
        """
        log = self._log
        log.floor = token = log.take_sequence()
        log.purges += 1
        log.records.clear()
        self._batches.forget_all()
        log.tasks.start(self._purge(token))
        return token

    def _purge(self, token: int) -> Steps[None]:
        self._purging += 1
        yield from self._upkeep.purge(token)
        self._purging -= 1

    def reclaimed(self, segment: int) -> None:
        """Say that a segment of a `Reclaim` may be overwritten."""
        self._upkeep.reclaimed(segment)
        self._log.tasks.poke()

    @property
    def membership(self) -> int:
        """When the set of disks of the store last changed, as far as this disk knows.
        One that knows an older number than others was away, and has to be purged."""
        return self._log.superblock.membership

    @property
    def has_recovered(self) -> bool:
        """Whether the index is there, and was before the volume ended."""
        return not self._unrestored and self.state not in ("recovering", "closed")

    def set_membership(self, membership: int) -> None:
        """Note that the set of disks has changed."""
        self._log.tasks.start(self._upkeep.note_membership(membership))

    # Ending

    def stop_overwriting(self) -> None:
        """Write to what is free from now on, and overwrite nothing."""
        self._log.segments.overwrites = False
        self._log.tasks.poke()

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be written, because nothing may be overwritten."""
        segments = self._log.segments
        is_last = not segments.overwrites and segments.are_used_up
        return is_last and (self._batches.was_refused or not self.room())

    def stop_writing(self) -> None:
        """Write nothing more: the volume becomes read-only. Batches under way go on."""
        if self.state in ("open", "recovering"):
            self.state = "read-only"
        self._log.tasks.poke()

    def snapshot(self) -> None:
        """Begin a snapshot, so that the next start reads less. It is made in `step`."""
        if self._is_writable():
            self._log.tasks.start(self._upkeep.snapshot())

    def close(self) -> None:
        """End the volume: when batches under way have ended, write a snapshot and the
        mark of a clean end. `state` becomes closed when that is durable or failed.

        A volume that does not write, or has not recovered yet, just ends.
        """
        if self.state == "open":
            self.state = "closing"
            self._log.tasks.start(self._close())
            self._log.tasks.poke()
        elif self.state != "closing":
            self.state = "closed"

    def _close(self) -> Steps[None]:
        yield from self._upkeep.close()
        self.state = "closed"

    def statistics(self) -> VolumeStatistics:
        """Return the current figures."""
        log = self._log
        in_log = log.segments.in_log()
        return VolumeStatistics(
            state=self.state,
            capacity_bytes=log.segments.most * log.segment_bytes,
            allocated_bytes=log.segments.allocated * log.segment_bytes,
            used_bytes=sum(one.end_bytes for one in in_log),
            segments=log.segments.allocated,
            quarantined_segments=sum(one.state is SegmentState.ABANDONED and one.unsettled > 0 for one in in_log),
            records=log.records.live_records,
            index_bytes=log.records.memory_bytes,
            **attrs.asdict(log.counters),
        )
