"""The demonstration, run as people run it: real processes over TCP, with a layout that
is small.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from infinistore.demo.prompts import KVLayout, block_key, chunk_names, token_ids
from tests import warm
from tests.cli.in_process import run_here

from .conftest import command, started

LAYERS, CHUNK_TOKENS = 3, 16
SMALL = ["--layers", str(LAYERS), "--chunk-tokens", str(CHUNK_TOKENS), "--prefill-tokens-per-s", "100000"]
LAYOUT = KVLayout(layers=LAYERS, chunk_tokens=CHUNK_TOKENS)
TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 10


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "night.txt"
    file.write_text(TEXT)
    return file


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(command("demo", *arguments), capture_output=True, text=True, check=False)


def refused(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a demo, in this process, that starts none."""
    return run_here("demo", *arguments, environment=os.environ, cwd=folder)


def demo_as_json(*arguments: str) -> Any:
    done = run_demo("--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def without_last_byte(block: bytearray) -> bytearray:
    return block[:-1]


def other_byte_in_the_middle(block: bytearray) -> bytearray:
    block[1000] ^= 1
    return block


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        pytest.param(other_byte_in_the_middle, r"byte 1000 is 0x\w\w and should be 0x\w\w", id="one-bit"),
        pytest.param(without_last_byte, "byte 32767 is missing", id="too-short", marks=pytest.mark.nightly),
    ],
)
def test_every_byte_is_right_and_a_second_run_finds_all_and_a_wrong_block_fails_a_third(
    url: str, text_file: Path, spoil: Callable[[bytearray], bytearray], complaint: str
) -> None:
    arguments = [*SMALL, "--input", str(text_file), "--url", url]
    found = demo_as_json(*arguments)

    tokens = len(token_ids(TEXT))
    first, second = found["prompts"]
    whole = tokens // CHUNK_TOKENS * CHUNK_TOKENS
    shared = 2 * tokens // 3 // CHUNK_TOKENS * CHUNK_TOKENS
    assert found["ok"] is True
    assert found["transport"] == "tcp"
    assert (first["tokens"], first["prefill"]["hit_tokens"], first["decode"]["hit_tokens"]) == (tokens, 0, whole)
    assert 0 < second["prefill"]["hit_tokens"] < second["tokens"]
    assert second["prefill"]["hit_tokens"] == shared
    moved = [part["loaded_bytes"] for prompt in found["prompts"] for part in (prompt["prefill"], prompt["decode"])]
    assert found["checked_bytes"] == sum(moved)
    assert first["decode"]["loaded_bytes"] == whole // CHUNK_TOKENS * LAYERS * 2048 * CHUNK_TOKENS

    again = demo_as_json(*arguments)

    for prompt in again["prompts"]:
        assert prompt["prefill"]["written_bytes"] == 0
        assert prompt["prefill"]["hit_tokens"] == prompt["decode"]["hit_tokens"]
        assert prompt["prefill"]["computed_tokens"] == prompt["tokens"] - prompt["prefill"]["hit_tokens"]

    key = block_key(chunk_names(LAYOUT, token_ids(TEXT))[2], 1)
    with blocking.open_store(url) as store:
        store.put(key, spoil(store.get(key)))

    done = run_demo(*arguments)

    assert done.returncode == 1
    assert re.fullmatch(
        rf"infinistore: the demo failed: prefill: layer 1 of chunk 2 \(key {key}\) is wrong: {complaint}.*\n",
        done.stderr,
    )


def test_failure_as_json_is_one_object_with_the_reason(tmp_path: Path) -> None:
    done = refused(tmp_path, "--json", "--input", str(tmp_path / "none.txt"))

    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert "none.txt" in report["error"]


def test_a_text_shorter_than_a_chunk_is_refused_with_a_remedy(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("three words only")

    done = refused(tmp_path, "--input", str(short), "--pool-size", "64MiB")

    assert (done.returncode, done.stdout) == (2, b"")
    assert b"3 tokens" in done.stderr
    assert b"--chunk-tokens" in done.stderr


def test_without_a_terminal_the_output_is_plain_lines_and_a_table_and_a_long_text_is_cut_to_what_the_pool_takes(
    tmp_path: Path,
) -> None:
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 40)

    done = run_demo(*SMALL, "--input", str(long), "--pool-size", "32MiB")

    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(
        r"The text has [\d,]+ tokens, more than .* a pool of 32 MiB: the first [\d,]+ are used\.", done.stdout
    )
    assert "\x1b" not in done.stdout
    for who in ("server", "prefill", "decode"):
        assert re.search(rf"^{who} +process \d+ ", done.stdout, flags=re.MULTILINE)
    assert "simulated" in done.stdout
    assert re.search(r"bytes that differ +│ +0 │ +0 │", done.stdout)


def test_a_server_that_does_not_start_is_reported_in_its_own_words(text_file: Path) -> None:
    done = run_demo(*SMALL, "--input", str(text_file), "--pool-size", "900TiB")

    assert done.returncode == 1
    assert re.fullmatch(r"infinistore: the demo failed: the server process ended with exit status 2: .+\n", done.stderr)
    assert "--prealloc-size" in done.stderr


def test_an_address_where_nobody_listens_is_reported(text_file: Path) -> None:
    done = refused(text_file.parent, "--input", str(text_file), "--url", "tcp://127.0.0.1:1")

    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1


def test_a_pool_size_or_a_disk_for_somebody_elses_server_is_refused(tmp_path: Path) -> None:
    for flags in (["--pool-size", "1GiB"], ["--disk"]):
        assert refused(tmp_path, "--url", "tcp://127.0.0.1:1", *flags).returncode == 2


def test_after_a_restart_on_its_disk_the_server_has_what_its_pool_had_lost(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = demo_as_json(*SMALL, "--input", str(text_file), "--pool-size", "64MiB", "--disk")

    first, restart = found["prompts"][0], found["restart"]
    assert restart["filled_bytes"] >= restart["pool_bytes"] / 2  # blocks of 32 KiB take units of 64 KiB
    assert restart["hit_tokens"] == first["decode"]["hit_tokens"]
    assert restart["loaded_bytes"] == first["decode"]["loaded_bytes"]
    assert restart["disk_blocks"] == restart["hit_tokens"] // CHUNK_TOKENS * LAYERS
    assert list(tmp_path.iterdir()) == [text_file]


@pytest.mark.nightly
def test_signals_while_the_server_restarts_leave_no_disk_behind(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("demo", *SMALL, "--input", str(text_file), "--pool-size", "64MiB", "--disk") as demo:
        assert demo.stdout is not None
        while "Restart" not in (line := demo.stdout.readline()):
            assert line, "the demo ended"
        assert [path for path in tmp_path.iterdir() if path.name.startswith("infinistore-demo-")]
        for _ in range(2):  # by people who are in a hurry
            demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate()

    assert demo.returncode == 128 + signal.SIGINT
    assert errors == "infinistore: stopped by SIGINT; the server and the workers have ended\n"
    assert list(tmp_path.iterdir()) == [text_file]


@contextmanager
def demo_at_work(text_file: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A demo whose model is so slow that it will not end by itself, and the numbers of
    its three processes.
    """
    slow = [*SMALL[:-1], "1", "--input", str(text_file), "--pool-size", "64MiB"]
    with started("demo", *slow) as demo:
        assert demo.stdout is not None
        processes: dict[str, int] = {}
        while "Prompt A" not in (line := demo.stdout.readline()):
            assert line, "the demo ended"
            if said := re.match(r"(server|prefill|decode) +process (\d+) ", line):
                processes[said[1]] = int(said[2])
        assert set(processes) == {"server", "prefill", "decode"}
        yield demo, processes


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)], ids=str)
def test_a_signal_ends_all_processes_and_then_the_demo(text_file: Path, number: signal.Signals) -> None:
    with demo_at_work(text_file) as (demo, processes):
        demo.send_signal(number)
        _, errors = demo.communicate()

    assert demo.returncode == 128 + number
    assert errors == f"infinistore: stopped by {number.name}; the server and the workers have ended\n"
    assert [who for who, process in processes.items() if is_running(process)] == []


@pytest.mark.parametrize("victim", ["server", pytest.param("prefill", marks=pytest.mark.nightly)])
def test_a_process_that_is_killed_ends_the_demo_which_says_so(text_file: Path, victim: str) -> None:
    with demo_at_work(text_file) as (demo, processes):
        os.kill(processes[victim], signal.SIGKILL)
        _, errors = demo.communicate()

    assert demo.returncode == 1
    assert f"the {victim} process was killed by signal 9" in errors
    assert len(errors.splitlines()) == 1
    assert [who for who, process in processes.items() if is_running(process)] == []


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = (
        "import infinistore.demo.run, infinistore.demo.workers, sys;"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert warm.run([sys.executable, "-P", "-c", code], cold=True, check=False).returncode == 0
