"""Resets of vLLM's cache with requests under way, with vLLM's scheduler and a store in a
process of its own: `made_engine.py`.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.bad_days.servers import ServerProcess

if TYPE_CHECKING:
    from .made_engine import MadeEngine

# What vLLM imports warns.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-integrations"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

BLOCK = 16
PROMPT = list(range(100, 100 + 5 * BLOCK + 1))
Open = Callable[..., "MadeEngine"]


@pytest.fixture
def opened(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens engines; all end with the test."""
    from .made_engine import open_engine

    with ExitStack() as stack:

        def open_one(store: ServerProcess = server, **options: Any) -> "MadeEngine":
            return stack.enter_context(open_engine(store.url, tmp_path, monkeypatch, **options))

        yield open_one


def test_a_request_that_is_given_up_after_a_reset_leaves_nothing_behind(opened: Open) -> None:
    engine = opened()
    request = engine.submit(PROMPT, count=20)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.abort(request)
    engine.settle()
    engine.step()
    assert not engine.scheduler.has_requests()


def test_of_a_step_in_two_micro_batches_all_is_stored_when_all_is_computed(opened: Open) -> None:
    """vLLM calls `save_kv_layer` after each layer of each micro-batch."""
    from .made_engine import answer_to

    engine = opened()
    engine.worker._vllm_config.parallel_config.enable_dbo = True
    prompts = [PROMPT, PROMPT[::-1]]
    requests = [engine.submit(prompt) for prompt in prompts]
    compute = engine._compute

    def compute_and_save(name: str, count: int) -> list[int]:
        sampled = compute(name, count)
        for layer, cache in engine.caches.items():
            engine.worker.save_kv_layer(layer, cache, None)
            assert engine.worker._worker is not None
            engine.worker._worker._writer.flush()
        return sampled

    engine._compute = compute_and_save  # type: ignore[method-assign]
    engine.finish(*requests)
    engine.settle()

    late = opened()
    assert late.ask(*prompts) == [answer_to(prompt) for prompt in prompts]
    assert late.external()[1] == 2 * 5 * BLOCK
    late.settle()
