"""vLLM itself, on a CPU, with a small model of random weights: engines in processes of
their own share a store.

An engine takes half a minute to start where others use the machine, too, so there are
few of them, and each does a lot.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from tests.bad_days.servers import ServerProcess, running_server_process

from .running import BENCH, PROMPT, Engines, cached, made_prompts, tokens_of, transfer_config, url_of

pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

BLOCK = 32
CACHED = PROMPT // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    command = [sys.executable, "-P", str(BENCH / "small_llama.py"), str(folder), "--layers", "2", "--hidden", "192"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(model, tmp_path_factory.mktemp("logs"), stack)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server_process("--prealloc-size", "256MiB", "--unix-socket", "auto") as server:
        yield server


@pytest.fixture(scope="module")
def alone(engines: Engines) -> Callable[[list[list[int]]], list[list[int]]]:
    """What vLLM answers without a store."""
    engine = engines.start("alone", enable_prefix_caching=False)
    engine.wait_until_ready()
    return lambda prompts: tokens_of(engine.ask(prompts))


def multi_config(url: str, **policy: str) -> dict[str, Any]:
    """One of several connectors, of which vLLM's own is in charge."""
    ours = transfer_config("kv_both", {"url": url, "namespace": "multi"})
    extra = {"connectors": [ours]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra, **policy}


def test_one_engine_prefills_and_another_decodes_from_the_store(
    engines: Engines, server: ServerProcess, alone: Callable[[list[list[int]]], list[list[int]]]
) -> None:
    extra = {"url": url_of(server), "namespace": "pair"}
    # Without a cache of their own, so that what was not computed was read from the
    # store.
    producer = engines.start("producer", "kv_producer", extra, enable_prefix_caching=False)
    consumer = engines.start("consumer", "kv_consumer", extra, enable_prefix_caching=False)
    producer.wait_until_ready()
    consumer.wait_until_ready()
    prompts = made_prompts(1)

    # A proxy lets the one compute the prompt, which ends with the first token, and then
    # asks the other.
    prefilled = producer.ask(prompts, max_tokens=1)
    decoded = consumer.ask(prompts)

    assert cached(decoded) == [CACHED] * 3
    assert tokens_of(decoded) == alone(prompts)
    assert [answer.tokens[0] for answer in prefilled] == [tokens[0] for tokens in tokens_of(decoded)]
    with blocking.open_store(server.url) as store:
        keys = store.keys("vllm/")  # those of blocks
        assert all(re.fullmatch(r"vllm/pair/[^/]+/[0-9a-f]{16}/[0-9a-f]{32}/0/[01]", key) for key in keys)

        # Only what is salted alike is found; a consumer leaves nothing behind.
        assert cached(consumer.ask(made_prompts(2))) == [0] * 3
        assert consumer.ask(prompts[:1], salt="tenant")[0].cached_tokens == 0
        assert store.keys("vllm/") == keys
        producer.ask(prompts[:1], max_tokens=1, salt="tenant")
        assert consumer.ask(prompts[:1], salt="tenant")[0].tokens == tokens_of(decoded)[0]

        # Blocks of another size than expected: vLLM computes, and answers the same.
        damaged = made_prompts(3)
        known = set(store.keys())
        producer.ask(damaged, max_tokens=1)
        store.put_many({key: b"too short" for key in store.keys() if key not in known})  # noqa: SIM118 - no mapping
        assert tokens_of(consumer.ask(damaged)) == alone(damaged)

    # The store dies, and comes back empty.
    server.kill()
    after = made_prompts(4)
    producer.ask(after, max_tokens=1)
    assert tokens_of(consumer.ask(after)) == alone(after)
    server.start()
    while cached(consumer.ask(after)) != [CACHED] * 3:
        producer.ask(after, max_tokens=1)
    assert tokens_of(consumer.ask(after)) == alone(after)
    assert "the engine goes on without" in engines.log("producer")
    assert "the engine goes on without" in engines.log("consumer")


@pytest.mark.nightly
def test_an_engine_starts_without_its_store_and_lives_with_one_that_is_too_small(
    engines: Engines, alone: Callable[[list[list[int]]], list[list[int]]]
) -> None:
    with running_server_process("--prealloc-size", "1MiB") as small:
        small.kill()
        # Two requests fit when they begin and not when they end: the younger one is
        # preempted, and resumes by reading.
        extra = {"url": url_of(small), "save_generated": True}
        engine = engines.start("both", "kv_both", extra, num_gpu_blocks_override=22)
        engine.wait_until_ready()
        assert "the store is not there, and vLLM goes on without it" in engines.log("both")
        prompts = made_prompts(6, count=4)
        expected = alone(prompts)

        def first_tokens() -> list[list[int]]:
            return [tokens[:8] for tokens in tokens_of(engine.ask(prompts, max_tokens=40))]

        assert first_tokens() == expected
        small.start()
        for _ in range(3):
            assert first_tokens() == expected


@pytest.mark.nightly
def test_within_a_multi_connector_where_a_lost_read_fails_a_request_vllm_does_not_start(engines: Engines) -> None:
    failing = engines.start("failing", kv_transfer_config=multi_config("infinistore://127.0.0.1:9"))
    with pytest.raises(RuntimeError, match="the engine ended"):
        failing.wait_until_ready()
    assert re.search('add "kv_load_failure_policy": "recompute".* beside .*MultiConnector', engines.log("failing"))


@pytest.mark.nightly
def test_within_a_multi_connector_what_cannot_be_read_is_computed(
    engines: Engines, alone: Callable[[list[list[int]]], list[list[int]]]
) -> None:
    with running_server_process("--prealloc-size", "64MiB") as server:
        computing = multi_config(url_of(server), kv_load_failure_policy="recompute")
        engine = engines.start("computing", kv_transfer_config=computing, enable_prefix_caching=False)
        engine.wait_until_ready()
        prompts = made_prompts(7)
        expected = alone(prompts)
        while cached(engine.ask(prompts)) != [CACHED] * 3:
            pass
        with blocking.open_store(server.url) as store:
            store.put_many(dict.fromkeys(store.keys(), b"too short"))
        assert tokens_of(engine.ask(prompts)) == expected
        server.kill()
        assert tokens_of(engine.ask(prompts)) == expected


@pytest.mark.nightly
def test_a_config_that_names_no_store_stops_vllm_and_says_what_is_missing(engines: Engines) -> None:
    engine = engines.start("nameless", extra={"deadline_s": 3})
    with pytest.raises(RuntimeError, match="the engine ended"):
        engine.wait_until_ready()
    assert "kv_connector_extra_config of --kv-transfer-config names no store" in engines.log("nameless")


@pytest.mark.nightly
def test_an_engine_pins_the_system_prompts_of_its_list(engines: Engines, tmp_path: Path) -> None:
    prompts = [[max(token, 2) for token in prompt] for prompt in made_prompts(31)]
    system = prompts[0][: PROMPT // 3]
    listed = tmp_path / "prompts.json"
    listed.write_text(json.dumps([" ".join(f"w{token}" for token in system), [7, 8, 9]]))
    with running_server_process("--prealloc-size", "64MiB") as server, blocking.open_store(server.url) as store:
        engine = engines.start("pins", extra={"url": url_of(server), "pin_prompts_file": str(listed)})
        engine.wait_until_ready()
        engine.ask(made_prompts(32))
        answers = tokens_of(engine.ask(prompts))
        of_two_layers = 2 * (len(system) // BLOCK)
        while (pinned := store.stats().store.protected_keys) < of_two_layers:
            engine.ask([prompts[1]], max_tokens=1)
        assert pinned == of_two_layers
        assert tokens_of(engine.ask(prompts)) == answers
