"""A router writes down what it is asked, as a trace that a simulation reads."""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from infinistore.errors import ConfigError
from infinistore.routing.recording import AnswerLength, Recording
from infinistore.scheduling import Request
from infinistore.traces import TracedRequest, read_trace
from tests.routing.fakes import MODEL, FakeEngine, at_once, routed


def trace_of(file: Path) -> list[TracedRequest]:
    """Read what was written."""
    return read_trace(file.read_text().splitlines())


def events(*texts: str) -> list[str]:
    """An answer that is streamed."""
    return [f"data: {text}\n\n" for text in (*texts, "[DONE]")]


def refused(problem: str) -> AbstractContextManager[object]:
    """Expect that the router does not start."""
    return pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=problem), allow_unwrapped=True, flatten_subgroups=True
    )


async def test_prompts_with_the_same_beginning_have_the_same_ids(autojump_clock: MockClock, tmp_path: Path) -> None:
    file = tmp_path / "trace"

    def prepare(engine: FakeEngine) -> None:
        engine.pieces = events("a", "b", "c")

    async with routed("a", "b", record=file, prepare=prepare) as world:
        for prompt in ("x" * 1100, "x" * 1600, "y" + "x" * 1099, [1, 2, 3]):
            assert (await world.complete(prompt))[0] == 200
            await trio.sleep(1)
        assert (await world.complete("x" * 1100, cache_salt="of another"))[0] == 200
    first, longer, other, short, salted = trace_of(file)
    assert [one.tokens for one in (first, longer, other, short, salted)] == [1100, 1600, 1100, 3, 1100]
    assert first.output_tokens == 3
    assert longer.arrived_s - first.arrived_s == pytest.approx(1, abs=0.1)
    assert longer.blocks[:2] == first.blocks[:2]
    every = [block for one in (first, longer, other, short, salted) for block in one.blocks]
    assert len(set(every)) == len(every) - 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_prompt_that_nobody_can_tokenize_shares_nothing_with_itself(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    def prepare(engine: FakeEngine) -> None:
        engine.tokenize_s = 10

    async with routed("a", record=tmp_path / "trace", prepare=prepare) as world:
        await world.complete("x" * 4000)
        await world.complete("x" * 4000)
    first, second = trace_of(tmp_path / "trace")
    assert first.tokens == second.tokens == 1000
    assert not {*first.blocks} & {*second.blocks}


async def test_models_share_nothing(autojump_clock: MockClock, tmp_path: Path) -> None:
    def prepare(engine: FakeEngine) -> None:
        engine.models = [{"id": name, "root": f"/models/{name}"} for name in (MODEL, "large")]

    async with routed("a", record=tmp_path / "trace", prepare=prepare) as world:
        await world.complete("x" * 600)
        await world.ask("/v1/completions", {"model": "large", "prompt": "x" * 600})
    small, large = trace_of(tmp_path / "trace")
    assert not {*small.blocks} & {*large.blocks}


@pytest.mark.parametrize("torn", ["", '{"tim', '{"timestamp":99,"inp'])
async def test_a_recording_goes_on_behind_an_earlier_one(autojump_clock: MockClock, tmp_path: Path, torn: str) -> None:
    file = tmp_path / "trace"
    for time in range(2):
        async with routed("a", record=file) as world:
            await trio.sleep(5)
            await world.complete("x" * 600)
        if not time:
            file.write_text(file.read_text() + torn)
    first, second = trace_of(file)
    assert second.arrived_s - first.arrived_s == pytest.approx(5, abs=0.1)
    assert not {*first.blocks} & {*second.blocks}  # the key of the first is gone


async def test_two_routers_do_not_write_to_one_file(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with routed("a", record=tmp_path / "trace") as world:
        with refused("another router writes to it"):
            async with routed("b", record=tmp_path / "trace"):
                pass
        await world.complete()
    assert len(trace_of(tmp_path / "trace")) == 1


@pytest.mark.parametrize("there", ["no trace\n", "no trace", "\udcff\n", None])
async def test_a_file_that_is_no_trace_is_refused_and_kept(
    autojump_clock: MockClock, tmp_path: Path, there: str | None
) -> None:
    file = tmp_path / "trace"
    before = None if there is None else there.encode(errors="surrogateescape")
    if before is None:
        os.mkfifo(file)
    else:
        file.write_bytes(before)
    with refused("--record"):
        async with routed("a", record=file):
            pass
    assert before is None or file.read_bytes() == before


async def test_a_full_recording_ends_and_prompts_are_answered(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "trace"
    async with routed("a", record=file, record_bytes=300) as world:
        for _ in range(9):
            assert (await world.complete("hello"))[0] == 200
    assert 1 <= len(trace_of(file)) < 9
    assert file.stat().st_size <= 300
    assert [record.getMessage() for record in caplog.records] == ["the recording has its most bytes, and ends"]


async def test_a_recording_ends_when_the_disk_is_full(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if arguments:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return work()

    recording = Recording(tmp_path / "trace", 1 << 20, in_thread)
    async with trio.open_nursery() as nursery:
        await nursery.start(recording.run)
        recording.note(Request(5), MODEL, trio.current_time(), 0)
    recording.note(Request(5), MODEL, trio.current_time(), 0)
    assert [record.getMessage() for record in caplog.records] == ["the recording ends"]


async def test_a_slow_disk_costs_lines_and_no_memory(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording(tmp_path / "trace", 1 << 20, at_once)
    async with trio.open_nursery() as nursery:
        await nursery.start(recording.run)
        await wait_all_tasks_blocked()
        for _ in range(2000):
            recording.note(Request(5), MODEL, trio.current_time(), 0)
        nursery.cancel_scope.cancel()
    assert len(trace_of(tmp_path / "trace")) == 1 + 1024  # one went to the writer at once
    assert ["too slow" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        ([], 0),
        (events("a", "b"), 2),
        ([*events("a", "b")[:-1], 'data: {"usage": {"completion_tokens": 7, "x": 1}}\n\ndata: [DO', "NE]"], 7),
        (['{"choices": [], "usage": {"completion_to', 'kens":12}}'], 12),
        (['{"error": "no"}'], 0),
    ],
)
async def test_the_length_of_an_answer_is_what_it_says_or_its_events(pieces: Iterable[str], tokens: int) -> None:
    left = [*map(str.encode, pieces), b""]

    async def more() -> bytes:
        await trio.lowlevel.checkpoint()
        return left.pop(0)

    length = AnswerLength()
    counted = length.counting(more)
    while await counted():
        pass
    assert length.tokens == tokens
