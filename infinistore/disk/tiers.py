"""Tiers: a store's memory, and the disks below it if it has any, as requests see them.

Without disks, the answers are those of the core. With disks, they are those of both
tiers: a key that left memory and is on disk is there.

If the disk tier raises an error that it should not, its state cannot be trusted any
more. All of its disks are then off, with an alarm and a traceback in the log, and the
store goes on as one without disks. Requests that wait for the disks end: reads find a
miss; flushes, deletions and purges raise `DiskFailed`. Memory that the disks may still
read or write stays pinned until their jobs have returned.

Requests that may wait for disks are generators, `Steps`. Their caller waits for each
`Wait` that they yield, and may let others run at each None. A server and an embedded
store do so in their own ways, and each step runs at once.

This module needs no numpy. So a store imports it with or without disks.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from infinistore.core import Client, StoreCore
from infinistore.core.removals import SLICE_KEYS
from infinistore.disk.jobs import Job, Result
from infinistore.disk.waits import Deletion, Prefetch, PrefixMatch, Wait
from infinistore.errors import InfiniStoreException
from infinistore.statistics import DiskTierStatistics

if TYPE_CHECKING:
    from infinistore.disk.tier import DiskTier

_log: Final = logging.getLogger("infinistore.disk")
_T = TypeVar("_T")
Steps: TypeAlias = Generator[Wait | None, None, _T]
"""The steps of one request, which returns `_T`."""

_MOST_WAITS = 8
"""So that clients that evict each other's blocks do not read them for ever."""
_NO_WAITS: Iterator[Wait] = iter(())


class Tiers:
    """The store `core`, and the tier of its disks, which nobody else may use from now
    on. `describe` adds to the figures of that tier what only its disks' runner knows.

    A time `within_s` is what a request may take, in seconds.
    """

    def __init__(
        self,
        core: StoreCore,
        disk: "DiskTier | None" = None,
        describe: Callable[[DiskTierStatistics], DiskTierStatistics] | None = None,
    ) -> None:
        self.core = core
        """The store's memory."""
        self._disk = disk
        """None if there are no disks, or no longer any that can be used."""
        self._describe = describe
        self._stopped: DiskTier | None = None
        """The tier that was in use before its disks failed or the store was closed."""
        self._failure = ""
        """Why it was stopped, and what to do about it."""
        self._out: set[Job] = set()

    # Reading

    def exists(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 0 if it is nowhere, 1 in memory, 2 on disk only."""
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.exists(keys)
        return self.core.exists(keys)

    def waits_for_disk(self, keys: Sequence[str]) -> bool:
        """Whether some of these keys are on disk only."""
        return self._disk is not None and 2 in self.exists(keys)

    def match_prefix(self, keys: Sequence[str], *, touch: bool = True) -> PrefixMatch:
        """Count the leading keys that are there; touch those in memory.

        With `touch=False` the caller touches them after it has sent the answer.
        """
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.match_prefix(keys, touch=touch)
        matched = self.core.match_prefix(keys, touch=touch)
        return PrefixMatch(matched, matched)

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> PrefixMatch:
        """Match a prefix and hold it, in memory and on disk."""
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.hold_prefix(client, keys, hold_s)
        matched, hold_id = self.core.hold_prefix(client, keys, hold_s)
        return PrefixMatch(matched, matched, hold_id)

    def release_hold(self, hold_id: int) -> bool:
        """End a hold; False if there is none with this id."""
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.release_hold(hold_id)
        return self.core.release_hold(hold_id)

    def prefetch(self, client: Client, keys: Sequence[str], hold_s: float = 0) -> Prefetch:
        """Bring keys into memory in the background; with `hold_s`, hold them."""
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.prefetch(keys, hold_s or None)
        there = list(compress(keys, self.core.exists(keys)))
        return Prefetch(0, 0, self.core.hold_prefix(client, there, hold_s)[1] if hold_s else 0)

    def fetch(
        self, keys: Sequence[str], within_s: float, *, whole: bool = False
    ) -> tuple[Sequence[str], Iterator[Wait]]:
        """Bring keys that are on disk only into memory, before they are leased. Return
        the leading keys to read at a time, and what to wait for until they are there.
        These are all keys if `whole`, or if the pool has room for all of them.

        Wait for each wait, then go on at once, and lease after the last one before
        anybody else can evict. While some keys are read from disk, others may be
        evicted, even those that have just come up, so they are looked up again after
        each wait. What is late, fails, or finds no room stays missing.
        """
        disk = self._disk
        if disk is None:
            return keys, _NO_WAITS
        if not whole:
            keys = keys[: self._fitting(keys)]
        return keys, self._fetch(keys, disk.last_moment(disk.clock() + within_s))

    def _fitting(self, keys: Sequence[str]) -> int | None:
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.fitting(keys)
        return None

    def _fetch(self, keys: Sequence[str], deadline: float) -> Iterator[Wait]:
        for _ in range(_MOST_WAITS):
            wait = self._want(keys, deadline)
            if wait is None:
                return
            yield wait

    def _want(self, keys: Sequence[str], deadline: float) -> Wait | None:
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.want(keys, deadline)
        return None

    # Writing and removing

    def flush(self, keys: Sequence[str], within_s: float) -> Steps[int]:
        """Wait until the blocks of these keys are durable; return how many of the keys
        have a durable one: none, without disks.

        Raises:
            DiskFailed: the disks failed meanwhile.
        """
        wait = self._flush(keys, within_s)
        yield wait
        wait.check()
        return len(set(keys)) - wait.unmet

    def _flush(self, keys: Sequence[str], within_s: float) -> Wait:
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.flush(keys, self._disk.clock() + within_s)
        return self._without_disks(unmet=len(set(keys)))

    def delete(self, keys: Sequence[str], within_s: float) -> Steps[int]:
        """Delete keys, and wait until no crash can bring them back; return how many
        were there.

        Raises:
            DiskFailed: they are deleted, but a disk that cannot be written may bring
                one back when it is opened again.
            DeadlineExceeded: the same of a disk that did not answer in time.
        """
        log = self.core.removal_log
        # A key that is on disk only is not removed from memory, which would note it.
        on_disk = [key for key, place in zip(keys, self.exists(keys), strict=True) if place == 2] if log.is_kept else []
        deletion = self._delete(keys, within_s)
        if on_disk:
            log.note(on_disk)
        yield deletion.wait
        deletion.wait.check(in_time=True)
        return deletion.deleted

    def _delete(self, keys: Sequence[str], within_s: float) -> Deletion:
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.delete(keys, self._disk.clock() + within_s)
        return Deletion(self.core.delete(keys), self._without_disks())

    def purge(self, within_s: float) -> Steps[int]:
        """Delete everything, and wait until no crash can bring it back; return how many
        keys there were in memory. New keys stay.

        A disk is purged by one record, and needs one for each key otherwise. So the
        disks are purged first. Meanwhile, what is in memory may be written to them
        again, and then be evicted. So what was in memory when the purge began is then
        deleted by name, from both tiers.

        Raises:
            DiskFailed: everything is deleted, but a disk that cannot be written may
                bring some of it back when it is opened again.
            DeadlineExceeded: the same of a disk that did not answer in time.
        """
        core, deleted = self.core, 0
        if self._disk is None and not self._failure:
            for count in core.purge_in_slices():
                deleted += count
                yield None
            return deleted
        keys = core.all_keys()
        core.deletions.note_all()
        waits = [self._purge_disks(within_s)]
        yield waits[0]
        slice_keys = min(SLICE_KEYS, core.limits.max_batch_keys)
        while keys:
            yield None
            deletion = self._delete(keys[-slice_keys:], within_s)
            del keys[-slice_keys:]
            deleted += deletion.deleted
            waits.append(deletion.wait)
        yield from waits
        core.removal_log.end()  # what was on disk only has no names here
        for wait in waits:
            wait.check(in_time=True)
        return deleted

    def _purge_disks(self, within_s: float) -> Wait:
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.purge(self._disk.clock() + within_s)
        return self._without_disks()

    # Looking

    def statistics(self) -> DiskTierStatistics | None:
        """Return the current figures of the disks; None without disks."""
        disk = self._disk or self._stopped
        return None if disk is None or self._describe is None else self._describe(disk.statistics())

    # Driving, see `DiskTier`: these never raise

    def when_there_is_work(self, call: Callable[[], object]) -> None:
        """Call this when `jobs` should be called, from within any call."""
        if self._disk is not None:
            self._disk.on_work = call

    def jobs(self) -> list[Job]:
        """Return the jobs to start now."""
        if self._disk is not None:
            with self._guarded():
                jobs = self._disk.jobs()
                self._out.update(jobs)
                return jobs
        return []

    def done(self, results: Sequence[Result]) -> None:
        """Take the results of jobs."""
        self._out.difference_update(result.job for result in results)
        if self._disk is not None:
            with self._guarded():
                self._disk.done(results)
        self._let_go()

    def next_deadline(self) -> float | None:
        """Return when to call `jobs` at the latest; None: when something happens."""
        if self._disk is not None:
            with self._guarded():
                return self._disk.next_deadline()
        return None

    @property
    def is_idle(self) -> bool:
        """Whether no job is out."""
        return not self._out

    # Ending

    def close(self, within_s: float) -> Wait:
        """Write what is queued, and clean ends. `unmet` counts disks that were late."""
        if self._disk is not None:
            with self._guarded(InfiniStoreException):
                return self._disk.close(self._disk.clock() + within_s)
        return self._without_disks()

    def stop(self) -> None:
        """Let nobody wait for the disks any more: the store is closed."""
        self._stop("this store was closed while a disk did not answer; open another one")

    def fail(self, error: Exception) -> None:
        """Turn all disks off, because of an unexpected error that is being handled."""
        if self._disk is None:
            return
        _log.exception("the disks are off because of an internal error")
        self._stop(
            f"the disks of this store are off because of an internal error ({type(error).__name__}: {error}), which the"
            " log has; what is in memory is served on. Start the store again; keys that were deleted meanwhile may be"
            " back then",
            error,
        )

    def _stop(self, why: str, error: Exception | None = None) -> None:
        disk, self._disk = self._disk, None
        if disk is not None:
            self._stopped, self._failure = disk, why
            disk.stop(why, error)
            self._let_go()

    def _let_go(self) -> None:
        if self._stopped is not None and not self._out:
            self._stopped.let_go()

    @contextmanager
    def _guarded(self, *refusals: type[Exception]) -> Iterator[None]:
        """Turn the tier off if it raises anything but these, and go on without it."""
        try:
            yield
        except refusals:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the store goes on
            self.fail(error)

    def _without_disks(self, unmet: int = 0) -> Wait:
        """Return a wait that is settled: it failed if the disks did."""
        if not self._failure:
            return Wait(0.0, unmet=unmet)
        wait = Wait(0.0, pending=1)
        wait.fail(self._failure)
        return wait
