"""The guard of the hot operations' cost: what it must find, it finds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from guard import Counts, compare, surcharges

PROJECT = Path(__file__).parents[2]

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")


def guard(numbers: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(PROJECT / "bench" / "guard.py"), "--only", "protocol", "--numbers", str(numbers)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.nightly
@pytest.mark.timeout(300)  # valgrind on a busy machine
@needs_valgrind
def test_an_operation_that_takes_15_percent_more_fails_and_is_named_and_others_are_not(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    recorded = guard(numbers, "--record")
    assert recorded.returncode == 0, recorded.stderr

    planted = guard(numbers, "--plant", "protocol: Get of 64: 0.15")

    assert planted.returncode == 1
    first, *_, last = planted.stderr.splitlines()
    assert "'protocol: Get of 64' takes 15." in first
    assert "LeaseReply" not in planted.stderr
    assert "make bench-guard RECORD=1" in last


def test_a_batch_in_a_cluster_of_one_node_may_take_a_tenth_more(capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"socket: get": 100, "socket: get_many 64": 1000, "socket: lease 64": 1000}
    of_one = {f"cluster of one, {name}": number for name, number in plain.items()}
    dear = of_one | {"cluster of one, socket: get": 200, "cluster of one, socket: lease 64": 1101}
    now = Counts(plain | dear, 1.0, {})
    assert surcharges(now) == {
        "cluster of one, socket: get_many 64": 0.0,
        "cluster of one, socket: lease 64": pytest.approx(0.101),
    }
    (wrong,) = compare(now, now)
    assert "lease 64' takes 10.1% more instructions than without a cluster" in wrong
    assert compare(Counts(plain | of_one, 1.0, {}), now) == []
    assert surcharges(Counts(dear, 1.0, {})) == {}  # the plain store was not counted


def test_without_numbers_for_this_python_nothing_passes(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    numbers.write_text(json.dumps({"another 3.1": {}}))

    done = guard(numbers)

    assert done.returncode == 2
    assert "no numbers" in done.stderr and "another 3.1" in done.stderr
