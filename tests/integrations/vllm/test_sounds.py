"""vLLM itself with a model that hears: what a prompt's blocks depend on besides its
tokens.
"""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bad_days.servers import running_server_process

from .running import BENCH, VOCABULARY, Engines, cached, made_prompts, tokens_of, url_of

pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_prompts_share_blocks_up_to_the_first_sound_that_differs(tmp_path: Path) -> None:
    program = Path(__file__).with_name("sound_model.py")
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-P", str(program), str(model), str(BENCH)], check=True, capture_output=True)
    [words] = made_prompts(1, count=1, length=160)
    prompt = [*words[:100], VOCABULARY, *words[100:]]  # a sound of two seconds takes 50 tokens
    settings = {"enable_prefix_caching": False}
    with ExitStack() as stack, running_server_process("--prealloc-size", "64MiB") as server:
        engines = Engines(model, tmp_path, stack)
        writer = engines.start("writer", "kv_producer", {"url": url_of(server)}, **settings)
        writer.wait_until_ready()
        reader = engines.start("reader", "kv_consumer", {"url": url_of(server)}, **settings)
        reader.wait_until_ready()
        computed = reader.ask([prompt] * 3, max_tokens=16, sounds=[1, 2, 3])
        assert cached(computed) == [0, 0, 0]
        assert len({tuple(tokens) for tokens in tokens_of(computed)}) == 3

        assert tokens_of(writer.ask([prompt] * 2, max_tokens=16, sounds=[1, 2])) == tokens_of(computed)[:2]

        found = reader.ask([prompt] * 3, max_tokens=16, sounds=[1, 2, 3])
        assert cached(found) == [192, 192, 96]
        assert tokens_of(found) == tokens_of(computed)
