"""SGLang's server on a CPU: what it stores, another one finds."""

import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-integrations")

from infinistore import blocking
from tests.asking import until
from tests.bad_days.servers import ServerProcess
from tests.ports import own_ports

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(600)]

TOP = Path(__file__).parents[3]
PAGE_TOKENS, PROMPT_TOKENS = 64, 512
FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-tokenizer-init"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "4096", "--page-size", str(PAGE_TOKENS)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-mem-layout", "page_first"),
    *("--hicache-io-backend", "kernel", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", "dynamic"),
]


class Answer(NamedTuple):
    tokens: list[int]
    from_storage: int
    """How many of the prompt's tokens came from the store."""


class Sglang:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, prompt: list[int]) -> Answer:
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answered:
            answer = json.load(answered)
        return Answer(answer["output_ids"], (answer["meta_info"]["cached_tokens_details"] or {}).get("storage", 0))


@contextmanager
def running_sglang(model: Path, store: ServerProcess, log: Path) -> Iterator[Sglang]:
    """Run SGLang, which has answered one prompt of its own."""
    [port] = own_ports(1)
    settings = json.loads((TOP / "examples" / "sglang" / "hicache.json").read_text()) | {"url": store.url}
    command = [sys.executable, "-m", "tests.integrations.sglang.serve", "--model-path", str(model), "--port", str(port)]
    command += [*FLAGS, "--hicache-storage-backend-extra-config", json.dumps(settings)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=TOP, env=environment, start_new_session=True
        )
    try:
        until(lambda: process.poll() is not None or "ready to roll" in log.read_text())
        assert process.poll() is None, log.read_text()[-2000:]
        yield Sglang(f"http://127.0.0.1:{port}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def made_prompt(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(PROMPT_TOKENS)]


def test_a_server_that_was_started_again_finds_its_pages_and_outlives_the_store(
    tmp_path: Path, mortal_server: ServerProcess
) -> None:
    model = tmp_path / "model"
    command = [sys.executable, "-P", str(TOP / "bench" / "small_llama.py"), str(model), "--layers", "2"]
    subprocess.run([*command, "--hidden", "192"], check=True, capture_output=True)
    first, second, other = map(made_prompt, (1, 2, 3))
    with running_sglang(model, mortal_server, tmp_path / "first.log") as sglang:
        computed = [sglang.ask(prompt) for prompt in (first, second)]
        assert computed[0].tokens != computed[1].tokens
        pages = 2 * PROMPT_TOKENS // PAGE_TOKENS
        with blocking.open_store(mortal_server.url) as store:
            until(lambda: len(list(store.keys("sglang/"))) == 2 * pages)  # keys and values

    with running_sglang(model, mortal_server, tmp_path / "second.log") as sglang:
        usable = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert [sglang.ask(prompt) for prompt in (first, second)] == [Answer(one.tokens, usable) for one in computed]
        mortal_server.kill()
        assert sglang.ask(other).from_storage == 0
        assert sglang.ask(first).tokens == computed[0].tokens
