"""The scheduler's half, with a store but without vLLM: what is read, held and written,
and when.
"""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.errors import StoreUnavailable
from infinistore.integrations.vllm.blocks import BlockNames, LayerGroup, Load, Step, block_names
from infinistore.integrations.vllm.observations import Observations
from infinistore.integrations.vllm.scheduler import Found, SchedulerSide
from tests.cluster_client.clusters import Member
from tests.integrations.disks import leave_on_disk, no_prefetch, wait_until_in_memory

from .halves import BLOCK_TOKENS, FULL, MadeRequest, loadable, make_names, make_scheduler

TOKENS = list(range(100, 122))  # five full blocks and two tokens


def run(scheduler: SchedulerSide, request: MadeRequest, count: int) -> Step:
    """One step that computes `count` tokens of a request in the blocks 10, 11,
    12, ...
    """
    step = scheduler.plan({request.request_id: count}, (), lambda _: (range(10, 40),))
    request.num_computed_tokens += count
    return step


def start(scheduler: SchedulerSide, request: MadeRequest, computed: int = 0) -> int:
    """What vLLM's scheduler does with a new request; returns how many tokens will be
    read.
    """
    tokens = loadable(scheduler, request, computed)
    scheduler.allocated(request, (range(10, 40),), tokens)
    request.num_computed_tokens = computed + tokens
    return tokens


def fill(
    store: blocking.BlockingStore,
    blocks: int,
    names: BlockNames | None = None,
    groups: tuple[LayerGroup, ...] = (FULL,),
) -> list[str]:
    """Store the first blocks of TOKENS; return all of their keys."""
    names = names or make_names()
    scheduler = make_scheduler(store, names, reads=False, groups=groups)
    request = MadeRequest.of(TOKENS)
    start(scheduler, request)
    (saved,) = run(scheduler, request, len(TOKENS)).saves
    keys = names.all_keys(saved.blocks.hashes[:blocks])
    store.put_many(dict.fromkeys(keys, b"bytes"))
    return keys


class Later:
    """Looks up when the test says so."""

    def __init__(self) -> None:
        self._due: list[tuple[Callable[[], Found | None], Future[Found | None]]] = []

    def __call__(self, work: Callable[[], Found | None]) -> "Future[Found | None]":
        self._due.append((work, Future()))
        return self._due[-1][1]

    def run(self) -> int:
        """Do all that is due; return how much that was."""
        due, self._due = self._due, []
        for work, answer in due:
            answer.set_result(work())
        return len(due)


def test_a_step_that_computes_goes_on_without_an_answer_that_is_late(store: blocking.BlockingStore) -> None:
    fill(store, 3)
    later = Later()
    scheduler = make_scheduler(store, in_thread=later)
    run(scheduler, MadeRequest.of([1], "running"), 1)
    one, other = MadeRequest.of(TOKENS, "one"), MadeRequest.of(TOKENS, "other")

    assert [scheduler.loadable_tokens(request, 0) for request in (one, other, one)] == [None] * 3
    assert later.run() == 2  # each is looked up once
    assert [scheduler.loadable_tokens(request, 0) for request in (one, other)] == [12, 12]
    assert later.run() == 0


def test_a_step_waits_for_all_answers_together_only_once(store: blocking.BlockingStore) -> None:
    now = 0.0
    waited: list[float | None] = []

    def wait_for(answers: list[Any], limit_s: float | None) -> None:
        nonlocal now
        waited.append(limit_s)
        now += 0.003

    later = Later()
    scheduler = make_scheduler(store, in_thread=later, clock=lambda: now)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("infinistore.integrations.vllm.scheduler.wait", wait_for)
        for _ in range(2):
            run(scheduler, MadeRequest.of([1], "running"), 1)
            for name in "abcd":
                assert scheduler.loadable_tokens(MadeRequest.of(TOKENS, name), 0) is None
    assert waited == pytest.approx([0.005, 0.002] * 2)


def test_a_step_that_computes_nothing_waits_for_the_answer(store: blocking.BlockingStore) -> None:
    fill(store, 3)
    with ThreadPoolExecutor(1) as threads:
        scheduler = make_scheduler(store, in_thread=threads.submit)
        assert start(scheduler, MadeRequest.of(TOKENS)) == 12
        run(scheduler, MadeRequest.of([1], "running"), 1)
        late = MadeRequest.of(TOKENS, "late")
        assert scheduler.loadable_tokens(late, 0) in {None, 12}
        scheduler.plan({}, (), lambda _: ())
        assert scheduler.loadable_tokens(late, 0) == 12


def test_an_answer_from_before_a_reset_is_not_used(store: blocking.BlockingStore) -> None:
    keys = fill(store, 3)
    later = Later()
    scheduler = make_scheduler(store, in_thread=later)
    request = MadeRequest.of(TOKENS)
    run(scheduler, MadeRequest.of([1], "running"), 1)
    assert scheduler.loadable_tokens(request, 0) is None
    later.run()
    store.delete(keys)
    scheduler.forget()
    scheduler.workers_past({1: 1})

    assert scheduler.loadable_tokens(request, 0) is None
    later.run()
    assert scheduler.loadable_tokens(request, 0) == 0
    assert [save.blocks.block_ids for save in run(scheduler, request, 22).saves] == [[10, 11, 12, 13, 14]]


def test_of_a_new_prompt_each_full_block_is_written_once(store: blocking.BlockingStore) -> None:
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    assert start(scheduler, request) == 0

    steps = [run(scheduler, request, count) for count in (3, 6, 2, 11)]
    request.all_token_ids += [7] * 10
    steps += [run(scheduler, request, 1) for _ in range(10)]

    written = [block for step in steps for save in step.saves for block in save.blocks.block_ids]
    assert written == [10, 11, 12, 13, 14]
    assert [len(step.saves) for step in steps] == [0, 1, 0, 1, *[0] * 10]
    assert scheduler.finished(request)


def test_generated_tokens_are_written_if_that_is_asked_for(store: blocking.BlockingStore) -> None:
    scheduler, request = make_scheduler(store, save_generated=True), MadeRequest.of(TOKENS)
    start(scheduler, request)
    run(scheduler, request, len(TOKENS))
    written = []
    for token in range(8):
        request.all_token_ids.append(token)
        written += [block for save in run(scheduler, request, 1).saves for block in save.blocks.block_ids]

    assert written == [15, 16]


def test_drafted_tokens_are_not_written_before_they_are_accepted(store: blocking.BlockingStore) -> None:
    scheduler, request = make_scheduler(store, save_generated=True), MadeRequest.of(TOKENS[:-1])
    start(scheduler, request)
    run(scheduler, request, len(TOKENS) - 1)
    request.all_token_ids.append(1)

    assert run(scheduler, request, 5).saves == []


def test_a_request_may_leave_the_store_out(store: blocking.BlockingStore) -> None:
    keys = fill(store, 3)
    for settings, read, written in (
        ({}, 3, [13, 14]),
        ({"load": False}, 0, [13, 14]),
        ({"save": False}, 3, []),
        ({"load": False, "save": False}, 0, []),
        ({"save": 0}, 3, [13, 14]),  # that is wrong, and nobody can be told but the log
    ):
        scheduler = make_scheduler(store)
        request = MadeRequest.of(TOKENS)
        request.kv_transfer_params = {"infinistore": settings, "of another connector": True}
        assert start(scheduler, request) == read * BLOCK_TOKENS
        step = run(scheduler, request, len(TOKENS) - request.num_computed_tokens)
        assert len(step.loads) == bool(read)
        assert [block for save in step.saves for block in save.blocks.block_ids] == written
        assert scheduler.finished(request) == bool(written)
    assert store.exists_many(keys).count(True) == len(keys)


def test_a_request_that_reads_nothing_has_nothing_read_ahead(store_with_disk: blocking.BlockingStore) -> None:
    found = fill(store_with_disk, 3)
    leave_on_disk(store_with_disk)
    request = MadeRequest.of(TOKENS)
    request.kv_transfer_params = {"infinistore": {"load": False}}
    assert start(make_scheduler(store_with_disk), request) == 0
    assert store_with_disk.exists_many(found).in_memory == 0


def test_what_a_request_says_of_its_blocks_goes_with_them(store: blocking.BlockingStore) -> None:
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    request.kv_transfer_params = {"infinistore": {"ttl_s": 60}}
    start(scheduler, request)
    assert [save.ttl_s for save in run(scheduler, request, len(TOKENS)).saves] == [60]


@given(st.integers(0, 5), st.integers(0, 5))
def test_what_the_store_has_beyond_the_local_cache_is_read_and_only_the_rest_written(stored: int, local: int) -> None:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        fill(store, stored)
        scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)

        assert start(scheduler, request, local * BLOCK_TOKENS) == max(0, stored - local) * BLOCK_TOKENS
        step = run(scheduler, request, 1 if request.num_computed_tokens == 20 else 20 - request.num_computed_tokens)

        assert [load.block_ids for load in step.loads] == (
            [[*range(10 + local, 10 + stored)]] if stored > local else []
        )
        written = [block for save in step.saves for block in save.blocks.block_ids]
        assert written == [*range(10 + stored, 15)]  # what only the local cache has is written, too


@pytest.fixture
def store_with_disk(tmp_path: Path) -> Iterator[blocking.BlockingStore]:
    disk = f"{tmp_path / 'disk'}:64MiB"
    with blocking.open_store(
        pool_bytes=1 << 20, minimal_allocate_bytes=4096, disk=disk, disk_admission="eager"
    ) as store:
        yield store


def test_what_is_on_disk_only_is_read_ahead_as_soon_as_it_is_found(store_with_disk: blocking.BlockingStore) -> None:
    store = store_with_disk
    found = fill(store, 3)
    store.put("other", b"bytes")
    leave_on_disk(store)
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)

    assert scheduler.loadable_tokens(request, BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    own = found[len(found) // 3 :]
    wait_until_in_memory(store, own)
    assert store.exists_many([*found, "other"]).in_memory == len(own)  # not what vLLM has itself, nor anything else


def test_a_producer_reads_nothing_and_nothing_ahead_and_writes_what_the_store_lacks(
    store_with_disk: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store_with_disk, 3)
    leave_on_disk(store_with_disk)
    no_prefetch(monkeypatch)
    scheduler, request = make_scheduler(store_with_disk, reads=False), MadeRequest.of(TOKENS)

    assert start(scheduler, request) == 0
    assert [save.blocks.block_ids for save in run(scheduler, request, 22).saves] == [[13, 14]]


def test_what_is_in_memory_costs_no_request_to_read_ahead(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 3)
    no_prefetch(monkeypatch)

    assert make_scheduler(store).loadable_tokens(MadeRequest.of(TOKENS), 0) == 3 * BLOCK_TOKENS


def test_a_look_up_counts_even_if_nothing_can_be_read_ahead(
    store_with_disk: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store_with_disk, 3)
    leave_on_disk(store_with_disk)

    def fail(*_: object) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(blocking.BlockingStore, "prefetch", fail)

    assert make_scheduler(store_with_disk).loadable_tokens(MadeRequest.of(TOKENS), 0) == 3 * BLOCK_TOKENS


def test_a_look_up_holds_nothing(store: blocking.BlockingStore) -> None:
    fill(store, 5)

    assert make_scheduler(store).loadable_tokens(MadeRequest.of(TOKENS), 0) == 20
    assert store.stats().store.holds == 0


def test_a_request_that_waits_is_looked_up_once_a_second_and_observed_once(store: blocking.BlockingStore) -> None:
    now = 0.0
    observed = Observations()
    scheduler = make_scheduler(store, clock=lambda: now, observations=observed)
    fill(store, 2)
    request = MadeRequest.of(TOKENS)

    assert scheduler.loadable_tokens(request, 0) == 8
    fill(store, 5)
    assert scheduler.loadable_tokens(request, 0) == 8
    now = 1.0
    assert scheduler.loadable_tokens(request, 0) == 20
    assert observed.take()["counters"] == {"looked_up_tokens": len(TOKENS), "hit_tokens": 8}


class Asked:
    """Counts the keys that a store is asked for by `match_prefix`."""

    def __init__(self, store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[list[str]] = []
        match = store.match_prefix

        def counting(keys: list[str]) -> blocking.PrefixMatch:
            self.requests.append(keys)
            return match(keys)

        monkeypatch.setattr(store, "match_prefix", counting)


@pytest.mark.parametrize(("layers", "shards"), [(300, 1), (40, 8), (1, 500)])
def test_a_look_up_of_many_layers_is_one_request_for_a_bounded_number_of_keys(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch, layers: int, shards: int
) -> None:
    names, groups = deep(layers, shards)
    fill(store, 5, names, groups)
    asked = Asked(store, monkeypatch)

    assert make_scheduler(store, names, groups=groups).loadable_tokens(MadeRequest.of(TOKENS), 0) == 20
    (keys,) = asked.requests
    assert len(set(keys)) <= 384
    # of each block the ends of what is written, and others from block to block
    assert {key.rsplit("/", 2)[2] for key in keys} >= {"0", str(layers - 1)}
    assert len({tuple(key.rsplit("/", 2)[1:]) for key in keys}) >= min(layers * shards, 5 * (384 // 5 - 2))


@given(st.data())
def test_a_layer_that_was_evicted_of_all_blocks_is_missed_within_as_many_blocks_as_it_takes(
    data: st.DataObject,
) -> None:
    """Whole layers go first, when the store is full: a prompt is written layer by
    layer.
    """
    layers, shards = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    most, blocks = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 60))
    names, _ = deep(layers, shards)
    keys, each = names.some_keys([f"{number:032x}" for number in range(blocks)], most=most)
    gone = data.draw(st.integers(0, layers - 1))
    of_block = [keys[first : first + each] for first in range(0, len(keys), each)]
    found = next((n for n, some in enumerate(of_block) if any(key.endswith(f"/{gone}") for key in some)), blocks)

    assert len(of_block) == blocks and set(keys) <= set(names.all_keys([f"{n:032x}" for n in range(blocks)]))
    if gone in (0, layers - 1):
        assert found == 0
    elif each > 2:
        assert found <= layers * shards // (each - 2)


def deep(layers: int, shards: int) -> tuple[BlockNames, tuple[LayerGroup, ...]]:
    labels = tuple(map(str, range(layers)))
    return block_names({}, model="deep", namespace="", layers=labels, shards=shards), (
        LayerGroup(labels, BLOCK_TOKENS),
    )


def test_blocks_of_another_model_or_salt_are_not_found(store: blocking.BlockingStore) -> None:
    fill(store, 5)

    def salted(request: Any, first: int, end: int) -> bytes:
        return b"salt" if first == 0 else b""

    assert make_scheduler(store, make_names(dtype="float16")).loadable_tokens(MadeRequest.of(TOKENS), 0) == 0
    assert make_scheduler(store, extra=salted).loadable_tokens(MadeRequest.of(TOKENS), 0) == 0


def test_a_consumer_writes_nothing(store: blocking.BlockingStore) -> None:
    fill(store, 3)
    scheduler, request = make_scheduler(store, writes=False), MadeRequest.of(TOKENS)

    assert start(scheduler, request) == 12
    assert run(scheduler, request, 10).saves == []
    assert not scheduler.finished(request)


def test_what_could_not_be_read_is_computed_written_and_not_asked_for_again(store: blocking.BlockingStore) -> None:
    fill(store, 5)
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    start(scheduler, request)
    (load,) = scheduler.plan({}, (), lambda _: ()).loads

    scheduler.loads_ended([request.request_id], {load.block_ids[2], 99})
    request.num_computed_tokens = 2 * BLOCK_TOKENS

    assert scheduler.loadable_tokens(request, 0) == 0
    assert [save.blocks.block_ids for save in run(scheduler, request, 14).saves] == [[12, 13, 14]]


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 2)])
def test_of_what_several_ranks_could_not_read_all_is_written(
    store: blocking.BlockingStore, first: int, second: int
) -> None:
    fill(store, 5)
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    start(scheduler, request)
    (load,) = scheduler.plan({}, (), lambda _: ()).loads

    scheduler.loads_ended([], {*load.block_ids[first:]})
    scheduler.loads_ended([request.request_id], {*load.block_ids[second:]})  # the other rank's, a step later
    request.num_computed_tokens = 2 * BLOCK_TOKENS

    assert [save.blocks.block_ids for save in run(scheduler, request, 14).saves] == [[12, 13, 14]]


def test_the_failed_load_of_one_request_is_none_of_anothers(store: blocking.BlockingStore) -> None:
    fill(store, 5)
    scheduler = make_scheduler(store)
    one, other = MadeRequest.of(TOKENS, "one"), MadeRequest.of(TOKENS, "other")
    for request, first in ((one, 10), (other, 20)):
        scheduler.allocated(request, (range(first, first + 10),), loadable(scheduler, request))
    loads: list[Load] = scheduler.plan({}, (), lambda _: ()).loads

    assert [load.block_ids[0] for load in loads] == [10, 20]
    scheduler.loads_ended(["one", "other"], {10})
    assert (scheduler.loadable_tokens(one, 0), scheduler.loadable_tokens(other, 0)) == (0, 20)


def test_a_preempted_request_is_looked_up_again_and_no_longer_kept(store: blocking.BlockingStore) -> None:
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    start(scheduler, request)
    assert run(scheduler, request, 22).saves
    fill(store, 5)

    step = scheduler.plan({}, [request.request_id], lambda _: ())

    assert step.preempted == {request.request_id}
    assert start(scheduler, request) == 20
    assert not scheduler.finished(request)


def test_blocks_of_a_request_that_is_given_up_just_after_it_was_preempted_are_not_kept(
    store: blocking.BlockingStore,
) -> None:
    """As by a reset of vLLM's cache, which preempts all requests between two steps."""
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    start(scheduler, request)
    assert run(scheduler, request, 22).saves

    request.num_computed_tokens = 0
    assert not scheduler.finished(request)


def test_after_a_look_up_that_failed_only_an_engine_that_writes_for_others_saves(
    own_server: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinistore.client.connection.circuit_breaker.FIRST_PAUSE_S", 0.0)
    now = 0.0
    with blocking.open_store(f"tcp://{own_server.address}?deadline_s=600", lazy=True) as store:
        own_server.stop()
        scheduler = make_scheduler(store, clock=lambda: now)
        for engine, saves in ((scheduler, 0), (make_scheduler(store, reads=False), 1)):
            request = MadeRequest.of(TOKENS)
            assert start(engine, request) == 0
            assert len(run(engine, request, 22).saves) == saves  # all of it may be stored; others may wait for it
        own_server.start()
        fill(store, 5)
        assert start(scheduler, MadeRequest.of(TOKENS, "later")) == 20


def test_a_step_travels_to_other_processes(store: blocking.BlockingStore) -> None:
    fill(store, 2)
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    start(scheduler, request)
    step = run(scheduler, request, 14)
    assert step.loads and step.saves

    assert pickle.loads(pickle.dumps(step)) == step


def test_lookups_and_hits_are_observed(store: blocking.BlockingStore) -> None:
    fill(store, 3)
    observed = Observations()
    scheduler = make_scheduler(store, observations=observed)
    start(scheduler, MadeRequest.of(TOKENS), computed=BLOCK_TOKENS)

    taken = observed.take()
    assert taken["counters"] == {"looked_up_tokens": len(TOKENS) - BLOCK_TOKENS, "hit_tokens": 2 * BLOCK_TOKENS}
    assert len(taken["times"]["look_up"]) == 1
    assert observed.take() == {}


def test_after_a_reset_nothing_is_read_or_written_until_all_workers_are_past_it(store: blocking.BlockingStore) -> None:
    fill(store, 3)
    scheduler, request = make_scheduler(store, workers=2), MadeRequest.of(TOKENS)
    assert scheduler.loadable_tokens(request, 0) == 3 * BLOCK_TOKENS

    scheduler.forget()
    scheduler.forget()

    for counts in ({}, {1: 2}, {2: 1}):  # what is told of the first one counts no more
        scheduler.workers_past(counts)
        assert start(scheduler, request) == 0
        step = run(scheduler, request, 5)
        assert (step.saves, step.resets) == ([], 2)
    scheduler.workers_past({2: 1})
    assert start(scheduler, MadeRequest.of(TOKENS, "later")) == 3 * BLOCK_TOKENS
    request.num_computed_tokens = 15
    assert [save.blocks.block_ids for save in run(scheduler, request, 7).saves] == [[10, 11, 12, 13, 14]]


def test_a_request_with_blocks_of_before_a_reset_writes_none_until_it_is_preempted(
    store: blocking.BlockingStore,
) -> None:
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    start(scheduler, request)
    assert run(scheduler, request, 9).saves
    scheduler.forget()
    scheduler.workers_past({1: 1})
    assert run(scheduler, request, 9).saves == []

    scheduler.plan({}, [request.request_id], lambda _: ())
    start(scheduler, request)
    assert [save.blocks.block_ids for save in run(scheduler, request, 22).saves] == [[10, 11, 12, 13, 14]]


def test_a_consumer_writes_nothing_that_could_be_late(store: blocking.BlockingStore) -> None:
    fill(store, 3)
    scheduler = make_scheduler(store, writes=False)
    scheduler.forget()
    assert start(scheduler, MadeRequest.of(TOKENS)) == 3 * BLOCK_TOKENS


def test_after_a_reset_what_is_gone_is_looked_up_again(store: blocking.BlockingStore) -> None:
    fill(store, 3)
    scheduler, request = make_scheduler(store), MadeRequest.of(TOKENS)
    assert scheduler.loadable_tokens(request, 0) == 3 * BLOCK_TOKENS

    store.delete(store.keys())
    scheduler.forget()
    scheduler.workers_past({1: 1})

    assert scheduler.loadable_tokens(request, 0) == 0
