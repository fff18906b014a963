"""Programs that a benchmark starts: all that they started ends, and may tidy up."""

import sys
from pathlib import Path

import pytest
import trio

import programs
from programs import ProgramError, running

# The child removes a file when its parent has ended, as Python's process does that
# knows of shared memory.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE)
print("ready", flush=True)
time.sleep(1000)
"""
TIDY = "import os, sys; sys.stdin.read(); os.unlink(sys.argv[1])"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


async def test_what_a_program_has_started_may_tidy_up_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_TIDY_UP_S", 100)
    memory = tmp_path / "memory"
    memory.touch()
    async with trio.open_nursery() as nursery:
        command = [sys.executable, "-c", PARENT, TIDY, str(memory)]
        async with running(nursery, "parent", command, log=tmp_path / "log") as program:
            await program.wait_until_it_says("^ready", limit_s=60)

    assert not memory.exists()


async def test_what_a_program_has_started_is_killed_if_it_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_TIDY_UP_S", 0.2)
    async with trio.open_nursery() as nursery:
        command = [sys.executable, "-c", PARENT, STUBBORN]
        async with running(nursery, "parent", command, log=tmp_path / "log") as program:
            await program.wait_until_it_says("^ready", limit_s=60)
    # The log's pipe has ended with the nursery: nobody has it open any more.
    assert (tmp_path / "log").read_text() == "ready\n"


async def test_a_program_that_fails_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    told: list[str] = []

    async def wait(for_what: str) -> None:
        command = [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]
        async with running(nursery, "loser", command, log=tmp_path / for_what) as program:
            try:
                if for_what == "line":
                    await program.wait_until_it_says("^ready", limit_s=60)
                else:
                    await program.wait_until_it_ends(limit_s=60)
            except ProgramError as error:
                told.append(str(error))

    async with trio.open_nursery() as nursery:
        await wait("line")
        await wait("end")

    assert told[0].startswith("loser ended too early. The end of its log")
    assert told[1].startswith("loser ended with status 3. The end of its log")
    assert all(text.endswith("no luck\n") for text in told)
