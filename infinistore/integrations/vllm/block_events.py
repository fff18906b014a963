"""What is stored and what is gone, for routers that send a request where its prefix is.

The scheduler's half collects changes here. A block is stored when every worker has
written its part of it, or when a look-up has found it. It is gone when the store tells
that it has removed it, when a look-up, a load or a sweep has missed it, or when the
store was reset. A sweep asks for a few blocks at a time, so that in the end it is
noticed, too, what the store could not tell; at once, if the store says that there was
something that it could not.

What is known is bounded: the blocks known for longest are told as gone, and no longer
watched. A router that believes that sends a request elsewhere, which costs time only.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs

from infinistore.blocking import BlockingStore, RemovedKeys
from infinistore.errors import InfiniStoreException, VersionMismatch
from infinistore.integrations.internal.record import Record

__all__ = ["BlockEvents", "Change", "SavedBlocks", "Sweeper"]

_SWEPT_AT_ONCE = 128
_REMOVALS_WITHIN_S = 0.001
_MOST_BATCHES = 16
"""Of removed keys, in one question: more are asked for the next time."""


@attrs.frozen
class Change:
    """Blocks that are stored now, one behind the other; or, without tokens, blocks that
    are gone.
    """

    names: tuple[Hashable, ...]
    """The engine's hashes of the blocks."""
    parent: Hashable = None
    """That of the block before; None for the first block of a prompt."""
    tokens: tuple[int, ...] = ()
    about: Any = None
    """What else the engine tells of such blocks, such as the LoRA adapter."""
    extra_keys: tuple[Any, ...] = ()
    """What each block depends on besides its tokens; empty if none does."""

    def part(self, first: int, end: int) -> "Change":
        """Return that of some of the blocks, by their numbers."""
        each = len(self.tokens) // len(self.names)
        return Change(
            self.names[first:end],
            self.names[first - 1] if first else self.parent,
            self.tokens[first * each : end * each],
            self.about,
            self.extra_keys[first:end],
        )


@attrs.frozen
class SavedBlocks:
    """What became of saves, by their numbers: how many workers have written all, and
    how many have not.
    """

    complete: Counter[int] = attrs.field(factory=Counter)
    incomplete: Counter[int] = attrs.field(factory=Counter)

    def __add__(self, other: "SavedBlocks") -> "SavedBlocks":
        return SavedBlocks(self.complete + other.complete, self.incomplete + other.incomplete)

    def __bool__(self) -> bool:
        return bool(self.complete or self.incomplete)


class BlockEvents:
    """The changes that are not told yet, and the blocks that were told as stored.

    `workers` write parts of each block. `describe` returns the change that stores a
    request's blocks, from a number up to another one. At most `most` blocks are known,
    and saves awaited. One thread uses it.
    """

    def __init__(self, workers: int, describe: Callable[[Any, int, int], Change], *, most: int = 100_000) -> None:
        self._workers = workers
        self._describe = describe
        self._most = most
        self._numbers = itertools.count(1)
        self._saving: OrderedDict[int, tuple[tuple[str, ...], Change, Counter[bool]]] = OrderedDict()
        self._known: OrderedDict[str, Hashable] = OrderedDict()
        self._changes: list[Change] = []

    def saving(self, request: object, hashes: Sequence[str], first: int) -> int:
        """Expect that workers write these blocks of a request, from number `first` on;
        return the number of the save.
        """
        number = next(self._numbers)
        self._saving[number] = (tuple(hashes), self._describe(request, first, first + len(hashes)), Counter())
        if len(self._saving) > self._most:
            self._saving.popitem(last=False)
        return number

    def saved(self, blocks: SavedBlocks) -> None:
        """Note what workers have written."""
        for is_complete, numbers in ((True, blocks.complete), (False, blocks.incomplete)):
            for number, count in numbers.items():
                if (waiting := self._saving.get(number)) is None:
                    continue
                hashes, change, told = waiting
                told[is_complete] += count
                if told.total() >= self._workers:
                    del self._saving[number]
                    if not told[False]:
                        self._stored(hashes, change)

    def found(self, request: object, hashes: Sequence[str]) -> None:
        """Note that a request's leading blocks, which have these hashes, are stored."""
        first = next((number for number, block in enumerate(hashes) if block not in self._known), None)
        if first is not None:
            self._stored(hashes[first:], self._describe(request, first, len(hashes)))

    def missing(self, hashes: Sequence[str]) -> None:
        """Note that blocks are not stored."""
        if gone := tuple(self._known.pop(block) for block in hashes if block in self._known):
            self._changes.append(Change(gone))

    def clear(self) -> None:
        """Note that nothing is stored any more."""
        self._saving.clear()
        self.missing(list(self._known))

    def take(self) -> list[Change]:
        """Return the changes since the last call, in order."""
        taken, self._changes = self._changes, []
        return taken

    @property
    def known(self) -> int:
        """How many blocks are known."""
        return len(self._known)

    def next_to_sweep(self, count: int) -> list[str]:
        """Return some known blocks, and other ones the next time."""
        hashes = list(itertools.islice(self._known, count))
        for block in hashes:
            self._known.move_to_end(block)
        return hashes

    def _stored(self, hashes: Sequence[str], change: Change) -> None:
        # Routers may count how often a block was told, so one that is known is not.
        is_new = [block not in self._known for block in hashes]
        for new, run in itertools.groupby(range(len(hashes)), is_new.__getitem__):
            if new:
                first, *others = run
                self._changes.append(change.part(first, first + 1 + len(others)))
        self._known.update(zip(hashes, change.names, strict=True))
        if (excess := len(self._known) - self._most) > 0:
            self.missing(list(itertools.islice(self._known, excess)))


class Sweeper:
    """Asks a store in a thread of its own which blocks are gone, one question at a
    time, and at most one in `pause_s`: which keys it has removed since the last, and
    whether a few blocks are there. If the store does not know all that it has removed,
    it is asked for all blocks without a pause.

    `keys_of` returns some keys of each block, and how many each has; `blocks_with`
    returns the blocks that have some of these keys.
    """

    def __init__(
        self,
        store: BlockingStore,
        record: Record,
        events: BlockEvents,
        keys_of: Callable[[Sequence[str]], tuple[list[str], int]],
        blocks_with: Callable[[Sequence[str]], list[str]],
        *,
        clock: Callable[[], float],
        pause_s: float = 1.0,
    ) -> None:
        self._store = store
        self._record = record
        self._events = events
        self._keys_of = keys_of
        self._blocks_with = blocks_with
        self._removals: Iterable[RemovedKeys] = store.removals(_REMOVALS_WITHIN_S)
        self._clock = clock
        self._pause_s = pause_s
        self._next_s = clock() + pause_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="infinistore-sweep")
        self._asked: Future[list[str]] | None = None
        self._gap = False
        self._in_doubt = 0
        """How many blocks are still to be asked for without a pause."""

    def go_on(self) -> None:
        """Note what the last question found, and ask the next one if it is time."""
        if self._asked is not None and self._asked.done():
            self._events.missing(self._asked.result())
            self._asked = None
            if self._gap:
                self._gap, self._in_doubt = False, self._events.known
        now = self._clock()
        if self._asked is None and (now >= self._next_s or self._in_doubt > 0):
            self._next_s = now + self._pause_s
            self._in_doubt = max(0, self._in_doubt - _SWEPT_AT_ONCE)
            if hashes := self._events.next_to_sweep(_SWEPT_AT_ONCE):
                self._asked = self._thread.submit(self._ask, hashes)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self, hashes: Sequence[str]) -> list[str]:
        keys, each = self._keys_of(hashes)
        try:
            removed = self._blocks_with(self._removed())
            there = self._store.exists_many(keys)
        except InfiniStoreException as error:
            self._record.failed("sweep", error)
            return []
        self._record.succeeded("sweep")
        return removed + [
            block for number, block in enumerate(hashes) if not all(there[number * each : (number + 1) * each])
        ]

    def _removed(self) -> list[str]:
        """Return the keys that the store has removed since the last question; of a
        store that cannot tell them, none.
        """
        keys: list[str] = []
        try:
            for batch in itertools.islice(self._removals, _MOST_BATCHES):
                keys += batch.keys
                self._gap = self._gap or batch.gap
                if not batch.keys:
                    break
        except VersionMismatch:
            self._removals = ()
        return keys
