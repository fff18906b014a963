"""GuardedTier: a tier whose own errors end nothing but the tier; and what takes its
users several calls.

Servers and embedded stores use a tier through this. If the tier raises what it should
not, nobody knows what it knows any more. So all of its disks are off from then on, with
an alarm and a traceback in the log, and the store serves from memory as one without
disks. Whoever waits for the disks is told: reads find a miss; flushes, deletions and
purges raise `DiskFailed`. Memory that the disks may still read or write stays pinned
until their jobs have returned.

A fetch brings keys into memory for a read, until all of them are there. While some are
read from disk, others may be evicted, and even those that have just come up, before
whoever waits for them is awake. So it looks again before the lease.

A purge empties both tiers, whatever is written, read or evicted meanwhile. A disk is
purged by one record, and needs one for each key otherwise. So the disks are purged
first, and that is waited for. Meanwhile, what is in memory may be written to them
again, and then be evicted. So what was in memory when the purge began is deleted by
name, from both tiers, and that is waited for, too.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Final, TypeVar

from infinistore.core import Client, StoreCore
from infinistore.disk.disks import TierStatistics
from infinistore.disk.jobs import Job, Result
from infinistore.disk.tier import DiskTier
from infinistore.disk.waits import Deletion, Prefetch, PrefixMatch, Wait
from infinistore.errors import InfiniStoreException

_log: Final = logging.getLogger("infinistore.disk")
_T = TypeVar("_T")


class GuardedTier:
    """The calls of `tier`, which nobody else may use from now on."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._out: set[Job] = set()
        self._holder = tier.core.open_client("holds without disks", counted=False)
        self._failure = ""
        """Why there are no disks any more, and what to do."""

    @property
    def core(self) -> StoreCore:
        """The store above the disks."""
        return self._tier.core

    def fail(self, error: Exception) -> None:
        """Turn all disks off, because of an error that nobody expected, and that is
        being handled."""
        if self._failure:
            return
        _log.exception("the disks are off because of an internal error")
        self._stop(
            f"the disks of this store are off because of an internal error ({type(error).__name__}: {error}), which the"
            " log has; what is in memory is served on. Start the store again; keys that were deleted meanwhile may be"
            " back then",
            error,
        )

    def stop(self) -> None:
        """Let nobody wait for the disks any more: the store is closed."""
        if not self._failure:
            self._stop("this store was closed while a disk did not answer; open another one")

    def abandon(self) -> None:
        """Let go of the store for good: nobody uses it any more."""
        self.stop()
        self.core.close_client(self._holder)

    @property
    def is_idle(self) -> bool:
        """Whether no job is out."""
        return not self._out

    def _stop(self, why: str, error: Exception | None = None) -> None:
        self._failure = why
        self._tier.stop(why, error)
        self._let_go()

    def _let_go(self) -> None:
        if self._failure and not self._out:
            self._tier.let_go()

    # Driving, see `DiskTier`: these never raise

    def when_there_is_work(self, call: Callable[[], object]) -> None:
        """Call this when `jobs` should be called, maybe from within any call of the
        store."""
        self._tier.on_work = call

    def jobs(self) -> list[Job]:
        """Return the jobs to start now."""
        jobs: list[Job] = self._driven(self._tier.jobs, [])
        self._out.update(jobs)
        return jobs

    def done(self, results: Sequence[Result]) -> None:
        """Take the results of jobs."""
        self._out.difference_update(result.job for result in results)
        self._driven(lambda: self._tier.done(results), None)
        self._let_go()

    def next_deadline(self) -> float | None:
        """Return when to call `jobs` at the latest; None: when something happens."""
        return self._driven(self._tier.next_deadline, None)

    def _driven(self, call: Callable[[], _T], otherwise: _T) -> _T:
        if not self._failure:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - whatever it is, the store goes on
                self.fail(error)
        return otherwise

    # Requests: without disks, what the core has

    def last_moment(self, deadline: float) -> float:
        """Return how long a read waits that begins now."""
        return self._tier.last_moment(deadline)

    def want(self, keys: Sequence[str], deadline: float) -> Wait | None:
        """Bring the keys that are on disk only into memory."""
        return self._asked(lambda: self._tier.want(keys, deadline), lambda: None)

    def fitting(self, keys: Sequence[str]) -> int:
        """Count the leading keys to read at a time."""
        return self._asked(lambda: self._tier.fitting(keys), lambda: len(keys))

    def prefetch(self, keys: Sequence[str], hold_s: float | None) -> Prefetch:
        """Bring keys into memory in the background."""

        def in_memory() -> Prefetch:
            there = list(compress(keys, self.core.exists(keys)))
            return Prefetch(0, 0, self.core.hold_prefix(self._holder, there, hold_s)[1] if hold_s else 0)

        return self._asked(lambda: self._tier.prefetch(keys, hold_s), in_memory)

    def exists(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 0 if it is nowhere, 1 in memory, 2 on disk only."""
        return self._asked(lambda: self._tier.exists(keys), lambda: self.core.exists(keys))

    def match_prefix(self, keys: Sequence[str]) -> PrefixMatch:
        """Count the leading keys that either tier has."""

        def in_memory() -> PrefixMatch:
            matched = self.core.match_prefix(keys)
            return PrefixMatch(matched, matched)

        return self._asked(lambda: self._tier.match_prefix(keys), in_memory)

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> PrefixMatch:
        """Match a prefix and hold it."""

        def in_memory() -> PrefixMatch:
            matched, hold_id = self.core.hold_prefix(client, keys, hold_s)
            return PrefixMatch(matched, matched, hold_id)

        return self._asked(lambda: self._tier.hold_prefix(client, keys, hold_s), in_memory)

    def release_hold(self, hold_id: int) -> bool:
        """End a hold; False if there is none with this id."""
        return self._asked(lambda: self._tier.release_hold(hold_id), lambda: self.core.release_hold(hold_id))

    def flush(self, keys: Sequence[str] | None, deadline: float) -> Wait:
        """Write the blocks that these keys have now."""
        return self._asked(lambda: self._tier.flush(keys, deadline), self._failed)

    def delete(self, keys: Sequence[str], deadline: float) -> Deletion:
        """Delete keys from both tiers."""
        return self._asked(
            lambda: self._tier.delete(keys, deadline), lambda: Deletion(self.core.delete(keys), self._failed())
        )

    def purge(self, deadline: float) -> Wait:
        """Forget everything on every disk."""
        return self._asked(lambda: self._tier.purge(deadline), self._failed)

    def close(self, deadline: float) -> Wait:
        """Write what is queued, and end."""
        return self._asked(lambda: self._tier.close(deadline), self._failed)

    def statistics(self) -> TierStatistics:
        """Return the current figures."""
        return self._tier.statistics()

    def _failed(self) -> Wait:
        wait = Wait(0.0, 1)
        wait.fail(self._failure)
        return wait

    def _asked(self, call: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
        if not self._failure:
            try:
                return call()
            except InfiniStoreException:
                raise  # a request that is refused
            except Exception as error:  # noqa: BLE001 - whatever it is, the store goes on
                self.fail(error)
        return otherwise()


_MOST_WAITS = 8
"""So that clients that evict each other's blocks do not read them for ever."""


class Fetch:
    """One read of `keys`: call `next` and wait for what it returns, until it returns
    None; then lease at once, before anybody else can evict.

    It ends by the deadline, or when `wait_s` of the tier's settings is over.
    """

    def __init__(self, tier: GuardedTier | DiskTier, keys: Sequence[str], deadline: float) -> None:
        self._tier = tier
        self._keys = keys
        self._deadline = tier.last_moment(deadline)
        self._waits = 0

    def next(self) -> Wait | None:
        """Return what to wait for now; None if there is nothing, or no time left."""
        if self._waits == _MOST_WAITS:
            return None
        self._waits += 1
        return self._tier.want(self._keys, self._deadline)


_SLICE_KEYS = 4096


class Purging:
    """One purge: wait for `disks`; call `delete_some` until it returns False; wait for
    all `waits`; then `check`.

    New keys stay.
    """

    def __init__(self, tier: GuardedTier | DiskTier, deadline: float) -> None:
        self._tier = tier
        self._deadline = deadline
        self._keys = tier.core.all_keys()
        tier.core.deletions.note_all()
        self._slice_keys = min(_SLICE_KEYS, tier.core.limits.max_batch_keys)
        self.disks = tier.purge(deadline)
        """Settled when the disks are purged."""
        self.waits: list[Wait] = [self.disks]
        """What to wait for in the end: until then, a crash may bring keys back."""
        self.deleted = 0
        """Keys that were in memory, and are deleted."""

    def delete_some(self) -> bool:
        """Delete some of the keys, which takes a few milliseconds; return whether there
        are more."""
        some = self._keys[-self._slice_keys :]
        del self._keys[-self._slice_keys :]
        if some:
            deletion = self._tier.delete(some, self._deadline)
            self.deleted += deletion.deleted
            self.waits.append(deletion.wait)
        return bool(self._keys)

    def check(self) -> None:
        """Raise `DiskFailed` if a disk failed, or cannot be written, and
        `DeadlineExceeded` if one did not answer by the deadline."""
        for wait in self.waits:
            wait.check(in_time=True)


def names_on_disk(tier: GuardedTier | DiskTier, keys: Sequence[str]) -> list[str]:
    """Return those of these keys that are on disk only, if somebody follows removals:
    that a disk forgets them is not a removal from memory."""
    if not tier.core.removal_log.is_kept:
        return []
    return [key for key, place in zip(keys, tier.exists(keys), strict=True) if place == 2]  # on disk
