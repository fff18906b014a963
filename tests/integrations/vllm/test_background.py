"""The thread that does the connector's work in the background."""

import threading
from collections.abc import Iterator

import pytest

from infinistore.integrations.vllm.background import Background

from .halves import make_record


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background(make_record())
    yield background
    background.close()


def test_while_one_task_pauses_others_go_on(background: Background) -> None:
    done: list[str] = []
    both_are_there, both = threading.Event(), threading.Event()

    def task(name: str, *pauses: float) -> Iterator[float]:
        for pause_s in pauses:
            done.append(name)
            yield pause_s
        if name == "b":
            both.set()

    background.submit(both_are_there.wait, False)
    background.start(task("a", 0.0, 3600.0, 0.0))
    background.start(task("b", 0.0, 0.0, 0.001))
    both_are_there.set()
    assert both.wait(60)
    assert done == ["a", "b", "a", "b", "b"]


def test_a_task_that_fails_ends_and_the_next_is_done(background: Background, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Iterator[float]:
        yield 0.0
        raise KeyError("a bug")

    background.start(fails())
    assert background.submit(lambda: 0, -1).result(60) == 0
    assert background.submit(lambda: 1, -1).result(60) == 1
    assert "KeyError: 'a bug'" in caplog.text


def test_whoever_waits_for_a_function_that_fails_goes_on(
    background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise KeyError("a bug")

    assert background.submit(fail, -1).result(60) == -1
    assert "KeyError: 'a bug'" in caplog.text


def test_without_a_thread_nothing_is_done_until_there_is_one(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        first = background.submit(lambda: 1, -1)
    assert background.submit(lambda: 2, -1).result(60) == 2
    assert first.result(60) == 1


def test_at_the_end_a_step_is_waited_for_and_no_other_begins(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ends, done = threading.Event(), threading.Event(), list[int]()
    join = threading.Thread.join

    def task() -> Iterator[float]:
        began.set()
        ends.wait()
        done.append(1)
        yield 0.0
        done.append(2)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        ends.set()
        join(thread, timeout)

    background.start(task())
    began.wait()
    later = background.submit(lambda: done.append(3), None)
    monkeypatch.setattr(threading.Thread, "join", joined)
    background.close()
    assert done == [1]
    assert not later.done()
