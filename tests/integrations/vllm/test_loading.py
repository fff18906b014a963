"""The setting `"load": "faster"`: what is measured, and which requests load for that,
without vLLM.
"""

import logging
from collections.abc import Iterable
from typing import Any

import attrs
import pytest

from infinistore import blocking
from infinistore.integrations.vllm.blocks import Step
from infinistore.integrations.vllm.loading import LinkMeter, LinkReport, LoadChoice, Reads
from infinistore.integrations.vllm.observations import Observations

from .halves import BLOCK_TOKENS, MadeRequest, make_cache, make_scheduler, make_worker, save
from .test_scheduler import TOKENS, fill, run, start


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_reads_beside_each_other_are_one_measurement(clock: Clock) -> None:
    meter = LinkMeter(clock)
    for _ in range(3):
        meter.queue(100)
    meter.begin()
    clock.now += 0.25
    meter.begin()
    meter.read(100)
    meter.end(0)
    clock.now += 0.25
    meter.read(40)
    meter.end(60)  # the rest of it was missing
    clock.now += 5.0
    assert meter.take() == Reads(140, 0.5, 100)
    assert meter.take() is None


def test_a_long_read_is_reported_while_it_goes_on(clock: Clock) -> None:
    meter = LinkMeter(clock)
    meter.queue(1000)
    meter.begin()
    clock.now += 0.75
    assert meter.take() is None
    clock.now += 0.75
    assert meter.take() == Reads(0, 1.5, 1000)
    clock.now += 0.125
    meter.read(1000)
    meter.end(0)
    assert meter.take() == Reads(1000, 0.125, 0)


class Engine:
    """Computes and reads so many tokens a second, and tells a choice."""

    def __init__(self, clock: Clock, *, ranks: int = 1) -> None:
        self.clock = clock
        self.observed = Observations()
        self.choice = LoadChoice(clock, ranks=ranks, observations=self.observed)
        self.ranks = ranks

    def compute(self, tokens: int, seconds: float) -> None:
        number = self.choice.planned([(0, tokens)])
        self.clock.now += seconds
        self.choice.ended(number, {})

    def decode(self, seconds: float) -> None:
        number = self.choice.planned([])
        self.clock.now += seconds
        self.choice.ended(number, {})

    def read(self, tokens: int, *seconds: float, disk: bool = False) -> None:
        """Read on each rank, in so many seconds."""
        reads = [Reads(tokens, one, 0) for one in seconds]
        reports = {rank: LinkReport(disk=one) if disk else LinkReport(one) for rank, one in enumerate(reads)}
        number = self.choice.planned([])
        self.choice.ended(number, reports)

    def loads(self, name: str, tokens: int = 4000, **options: Any) -> bool:
        given = {"cached_tokens": 0, "stored_tokens": tokens - 16, "is_on_disk": False, "queued": ()}
        return self.choice.loads(name, **{"tokens": tokens, **given, **options}).load


def test_until_both_ways_are_measured_requests_load(clock: Clock) -> None:
    engine = Engine(clock)
    assert engine.loads("first")
    engine.read(1000, 10.0)
    assert engine.loads("second")
    engine.compute(1000, 0.1)
    assert not engine.loads("third")
    assert engine.loads("first"), "it gets the same answer"
    clock.now += 61
    assert engine.loads("fourth"), "what was measured is old"


def test_the_faster_way_is_chosen_and_the_slowest_rank_counts(clock: Clock) -> None:
    engine = Engine(clock, ranks=2)
    engine.read(1000, 0.001, 0.001)
    engine.compute(1000, 0.1)
    assert engine.loads("fast")
    for _ in range(20):
        engine.read(1000, 0.001, 10.0)
    assert not engine.loads("slow")
    assert engine.observed.take()["counters"] == {"skipped_loads": 1, "skipped_tokens": 3984}


def test_memory_and_disks_are_measured_apart(clock: Clock) -> None:
    engine = Engine(clock)
    engine.read(1000, 0.001)
    engine.read(1000, 10.0, disk=True)
    engine.compute(1000, 0.1)
    assert engine.loads("in memory")
    assert not engine.loads("on disk", is_on_disk=True)


def test_steps_that_only_decode_say_nothing_of_prefill(clock: Clock) -> None:
    engine = Engine(clock)
    engine.read(1000, 0.5)
    for _ in range(100):
        engine.decode(1.0)
    assert engine.loads("a request")
    engine.compute(1000, 0.1)
    assert not engine.loads("another")


def test_steps_that_overlap_are_measured_by_when_they_end(clock: Clock) -> None:
    """As where vLLM plans the next one before the last one has ended."""
    engine = Engine(clock)
    engine.read(1000, 0.15)
    numbers = [engine.choice.planned([(0, 1000)]) for _ in range(20)]
    for number in numbers:
        clock.now += 0.1
        engine.choice.ended(number, {})
    assert not engine.loads("a request"), "0.1 s for a thousand tokens, not 2"


def test_a_step_that_is_never_reported_changes_nothing(clock: Clock) -> None:
    engine = Engine(clock)
    engine.read(1000, 0.15)
    engine.choice.planned([(0, 1000)])
    clock.now += 30
    engine.compute(1000, 0.1)
    assert not engine.loads("a request")


def test_a_link_that_has_recovered_is_noticed(clock: Clock) -> None:
    engine = Engine(clock)
    engine.read(1000, 10.0)
    engine.compute(1000, 0.1)
    asked = [engine.loads(f"request {number}") for number in range(40)]
    assert asked.count(True) == 2
    assert engine.observed.take()["counters"]["tried_loads"] == 2
    for _ in range(2):
        engine.read(40, 0.4)  # what these have read until they were given up
    engine.clock.now += 61
    assert [engine.loads(name) for name in ("a minute later", "beside it")] == [True, False]
    engine.read(4000, 0.004)  # what that one has read
    assert [engine.loads(name) for name in ("after it", "later")] == [True, True]


def test_the_log_says_once_which_way_is_faster(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine(clock)
    for _ in range(3):
        engine.read(1000, 0.001)
        engine.compute(1000, 0.1)
    for _ in range(60):
        engine.read(1000, 10.0)
    said = [record.getMessage() for record in caplog.records]
    assert ["loading is faster now" in said[0], "computing is faster now" in said[1]] == [True, True]
    assert len(said) == 2


def test_a_request_that_is_not_worth_loading_is_computed_and_not_stored_again(
    store: blocking.BlockingStore, clock: Clock
) -> None:
    engine = Engine(clock)
    engine.read(1000, 1000.0)
    engine.compute(1000, 0.001)
    fill(store, 3)
    scheduler, request = make_scheduler(store, choice=engine.choice), MadeRequest.of(TOKENS)
    assert start(scheduler, request) == 0
    step = run(scheduler, request, len(TOKENS))
    assert not step.loads
    assert [block for part in step.saves for block in part.blocks.block_ids] == [13, 14]
    scheduler.finished(request)
    assert start(make_scheduler(store), MadeRequest.of(TOKENS)) == 3 * BLOCK_TOKENS


def test_a_trial_on_a_link_that_is_still_slow_is_given_up_and_its_blocks_stay_known(
    store: blocking.BlockingStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(clock)
    engine.read(1000, 1000.0)
    engine.compute(1000, 0.5)
    fill(store, 3)
    clock.now += 61
    scheduler = make_scheduler(store, choice=engine.choice)
    request = MadeRequest.of(TOKENS)
    assert start(scheduler, request) == 3 * BLOCK_TOKENS
    step = run(scheduler, MadeRequest.of([1], "another"), 1)
    (load,) = step.loads
    assert load.limit_s == pytest.approx(3 * BLOCK_TOKENS * 0.5 / 1000, rel=0.3)

    sizes: list[int] = []

    def slowly(items: Iterable[tuple[str, memoryview]]) -> list[int | None]:
        asked = list(items)
        sizes.append(len(asked))
        clock.now += 0.001 * len(asked)
        return [len(view) for _, view in asked]

    monkeypatch.setattr(store, "get_many_into", slowly)
    worker = make_worker(store, make_cache(2, blocks=40), clock=clock)
    save(worker, step)
    worker.close()
    assert sizes == [1, 2, 3]  # blocks of the first layer, and of the others none
    assert worker.take_failed_blocks() == {10, 11, 12}
    report = worker.take_link_report()[1]
    assert report is not None and report.memory is not None
    assert attrs.astuple(report.memory) == pytest.approx((6 / 9 * 3 * BLOCK_TOKENS, 0.006, 0.0))

    scheduler.loads_ended(["r"], {10, 11, 12})
    request.num_computed_tokens = 0
    assert scheduler.loadable_tokens(request, 0) == 0
    assert [save.blocks.block_ids for save in run(scheduler, request, len(TOKENS)).saves] == [[13, 14]]


def test_what_a_worker_reads_is_what_its_scheduler_learns(store: blocking.BlockingStore, clock: Clock) -> None:
    observed = Observations()
    choice = LoadChoice(clock, ranks=1, observations=observed)
    scheduler = make_scheduler(store, choice=choice)
    request = MadeRequest.of(TOKENS)
    start(scheduler, request)
    writer = make_worker(store, make_cache(1, blocks=40))
    save(writer, run(scheduler, request, len(TOKENS)))
    writer.close()

    again = MadeRequest.of(TOKENS, "again")
    assert start(scheduler, again) == 5 * BLOCK_TOKENS
    step = run(scheduler, again, 2)
    reader = make_worker(store, make_cache(2, blocks=40), clock=clock)
    save(reader, step)
    reader.close()
    number, report = reader.take_link_report()
    assert number == step.number == 2
    assert report is not None and report.memory is not None and report.disk is None
    assert report.memory.tokens == pytest.approx(5 * BLOCK_TOKENS)
    assert report.memory.waiting_tokens == pytest.approx(0)
    scheduler.step_ended(number, {0: report})
    assert reader.take_link_report() == (number, None)


def test_without_a_choice_workers_report_nothing(store: blocking.BlockingStore) -> None:
    worker = make_worker(store, make_cache(1))
    worker.begin(Step())
    assert worker.take_link_report() == (0, None)
    worker.close()
