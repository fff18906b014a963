"""Whether to load or to compute: the cheaper way by what was measured, noticed again
when that changes.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.scheduling import Advice, LoadAdvisor, Reason, price_s

BYTES_PER_TOKEN = 1_000
ASKED = {"tokens": 2_000, "cached_tokens": 0, "stored_tokens": 1_500}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An advisor of an engine that computes 1,000 tokens/s."""

    def __init__(self, *link_tokens_per_s: float, ranks: int = 1, most_remembered: int = 100) -> None:
        self.clock = Clock()
        self.advisor = LoadAdvisor(
            self.clock, rank_bytes_per_token=BYTES_PER_TOKEN, ranks=ranks, most_remembered=most_remembered
        )
        self._names = itertools.count()
        self.computes()
        for rank, speed in enumerate(link_tokens_per_s):
            self.loads(speed, rank)

    def computes(self, tokens_per_s: float = 1_000.0) -> None:
        """Be measured, without being busy."""
        now = self.clock.now
        for _ in range(5):
            self.advisor.step(now - 1e-6 - 4_096 / tokens_per_s, now, [(0, 4_096)])
        self.clock.now += 50.0

    def loads(self, tokens_per_s: float, rank: int = 0, *, disk: bool = False) -> None:
        for _ in range(50):
            self.advisor.loaded(rank, round(1_000 * BYTES_PER_TOKEN), 1_000 / tokens_per_s, disk=disk)

    def ask(
        self, tokens: int = 2_000, stored: int = 1_500, *, cached: int = 0, on_disk: int = 0, queued_s: float = 0.0
    ) -> Advice:
        return self.advisor.advise(
            next(self._names),
            tokens=tokens,
            cached_tokens=cached,
            stored_tokens=stored,
            disk_tokens=on_disk,
            queued_s=queued_s,
        )


@given(
    st.floats(10, 1e5),
    st.integers(1, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.floats(0, 100),
)
def test_the_cheaper_way_is_taken(speed: float, tokens: int, cached: int, stored: int, queued_s: float) -> None:
    bench = Bench(speed)
    cached, stored = min(cached, tokens - 1), min(stored, tokens - 1)
    busy = bench.advisor.busy_share
    advice = bench.ask(tokens, stored, cached=cached, queued_s=queued_s)
    if stored <= cached:
        assert advice == Advice(load=False, reason=Reason.NOTHING)
        return
    rest_s, all_s = bench.advisor.compute_s(stored, tokens), bench.advisor.compute_s(cached, tokens)
    load = price_s(max(queued_s, (stored - cached) / speed) + rest_s, rest_s, busy)
    compute = price_s(queued_s + all_s, all_s, busy)
    assert advice.load_price_s == pytest.approx(load)
    assert advice.compute_price_s == pytest.approx(compute)
    assert advice.load == (advice.reason is Reason.CHEAPER)
    if abs(load - compute) > 1e-6:
        assert advice.load == (load < compute)


@pytest.mark.parametrize(("busy", "price"), [(0.0, 2.0), (0.5, 3.0), (0.9, 11.0), (0.95, 21.0), (1.0, 21.0)])
def test_a_busy_engine_is_dear(busy: float, price: float) -> None:
    assert price_s(2.0, 1.0, busy) == pytest.approx(price)


def test_nothing_is_skipped_before_loads_and_prefill_were_measured() -> None:
    fresh = LoadAdvisor(Clock(), rank_bytes_per_token=BYTES_PER_TOKEN)
    assert fresh.advise("a", **ASKED) == Advice(load=True, reason=Reason.UNMEASURED)
    fresh.loaded(0, 10, 1_000.0)  # very slow; but how fast it computes is not known
    assert fresh.advise("b", **ASKED).reason is Reason.UNMEASURED
    assert fresh.prefers_loading is None
    assert Bench().ask().reason is Reason.UNMEASURED


def test_a_slow_link_is_noticed_and_one_that_recovers_too() -> None:
    bench = Bench(100)
    assert bench.ask().reason is Reason.DEARER
    assert bench.advisor.prefers_loading is False
    bench.loads(100_000)
    assert bench.ask().reason is Reason.CHEAPER
    assert bench.advisor.prefers_loading is True


def test_of_twenty_requests_that_should_not_load_one_does() -> None:
    bench = Bench(100)
    reasons = []
    for _ in range(60):
        reasons.append(bench.ask().reason)
        bench.advisor.waiting(0, 0)
        bench.loads(100)
    assert [number for number, reason in enumerate(reasons, 1) if reason is Reason.TRIAL] == [20, 40, 60]
    assert set(reasons) == {Reason.DEARER, Reason.TRIAL}
    statistics = bench.advisor.statistics
    assert (statistics.loads, statistics.trials, statistics.skipped_loads) == (3, 3, 57)
    assert statistics.skipped_tokens == 57 * 1_500


def test_an_old_measurement_advises_to_load_until_computing_would_have_taken_as_long() -> None:
    bench = Bench(100)
    bench.computes()
    bench.clock.now += 9.0
    advice = bench.ask()
    assert (advice.load, advice.limit_s) == (False, None)
    bench.clock.now += 1.5  # 60.5 s after the link was measured
    advice = bench.ask()
    assert (advice.load, advice.reason, bench.advisor.statistics.trials) == (True, Reason.TRIAL, 1)
    assert advice.limit_s == pytest.approx(1.5, rel=0.01)
    fast = Bench(100_000)
    fast.clock.now += 61
    assert (fast.ask().reason, fast.ask().limit_s) == (Reason.CHEAPER, None)


def test_an_engine_that_has_only_loaded_for_long_still_knows_how_fast_it_computes() -> None:
    """A link that becomes slow then would never be noticed: nothing is computed."""
    bench = Bench(100_000)
    for _ in range(100):
        bench.clock.now += 11.0
        bench.loads(100_000)
        assert bench.ask().reason is Reason.CHEAPER
    bench.loads(100)
    assert bench.ask().reason is Reason.DEARER


def test_a_link_that_is_loading_is_not_taken_for_one_that_nobody_has_measured() -> None:
    bench = Bench(100)
    bench.clock.now += 55.0
    bench.computes()
    assert bench.ask().reason is Reason.TRIAL
    bench.advisor.waiting(0, 100 * 100 * BYTES_PER_TOKEN)
    bench.clock.now += 5.0
    assert bench.ask().reason is Reason.DEARER


def test_a_request_gets_the_same_advice_as_often_as_it_asks() -> None:
    bench = Bench(100)
    first = bench.advisor.advise("one", **ASKED)
    bench.loads(100_000)
    again = bench.advisor.advise("one", **ASKED)
    assert again is first
    assert bench.advisor.statistics.skipped_loads == 1
    bench.advisor.forget("one")
    bench.advisor.forget("never asked")
    assert bench.advisor.advise("one", **ASKED).load


def test_only_so_many_requests_are_remembered() -> None:
    bench = Bench(100, most_remembered=10)
    oldest = bench.advisor.advise("oldest", **ASKED)
    for _ in range(9):
        bench.ask()
    assert bench.advisor.advise("oldest", **ASKED) is oldest
    bench.ask()
    assert bench.advisor.advise("oldest", **ASKED) is not oldest


def test_the_slowest_rank_counts() -> None:
    assert Bench(9_000, 9_000, ranks=2).ask().load
    assert not Bench(9_000, 500, ranks=2).ask().load
    assert not Bench(500, 9_000, ranks=2).ask().load
    assert Bench(9_000, ranks=2).ask().reason is Reason.UNMEASURED


def test_memory_and_disks_are_measured_apart() -> None:
    bench = Bench(50_000)
    assert bench.ask(on_disk=100).reason is Reason.UNMEASURED
    bench.loads(100, disk=True)
    assert bench.ask().load
    assert bench.ask(on_disk=9_999).reason is Reason.DEARER  # more than was found
    bench.advisor.waiting(0, 0, disk=True)
    assert bench.ask(on_disk=9_999).load_price_s == bench.ask(on_disk=1_500).load_price_s
    assert bench.ask(on_disk=10).load


def test_what_waits_for_the_link_counts_and_drains_with_time() -> None:
    bench = Bench(10_000)
    bench.advisor.waiting(0, 100_000 * BYTES_PER_TOKEN)
    assert not bench.ask().load
    bench.clock.now += 9.5
    assert bench.ask().load
    bench.advisor.waiting(0, 0)
    assert bench.ask().load


def test_loads_that_were_just_advised_wait_too() -> None:
    bench = Bench(10_000)
    loads = [bench.ask(20_000, 19_000).load for _ in range(18)]
    assert 5 < loads.count(True) < 15  # each takes 1.9 s, and computing it 20 s
    assert loads == sorted(loads, reverse=True)
    bench.advisor.waiting(0, 0)
    assert bench.ask(20_000, 19_000).load


def test_a_queue_before_the_engine_hides_a_load() -> None:
    bench = Bench(900)
    assert not bench.ask().load
    assert bench.ask(queued_s=10.0).load


def test_a_busy_engine_loads_what_an_idle_one_computes() -> None:
    bench = Bench(900)
    assert not bench.ask().load
    for _ in range(60):
        bench.clock.now += 1.0
        bench.advisor.step(bench.clock.now - 1.0, bench.clock.now, [(0, 1_000)])
    assert bench.advisor.busy_share > 0.6
    bench.loads(900)
    assert bench.ask().load


def test_steps_that_only_decode_say_nothing() -> None:
    bench = Bench(900)
    share, seconds = bench.advisor.busy_share, bench.advisor.compute_s(0, 1_000)
    bench.advisor.step(bench.clock.now, bench.clock.now + 30, [])
    bench.advisor.step(bench.clock.now, bench.clock.now + 30, [(100, 100)])
    assert (bench.advisor.busy_share, bench.advisor.compute_s(0, 1_000)) == (share, seconds)


def test_short_steps_keep_the_engine_busy_and_are_not_measured() -> None:
    bench = Bench(900)
    seconds = bench.advisor.compute_s(0, 1_000)
    bench.advisor.step(bench.clock.now, bench.clock.now + 5.0, [(0, 100), (0, 50)])
    bench.clock.now += 5.0
    assert bench.advisor.compute_s(0, 1_000) == seconds
    assert bench.advisor.busy_share > 0


def test_a_step_with_parts_of_several_prompts_is_measured_as_one() -> None:
    one, several = Bench(), Bench()
    for _ in range(200):
        several.advisor.step(0.0, 3.0, [(0, 1_000), (4_000, 4_500), (0, 500)])
        one.advisor.step(0.0, 2.0, [(0, 1_000)])
    assert several.advisor.compute_s(0, 2_000) == pytest.approx(3.0, rel=0.1)
    assert one.advisor.compute_s(0, 2_000) == pytest.approx(4.0, rel=0.1)


def test_a_step_is_measured_where_its_tokens_stand() -> None:
    advisor = LoadAdvisor(Clock(), rank_bytes_per_token=BYTES_PER_TOKEN)
    for _ in range(100):
        advisor.step(0.0, 1.0, [(0, 1_000)])
        advisor.step(0.0, 3.0, [(30_000, 31_000)])
    assert advisor.compute_s(0, 1_000) == pytest.approx(1.0, rel=0.1)
    assert advisor.compute_s(30_000, 31_000) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("name", ["rank_bytes_per_token", "ranks", "expires_s", "trial_every", "most_remembered"])
def test_an_impossible_setting_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="above 0"):
        LoadAdvisor(Clock(), **({"rank_bytes_per_token": 1} | {name: 0}))
