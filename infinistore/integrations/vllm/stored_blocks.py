"""The blocks that batches of KV cache events have told as stored and not as removed.

One who has followed all batches knows them. This keeps what is needed to tell them to
one who comes late: as of the end of a batch, whose number is known, with parents before
their children.

A block is told as stored once for each copy of it, and as removed as often: vLLM does
not merge equal blocks. So copies are counted here, and a dump tells each.

What is kept is bounded. Of more blocks, the last ones are left out, because what is
stored behind others is of no use without them, and it is counted how many.
"""

import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import attrs

__all__ = ["Dump", "Run", "StoredBlocks"]

_PART_BLOCKS: Final = 1024
_MOST_ABOUTS: Final = 1000


@attrs.frozen
class Run:
    """Blocks of one place, one behind the other."""

    place: Hashable
    """Blocks with the same name in two places are two blocks."""
    names: Sequence[Hashable]
    parent: Hashable = None
    """The name of the block before; None for the first block of a prompt."""
    tokens: Sequence[int] = ()
    """Those of all blocks, of each as many; none if they are not known."""
    extra_keys: Sequence[Any] = ()
    """What each block depends on besides its tokens; empty if none does."""
    about: Hashable = None
    """What else is told of such blocks."""


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
    """All blocks that were stored when the batches before `next_batch` were told.

    `left_out` copies of blocks are missing. There are `parts` parts, at least one.
    """

    def __init__(self, next_batch: int, left_out: int, blocks: Sequence[tuple[Hashable, Hashable, _Block]]) -> None:
        self.next_batch = next_batch
        self.left_out = left_out
        self.parts = max(1, -(-len(blocks) // _PART_BLOCKS))
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def part(self, number: int) -> Iterator[Run]:
        """Return the blocks of a part: their parents are there, or in one before."""
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
        """How many copies of blocks are stored and not known here."""
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
        place,
        [name for _, name, _ in blocks],
        first.parent,
        tokens.tolist(),
        extra_keys if any(keys is not None for keys in extra_keys) else (),
        first.about,
    )
