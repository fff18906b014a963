"""vLLM itself with models whose layers are of several kinds: the same tokens, whether
computed, read, read in part, or read where blocks are missing.
"""

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from tests.bad_days.servers import ServerProcess, running_server_process

from .running import BENCH, Engines, cached, made_prompts, tokens_of, url_of

pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(900)]

WINDOWS: dict[str, Any] = {}
STATES: dict[str, Any] = {"dtype": "bfloat16", "mamba_cache_mode": "align", "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server_process("--prealloc-size", "256MiB", "--unix-socket", "auto") as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


def make(kind: str, folder: Path) -> Path:
    program = Path(__file__).with_name("hybrid_models.py")
    subprocess.run(
        [sys.executable, "-P", str(program), kind, str(folder / kind), str(BENCH)], check=True, capture_output=True
    )
    return folder / kind


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("gemma3", WINDOWS), ("gpt-oss", WINDOWS), ("qwen3-next", STATES)],
)
def test_a_model_with_layers_of_several_kinds_answers_the_same_cold_and_warm(
    folder: Path, server: ServerProcess, kind: str, settings: dict[str, Any]
) -> None:
    extra = {"url": url_of(server), "namespace": kind}
    own_cache = {"enable_prefix_caching": False, **settings, "skip_tokenizer_init": True, "max_model_len": 1024}
    with ExitStack() as stack, blocking.open_store(server.url) as store:
        engines = Engines(make(kind, folder), folder, stack)
        writer = engines.start(f"{kind}-writer", "kv_producer", extra, **own_cache)
        writer.wait_until_ready()
        reader = engines.start(f"{kind}-reader", "kv_consumer", extra, **own_cache)
        reader.wait_until_ready()
        prompts = made_prompts(11, length=330)
        block = int(re.findall(r"^blocks of (\d+) tokens$", engines.log(f"{kind}-reader"), re.MULTILINE)[0])
        usable = 329 // block * block
        assert usable

        cold = tokens_of(reader.ask(prompts, salt="another tenant"))  # a reader leaves nothing behind
        assert len({tuple(tokens) for tokens in cold}) == 3  # the answers depend on the prompts
        assert tokens_of(writer.ask(prompts)) == cold
        warm = made_warm(reader, prompts)
        assert (cached(warm), tokens_of(warm)) == ([usable] * 3, cold)

        # Prompts that go on where these end: a part is read, and the rest computed.
        longer = [prompt + more[:170] for prompt, more in zip(prompts, made_prompts(12), strict=True)]
        computed = tokens_of(writer.ask(longer, salt="another tenant"))
        partly = made_warm(reader, longer)
        assert tokens_of(partly) == computed
        assert all(tokens >= usable for tokens in cached(partly))

        # Holes: whatever is missing, the answers are the same.
        generator = random.Random(13)
        for share in (0.02, 0.1, 0.5):
            keys = [key for key in store.keys() if key.startswith(f"vllm/{kind}/")]  # noqa: SIM118 - no mapping
            store.delete(generator.sample(keys, max(1, round(share * len(keys)))))
            assert tokens_of(made_warm(reader, prompts)) == cold
            assert tokens_of(made_warm(reader, longer)) == computed
        # Blocks of another size are found and cannot be read: vLLM computes.
        store.put_many({key: b"too short" for key in store.keys() if key.startswith(f"vllm/{kind}/")})  # noqa: SIM118
        assert tokens_of(made_warm(reader, prompts)) == cold
        assert "the model is computed" not in engines.log(f"{kind}-writer")


def made_warm(reader: Any, prompts: list[list[int]]) -> Any:
    """Ask with nothing in the engine's own cache, where it has one."""
    reader.reset()
    return reader.ask(prompts)


def test_a_model_whose_states_are_not_kept_is_computed_and_a_warning_says_what_to_do(
    folder: Path, server: ServerProcess
) -> None:
    with ExitStack() as stack, blocking.open_store(server.url) as store:
        engines = Engines(make("qwen3-next", folder), folder, stack)
        settings = {"dtype": "bfloat16", "mamba_cache_mode": "none", "enable_prefix_caching": False}
        extra = {"url": url_of(server), "namespace": "none"}
        engine = engines.start("none", "kv_both", extra, **settings, skip_tokenizer_init=True, max_model_len=512)
        engine.wait_until_ready()
        prompts = made_prompts(14)

        assert tokens_of(engine.ask(prompts)) == tokens_of(engine.ask(prompts))
        assert not [key for key in store.keys() if key.startswith("vllm/none/")]  # noqa: SIM118 - no mapping
        log = engines.log("none")
        assert log.count("the model is computed, and nothing of it is stored") == 1
        assert "--mamba-cache-mode align" in log
