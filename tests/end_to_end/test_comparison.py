"""The comparison with other stores measures what it says, and names what is missing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

BENCH = Path(__file__).resolve().parents[2] / "bench"
pytest.importorskip("numpy")


def compare(out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, str(BENCH / "compare.py"), "--rounds", "1", "--seconds", "0.02"]
    command += ["--out", str(out), *arguments]
    done = warm.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "compare.json").read_text())


@pytest.mark.nightly
def test_stores_are_measured_with_their_limits_in_one_run(tmp_path: Path) -> None:
    names = ["TCP", "shared memory", "lease", "embedded", "raw sockets"]
    shown = ["--shapes", "64 x 4 KiB", "--clients", "1", "2", "--operations", "put", "get"]
    out, found = compare(tmp_path, "--systems", *names, *shown)
    assert not found["failures"]
    results = [one for row in found["rows"] for one in row["results"]]
    measured = {(one["operation"], one["clients"], one["system"]) for one in results}
    assert {("put", 2, name) for name in names if name not in ("lease", "embedded")} <= measured
    assert {("get", 1, name) for name in names} <= measured
    assert ("get", 2, "embedded") not in measured  # nobody shares it
    assert all(one["figures"]["calls_per_s"] > 0 for one in results)
    assert not found["missing"]
    assert "## put, 2 clients" in out
    assert "## Not measured" not in out


@pytest.mark.nightly
def test_a_store_that_is_not_there_is_named_with_the_remedy_and_others_are_measured(tmp_path: Path) -> None:
    names = ["TCP", "memcpy", "Mooncake"]
    out, found = compare(
        tmp_path, "--systems", *names, "--shapes", "64 x 4 KiB", "--operations", "put", "--clients", "1"
    )
    assert "make compare" in found["failures"]["Mooncake"]
    assert {one["system"] for row in found["rows"] for one in row["results"]} == {"TCP", "memcpy"}
    assert "- Mooncake: mooncake is not installed" in out.partition("## Not measured")[2]
    assert {one["verdict"] for one in found["wanted"]} == {"not measured"}  # which takes other shapes
