"""The tutorial "vLLM in ten", carried out: its commands, with a small model."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import trio

from tests.documentation.blocks import of_pages

from .running import Bench

pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
ADDRESS = "127.0.0.1:22345"
SIZES = argparse.Namespace(prompts=2, tokens=300, overhead_minutes=0, layers=2, hidden=192)


NAMES = [
    name if name.endswith("_total") else f"{name}_count"
    for name in re.findall(r"^\| `(vllm:infinistore_\w+)` \|", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE)
]
"""The metrics of the page."""


def shell(beginning: str) -> str:
    """The page's block of shell that begins so."""
    (found,) = [block.code for block in of_pages(["docs/tutorials/vllm.md"]) if block.code.startswith(beginning)]
    return found


async def test_an_engine_that_was_stopped_and_started_again_finds_what_the_first_has_stored(tmp_path: Path) -> None:
    words = shlex.split(shell("vllm serve"))
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra = transfer["kv_connector_extra_config"]
    assert extra["url"] == f"infinistore://{ADDRESS}"

    answers, hits, counted = [], [], []
    async with trio.open_nursery() as nursery:
        bench = Bench(SIZES, tmp_path, nursery, lambda _: None, lambda _: None)
        await bench.make_model(SIZES.layers, SIZES.hidden)
        async with bench.store() as store:
            extra["url"] = f"infinistore://{store.address}"
            prompt = bench.prompt("a long one")
            for _ in range(2):
                async with bench.vllm(transfer) as vllm:
                    answers.append(await bench.ask(vllm, prompt, tokens=8))
                    hits.append(await bench.hit_tokens(vllm))
                    counted.append(await trio.to_thread.run_sync(metrics_of, vllm.url))
            seen = await trio.to_thread.run_sync(look, extra["url"])
        nursery.cancel_scope.cancel()

    assert answers[0] == answers[1]
    assert hits == [0, 288]  # whole blocks of 32 tokens
    assert "vllm/" in seen
    assert len(NAMES) == 9
    # The connector's own metrics, which its page lists, have come from the scheduler
    # and the worker to vLLM's server.
    for name in NAMES:
        assert name in counted[0], f"{name} is not among vLLM's metrics"
    assert [told["vllm:infinistore_hit_tokens_total"] for told in counted] == [0, 288]
    assert counted[1]["vllm:infinistore_read_seconds_count"] == 1
    assert counted[1]["vllm:infinistore_read_bytes_total"] > 0


def metrics_of(url: str) -> dict[str, float]:
    """Return what vLLM's server says of the connector, by the names of the metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^(vllm:infinistore_\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    return {name: float(number) for name, number in found}


def look(url: str) -> str:
    """Run the page's commands that look at the store; return what they print."""
    environment = {**os.environ, "INFINISTORE_URL": url, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", shell("infinistore stat")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
