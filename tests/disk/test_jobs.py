"""Tasks take turns, and each gets the results of its own jobs, in whatever order they
come."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from infinistore.disk.jobs import PAUSE, WAIT, Flush, Job, Result, Steps, Tasks, aligned, file_bytes

PLANS = st.lists(st.lists(st.integers(0, 3) | st.just(WAIT), max_size=4), max_size=5)
"""For each task, its steps: how many jobs, or WAIT."""


@given(PLANS, st.randoms(use_true_random=False))
def test_each_task_goes_on_with_the_results_of_its_jobs_and_none_is_forgotten(
    plans: list[list[int | str]], random: Random
) -> None:
    tasks = Tasks()
    ended: list[int] = []

    def follow(number: int) -> Steps[None]:
        for step in plans[number]:
            wanted: list[Job] = [Flush(number, str(one)) for one in range(step)] if isinstance(step, int) else []
            results = yield WAIT if step == WAIT else wanted or PAUSE
            assert [result.job for result in results] == wanted
        ended.append(number)

    for number in range(len(plans)):
        tasks.start(follow(number))
    under_way: list[Job] = []
    while len(ended) < len(plans):
        assert len(tasks) == len(plans) - len(ended)
        turns = 0
        while tasks.step():
            turns += 1
            assert turns < 100  # others would not have their turn
        under_way += tasks.jobs
        tasks.jobs.clear()
        if under_way:
            assert tasks.done(Result(under_way.pop(random.randrange(len(under_way)))))
        else:
            tasks.poke()
    assert len(tasks) == 0
    assert not tasks.step()
    assert not tasks.done(Result(Flush(0, "of somebody else")))


@given(st.lists(st.integers(0, 9000), max_size=4))
def test_each_view_of_a_job_takes_whole_pages_of_its_file(lengths: list[int]) -> None:
    pages = [-(-length // 4096) for length in lengths]
    assert [aligned(length) for length in lengths] == [4096 * count for count in pages]
    assert file_bytes([memoryview(bytes(length)) for length in lengths]) == 4096 * sum(pages)


def test_tasks_take_turns_and_the_end_of_one_asks_those_again_that_wait() -> None:
    tasks = Tasks()
    order: list[int] = []

    def pausing(number: int) -> Steps[None]:
        for _ in range(3):
            order.append(number)
            yield PAUSE

    def waiting() -> Steps[None]:
        yield WAIT
        order.append(9)

    for steps in (waiting(), pausing(0), pausing(1), pausing(2)):
        tasks.start(steps)
    while tasks.step():
        pass
    assert order == [0, 1, 2] * 3 + [9]
