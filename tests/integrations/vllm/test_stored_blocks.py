"""Who joins late and takes a dump knows what one does who has seen everything."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.integrations.vllm.block_events import Dump, Run, StoredBlocks

PLACES = ["GPU", "CPU", "STORAGE"]
Path = tuple[int, ...]
"""The name of a block: its parent's, and a number."""
Change = Callable[[Any], None]


def run_of(path: Path, first: int, place: str = "GPU", **changes: Any) -> Run:
    """The blocks of a path from a number on."""
    names = [path[:end] for end in range(first + 1, len(path) + 1)]
    tokens = [number for name in names for number in tokens_of(name)]
    extra = [f"image {name}" if 3 in name else None for name in names] if 3 in path else ()
    return Run(
        names, path[:first] or None, tokens, extra_keys=extra, place=place, **{"about": len(path[:1]), **changes}
    )


def tokens_of(name: Path) -> list[int]:
    return [sum(name), len(name)]


class Follower:
    """Counts the copies of each block, as one who has followed all batches."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Hashable, Hashable]] = Counter()
        self.known: dict[tuple[Hashable, Hashable], Any] = {}

    def store(self, run: Run) -> None:
        each = len(run.tokens) // len(run.names)
        parent = run.parent
        for number, name in enumerate(run.names):
            extra = run.extra_keys[number] if run.extra_keys else None
            told = (parent, list(run.tokens[number * each : (number + 1) * each]), extra, run.about)
            assert self.known.setdefault((run.place, name), told) == told
            self.copies[run.place, name] += 1
            parent = name

    def remove(self, place: Hashable, names: list[Hashable]) -> None:
        for name in names:
            self.copies[place, name] -= 1
        self.copies += Counter()  # without what is zero

    def clear(self, is_cleared: Callable[[Any], bool]) -> None:
        self.copies = Counter({block: count for block, count in self.copies.items() if not is_cleared(block[0])})

    def join(self, dump: Dump) -> None:
        for run in runs_of(dump):
            self.store(run)


def runs_of(dump: Dump) -> Iterator[Run]:
    for number in range(dump.parts):
        yield from dump.part(number)


@st.composite
def batches(draw: st.DrawFn) -> list[list[Change]]:
    """Of what is stored, removed and cleared in turn. What is removed was stored."""
    follower = Follower()
    made = []

    def change() -> Change:
        stored = sorted(follower.copies)
        kind = draw(st.sampled_from(["store", "store", "remove", "clear"]))
        if kind == "store" or not stored:
            path = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
            run = run_of(path, draw(st.integers(0, len(path) - 1)), draw(st.sampled_from(PLACES)))
            return lambda one: one.store(run)
        if kind == "remove":
            place, name = draw(st.sampled_from(stored))
            return lambda one: one.remove(place, [name])
        cleared = draw(st.sampled_from(PLACES))
        return lambda one: one.clear(lambda place: place == cleared)

    for _ in range(draw(st.integers(0, 12))):
        batch = []
        for _ in range(draw(st.integers(0, 4))):
            batch.append(change())
            batch[-1](follower)
        made.append(batch)
    return made


def follow(blocks: StoredBlocks, batch: list[Change]) -> None:
    with blocks.batch():
        for change in batch:
            change(blocks)


@given(batches(), st.data())
def test_one_that_joins_at_any_point_knows_what_one_does_that_saw_everything(
    made: list[list[Change]], data: st.DataObject
) -> None:
    subscribes = data.draw(st.integers(0, len(made)))
    takes = data.draw(st.integers(subscribes, len(made)))
    blocks, everything, late = StoredBlocks(most=1000), Follower(), Follower()
    for batch in made[:takes]:
        follow(blocks, batch)
        for change in batch:
            change(everything)
    dump = blocks.dump()
    late.join(dump)

    assert (late.copies, dump.left_out, len(dump)) == (everything.copies, 0, everything.copies.total())
    for number, batch in enumerate(made[subscribes:], subscribes):
        if number < dump.next_batch:
            continue
        for change in batch:
            change(everything)
            change(late)
        assert late.copies == everything.copies
    for block in late.copies:
        assert late.known[block] == everything.known[block]


@given(batches())
def test_parents_come_before_their_children(made: list[list[Change]]) -> None:
    blocks = StoredBlocks(most=1000)
    for batch in made:
        follow(blocks, batch)
    stored = {(run.place, name) for run in runs_of(blocks.dump()) for name in run.names}
    told = set()
    for run in runs_of(blocks.dump()):
        parent = run.parent
        for name in run.names:
            assert (run.place, parent) in told or (run.place, parent) not in stored
            told.add((run.place, name))
            parent = name


@given(batches(), st.integers(1, 5))
def test_what_is_left_out_above_the_bound_is_counted(made: list[list[Change]], most: int) -> None:
    blocks, everything = StoredBlocks(most=most), Follower()
    for batch in made:
        follow(blocks, batch)
        for change in batch:
            change(everything)
        dump, late = blocks.dump(), Follower()
        late.join(dump)

        assert len(late.copies) <= most
        assert late.copies <= everything.copies
        assert dump.left_out == blocks.left_out == (everything.copies - late.copies).total()


def test_blocks_behind_each_other_are_one_run_also_over_parts() -> None:
    path: Path = (1,) * 3000
    blocks = StoredBlocks(most=10_000)
    for end in range(500, 3001, 500):
        follow(blocks, [lambda one, end=end: one.store(run_of(path[:end], end - 500))])  # type: ignore[misc]
    dump = blocks.dump()
    runs = [list(dump.part(number)) for number in range(dump.parts)]

    assert [[len(run.names) for run in part] for part in runs] == [[1024], [1024], [952]]
    assert runs[1][0].parent == runs[0][0].names[-1]
    assert [token for part in runs for run in part for token in run.tokens] == run_of(path, 0).tokens


@pytest.mark.parametrize(
    "other",
    [
        run_of((1, 2), 1, about="another adapter"),
        run_of((1, 2), 1, place="STORAGE"),
        attrs.evolve(run_of((1, 2), 1), tokens=[]),
        run_of((2,), 0),
    ],
)
def test_what_differs_is_no_run(other: Run) -> None:
    blocks = StoredBlocks(most=10)
    follow(blocks, [lambda one: one.store(run_of((1,), 0)), lambda one: one.store(other)])

    assert list(runs_of(blocks.dump())) == [attrs.evolve(run_of((1,), 0), names=[(1,)]), other]


def test_a_token_that_is_no_number_of_a_vocabulary_leaves_its_blocks_out() -> None:
    blocks = StoredBlocks(most=10)
    follow(blocks, [lambda one: one.store(Run(["a", "b"], tokens=[1, 1 << 40], place="GPU"))])

    assert (len(blocks.dump()), blocks.dump().left_out) == (0, 2)


def test_adapters_without_end_take_no_room_without_end() -> None:
    blocks = StoredBlocks(most=10)
    for number in range(5000):
        follow(blocks, [lambda one, number=number: one.store(Run([number], about=str(number), place="GPU"))])  # type: ignore[misc]

    assert [run.about for run in runs_of(blocks.dump())] == [str(number) for number in range(10)]
    assert blocks.left_out == 4990
