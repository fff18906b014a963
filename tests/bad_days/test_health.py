"""The circuit breaker, with a clock that the test turns: when a server is tried, and
when it is left alone.
"""

import random
import threading
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.client.connection.circuit_breaker import CircuitBreaker
from infinistore.errors import StoreUnavailable

FAILURES_TO_OPEN = 5
LONGEST_PAUSE_S = 15.0
BROKEN = StoreUnavailable("the connection broke")


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class NoSpread(random.Random):
    """Always the longest pause of those that could be drawn."""

    def uniform(self, a: float, b: float) -> float:
        return b


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(clock, NoSpread())


def is_open(health: CircuitBreaker) -> bool:
    """Whether calls are kept away. Only for a circuit whose pause is not over: this
    would be the probe.
    """
    try:
        health.check()
    except StoreUnavailable:
        return True
    return False


def open_circuit(health: CircuitBreaker) -> None:
    for _ in range(FAILURES_TO_OPEN):
        health.failed(BROKEN)


def wait_for_probe(health: CircuitBreaker, clock: Clock) -> tuple[float, int]:
    """Wait, in steps of 1/8 s, until a probe is let through; return how long that took,
    and the probe.
    """
    start = clock.now
    while clock.now - start < 100:
        try:
            return clock.now - start, health.check()
        except StoreUnavailable:
            clock.now += 0.125
    raise AssertionError("no probe was let through")


def test_waits_grow_until_five_failures_in_a_row_open_the_circuit(health: CircuitBreaker) -> None:
    delays = [health.failed(BROKEN) for _ in range(FAILURES_TO_OPEN)]
    assert delays == [0.02, 0.04, 0.08, 0.16, None]
    with pytest.raises(StoreUnavailable, match=r"the connection broke \(not tried again for another 1\.0 s\)"):
        health.check()


def test_an_answer_between_failures_keeps_the_circuit_closed(health: CircuitBreaker) -> None:
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            assert health.failed(BROKEN) is not None
        health.succeeded()
    assert not is_open(health)


def test_one_probe_is_let_through_when_the_pause_is_over(health: CircuitBreaker, clock: Clock) -> None:
    open_circuit(health)
    clock.now += 0.99
    assert is_open(health)
    clock.now += 0.01
    assert not is_open(health)  # the probe
    assert is_open(health)
    clock.now += 0.99
    assert is_open(health)


def test_a_probe_that_is_never_heard_of_again_is_followed_by_another(health: CircuitBreaker, clock: Clock) -> None:
    open_circuit(health)
    clock.now += 1
    health.check()
    clock.now += 1
    assert not is_open(health)


def test_a_cancelled_probe_lets_the_next_call_be_the_probe(health: CircuitBreaker, clock: Clock) -> None:
    open_circuit(health)
    for _ in range(6):  # the longest pause
        clock.now += 20
        health.failed(BROKEN, health.check())
    clock.now += 20
    probe = health.check()
    assert is_open(health)
    health.dropped(probe)
    assert not is_open(health)
    assert is_open(health)


def test_a_deadline_that_drops_the_probe_first_still_counts(health: CircuitBreaker, clock: Clock) -> None:
    open_circuit(health)
    clock.now += 1
    probe = health.check()
    health.dropped(probe)
    health.failed(BROKEN, probe)
    assert wait_for_probe(health, clock)[0] == 2


def test_failed_probes_double_the_pause_up_to_fifteen_seconds(health: CircuitBreaker, clock: Clock) -> None:
    open_circuit(health)
    pauses = []
    for _ in range(7):
        pause_s, probe = wait_for_probe(health, clock)
        pauses.append(pause_s)
        assert health.failed(BROKEN, probe) is None
    assert pauses == [1, 2, 4, 8, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_calls_that_were_under_way_when_the_server_died_do_not_lengthen_the_pause(
    health: CircuitBreaker, clock: Clock
) -> None:
    calls = [health.check() for _ in range(10)]
    for call in calls:
        health.failed(BROKEN, call)
    assert wait_for_probe(health, clock)[0] == 1


def test_success_closes_the_circuit_and_forgets_the_pauses(health: CircuitBreaker, clock: Clock) -> None:
    open_circuit(health)
    for _ in range(3):
        clock.now += 20
        health.failed(BROKEN, health.check())
    clock.now += 20
    health.check()
    health.succeeded()
    assert not any(is_open(health) for _ in range(10))
    assert health.failed(BROKEN) == 0.02
    for _ in range(FAILURES_TO_OPEN - 1):
        health.failed(BROKEN)
    assert wait_for_probe(health, clock)[0] == 1


def test_an_answer_to_a_call_from_before_closes_the_circuit_too(health: CircuitBreaker) -> None:
    health.check()
    open_circuit(health)
    health.succeeded()
    assert not is_open(health)


def test_pauses_are_spread_but_never_longer_than_said(clock: Clock) -> None:
    pauses = set()
    for seed in range(50):
        health = CircuitBreaker(clock, random.Random(seed))
        open_circuit(health)
        pauses.add(wait_for_probe(health, clock)[0])
    assert min(pauses) >= 0.75 and max(pauses) <= 1
    assert len(pauses) > 1


EVENTS = st.lists(
    st.tuples(st.sampled_from(["check", "fail", "break", "drop", "succeed", "wait"]), st.integers(0, 9)), max_size=60
)
PROBE: list[tuple[str, int]] = [("break", 0), ("wait", 1), ("check", 0)]


@given(EVENTS)
@example([("check", 0), *PROBE, ("drop", 0)])
@example([*PROBE, ("break", 0)])
@example([*PROBE, *PROBE[1:], ("fail", 0)])
@example([*PROBE, ("fail", 0), ("wait", 9), ("check", 0), ("drop", 0)])
@example([*PROBE, ("succeed", 0), ("break", 0), ("fail", 0)])
def test_only_the_probe_that_is_out_says_when_the_next_one_goes_and_that_is_soon(
    events: list[tuple[str, int]],
) -> None:
    clock = Clock()
    health = CircuitBreaker(clock, random.Random(1))
    calls: list[int] = []
    out = -1  # which of the calls is the probe
    for event, which in events:
        before = health.open_until
        if event == "check":
            with suppress(StoreUnavailable):
                calls.append(health.check())
                out = -1 if before is None else len(calls) - 1
        elif event == "wait":
            clock.now += which
        elif event == "break":
            open_circuit(health)
            assert before is None or health.open_until == before
        elif calls and event == "succeed":
            health.succeeded()
            out = -1
        elif calls:
            call = which % len(calls)
            if event == "drop":
                health.dropped(calls[call])
            else:
                delay_s = health.failed(BROKEN, calls[call])
                longest_s = 0.02 * 2 ** (health.failures - 1)
                assert delay_s is None or longest_s / 2 <= delay_s <= longest_s
            if before is not None and call != out:
                assert health.open_until == before
            elif event == "fail":
                out = -1
    clock.now += LONGEST_PAUSE_S
    assert not is_open(health)


def test_of_many_threads_one_is_the_probe(health: CircuitBreaker, clock: Clock) -> None:
    open_circuit(health)
    clock.now += 1
    start = threading.Barrier(8)
    let_through: list[int] = []

    def knock() -> None:
        start.wait()
        for _ in range(200):
            try:
                let_through.append(health.check())
            except StoreUnavailable:
                continue

    threads = [threading.Thread(target=knock) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(let_through) == 1


def test_failures_of_many_threads_are_all_counted(clock: Clock) -> None:
    health = CircuitBreaker(clock, NoSpread())
    delays: list[float | None] = []
    start = threading.Barrier(FAILURES_TO_OPEN)

    def fail() -> None:
        start.wait()
        delays.append(health.failed(BROKEN))

    threads = [threading.Thread(target=fail) for _ in range(FAILURES_TO_OPEN)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert delays.count(None) == 1
    assert is_open(health)
