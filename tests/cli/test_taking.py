"""A server that takes a large pool says so, and how far it is."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from infinistore.cli.taking import tell_of_taking
from infinistore.core import create_arena
from infinistore.sizes import GIB, MIB, describe_size


async def told_within(seconds: float, pool_bytes: int) -> None:
    """Let it tell for so long."""
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_of_taking, pool_bytes, scope)
        await trio.sleep(seconds)
        scope.cancel()


async def test_a_pool_that_takes_a_while_is_told_of_once(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await told_within(0.1, GIB)
    assert caplog.records == []
    await told_within(30, 11 * GIB + GIB // 2)
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["pool_bytes"]) == ("taking the pool", 11 * GIB + GIB // 2)
    assert capsys.readouterr() == ("", "")  # the log is JSON there, and nothing else


def taken_bytes() -> int:
    """What the first arenas have that there are in this process: those of the tests'
    own servers count, too.
    """
    taken = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "memfd:infinistore-arena-0" in os.readlink(entry):
                taken += os.stat(entry).st_blocks * 512
    assert taken >= MIB
    return taken


async def test_on_a_terminal_it_shows_how_much_is_taken_and_leaves_no_trace(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    arena = create_arena(0, MIB)
    pool_bytes = 4 * taken_bytes()
    await told_within(1, pool_bytes)
    arena.close()

    shown = capsys.readouterr().err.split("\r")
    assert shown[1] == f"infinistore: taking a pool of {describe_size(pool_bytes)}: 25 %"
    assert shown[-1] == "\x1b[K"
