"""vLLM's MultiConnector with two tiers, and vLLM with two tensor parallel ranks and
with one, on the same store: real engines, with the same tokens cold and warm.

The first tier is another store, or vLLM's own offloading to the CPU's memory, of which
only the copies are replaced, because they need a GPU (`offloading_on_cpu.py`).
"""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from tests.bad_days.servers import running_server_process

from .running import BENCH, EngineProcess, Engines, cached, made_prompts, tokens_of, transfer_config, url_of

pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(1200)]

CACHED = 288
"""Whole blocks of 32 tokens of a prompt of 300."""
KEYS = 2 * (3 + 3 * 6)
"""Of two layers, for three prompts that have three blocks in common."""


def stored(engine: EngineProcess, store: blocking.BlockingStore, count: int) -> list[str]:
    """Ask for short answers until so many keys are stored; return them."""
    while len(keys := store.keys("vllm/")) < count:
        engine.ask([[7] * 5], max_tokens=1)
    return keys


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    command = [sys.executable, "-P", str(BENCH / "small_llama.py"), str(folder), "--layers", "2", "--hidden", "384"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def two_tiers(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def test_the_second_tier_has_what_the_first_has_lost(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        near, far = (stack.enter_context(running_server_process("--prealloc-size", "64MiB")) for _ in range(2))
        stores = [stack.enter_context(blocking.open_store(server.url)) for server in (near, far)]
        tiers = [transfer_config("kv_both", {"url": url_of(server)}) for server in (near, far)]
        engines = Engines(model, tmp_path, stack)
        engine = engines.start("tiers", kv_transfer_config=two_tiers(*tiers), enable_prefix_caching=False)
        engine.wait_until_ready()
        prompts = made_prompts(31)

        cold = engine.ask(prompts)
        assert cached(cold) == [0] * 3
        keys = [stored(engine, store, KEYS) for store in stores]
        assert keys[0] == keys[1]
        for lost in (0, 1, 0):  # and the first tier again has what it was given meanwhile
            stores[lost].delete(keys[lost])
            warm = engine.ask(prompts)
            assert (cached(warm), tokens_of(warm)) == ([CACHED] * 3, tokens_of(cold))
            assert stored(engine, stores[lost], KEYS) == keys[lost]  # what a tier lacks is written to it again
        near.kill()
        warm = engine.ask(prompts)
        assert (cached(warm), tokens_of(warm)) == ([CACHED] * 3, tokens_of(cold))
        assert "the engine goes on without" in engines.log("tiers")


def test_the_store_has_what_vllms_own_offloading_has_evicted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "OffloadingOnCpu",
            "spec_module_path": "offloading_on_cpu",
            "cpu_bytes_to_use": 1,
            "blocks": 24,
        },
    }
    with ExitStack() as stack:
        server = stack.enter_context(running_server_process("--prealloc-size", "64MiB"))
        store = stack.enter_context(blocking.open_store(server.url))
        tiers = two_tiers(offloading, transfer_config("kv_both", {"url": url_of(server)}))
        engine = Engines(model, tmp_path, stack).start("own", kv_transfer_config=tiers, enable_prefix_caching=False)
        engine.wait_until_ready()
        prompts = made_prompts(33)

        cold = engine.ask(prompts)
        keys = stored(engine, store, KEYS)
        store.delete(keys)
        warm = engine.ask(prompts)
        assert (cached(warm), tokens_of(warm)) == ([CACHED] * 3, tokens_of(cold)), "of the engine's own tier"
        assert stored(engine, store, KEYS) == keys
        before = store.stats().store.hits
        for other in made_prompts(34, count=4):  # more than its own tier has room for
            engine.ask([other], max_tokens=1)
        warm = engine.ask(prompts)
        assert (cached(warm), tokens_of(warm)) == ([CACHED] * 3, tokens_of(cold)), "of the store"
        assert store.stats().store.hits >= before + KEYS


def test_one_and_two_tensor_parallel_ranks_answer_the_same_cold_and_warm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else vLLM asks for a NUMA node for each
    with ExitStack() as stack:
        server = stack.enter_context(running_server_process("--prealloc-size", "64MiB"))
        store = stack.enter_context(blocking.open_store(server.url))
        extra = {"url": url_of(server), "namespace": "ranks"}
        engine = Engines(model, tmp_path, stack).start(
            "ranks", "kv_both", extra, tensor_parallel_size=2, enable_prefix_caching=False
        )
        engine.wait_until_ready()
        prompts = made_prompts(32)

        cold = engine.ask(prompts)
        keys = stored(engine, store, 2 * KEYS)
        assert {tuple(key.split("/")[-2:]) for key in keys} == {(rank, layer) for rank in "01" for layer in "01"}
        warm = engine.ask(prompts)
        assert (cached(cold), cached(warm)) == ([0] * 3, [CACHED] * 3)
        assert tokens_of(warm) == tokens_of(cold)

        # One with all heads reads what the two have written, and writes what they read.
        alone = Engines(model, tmp_path, stack).start(
            "alone", "kv_both", {**extra, "shards": 2}, enable_prefix_caching=False
        )
        alone.wait_until_ready()
        read = alone.ask(prompts)
        assert (cached(read), tokens_of(read)) == ([CACHED] * 3, tokens_of(cold))
        store.delete(keys)
        computed = alone.ask(prompts)
        assert (cached(computed), tokens_of(computed)) == ([0] * 3, tokens_of(cold))
        assert stored(alone, store, 2 * KEYS) == keys
        alone.close()
        warm = engine.ask(prompts)
        assert (cached(warm), tokens_of(warm)) == ([CACHED] * 3, tokens_of(cold))

        # A part that one rank lacks: a look-up sees it, and all is computed.
        store.delete([key for key in keys if key.endswith("/1/0")])
        again = engine.ask(prompts)
        assert (cached(again), tokens_of(again)) == ([0] * 3, tokens_of(cold))
        assert stored(engine, store, 2 * KEYS) == keys
