"""`make serve-bench`, with few and short prompts."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")

PROGRAM = Path(__file__).parents[3] / "bench" / "serve_bench.py"
SMALL = ("--prompts", "2", "--tokens", "96", "--layers", "2", "--hidden", "192")

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(1200)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(PROGRAM), *arguments]


@pytest.mark.parametrize("flags", ["", "--api-server-count 2", "--data-parallel-size 2"])
def test_a_vllm_that_was_started_again_finds_what_the_first_has_stored(flags: str, tmp_path: Path) -> None:
    asked = command(*SMALL, "--ways", "connector", "--json", "--logs", str(tmp_path), f"--vllm={flags}")

    done = subprocess.run(asked, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["connector"]
    # Of each, two whole blocks of 32 tokens at least: prompts are text, and one may
    # have a token less when it is read.
    assert made["cold"]["hit_tokens"] == 0
    assert 2 * 64 <= made["warm"]["hit_tokens"] <= made["warm"]["prompt_tokens"]
    assert made["warm"]["same"]
    assert made["cold / warm, alone"] > 0
    assert 0 < made["cold"]["ttft_median_s"] <= made["cold"]["ttft_p99_s"]


def test_each_word_of_the_model_is_one_token(tmp_path: Path) -> None:
    """Prompts come as text; words that were read as others would make them alike."""
    made = [sys.executable, str(PROGRAM.with_name("small_llama.py")), str(tmp_path), "--layers", "1", "--hidden", "64"]
    subprocess.run(made, check=True, capture_output=True)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.all_special_ids]

    assert len(ordinary) == 2046
    assert tokenizer.encode(tokenizer.decode(ordinary)) == ordinary


def test_signals_end_everything_that_was_started(tmp_path: Path) -> None:
    mark = f"SERVE_BENCH_TEST={uuid.uuid4()}"
    environment = dict(os.environ, **dict([mark.split("=")]))
    asked = command(*SMALL, "--ways", "connector", "--logs", str(tmp_path))

    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "vLLM starts" in line:
                assert len(processes_with(mark)) >= 2
                running.send_signal(signal.SIGINT)
            if "stopping" in line:
                running.send_signal(signal.SIGTERM)  # also while things are stopped

    assert running.returncode == 128 + signal.SIGINT
    assert processes_with(mark) == []


def processes_with(mark: str) -> list[str]:
    """The processes whose environment has this, other than this test."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
        except OSError:
            continue
    return found
