"""Resets of vLLM's cache with requests under way, with vLLM's scheduler and a store in
a process of its own: `made_engine.py`.
"""

import threading
from collections.abc import Iterator

import pytest

from infinistore import blocking
from tests.bad_days.servers import ServerProcess

from .conftest import Open
from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

BLOCK = 16
PROMPT = list(range(100, 100 + 5 * BLOCK + 1))


@pytest.fixture
def store(server: ServerProcess) -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(server.url) as store:
        yield store


def until_stored(store: blocking.BlockingStore, count: int) -> None:
    """Wait until so many blocks have been stored in all."""
    while store.stats().store.puts < count:
        pass


def test_a_request_that_is_given_up_after_a_reset_leaves_nothing_behind(opened: Open) -> None:
    engine = opened()
    request = engine.submit(PROMPT, count=20)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.abort(request)
    engine.settle()
    engine.step()
    assert not engine.scheduler.has_requests()


def test_after_a_reset_no_request_reads_what_was_computed_before(
    opened: Open, store: blocking.BlockingStore, may_write: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that goes on, of others, and of other engines, with new weights."""
    from . import made_engine

    monkeypatch.setattr("infinistore.integrations.vllm.resets.PAUSES_S", ())
    engine, before = opened(), store.stats().store.puts
    request = engine.submit(PROMPT, count=30)
    engine.step()
    (first,) = request.output_token_ids
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    may_write.set()
    until_stored(store, before + 2 * 5)
    assert len(store.keys("vllm/")) == 2 * 5  # the writes that were under way

    numbers = made_engine.numbers
    monkeypatch.setattr(made_engine, "numbers", lambda tokens: [number ^ 1 for number in numbers(tokens)])
    same = engine.submit(PROMPT)
    assert engine.finish(request, same) == [
        [first, *made_engine.answer_to([*PROMPT, first], 29)],
        made_engine.answer_to(PROMPT),
    ]
    engine.settle()
    while len(store.keys("vllm/")) < 2 * 5:
        engine.ask(PROMPT)
        engine.settle()
    late = opened()
    assert late.ask(PROMPT) == [made_engine.answer_to(PROMPT)]
    assert late.external()[1] == 5 * BLOCK
    late.settle()


@pytest.mark.parametrize("ends", [False, True])
def test_writes_that_were_under_way_are_gone_soon_after_a_reset_though_no_step_follows(
    opened: Open, store: blocking.BlockingStore, ends: bool
) -> None:
    engine, before = opened(), store.stats().store.puts
    engine.submit(PROMPT, count=30)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    until_stored(store, before + 2 * 5)
    if ends:
        engine.close()
        assert not store.keys("vllm/")
    while store.keys("vllm/"):
        pass


def test_of_a_step_in_two_micro_batches_all_is_stored_when_all_is_computed(opened: Open) -> None:
    """vLLM calls `save_kv_layer` after each layer of each micro-batch."""
    from .made_engine import answer_to

    engine = opened()
    engine.scheduler.vllm_config.parallel_config.enable_dbo = True
    prompts = [PROMPT, PROMPT[::-1]]
    requests = [engine.submit(prompt) for prompt in prompts]
    compute, worker = engine.compute, engine.worker.worker_side

    def compute_and_save(name: str, count: int) -> list[int]:
        sampled = compute(name, count)
        for layer, cache in engine.caches.items():
            engine.worker.save_kv_layer(layer, cache, None)
            worker.writer.flush()  # what was to be written is
        return sampled

    engine.compute = compute_and_save  # type: ignore[method-assign]
    engine.finish(*requests)
    engine.settle()

    late = opened()
    assert late.ask(*prompts) == [answer_to(prompt) for prompt in prompts]
    assert late.external()[1] == 2 * 5 * BLOCK
    late.settle()


def test_a_reset_that_keeps_leaves_the_store_as_it_is_and_succeeds_without_it(
    opened: Open, mortal_server: ServerProcess
) -> None:
    engine = opened(mortal_server, reset="keep")
    engine.ask(PROMPT)
    engine.settle()
    with blocking.open_store(mortal_server.url) as store:
        kept = store.keys("vllm/")
        assert len(kept) == 2 * 5
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert store.keys("vllm/") == kept
    mortal_server.kill()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
