"""What vLLM's own tests of connectors ask of a scheduler and a worker, asked of this
one, of both its halves at once: vLLM's scheduler, and a store in a process of its own.

The cases are those of vLLM's tests of the lifecycles of requests, of loads that fail,
of caches that are polluted, and of statistics. `made_engine.py` says how an engine sees
that a block holds what it should.
"""

import copy
import logging
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from infinistore import blocking
from infinistore.errors import PermissionDenied
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.announcements import READER, URLS_PREFIX, AnnouncedBlocks, AnnouncedEngine
from tests.bad_days.servers import ServerProcess, running_server_process

from .conftest import Open
from .marks import NEEDS_VLLM

if TYPE_CHECKING:
    from .made_engine import MadeEngine

pytestmark = NEEDS_VLLM

BLOCK = 16


@pytest.fixture
def store(server: ServerProcess) -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(server.url) as store:
        yield store


def prompt(seed: int, tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, 2000) for _ in range(tokens)]


def answers(*prompts: Sequence[int], count: int = 4) -> list[list[int]]:
    from .made_engine import answer_to

    return [answer_to(each, count) for each in prompts]


def stored_by(opened: Open, *prompts: Sequence[int], **options: Any) -> None:
    """Have another engine compute and store these prompts."""
    other = opened(**options)
    other.ask(*prompts)
    other.settle()
    other.close()


def test_a_stored_prompt_is_loaded_while_others_are_computed(opened: Open) -> None:
    from vllm.v1.request import RequestStatus

    known, new = prompt(1, 40), prompt(2, 40)
    stored_by(opened, known)
    engine = opened()
    engine.loads_may_go.clear()

    request = engine.submit(known)
    other = engine.submit(new)
    assert engine.finish(other) == answers(new)

    # It has blocks, which nobody else finds as long as nothing is in them.
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == 2 * BLOCK
    assert not any(engine.is_cached(block) for block in engine.block_ids(request))
    again = engine.submit(known)
    engine.step()
    assert again.num_computed_tokens in (0, 2 * BLOCK)
    assert set(engine.block_ids(again)).isdisjoint(engine.block_ids(request))

    engine.loads_may_go.set()
    assert engine.finish(request, again) == answers(known, known)
    assert engine.external() == (40 + 40 + 40, 2 * BLOCK + 2 * BLOCK)
    engine.settle()
    assert engine.ask(known) == answers(known)
    assert engine.external()[1] == 2 * BLOCK + 2 * BLOCK  # vLLM has it itself now


def test_a_tenant_that_may_not_see_statistics_has_its_blocks_all_the_same(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionDenied("Statistics needs the role monitor")

    monkeypatch.setattr(blocking.BlockingStore, "stats", denied)
    known = prompt(31, 40)
    stored_by(opened, known)
    engine = opened()
    assert engine.ask(known) == answers(known)
    assert engine.external()[1] == 2 * BLOCK


def test_of_a_prompt_that_is_stored_as_a_whole_the_last_token_is_computed(opened: Open) -> None:
    known = prompt(3, 4 * BLOCK)
    stored_by(opened, known)
    engine = opened()

    assert engine.ask(known) == answers(known)
    assert engine.external()[1] in (3 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK)
    engine.settle()


def test_a_prompt_shorter_than_a_block_is_neither_looked_for_nor_stored(
    opened: Open, store: blocking.BlockingStore
) -> None:
    engine = opened()
    assert engine.ask(prompt(4, BLOCK - 1)) == answers(prompt(4, BLOCK - 1))
    engine.settle()
    assert engine.counted("written_bytes") == 0
    assert not store.keys("vllm/")


def test_a_request_is_neither_stored_nor_loaded_if_it_says_so(opened: Open, store: blocking.BlockingStore) -> None:
    known, secret = prompt(8, 40), prompt(9, 40)
    engine = opened()
    assert engine.finish(engine.submit(secret, save=False)) == answers(secret)
    engine.settle()
    assert not store.keys("vllm/")
    assert engine.finish(engine.submit(known, ttl_s=1e-6)) == answers(known)
    engine.settle()
    assert not store.keys("vllm/")

    stored_by(opened, known)
    engine = opened()
    assert engine.finish(engine.submit(known, load=False)) == answers(known)
    assert engine.external()[1] == 0
    other = opened()
    assert other.finish(other.submit(known, save="nonsense")) == answers(known)
    assert other.external()[1] == 2 * BLOCK
    for one in (engine, other):
        one.settle()


def test_where_loading_is_slower_prompts_are_computed(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from infinistore.integrations.vllm import connector
    from infinistore.integrations.vllm.loading import LinkReport, LoadChoice

    slower = 1e9

    class Slower(LoadChoice):
        def ended(self, number: int, reports: Mapping[int, LinkReport]) -> None:
            super().ended(number, {rank: with_link(report, slower) for rank, report in reports.items()})

    monkeypatch.setattr(connector, "LoadChoice", Slower)
    prompts = [prompt(20 + number, 300) for number in range(3)]
    stored_by(opened, *prompts)
    engine = opened(load="faster", caching=False)
    assert engine.ask(prompts[0]) == answers(prompts[0]), "nothing is measured: it loads"
    loaded = engine.external()[1]
    assert loaded > 250
    assert engine.ask(prompt(30, 300)) == answers(prompt(30, 300))
    assert engine.ask(prompts[1]) == answers(prompts[1])
    engine.settle()
    assert engine.external()[1] == loaded
    assert engine.counted("skipped_loads") == 1
    consumer = opened(load="faster", role="kv_consumer", caching=False)
    for each in (prompts[0], prompt(30, 300), prompts[1]):
        assert consumer.ask(each) == answers(each)
    assert consumer.external()[1] > 2 * 250, "what another engine has computed for it, it always loads"
    consumer.settle()


def with_link(report: Any, slower: float) -> Any:
    """A report of a link that is so many times as slow."""
    return attrs.evolve(report, memory=attrs.evolve(report.memory, seconds=report.memory.seconds * slower))


def test_where_there_is_no_room_for_a_load_it_waits_and_holds_nothing(opened: Open) -> None:
    first, second = prompt(5, 6 * BLOCK + 3), prompt(6, 6 * BLOCK + 3)
    stored_by(opened, first, second)
    engine = opened(blocks=10)  # for one of them
    engine.loads_may_go.clear()
    requests = [engine.submit(first), engine.submit(second)]
    engine.step()
    assert len(engine.block_ids(requests[0])) >= 6
    assert not engine.block_ids(requests[1])

    engine.loads_may_go.set()
    assert engine.finish(*requests) == answers(first, second)
    assert engine.external()[1] == 12 * BLOCK
    engine.settle()


def test_blocks_of_a_request_that_is_given_up_while_it_loads_are_kept_until_the_load_has_ended(opened: Open) -> None:
    known = prompt(7, 5 * BLOCK + 1)
    stored_by(opened, known)
    engine = opened()
    engine.loads_may_go.clear()
    request = engine.submit(known)
    engine.step()
    engine.abort(request)
    for _ in range(3):
        engine.step()
    assert engine.free_blocks <= engine.all_blocks - 5
    assert engine.ask(prompt(8, 30)) == answers(prompt(8, 30))

    engine.loads_may_go.set()
    engine.settle()
    assert engine.ask(known) == answers(known)
    engine.settle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("lost", [{0}, {0, 8}, {4, 8}, {8}])
def test_what_cannot_be_read_is_computed_from_there_on_and_pollutes_no_cache(
    opened: Open, store: blocking.BlockingStore, policy: str, lost: set[int]
) -> None:
    known = prompt(9, 9 * BLOCK + 5)
    stored_by(opened, known)
    engine = opened(policy=policy)  # vLLM's default would fail the request: the connector sees to that
    engine.loads_may_go.clear()
    request = engine.submit(known)
    engine.step()
    # Of these blocks, one layer of two.
    gone = [block_hash for number, block_hash in enumerate(PrefixChain(BLOCK).extend(known)) if number in lost]
    keys = [
        key for key in store.keys("vllm/") if key.endswith("/0/0") and key.split("/")[-3] in gone
    ]  # one layer of two
    assert store.delete(keys) == len(lost)
    engine.loads_may_go.set()

    while not engine.scheduler.failed_recving_kv_req_ids:
        engine.step()
    assert request.num_computed_tokens == min(lost) * BLOCK
    assert not any(engine.is_cached(block) for block in engine.block_ids(request)[min(lost) :])
    assert engine.finish(request) == answers(known)
    assert engine.counted("failed_reads") == 1

    # Others get it from vLLM's own cache, and later engines from the store, which is
    # whole again.
    assert engine.ask(known, known) == answers(known, known)
    engine.settle()
    late = opened()
    assert late.ask(known) == answers(known)
    assert late.external()[1] == 9 * BLOCK
    assert late.counted("failed_reads") == 0


def test_a_finished_request_keeps_its_blocks_until_they_are_stored(opened: Open, may_write: threading.Event) -> None:
    known, given_up = prompt(14, 5 * BLOCK + 2), prompt(15, 5 * BLOCK + 2)
    engine = opened()
    request, other = engine.submit(known, count=1), engine.submit(given_up)
    engine.step()
    engine.abort(other)
    assert engine.finish(request) == answers(known, count=1)
    for _ in range(3):
        engine.step()
    assert engine.free_blocks <= engine.all_blocks - 10
    may_write.set()
    engine.settle()

    decoder = opened(role="kv_consumer")
    assert decoder.ask(known, given_up) == answers(known, given_up)
    assert decoder.external()[1] == 10 * BLOCK
    decoder.settle()
    assert decoder.counted("written_bytes") == 0


def test_requests_that_are_preempted_go_on_with_what_is_stored(opened: Open) -> None:
    both = [prompt(seed, 5 * BLOCK) for seed in (17, 18)]
    engine = opened(blocks=15, save_generated=True, caching=False)
    requests = [engine.submit(each, count=40) for each in both]
    assert engine.finish(*requests) == answers(*both, count=40)
    assert engine.preempted
    assert engine.counted("read_bytes") > 0
    engine.settle()


def test_shut_down_while_blocks_are_being_written_and_read(opened: Open) -> None:
    known = prompt(19, 8 * BLOCK + 1)
    engine = opened()
    engine.finish(engine.submit(known, count=1))
    engine.close()  # and what was to be written is

    late = opened()
    late.loads_may_go.clear()
    request = late.submit(known)
    late.step()
    assert request.num_computed_tokens == 8 * BLOCK
    late.close()


def test_the_statistics_of_both_halves_reach_vllms_own(opened: Open) -> None:
    known = prompt(22, 5 * BLOCK + 4)
    first = opened()
    first.ask(known)
    first.settle()
    engine = opened()
    engine.ask(known)
    engine.settle()

    block_bytes = 2 * BLOCK * 4  # of one layer
    assert first.counted("looked_up_tokens") == engine.counted("looked_up_tokens") == len(known)
    assert (first.counted("hit_tokens"), engine.counted("hit_tokens")) == (0, 5 * BLOCK)
    assert (first.counted("written_bytes"), engine.counted("read_bytes")) == (5 * 2 * block_bytes,) * 2
    told = [stats.kv_connector_stats for stats in engine.stats if stats.kv_connector_stats]
    assert sum(len(each["times"].get("look_up", ())) for each in told) == 1
    assert sum(len(each["times"].get("read", ())) for each in told) == 1


def test_a_reset_deletes_what_is_stored_and_nothing_old_is_answered(
    opened: Open, store: blocking.BlockingStore
) -> None:
    known = prompt(23, 4 * BLOCK + 1)
    engine, other = opened(), opened(namespace="other")
    for each in (engine, other):
        each.ask(known)
        each.settle()
    kept = store.keys("vllm/other/")
    assert len(kept) == 8

    assert engine.scheduler.reset_prefix_cache(reset_connector=True)

    assert store.keys("vllm/") == kept
    before = engine.external()[1]
    assert engine.ask(known) == answers(known)
    assert engine.external()[1] == before
    engine.settle()
    while len(store.keys("vllm/")) < 2 * len(kept):  # and it is stored again, soon
        engine.ask(known)
        engine.settle()


def test_a_reset_has_the_time_of_a_write_not_of_a_lookup(opened: Open, store: blocking.BlockingStore) -> None:
    """A store with millions of keys takes seconds to list them."""
    engine = opened(lookup_deadline_s=1e-6, role="kv_producer")  # no lookup ends in time, and it writes all the same
    assert engine.ask(prompt(25, 40)) == answers(prompt(25, 40))
    engine.settle()
    assert len(store.keys("vllm/")) == 4

    assert engine.scheduler.reset_prefix_cache(reset_connector=True)

    assert store.keys("vllm/") == []


def test_an_engine_announces_itself_and_one_that_only_reads_hears_that_it_finds_nothing(
    opened: Open, store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.infinistore")
    logger.addHandler(caplog.handler)  # vLLM's loggers keep what they get
    try:
        engine = opened(model="a/made")
        while len(store.keys("vllm-engines/")) < 1:
            engine.step()
        reader = opened(model="b/made", role="kv_consumer")
        while "computes every prompt" not in caplog.text:
            reader.step()
    finally:
        logger.removeHandler(caplog.handler)
    assert "model a/made, here b/made" in caplog.text
    assert sorted(key.count("/") for key in store.keys("vllm-engines/made/")) == [2, 3]


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_a_router_finds_an_engine_that_tells_its_url_and_can_ask_for_its_blocks(
    opened: Open, store: blocking.BlockingStore, role: str
) -> None:
    engine = opened(role=role, announce_url="http://10.0.0.1:8000/")
    while not (urls := store.keys(URLS_PREFIX)):
        engine.step()
    told = AnnouncedEngine.read(urls[0], bytes(store.get(urls[0])))
    assert told is not None
    assert (told.url, told.cache_tokens) == ("http://10.0.0.1:8000", 200 * BLOCK)
    key = told.announcement + ("" if role == "kv_both" else READER)
    blocks = AnnouncedBlocks.read(bytes(store.get(key)))
    assert blocks is not None

    known = prompt(27, 4 * BLOCK)
    writer = opened()
    writer.ask(known)
    writer.settle()
    chain = PrefixChain(blocks.hash_tokens, group_blocks=blocks.names.group_blocks)
    assert store.keys("vllm/") == sorted(blocks.names.all_keys(chain.extend(known)))
    # A key and a value of one number of 4 bytes, in each of two layers.
    assert (blocks.block_tokens, blocks.bytes_per_token) == (BLOCK, 16)


def test_within_a_multi_connector_stages_of_a_pipeline_tell_their_layers_with_the_first_step(
    opened: Open, store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM brings it from workers to the scheduler: one output of each, and of
    these, the parts of each connector.
    """
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from infinistore.integrations.vllm import connector

    engine = opened()
    known = prompt(26, 4 * BLOCK + 1)
    engine.ask(known)
    engine.settle()
    config = copy.copy(engine.worker._vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.pipeline_parallel_size = 2
    outer = copy.copy(config)
    outer.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
    )
    (group,) = engine.worker._kv_cache_config.kv_cache_groups
    stages = [KVCacheConfig(200, [], [KVCacheGroupSpec([name], group.kv_cache_spec)]) for name in group.layer_names]

    def reply(made: connector.InfiniStoreConnector) -> ModelRunnerOutput:
        told = made.build_connector_worker_meta()
        assert made.build_connector_worker_meta() is None  # once
        metadata = MultiKVConnectorWorkerMetadata((None, told))
        return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=metadata))

    with ExitStack() as stack:
        scheduler = connector.InfiniStoreConnector(config, KVConnectorRole.SCHEDULER, stages[0])
        stack.callback(scheduler.shutdown)
        outputs = []
        for rank in (1, 0):
            monkeypatch.setattr(connector, "get_pp_group", lambda rank=rank: SimpleNamespace(rank_in_group=rank))
            with set_current_vllm_config(outer):
                worker = connector.InfiniStoreConnector(config, KVConnectorRole.WORKER, stages[rank])
            stack.callback(worker.shutdown)
            assert worker.get_handshake_metadata() is None  # other connectors would refuse it
            outputs.append(reply(worker))
        store.delete([key for key in store.keys("vllm/") if key.endswith("/1")])  # the second stage's
        requests = [engine.submit(known) for _ in range(2)]
        assert scheduler.get_num_new_matched_tokens(requests[0], 0) == (4 * BLOCK, True)  # before the first step

        collected = KVOutputAggregator(2).aggregate(outputs)
        assert collected is not None
        assert collected.kv_connector_output is not None
        received = collected.kv_connector_output
        (_, received.kv_connector_worker_meta) = received.kv_connector_worker_meta.metadata
        scheduler.update_connector_output(received)

        assert scheduler.get_num_new_matched_tokens(requests[1], 0) == (0, False)
        engine.finish(*requests)
        engine.settle()  # which writes what was missing
        requests = [engine.submit(known)]
        assert scheduler.get_num_new_matched_tokens(requests[0], 0) == (4 * BLOCK, True)
        engine.finish(*requests)


def test_a_reset_fails_where_the_store_cannot_be_reached(opened: Open, mortal_server: ServerProcess) -> None:
    engine = opened(mortal_server)
    engine.ask(prompt(24, 40))
    engine.settle()
    mortal_server.kill()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.process
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))])
def test_whatever_happens_a_request_gets_its_own_answer(opened: Open, seed: int) -> None:
    """Prompts with beginnings in common, two engines, little room, blocks that are lost
    or damaged, requests that are given up.
    """
    generator = random.Random(seed)
    heads = [prompt(100 * seed + number, BLOCK * number) for number in range(1, 5)]
    with running_server_process("--prealloc-size", "1MiB") as small, blocking.open_store(small.url) as store:
        stored_by(opened, *heads, store=small)
        engines = [opened(small, blocks=26, save_generated=bool(seed % 2)) for _ in range(2)]
        waiting: list[tuple[MadeEngine, Any, list[int]]] = []
        for turn in range(120):
            engine = generator.choice(engines)
            event = generator.random()
            if event < 0.3:
                asked = generator.choice(heads) + prompt(1000 + generator.randrange(6), generator.randrange(1, 60))
                waiting.append((engine, engine.submit(asked, count=generator.randrange(1, 30)), asked))
            elif event < 0.35 and waiting:
                owner, request, _ = waiting.pop(generator.randrange(len(waiting)))
                owner.abort(request)
            elif event < 0.4 and (keys := store.keys("vllm/")):
                # by another generator: when there are keys does not depend on the seed
                chosen = random.Random(turn).sample(keys, min(4, len(keys)))
                store.delete(chosen) if turn % 2 else store.put_many(dict.fromkeys(chosen, b"too short"))
            elif event < 0.5:
                engine.loads_may_go.clear() if turn % 2 else engine.loads_may_go.set()
            engine.step()
        for engine in engines:
            engine.loads_may_go.set()
        for engine, request, asked in waiting:
            assert engine.finish(request) == answers(asked, count=request.max_tokens)
        assert len(waiting) > 10
        assert sum(engine.external()[1] for engine in engines) > 0
        for engine in engines:
            engine.settle()
            engine.close()
