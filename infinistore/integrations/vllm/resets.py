"""A reset of the cache: deletes all blocks of an engine, and the writes that were under
way and reach the store only afterwards.

The scheduler's half deletes all blocks at a reset, while workers still write. It cannot
wait for them, because workers hear of the reset with the next step only. Each worker
then waits for its writes, deletes their blocks, and reports that it is past the reset
(`LateWrites`). Until all workers have reported, the scheduler's half neither reads nor
writes. Workers delete nothing else: other engines may be past their resets, and have
stored new blocks.

The next step may come late or never, while other engines of the model read the blocks
that are left. So the scheduler's half deletes everything again shortly after the reset
(`Deletion`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Final

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import DiskFailed, InfiniStoreException
from infinistore.integrations.internal.record import Record
from infinistore.integrations.internal.resets import BlocksLeft, delete_all
from infinistore.integrations.vllm.background import Background
from infinistore.tensors import Ticket

_STEPS: Final = 32
"""More steps than vLLM plans ahead of a worker. Writes of that many steps may have
reached the store after the reset that the worker hears of now."""
_AT_ONCE: Final = 10_000
_WAIT_S: Final = 0.005
"""How long a step waits for a deletion. Most are of few keys."""
_AGAIN_S: Final = 1.0
"""How long after a failed deletion the next attempt begins."""


@attrs.frozen
class _Write:
    ticket: Ticket
    hashes: Sequence[str]
    shard: int
    label: str


class LateWrites:
    """The writes of one worker in its last steps. One thread uses it.

    `key_of` returns the key of a block, by its hash, the shard and the layer's label.
    """

    def __init__(
        self,
        store: BlockingStore,
        record: Record,
        key_of: Callable[[str, int, str], str],
        *,
        background: Background,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._record = record
        self._key_of = key_of
        self._background = background
        self._clock = clock
        self._steps: deque[list[_Write]] = deque([[]])
        self._resets = 0
        self._is_past = True
        self._late: list[_Write] = []
        """The writes from before the last reset, until their blocks are deleted."""
        self._deletion: Future[bool] | None = None
        self._next_s = 0.0

    def begin(self, resets: int) -> None:
        """Begin a step, before which the cache was reset that often."""
        if resets != self._resets:
            self._resets = resets
            self._is_past = False
            self._late += [write for step in self._steps for write in step]
            self._steps.clear()
            self._deletion = None  # if there is one, of what came before an earlier reset, it goes on
            self._next_s = 0.0
        self._steps.append([])
        while len(self._steps) > _STEPS and all(write.ticket.done for write in self._steps[0]):
            self._steps.popleft()

    def wrote(self, ticket: Ticket, hashes: Sequence[str], shard: int, label: str) -> None:
        """Note a write of this step: these blocks of a shard of a layer."""
        self._steps[-1].append(_Write(ticket, hashes, shard, label))

    def take_past(self) -> int:
        """Return the number of the last reset, once this worker is past it; else 0."""
        if self._is_past or not all(write.ticket.done for write in self._late):
            return 0
        if self._late and not self._is_deleted():
            return 0
        self._late = []
        self._is_past = True
        return self._resets

    def _is_deleted(self) -> bool:
        if self._deletion is None:
            now = self._clock()
            if now < self._next_s:
                return False
            self._next_s = now + _AGAIN_S
            late = list(self._late)
            self._deletion = self._background.submit(lambda: self._delete(late), False)
            wait([self._deletion], _WAIT_S)
        if not self._deletion.done():
            return False
        deletion, self._deletion = self._deletion, None
        return deletion.result()

    def _delete(self, late: Sequence[_Write]) -> bool:
        """In the background: delete the blocks of these writes. False if that failed.

        Blocks that a failed disk may bring back when it is opened again count as
        deleted, because every further attempt would fail, too.
        """
        keys = list(
            dict.fromkeys(
                self._key_of(block_hash, write.shard, write.label)
                for write in late
                if not write.ticket.dropped
                for block_hash in write.hashes
            )
        )
        lasts = True
        try:
            for first in range(0, len(keys), _AT_ONCE):
                try:
                    self._store.delete(keys[first : first + _AT_ONCE])
                except DiskFailed as error:
                    lasts = False
                    self._record.failed("reset", error)
        except InfiniStoreException as error:
            self._record.failed("reset", error)
            return False
        if lasts:
            self._record.succeeded("reset")
        return True


LOG = logging.getLogger("vllm.infinistore")

PAUSES_S: Final = (0.25, 2.0)
"""A write waits for others for a twentieth of a second, and is done soon after."""


class Deletion:
    """Deletes the keys with a prefix. One thread calls `delete`.

    The background repeats the deletion a few times, until `is_needless` returns True.
    """

    def __init__(
        self, store: BlockingStore, prefix: str, is_needless: Callable[[], bool], background: Background
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._is_needless = is_needless
        self._background = background
        self._deletions = 0
        self._is_due = False

    def delete(self) -> bool:
        """Delete all of them. False if some may be left."""
        if not self._delete():
            return False
        self._deletions += 1
        self._is_due = True
        self._background.start(self._repeat(self._deletions))
        return True

    def close(self) -> None:
        """Repeat the deletion now if the background has not done so before it ended."""
        if self._is_due and not self._is_needless():
            self._delete()

    def _repeat(self, number: int) -> Iterator[float]:
        for pause_s in PAUSES_S:
            yield pause_s
            if number != self._deletions:
                return  # a later one has begun
            if self._is_needless():
                break
            self._delete()
        if number == self._deletions:
            self._is_due = False

    def _delete(self) -> bool:
        try:
            delete_all(self._store, [self._prefix])
        except BlocksLeft as left:
            LOG.warning(
                "InfiniStore: a reset of the cache failed, and with it what has asked for it, such as vLLM's sleep and"
                " pause_generation, after which it stays paused (resume_generation ends that, and clear_cache=False"
                " pauses without a reset): %s",
                str(left),
            )
            return False
        return True
