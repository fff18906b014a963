"""What routers are told, without vLLM: blocks that are stored, and blocks that are
gone.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.blocking import RemovedKeys
from infinistore.errors import StoreUnavailable
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.block_events import BlockEvents, Run, SavedBlocks, Sweeper
from infinistore.integrations.vllm.blocks import Load

from .halves import BLOCK_TOKENS, ByHand, Engine, MadeRequest, loadable, make_cache, make_scheduler, make_worker

TOKENS = list(range(100, 122))  # five full blocks and two tokens


def describe(request: MadeRequest, first: int, end: int) -> Run:
    """Block i of a request has the name of its last token."""
    tokens = request.all_token_ids[first * BLOCK_TOKENS : end * BLOCK_TOKENS]
    names = tuple(tokens[BLOCK_TOKENS - 1 :: BLOCK_TOKENS])
    return Run(names, request.all_token_ids[first * BLOCK_TOKENS - 1] if first else None, tuple(tokens))


def told(events: BlockEvents) -> list[tuple[str, list[object], object]]:
    return [("stored" if change.tokens else "gone", list(change.names), change.parent) for change in events.take()]


class Telling(Engine):
    """An engine of two shards that collects what is to be told."""

    def __init__(self, store: blocking.BlockingStore, events: BlockEvents | None = None) -> None:
        self.background = background = ByHand()
        self.events = events or BlockEvents(2, describe)
        super().__init__(store, shards=2, events=self.events, background=background, clock=lambda: background.now)

    def compute(self, tokens: list[int], name: str = "r") -> int:
        """Compute a prompt and store it; return how much was found."""
        request = MadeRequest.of(tokens, name)
        found = loadable(self.scheduler, request)
        self.step(self.scheduler.plan({name: len(tokens)}, (), lambda _: (range(5),)))
        saved = SavedBlocks()
        for worker in self.workers:
            worker.close()  # writes what waits to be written
            saved += worker.take_saved()
        self.events.saved(saved)
        self.scheduler.finished(request)
        return found

    def swept(self) -> list[tuple[str, list[object], object]]:
        """Ask the store once, which is done once a second; return what is told."""
        self.background.run(1.0)
        for _ in range(2):  # what has been found is noted with the next step
            self.scheduler.plan({}, (), lambda _: ())
            self.background.run()
        return told(self.events)


def test_a_block_is_told_when_every_worker_has_written_it(store: blocking.BlockingStore) -> None:
    engine = Telling(store)
    request = MadeRequest.of(TOKENS)
    engine.scheduler.loadable_tokens(request, 0)
    engine.step(engine.scheduler.plan({"r": 22}, (), lambda _: (range(5),)))
    first, second = engine.workers
    first.close()
    engine.events.saved(first.take_saved())
    assert told(engine.events) == []
    second.close()
    engine.events.saved(second.take_saved())

    assert told(engine.events) == [("stored", [103, 107, 111, 115, 119], None)]
    assert told(engine.events) == []


def test_what_a_worker_could_not_write_is_not_told(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.put_batch

    def failing(batch: object, *arguments: object, **options: object) -> object:
        if "/1/2" in str(batch):
            raise StoreUnavailable("gone")
        return put(batch, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "put_batch", failing)
    engine = Telling(store)
    engine.compute(TOKENS)

    assert told(engine.events) == []


def test_what_a_look_up_finds_or_misses_is_told(store: blocking.BlockingStore) -> None:
    Telling(store).compute(TOKENS[:14])
    engine = Telling(store)

    assert engine.scheduler.loadable_tokens(MadeRequest.of(TOKENS, "1"), 0) == 12
    assert told(engine.events) == [("stored", [103, 107, 111], None)]
    assert engine.scheduler.loadable_tokens(MadeRequest.of(TOKENS, "2"), 0) == 12
    assert told(engine.events) == []
    second_block = [key for key in store.keys() if key.split("/")[-3] == hash_of(1)]  # noqa: SIM118
    store.delete(second_block)
    assert engine.scheduler.loadable_tokens(MadeRequest.of(TOKENS, "3"), 0) == 4
    assert told(engine.events) == [("gone", [107], None)]
    engine.close()


def test_a_look_up_that_fails_tells_nothing(store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Telling(store)
    engine.compute(TOKENS)
    told(engine.events)

    def fail(keys: object) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(store, "match_prefix", fail)
    assert engine.scheduler.loadable_tokens(MadeRequest.of(TOKENS, "2"), 0) == 0
    assert told(engine.events) == []
    engine.close()


def test_what_a_load_misses_is_told(store: blocking.BlockingStore) -> None:
    Telling(store).compute(TOKENS)
    engine = Telling(store)
    request = MadeRequest.of(TOKENS)
    engine.scheduler.allocated(request, (range(5),), loadable(engine.scheduler, request))
    (load,) = engine.scheduler.plan({}, (), lambda _: ()).loads
    assert isinstance(load, Load)
    told(engine.events)
    engine.scheduler.loads_ended(["r"], {load.block_ids[2]})

    assert told(engine.events) == [("gone", [111], None)]
    engine.close()


def test_a_block_after_others_names_the_one_before_it(store: blocking.BlockingStore) -> None:
    engine = Telling(store)
    request = MadeRequest.of(TOKENS)
    engine.scheduler.loadable_tokens(request, 0)
    for count in (9, 13):
        engine.step(engine.scheduler.plan({"r": count}, (), lambda _: (range(5),)))
        request.num_computed_tokens += count
    for worker in engine.workers:
        worker.close()
        engine.events.saved(worker.take_saved())

    assert told(engine.events) == [("stored", [103, 107], None), ("stored", [111, 115, 119], 107)]


def test_after_a_reset_all_that_was_told_is_gone(store: blocking.BlockingStore) -> None:
    engine = Telling(store)
    engine.compute(TOKENS)
    told(engine.events)
    engine.scheduler.forget()

    assert told(engine.events) == [("gone", [103, 107, 111, 115, 119], None)]
    engine.scheduler.forget()
    assert told(engine.events) == []


def test_a_sweep_tells_of_evictions_that_no_request_meets(store: blocking.BlockingStore) -> None:
    engine = Telling(store)
    engine.compute(TOKENS)
    told(engine.events)
    store.delete([key for key in store.keys() if key.split("/")[-3] == hash_of(3)])  # noqa: SIM118

    assert engine.swept() == [("gone", [115], None)]


class SweepsNothing(BlockEvents):
    """Asks for a block that is always there."""

    def next_to_sweep(self, count: int) -> list[str]:
        return super().next_to_sweep(1) and [hash_of(0)]


def test_what_the_store_removes_is_told_without_a_sweep(store: blocking.BlockingStore) -> None:
    engine = Telling(store, events=SweepsNothing(2, describe))
    engine.compute(TOKENS)
    told(engine.events)
    layer, *_ = engine.names.layers
    keys = [engine.names.key(hash_of(3), 1, layer), engine.names.key(hash_of(2), 0, "layer of another group"), "other"]

    engine.swept()
    store.put_many(dict.fromkeys(keys, b"x"))
    store.delete(keys)  # told is what is removed after the first question
    assert engine.swept() == [("gone", [115], None)]


class ForgetfulStore:
    """Has nothing, and does not know what it has removed before the first question."""

    def removals(self, wait_s: float) -> Iterator[RemovedKeys]:
        yield RemovedKeys(missed=None)
        while True:
            yield RemovedKeys()

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        return [False] * len(keys)


def test_all_blocks_are_asked_for_at_once_if_the_store_does_not_know_what_it_removed() -> None:
    events = BlockEvents(1, describe)
    blocks = [str(number) for number in range(1000)]
    events.found(MadeRequest.of(list(range(4 * len(blocks)))), blocks)
    told(events)
    store: Any = ForgetfulStore()
    background = ByHand()
    sweeper = Sweeper(
        store,
        Record(logging.getLogger("a test"), "a test"),
        events,
        lambda hashes: (list(hashes), 1),
        lambda keys: [],
        background=background,
        clock=lambda: background.now,
    )
    background.run(1.0)
    for _ in range(10):
        sweeper.go_on()
        background.run()
    assert events.known == 0


def test_a_sweep_asks_for_others_the_next_time() -> None:
    events = BlockEvents(1, describe)
    events.found(MadeRequest.of(TOKENS), list("abcde"))

    assert [events.next_to_sweep(2) for _ in range(3)] == [["a", "b"], ["c", "d"], ["e", "a"]]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.booleans()), max_size=20), st.integers(1, 8))
def test_whoever_follows_the_changes_knows_what_is_known_and_no_more_than_the_bound(
    steps: list[tuple[int, int, bool]], most: int
) -> None:
    events = BlockEvents(1, describe, most=most)
    follows: Counter[object] = Counter()
    for start, blocks, stays in steps:
        tokens = list(range(start * 100, start * 100 + 4 * blocks))
        request = MadeRequest.of(tokens)
        hashes = [str(token) for token in tokens[3::4]]
        if stays:
            number = events.saving(request, hashes, 0)
            events.saved(SavedBlocks(Counter([number])))
        else:
            events.missing(hashes)
        for change in events.take():
            for name in change.names:  # one that counts ends up with the same
                follows[name] += 1 if change.tokens else -1
                assert follows[name] in (0, 1)

        known = {str(name) for name, is_there in follows.items() if is_there}
        assert known == set(events.next_to_sweep(1000))
        assert len(known) <= most


def test_a_block_that_is_known_is_not_told_again_and_what_follows_it_names_it() -> None:
    """Two requests may compute the same blocks at the same time."""
    events = BlockEvents(1, describe)
    request = MadeRequest.of(TOKENS)
    events.found(request, list("ab"))
    events.missing(["a"])
    told(events)
    events.saved(SavedBlocks(Counter([events.saving(request, list("abcde"), 0)])))

    assert told(events) == [("stored", [103], None), ("stored", [111, 115, 119], 107)]


def test_saves_whose_workers_never_answer_are_forgotten_in_the_end() -> None:
    events = BlockEvents(1, describe, most=3)
    numbers = [events.saving(MadeRequest.of(TOKENS), list("abcde"), 0) for _ in range(5)]
    events.saved(SavedBlocks(Counter(numbers[:2])))
    assert told(events) == []
    events.saved(SavedBlocks(Counter(numbers[2:3]), Counter(numbers[3:4])))
    assert told(events)[0][0] == "stored"


def hash_of(number: int) -> str:
    return PrefixChain(BLOCK_TOKENS).extend(TOKENS)[number]


def test_nothing_is_numbered_without_events(store: blocking.BlockingStore) -> None:
    scheduler, worker = make_scheduler(store), make_worker(store, make_cache(1))
    request = MadeRequest.of(TOKENS)
    scheduler.loadable_tokens(request, 0)
    worker.begin(scheduler.plan({"r": 22}, (), lambda _: (range(5),)))
    worker.end_saves()
    worker.close()

    assert not worker.take_saved()
