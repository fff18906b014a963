"""A short run of the stress, and that it can fail. For long ones there is `make
stress`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infinistore.protocol.shared_tables import tables_are_safe_here
from tests.stress.client import PLANTS
from tests.stress.values import WrongValue, value_of, version_in


def run(*arguments: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress", *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("disk", [[], ["--disk"]], ids=["memory", "disk"])
def test_clients_that_are_stopped_and_killed_read_what_was_written_and_nothing_older(disk: list[str]) -> None:
    code, output = run("--seconds", "4", "--clients", "4", "--seed", "1", *disk)
    assert code == 0, output
    again = " ".join(["--seconds 4 --seed 1 --clients 4", *disk])
    assert output.startswith(f"seed 1; again: python -m tests.stress {again}\n")


@pytest.mark.nightly
@pytest.mark.skipif(not tables_are_safe_here(), reason="nobody believes what it knows without the tables")
@pytest.mark.parametrize(
    ("plant", "found"), [("wrong-bytes", r"byte \d+ of \d+ begins"), ("stale-reads", "is stale|after v|the value of")]
)
def test_a_fault_that_is_planted_is_found(plant: str, found: str) -> None:
    assert plant in PLANTS
    code, output = run("--seconds", "60", "--clients", "3", "--seed", "1", "--plant", plant)
    assert code == 1, output
    assert re.search(found, output), output


def test_a_value_tells_which_it_is_and_where_it_is_wrong() -> None:
    value = bytearray(value_of("0.2.1", 7, 10_000))
    assert version_in("0.2.1", value) == 7
    for wrong, why in (
        (value_of("0.2.2", 7, 10_000), "the value of 0.2.2 v7 of 10000 at 0"),
        (value[:9_999], "9999 bytes of 0.2.1 v7 of 10000"),
        (bytes(10_000), "that nobody wrote"),
        (value[:4096] + value_of("0.2.1", 8, 10_000)[4096:], "byte 4103 of 10000 begins b'8"),
        (value[:4096] + value[:4096] + value[8192:], "byte 4117 of 10000"),
    ):
        with pytest.raises(WrongValue, match=why):
            version_in("0.2.1", wrong)
