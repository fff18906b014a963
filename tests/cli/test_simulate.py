"""`infinistore simulate`: what it says of a trace, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

BLOCK = 512


def write_trace(file: Path, *, conversations: int = 20, turns: int = 5) -> str:
    """Conversations in turns, each of whose prompts begins with the one before."""
    lines = []
    for turn in range(1, turns + 1):
        for number in range(conversations):
            blocks = [1000 * number + block for block in range(2 * turn)]
            at_ms = 1000 * (turn * conversations + number)
            line = {"timestamp": at_ms, "input_length": len(blocks) * BLOCK, "output_length": 9, "hash_ids": blocks}
            lines.append(json.dumps(line))
    file.write_text("\n".join(lines))
    return str(file)


def test_a_larger_pool_spares_no_fewer_tokens_and_one_for_all_spares_all_that_came_before(
    command: Run, tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    done = command("simulate", trace, "--cache-tokens", "0", "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    ratios = [pool["reused_ratio"] for pool in found["pools"]]
    assert ratios == sorted(ratios)
    # 2, 4, 6, 8 of 4, 6, 8, 10 blocks were there before, and 0 of the first 2.
    assert (ratios[0], ratios[-1]) == (0, pytest.approx(20 / 30, abs=0.001))
    assert found["working_set_bytes"] == 20 * 10 * BLOCK * 256 * 1024


def test_a_pool_is_tried_that_is_asked_for(command: Run, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    done = command("simulate", trace, "--pool-size", "2GiB", "--pool-size", "64GiB", "--engines", "2")
    assert done.returncode == 0
    header, columns, *rows = done.stdout.decode().splitlines()
    assert header.startswith("100 requests, 3,072 tokens in the mean, 25 GiB in all; 2 engines")
    assert columns.split()[0] == "pool"
    assert [row.split("%")[0].rsplit(" ", 1)[0].strip() for row in rows] == ["no store", "2 GiB", "64 GiB"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "trace.jsonl: No such file or directory"),
        ("", "the trace has no requests"),
        ("{}\n", "line 1 of the trace is not a request"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}', "at least two requests"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(command: Run, tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "trace.jsonl").write_text(text)
    done = command("simulate", "trace.jsonl")
    assert (done.returncode, done.stdout) == (2, b"")
    assert why in done.stderr.decode()


def test_a_policy_that_is_not_known_is_refused(command: Run, tmp_path: Path) -> None:
    done = command("simulate", write_trace(tmp_path / "t"), "--policy", "luck")
    assert done.returncode == 2
    assert "soonest" in done.stderr.decode()
