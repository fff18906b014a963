"""Events about stored and removed blocks, for routers that send a request to the engine
that has its prefix; and dumps of all stored blocks for routers that start later.

The scheduler's half collects changes in `BlockEvents`. A block is stored when every
worker has written its part of it, or when a look-up has found it. It is gone when the
store has reported its removal, when a look-up, a load or a sweep has missed it, or when
the store was reset. A sweep asks for a few blocks at a time. In the end it finds the
removals that the store could not report; if the store says that there were some, the
sweep asks for all blocks at once. The number of known blocks is bounded: those known
for longest are reported as gone, and no longer watched. A router then sends a request
elsewhere, which costs time only.

A router that has followed all events knows the blocks that were stored and not removed.
`StoredBlocks` keeps the same knowledge for routers that start later, as of the end of a
numbered batch, with parents before their children. vLLM does not merge equal blocks: it
reports each copy as stored, and each as removed. So copies are counted, and a dump has
each of them. Above a bound, the last blocks are left out and counted, because blocks
are of no use without those before them.
"""

import itertools
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import attrs

from infinistore.blocking import BlockingStore, RemovedKeys
from infinistore.errors import VersionMismatch
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.background import Background

_PART_BLOCKS: Final = 1024
_MOST_ABOUTS: Final = 1000


@attrs.frozen
class Run:
    """Blocks in a row. As a change: they are stored; without tokens, gone."""

    names: Sequence[Hashable]
    """The engine's hashes of the blocks."""
    parent: Hashable = None
    """The name of the block before; None for the first block of a prompt."""
    tokens: Sequence[int] = ()
    """Those of all blocks, of each as many; none if they are not known."""
    about: Any = None
    """What else is told of such blocks, such as the LoRA adapter."""
    extra_keys: Sequence[Any] = ()
    """What each block depends on besides its tokens; empty if none does."""
    place: Hashable = None
    """Blocks with the same name in two places are two blocks."""

    def part(self, first: int, end: int) -> "Run":
        """Return that of some of the blocks, by their numbers."""
        each = len(self.tokens) // len(self.names)
        return attrs.evolve(
            self,
            names=self.names[first:end],
            parent=self.names[first - 1] if first else self.parent,
            tokens=self.tokens[first * each : end * each],
            extra_keys=self.extra_keys[first:end],
        )


class _Block(NamedTuple):
    parent: Hashable
    tokens: bytes
    extra_keys: Any
    about: Hashable


class _Place:
    """The blocks of one place, in the order in which they were stored."""

    def __init__(self) -> None:
        self.blocks: dict[Hashable, _Block] = {}
        self.more: Counter[Hashable] = Counter()
        """Of blocks with several copies, how many more than one."""
        self.left_out = 0


class Dump:
    """All blocks that were stored after the batches before `next_batch`.

    `left_out` copies of blocks are missing. A dump has at least one part.
    """

    def __init__(self, next_batch: int, left_out: int, blocks: Sequence[tuple[Hashable, Hashable, _Block]]) -> None:
        self.next_batch = next_batch
        self.left_out = left_out
        self.parts = max(1, -(-len(blocks) // _PART_BLOCKS))
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def part(self, number: int) -> Iterator[Run]:
        """Return the blocks of a part. Their parents are in it or in an earlier one."""
        run: list[tuple[Hashable, Hashable, _Block]] = []
        for place, name, block in self._blocks[number * _PART_BLOCKS : (number + 1) * _PART_BLOCKS]:
            if run and not _is_next(run[-1], (place, name, block)):
                yield _run_of(run)
                run = []
            run.append((place, name, block))
        if run:
            yield _run_of(run)


class StoredBlocks:
    """Follows batches, and makes dumps. At most `most` blocks are kept.

    One thread follows; any may ask for a dump.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._count = 0
        self._batches = 0
        self._places: defaultdict[Hashable, _Place] = defaultdict(_Place)
        self._abouts: dict[Hashable, Hashable] = {}
        self._lock = threading.Lock()

    @property
    def left_out(self) -> int:
        """How many copies of blocks are stored, but left out of dumps."""
        return sum(place.left_out for place in self._places.values())

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Follow one batch within: no dump has a part of it."""
        with self._lock:
            yield
            self._batches += 1

    def store(self, run: Run) -> None:
        """Note that blocks are stored."""
        place = self._places[run.place]
        try:
            tokens = array("i", run.tokens)
        except OverflowError:  # there is no such vocabulary
            place.left_out += len(run.names)
            return
        if len(self._abouts) >= _MOST_ABOUTS:
            self._abouts.clear()
        about = self._abouts.setdefault(run.about, run.about)
        each = len(tokens) // len(run.names)
        parent = run.parent
        for number, name in enumerate(run.names):
            if name in place.blocks:
                place.more[name] += 1
            elif self._count >= self._most:
                place.left_out += 1
            else:
                extra = run.extra_keys[number] if run.extra_keys else None
                own = tokens[number * each : (number + 1) * each].tobytes()
                place.blocks[name] = _Block(parent, own, extra, about)
                self._count += 1
            parent = name

    def remove(self, place: Hashable, names: Iterable[Hashable]) -> None:
        """Note that a copy of each of these blocks is gone."""
        known = self._places[place]
        for name in names:
            if name in known.more:
                known.more[name] -= 1
                if not known.more[name]:
                    del known.more[name]
            elif known.blocks.pop(name, None) is not None:
                self._count -= 1
            elif known.left_out:
                known.left_out -= 1

    def clear(self, is_cleared: Callable[[Any], bool]) -> None:
        """Note that nothing is stored in some places any more."""
        for place in [place for place in self._places if is_cleared(place)]:
            self._count -= len(self._places.pop(place).blocks)

    def dump(self) -> Dump:
        """Return what is stored now."""
        with self._lock:
            next_batch, left_out = self._batches, self.left_out
            places = [(place, dict(known.blocks), dict(known.more)) for place, known in self._places.items()]
        blocks = []
        for place, known, more in places:
            blocks += [(place, name, known[name]) for name in _parents_first(known)]
            blocks += [(place, name, known[name]) for name, copies in more.items() for _ in range(copies)]
        return Dump(next_batch, left_out, blocks)


def _parents_first(blocks: Mapping[Hashable, _Block]) -> Iterator[Hashable]:
    """Return the names of blocks, each behind its parent, if that is among them."""
    told: set[Hashable] = set()
    for name in blocks:
        line: list[Hashable] = []
        ahead: Hashable = name
        while ahead in blocks and ahead not in told:
            told.add(ahead)
            line.append(ahead)
            ahead = blocks[ahead].parent
        yield from reversed(line)


def _is_next(last: tuple[Hashable, Hashable, _Block], block: tuple[Hashable, Hashable, _Block]) -> bool:
    """Whether a block can be told in one run with the one before."""
    (last_place, last_name, before), (place, _, after) = last, block
    return (
        place == last_place
        and after.parent is not None
        and after.parent == last_name
        and after.about is before.about
        and len(after.tokens) == len(before.tokens)
    )


def _run_of(blocks: Sequence[tuple[Hashable, Hashable, _Block]]) -> Run:
    place, _, first = blocks[0]
    tokens = array("i", b"".join(block.tokens for _, _, block in blocks))
    extra_keys = [block.extra_keys for _, _, block in blocks]
    return Run(
        [name for _, name, _ in blocks],
        first.parent,
        tokens.tolist(),
        first.about,
        extra_keys if any(keys is not None for keys in extra_keys) else (),
        place,
    )


_SWEPT_AT_ONCE = 128
_REMOVALS_WITHIN_S = 0.001
_MOST_BATCHES = 16
"""Of removed keys, in one question: more are asked for the next time."""


@attrs.frozen
class SavedBlocks:
    """By the numbers of saves, how many workers have written all, and how many not."""

    complete: Counter[int] = attrs.field(factory=Counter)
    incomplete: Counter[int] = attrs.field(factory=Counter)

    def __add__(self, other: "SavedBlocks") -> "SavedBlocks":
        return SavedBlocks(self.complete + other.complete, self.incomplete + other.incomplete)

    def __bool__(self) -> bool:
        return bool(self.complete or self.incomplete)


class BlockEvents:
    """The changes that no event has reported yet, and the blocks reported as stored.

    `workers` write parts of each block. `describe` returns the change that stores a
    request's blocks, from a number up to another one. At most `most` blocks are known,
    and saves awaited. One thread uses it.
    """

    def __init__(self, workers: int, describe: Callable[[Any, int, int], Run], *, most: int = 100_000) -> None:
        self._workers = workers
        self._describe = describe
        self._most = most
        self._numbers = itertools.count(1)
        self._saving: OrderedDict[int, tuple[tuple[str, ...], Run, Counter[bool]]] = OrderedDict()
        self._known: OrderedDict[str, Hashable] = OrderedDict()
        self._changes: list[Run] = []

    def saving(self, request: object, hashes: Sequence[str], first: int) -> int:
        """Expect workers to write these blocks, from `first` on; return their save."""
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
            self._changes.append(Run(gone))

    def clear(self) -> None:
        """Note that nothing is stored any more."""
        self._saving.clear()
        self.missing(list(self._known))

    def take(self) -> list[Run]:
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

    def _stored(self, hashes: Sequence[str], change: Run) -> None:
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
    """Asks a store in the background which blocks are gone, one question at a time, and
    at most one in `pause_s`: which keys it has removed since the last, and whether a
    few blocks are there. If the store does not know all that it has removed, it is
    asked for all blocks without a pause.

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
        background: Background,
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
        self._background = background
        self._asked: Future[list[str]] | None = None
        self._gap = False
        self._in_doubt = 0
        """How many blocks are still to be asked for without a pause."""

    def go_on(self) -> None:
        """Note the answer to the last question, and ask the next one if it is time."""
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
                self._asked = self._background.submit(lambda: self._ask(hashes), [])

    def _ask(self, hashes: Sequence[str]) -> list[str]:
        keys, each = self._keys_of(hashes)
        gone: list[str] = []
        with self._record.trying("sweep"):
            gone = self._blocks_with(self._removed())
            there = self._store.exists_many(keys)
            gone += [
                block for number, block in enumerate(hashes) if not all(there[number * each : (number + 1) * each])
            ]
        return gone

    def _removed(self) -> list[str]:
        """Return the keys removed since the last question, if the store can tell."""
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
