"""An engine as its scheduler sees it: queue, link and cache follow what it was sent and
when it answered.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.scheduling import Engine, Loads, Plan, RecentBlocks, Request

SPEED = 1_000.0
BLOCK = 100


def engine(loads: Loads = "always", bytes_per_s: float = 1e6, cache_blocks: int = 1_000) -> Engine:
    """One that computes 1,000 tokens/s and loads 1,000 tokens/s."""
    return Engine(
        *("engine",),
        cache_blocks=cache_blocks,
        bytes_per_token=1_000,
        tokens_per_s=SPEED,
        bytes_per_s=bytes_per_s,
        loads=loads,
    )


def prompt(tokens: int, name: str = "", stored: int = 0) -> Request:
    return Request(tokens, [f"{name}{number}" for number in range(tokens // BLOCK)], BLOCK, stored)


@given(st.integers(0, 6), st.lists(st.lists(st.integers(0, 9), max_size=8, unique=True), max_size=20))
def test_recent_blocks_are_those_used_last_and_the_tail_falls_out_first(most: int, prompts: list[list[int]]) -> None:
    blocks, model = RecentBlocks(most), list[int]()
    for one in prompts:
        blocks.add(one)
        model = [block for block in model if block not in one] + one[::-1]
        model = model[max(0, len(model) - most) :]
        assert len(blocks) == len(model)
        leading = 0
        while leading < len(one) and one[leading] in model:
            leading += 1
        assert blocks.leading(one) == leading == min(len(one), most)
    blocks.discard([*range(5), "never there"])
    assert len(blocks) == len([block for block in model if block >= 5])


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 4_000)), min_size=1, max_size=20))
def test_first_tokens_are_predicted_if_the_engine_is_as_fast_as_measured(sent: list[tuple[float, int]]) -> None:
    """It computes prompts one after the other, with nothing to load."""
    seen, now, free_at = engine(), 0.0, 0.0
    running: list[tuple[float, int]] = []
    for number, (pause, tokens) in enumerate(sent):
        now += pause
        while running and running[0][0] <= now:
            finished, name = running.pop(0)
            seen.answered(name, finished)
        free_at = max(free_at, now) + tokens / SPEED
        plan = seen.send(number, prompt(tokens, f"{number} "), now)
        assert now + plan.first_token_s == pytest.approx(free_at)
        assert seen.queued_s(now) == pytest.approx(free_at - now)
        running.append((free_at, number))
    for finished, name in running:
        seen.answered(name, finished)
    assert (seen.requests, seen.prompt_tokens, seen.queued_s(free_at)) == (0, 0, 0.0)
    assert seen.prefill.seconds(0, 4_000) == pytest.approx(4.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "answered", "lost"]), st.floats(0, 5), st.integers(0, 9), st.integers(0, 30)
        ),
        max_size=40,
    ),
    st.sampled_from(["always", "faster", "never"]),
)
def test_no_order_of_events_makes_a_queue_negative(events: list[tuple[str, float, int, int]], loads: Loads) -> None:
    seen, now, waiting = engine(loads, cache_blocks=20), 0.0, dict[int, int]()
    for event, pause, name, blocks in events:
        now += pause
        if event == "answered":
            seen.answered(name, now)
            waiting.pop(name, None)
        elif event == "lost":
            seen.lost(name, now)
            waiting.pop(name, None)
        elif name not in waiting:
            waiting[name] = blocks * BLOCK + 1
            plan = seen.send(name, prompt(waiting[name], f"{name % 3} ", blocks), now)
            assert plan.cached_tokens <= plan.reused_tokens < waiting[name]
            assert min(plan.loaded_s, plan.load_s, plan.queued_s) >= 0 < plan.compute_s <= plan.first_token_s
        assert seen.queued_s(now) >= 0 <= seen.link_queued_s(now)
        assert 0 <= seen.busy_share(now) <= 1
        assert (seen.requests, seen.prompt_tokens) == (len(waiting), sum(waiting.values()))
        if not waiting:
            assert seen.queued_s(now) == seen.link_queued_s(now) == 0


def test_a_queue_shrinks_with_time_but_not_below_what_has_not_begun() -> None:
    seen = engine()
    seen.send("first", prompt(2_000, "a"), 10.0)
    seen.send("second", prompt(3_000, "b"), 11.0)
    assert seen.queued_s(11.0) == pytest.approx(4.0)
    assert seen.queued_s(11.5) == pytest.approx(3.5)
    assert seen.queued_s(99.0) == pytest.approx(3.0)  # the first takes longer than expected
    seen.answered("first", 99.0)
    assert seen.queued_s(100.0) == pytest.approx(2.0, rel=0.8)


def test_a_request_that_is_cancelled_leaves_the_queue_and_teaches_nothing() -> None:
    seen = engine()
    seen.send("first", prompt(2_000, "a"), 0.0)
    seen.send("second", prompt(3_000, "b"), 0.0)
    seen.send("third", prompt(4_000, "c"), 0.0)
    seen.lost("second", 1.0)
    assert seen.queued_s(1.0) == pytest.approx(5.0)
    seen.lost("first", 1.5)  # it was being computed: the third begins now
    assert seen.queued_s(2.5) == pytest.approx(3.0)
    assert seen.prefill.measured_at is None
    seen.lost("third", 3.0)
    seen.lost("never sent", 3.0)
    seen.answered("never sent", 3.0)
    assert seen.queued_s(3.0) == 0
    seen.send("first", prompt(1_000, "d"), 5.0)  # a name may come again
    assert seen.queued_s(5.5) == pytest.approx(0.5)


def test_the_same_name_twice_is_refused() -> None:
    seen = engine()
    seen.send("one", prompt(100), 0.0)
    with pytest.raises(ValueError, match="'one' before"):
        seen.send("one", prompt(100), 0.0)


def test_an_engine_learns_from_prompts_that_had_to_wait_for_it() -> None:
    """Or one that seems too fast is sent all long prompts, is never idle, and never
    found out.
    """
    seen, now = engine(), 0.0
    for number in range(60):
        seen.send(number, prompt(1_000, f"{number} "), now)
    for number in range(60):
        now += 3.0
        seen.answered(number, now)
    assert seen.prefill.seconds(0, 1_000) == pytest.approx(3.0, rel=0.05)


def test_the_time_of_a_load_is_not_taken_for_computation() -> None:
    seen = engine()
    seen.send("loads", prompt(2_000, "a", stored=10), 0.0)
    seen.answered("loads", 60.0)
    assert seen.prefill.measured_at is None


def test_a_prompt_that_was_loaded_long_before_its_turn_is_measured() -> None:
    seen = engine()
    seen.send("computes", prompt(5_000, "a"), 0.0)
    seen.send("loads", prompt(2_000, "b", stored=10), 0.0)
    seen.answered("computes", 5.0)
    seen.answered("loads", 7.0)
    assert seen.prefill.measured_at == 7.0
    assert seen.prefill.seconds(0, 1_000) > 1.05  # the last 1,000 tokens took 2 s


def test_an_engine_without_requests_has_nothing_to_load() -> None:
    seen = engine()
    seen.send("loads", prompt(2_000, "a", stored=15), 0.0)
    assert seen.link_queued_s(0.0) == pytest.approx(1.5)
    seen.lost("loads", 0.1)
    assert seen.link_queued_s(0.1) == 0


def test_a_name_that_comes_again_has_its_place_behind_those_sent_meanwhile() -> None:
    seen = engine()
    for name, tokens in (("first", 1_000), ("a", 2_000), ("b", 1_000)):
        seen.send(name, prompt(tokens, name), 0.0)
    seen.lost("a", 0.0)
    seen.send("a", prompt(2_000, "c"), 0.0)
    seen.answered("first", 1.0)
    seen.lost("b", 1.5)  # it was being computed
    assert seen.queued_s(2.0) == pytest.approx(1.5)


def test_a_prompt_under_way_makes_an_engine_busy() -> None:
    seen = engine()
    seen.send("long", prompt(90_000, "a"), 0.0)
    assert seen.busy_share(60.0) == pytest.approx(1 - 1 / math.e)
    seen.answered("long", 60.0)
    assert seen.busy_share(60.0) == pytest.approx(1 - 1 / math.e)
    assert seen.busy_share(120.0) < 0.25


def test_loads_wait_for_the_link_and_run_beside_the_computation() -> None:
    seen = engine()
    assert seen.plan(prompt(2_000, "a", stored=15), 0.0) == Plan(0, 1_500, 1.5, 1.5, 0.5, 0.0)
    assert seen.send("a", prompt(2_000, "a", stored=15), 0.0).first_token_s == pytest.approx(2.0)
    second = seen.send("b", prompt(1_000, "b", stored=5), 0.5)
    assert (second.loaded_s, second.load_s) == (1.5, 0.5)
    assert second.first_token_s == pytest.approx(2.0)  # with the load; the queue is 0.5 s
    assert seen.link_queued_s(0.5) == pytest.approx(1.5)
    computes = seen.plan(prompt(1_000, "c"), 0.5)
    assert (computes.load_s, computes.queued_s) == (0.0, 1.0)


def test_what_its_own_cache_has_is_neither_loaded_nor_computed() -> None:
    seen = engine()
    seen.send("a", prompt(1_050, "a"), 0.0)
    seen.answered("a", 1.05)
    plan = seen.plan(prompt(2_000, "a", stored=15), 2.0)
    assert (plan.cached_tokens, plan.reused_tokens, plan.load_s) == (1_000, 1_500, 0.5)
    seen.cache.discard(["a5"])
    assert seen.plan(prompt(2_000, "a", stored=15), 2.0).cached_tokens == 500


def test_the_last_token_is_always_computed() -> None:
    plan = engine().plan(prompt(1_000, "a", stored=10), 0.0)
    assert plan.reused_tokens == 999
    assert plan.compute_s > 0


@pytest.mark.parametrize(
    ("loads", "bytes_per_s", "reused"),
    [
        ("always", 1e4, 1_500),
        ("always", 1e8, 1_500),
        ("never", 1e8, 0),
        ("faster", 1e4, 0),
        ("faster", 1e8, 1_500),
    ],
)
def test_an_engine_is_expected_to_load_as_it_is_set(loads: Loads, bytes_per_s: float, reused: int) -> None:
    assert engine(loads, bytes_per_s).plan(prompt(2_000, "a", stored=15), 0.0).reused_tokens == reused


def test_a_busy_engine_is_expected_to_load_sooner_than_an_idle_one() -> None:
    """Loading takes 1.2 times as long as computing."""
    idle, busy = engine("faster", 0.8e6), engine("faster", 0.8e6)
    for number in range(30):
        busy.send(number, prompt(4_000, f"{number} "), number * 4.0)
        busy.answered(number, number * 4.0 + 3.9)
    assert idle.plan(prompt(2_000, "a", stored=15), 120.0).load_s == 0
    assert busy.busy_share(120.0) > 0.7
    assert busy.plan(prompt(2_000, "a", stored=15), 120.0).load_s > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loads": "sometimes"}, "not 'sometimes'"),
        ({"bytes_per_token": 0}, "bytes_per_token"),
        ({"tokens_per_s": 0}, "tokens_per_s"),
        ({"bytes_per_s": -1}, "bytes_per_s"),
        ({"cache_blocks": -1}, "-1 blocks"),
    ],
)
def test_an_engine_with_an_impossible_setting_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Engine("engine", **({"cache_blocks": 1, "bytes_per_token": 1} | change))  # type: ignore[arg-type]


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens"):
        Request(0)
