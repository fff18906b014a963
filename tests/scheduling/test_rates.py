"""Rates follow what is measured: the speed of prefill with the share of attention, the
link, and how busy an engine was.
"""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.scheduling import BusyShare, LinkRate, PrefillRate

speeds = st.floats(50, 200_000)
lengths = st.integers(1, 130_000)


def truth(tokens_per_s: float, attention: float) -> Callable[[int, int], float]:
    return lambda first, end: ((end - first) + attention * (end * end - first * first) / 2) / tokens_per_s


@given(speeds, st.floats(0, 1e-4), st.lists(st.integers(300, 130_000), min_size=1, max_size=20))
def test_prompts_as_long_as_those_measured_are_predicted(
    tokens_per_s: float, attention: float, ends: list[int]
) -> None:
    seconds = truth(tokens_per_s, attention)
    rate = PrefillRate(10_000)
    for turn in range(200):
        end = ends[turn % len(ends)]
        rate.measured(0, end, seconds(0, end), turn)
    total = sum(seconds(0, end) for end in ends)
    assert sum(rate.seconds(0, end) for end in ends) == pytest.approx(total, rel=0.1)
    assert rate.measured_at == 199


@given(speeds, st.floats(0, 1e-4))
def test_attention_is_told_from_the_rest_if_lengths_differ(tokens_per_s: float, attention: float) -> None:
    seconds = truth(tokens_per_s, attention)
    rate = PrefillRate(10_000)
    for turn in range(300):
        end = (1_000, 8_000, 60_000)[turn % 3]
        rate.measured(0, end, seconds(0, end), turn)
    for first, end in ((0, 4_000), (30_000, 32_000), (0, 120_000)):
        assert rate.seconds(first, end) == pytest.approx(seconds(first, end), rel=0.15)


@given(st.lists(st.tuples(lengths, lengths, st.floats(0, 1e6)), max_size=30), lengths, lengths, lengths)
def test_more_tokens_never_take_less_time(
    measured: list[tuple[int, int, float]], first: int, second: int, third: int
) -> None:
    rate = PrefillRate(10_000)
    for one, other, seconds in measured:
        rate.measured(one, other, seconds, 0.0)
    first, second, third = sorted((first, second, third))
    assert 0 <= rate.seconds(first, second) <= rate.seconds(first, third) < math.inf
    assert rate.seconds(first, third) == pytest.approx(rate.seconds(first, second) + rate.seconds(second, third))


def test_a_single_slow_prompt_hardly_counts() -> None:
    rate = PrefillRate(1_000)
    for turn in range(50):
        rate.measured(0, 2_000, 2.0, turn)
    rate.measured(0, 2_000, 300.0, 50.0)
    assert 2.0 < rate.seconds(0, 2_000) < 2.3


def test_many_short_prompts_do_not_displace_what_long_ones_said() -> None:
    rate = PrefillRate(1_000)
    for turn in range(50):
        rate.measured(0, 8_000, 8.0, turn)
    for turn in range(500):
        rate.measured(7_990, 8_000, 0.03, turn)
    assert rate.seconds(0, 8_000) == pytest.approx(8.0, rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.5, 3.0, 20.0])
def test_an_engine_that_becomes_slower_or_faster_is_noticed(factor: float) -> None:
    rate = PrefillRate(1_000)
    for turn in range(200):
        rate.measured(0, 2_000, 2.0, turn)
    for turn in range(300):
        rate.measured(0, 2_000, 2.0 * factor, turn)
    assert rate.seconds(0, 2_000) == pytest.approx(2.0 * factor, rel=0.05)


def test_one_measurement_outweighs_the_guess() -> None:
    rate = PrefillRate(10_000)
    rate.measured(0, 4_000, 1.0, 0.0)
    assert rate.seconds(0, 4_000) == pytest.approx(1.0, rel=0.1)


def test_a_short_prompt_that_comes_first_is_not_all_that_is_known() -> None:
    rate = PrefillRate(10_000)
    rate.measured(0, 10, 0.03, 0.0)
    assert 0.4 < rate.seconds(0, 4_000) < 1.2


def test_noise_among_prompts_of_one_length_is_hardly_taken_for_attention() -> None:
    rate = PrefillRate(1_000)
    for turn in range(100):
        rate.measured(0, 7_900, 7.5, turn)
        rate.measured(0, 8_100, 8.5, turn)
    assert rate.seconds(0, 8_000) == pytest.approx(8.0, rel=0.02)
    assert 32 < rate.seconds(0, 32_000) < 80


@pytest.mark.parametrize(("first", "end", "seconds"), [(100, 100, 1.0), (100, 50, 1.0), (0, 100, 0.0), (0, 100, -1.0)])
def test_a_measurement_of_nothing_is_ignored(first: int, end: int, seconds: float) -> None:
    rate = PrefillRate(1_000)
    rate.measured(first, end, seconds, 5.0)
    assert rate.measured_at is None
    assert rate.seconds(0, 1_000) == pytest.approx(1.0)


@pytest.mark.parametrize("guess", [0.0, -1.0, math.inf, math.nan])
def test_a_guess_that_is_no_speed_is_refused(guess: float) -> None:
    with pytest.raises(ValueError, match="tokens_per_s must be above 0"):
        PrefillRate(guess)
    with pytest.raises(ValueError, match="bytes_per_s must be above 0"):
        LinkRate(guess)


@given(st.floats(1e3, 1e12), st.lists(st.integers(1, 10**12), min_size=1, max_size=30))
def test_a_steady_link_has_its_speed(bytes_per_s: float, sizes: list[int]) -> None:
    link = LinkRate(1e9)
    for turn, size in enumerate(sizes):
        link.measured(size, size / bytes_per_s, turn)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert link.measured_at == len(sizes) - 1


def test_a_link_that_stalls_is_slow_before_its_read_ends() -> None:
    link = LinkRate(1e9)
    for turn in range(20):
        link.measured(10**9, 1.0, turn)
    for turn in range(20):
        link.measured(0, 1.0, 20 + turn)
    assert link.bytes_per_s < 0.2e9
    link.measured(-1, 1.0, 99)
    assert link.measured_at == 39
    stalled = LinkRate(1e9)
    stalled.measured(0, 5.0, 0.0)
    assert stalled.bytes_per_s == 1


def test_after_a_minute_one_short_read_outweighs_long_slow_ones() -> None:
    link = LinkRate(1e9)
    for turn in range(5):
        link.measured(16_000_000, 8.0, 8.0 * turn)
    assert link.bytes_per_s == pytest.approx(2e6)
    link.measured(16_000_000, 0.1, 100.0)
    assert link.bytes_per_s > 100e6


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=10), st.floats(0, 100))
def test_the_busy_share_weighs_each_moment_by_its_age(stretches: list[tuple[float, float]], after: float) -> None:
    busy = BusyShare(window_s=60)
    now = expected = 0.0
    for idle, computing in stretches:
        began, now = now + idle, now + idle + computing
        assert busy.at(began + computing / 2, busy_since=began) >= busy.at(began) * (1 - 1e-9)
        expected = expected * math.exp((-idle - computing) / 60) + 1 - math.exp(-computing / 60)
        busy.busy(began, now)
    assert busy.at(now) == pytest.approx(expected, abs=1e-9)
    assert busy.at(now + after) == pytest.approx(expected * math.exp(-after / 60), abs=1e-9)
    assert 0 <= busy.at(now) <= 1


def test_times_that_overlap_count_once() -> None:
    once, twice = BusyShare(), BusyShare()
    once.busy(10, 40)
    for began, ended in ((10, 30), (12, 25), (20, 40), (0, 5)):
        twice.busy(began, ended)
    assert twice.at(40) == pytest.approx(once.at(40))
    assert twice.at(35) == twice.at(40)
