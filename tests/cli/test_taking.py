"""A server that takes a large pool says so, and how far it is."""

import sys
from collections.abc import Callable
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from infinistore.cli.serve import tell_of_taking
from infinistore.sizes import GIB, MIB, DefaultSize
from tests import warm


async def told_within(
    seconds: float, pool_bytes: int, taken_bytes: Callable[[], int] = int, *, goes_on: bool = False
) -> None:
    """Let it tell for so long, in virtual time."""
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(tell_of_taking, pool_bytes, scope, taken_bytes, goes_on=goes_on))
        await trio.sleep(seconds)  # real time: none, for those who call this are in virtual time
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


async def test_a_size_that_an_earlier_pool_may_decide_is_not_told(
    autojump_clock: MockClock,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    await told_within(30, DefaultSize(GIB), goes_on=True)
    await told_within(30, GIB, goes_on=True)
    assert [vars(record).get("pool_bytes") for record in caplog.records] == [None, GIB]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    await told_within(0.3, DefaultSize(GIB), goes_on=True)
    assert capsys.readouterr().err == "\rinfinistore: taking the pool\r\x1b[K"


async def test_on_a_terminal_it_shows_how_much_is_taken_and_leaves_no_trace(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    await told_within(1, 4 * MIB, lambda: MIB)

    shown = capsys.readouterr().err.split("\r")
    assert shown[1] == "infinistore: taking a pool of 4 MiB: 25 %"
    assert shown[-1] == "\x1b[K"
    await told_within(1, DefaultSize(4 * MIB), lambda: MIB)
    assert "4 MiB, the default here (--prealloc-size chooses another size): 25 %\r" in capsys.readouterr().err


WITH_A_CHILD = """
import os
from infinistore.cli.serve import first_arena_bytes
from infinistore.core import create_arena

arenas = [create_arena(number, 1 << 20) for number in (0, 1)]
alone = first_arena_bytes()
told, tell = os.pipe()
if os.fork() == 0:  # a child that has the arenas, as a shard has its own
    os.read(told, 1)
else:
    print(alone, first_arena_bytes())
    os.write(tell, b".")
for arena in arenas:
    arena.close()
"""


@pytest.mark.process
def test_the_first_arenas_of_a_process_and_of_its_children_are_what_is_taken() -> None:
    done = warm.run([sys.executable, "-c", WITH_A_CHILD], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1048576 2097152\n", "")
