"""Policies choose an engine; other packages bring theirs by an entry point. What names
of all kinds have in common is tested with those of allocators.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.errors import ConfigError
from infinistore.scheduling import (
    Engine,
    LeastWork,
    Policy,
    Request,
    RoundRobin,
    Soonest,
    create_policy,
    policy_names,
    price_s,
)
from tests.installing import install

BUILT_IN = ["soonest", "least-work", "round-robin"]


def fleet(number: int = 3, bytes_per_s: float = 1e6) -> list[Engine]:
    return [
        Engine(
            *(f"engine-{index}",),
            cache_blocks=100,
            bytes_per_token=1_000,
            tokens_per_s=1_000,
            bytes_per_s=bytes_per_s,
        )
        for index in range(number)
    ]


def prompt(tokens: int, name: str = "", stored: int = 0) -> Request:
    return Request(tokens, [f"{name}{number}" for number in range(tokens // 100)], 100, stored)


sent = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3_000), st.integers(0, 20), st.sampled_from("abc")))


@given(sent, st.integers(1, 3_000), st.integers(0, 20), st.sampled_from("abc"))
def test_the_soonest_engine_is_chosen(
    before: list[tuple[int, int, int, str]], tokens: int, stored: int, name: str
) -> None:
    engines = fleet(4)
    for number, (index, length, blocks, beginning) in enumerate(before):
        engines[index].send(number, prompt(length, beginning, blocks), 0.0)
    request = prompt(tokens, name, stored)
    busy = sum(engine.busy_share(0.5) for engine in engines) / 4

    def price(engine: Engine) -> float:
        plan = engine.plan(request, 0.5)
        return price_s(plan.first_token_s, plan.compute_s, busy)

    assert price(Soonest().pick(request, engines, 0.5)) <= min(map(price, engines)) + 0.001
    least = LeastWork().pick(request, engines, 0.5)
    assert least.queued_s(0.5) <= min(engine.queued_s(0.5) for engine in engines) + 0.001


def test_soonest_goes_where_the_prompt_is_if_the_queue_is_shorter_than_what_that_saves() -> None:
    engines = fleet()
    engines[1].send("before", prompt(2_000, "a"), 0.0)
    engines[1].answered("before", 2.0)
    assert Soonest().pick(prompt(2_000, "a"), engines, 2.0) is engines[1]
    engines[1].send("more", prompt(1_500, "b"), 2.0)
    assert Soonest().pick(prompt(2_000, "a"), engines, 2.0) is engines[1]
    engines[1].send("still more", prompt(1_500, "c"), 2.0)
    assert Soonest().pick(prompt(2_000, "a"), engines, 2.0) is not engines[1]


def test_busy_engines_are_spared_what_another_need_not_compute() -> None:
    """One has the prompt and more to do first; that delays it, but nobody else."""
    engines = fleet(2)
    engines[1].send("before", prompt(2_000, "a"), 0.0)
    engines[1].answered("before", 2.0)
    request = prompt(2_000, "a")
    idle = [engine.plan(request, 2.0).first_token_s for engine in engines]
    engines[1].send("more", prompt(2_500, "b"), 2.0)
    assert Soonest().pick(request, engines, 2.0) is engines[0]
    for number in range(60):
        engines[0].send(number, prompt(3_000, f"{number} "), 3.0 * number)
        engines[0].answered(number, 3.0 * number + 3.0)
    now = 182.0
    engines[1].answered("more", now)
    engines[1].send("still more", prompt(2_500, "c"), now)
    assert engines[0].plan(request, now).first_token_s == pytest.approx(idle[0], rel=0.01)
    assert Soonest().pick(request, engines, now) is engines[1]


def test_soonest_leaves_an_engine_whose_link_is_occupied_to_those_that_need_none() -> None:
    engines = fleet(2)
    engines[0].send("loads", prompt(3_000, "a", stored=30), 0.0)
    engines[1].send("computes", prompt(2_000, "b"), 0.0)
    assert Soonest().pick(prompt(1_000, "c", stored=9), engines, 0.0) is engines[1]
    assert Soonest().pick(prompt(1_000, "d"), engines, 0.0) is engines[0]


@pytest.mark.parametrize("name", BUILT_IN)
def test_equal_engines_take_turns(name: str) -> None:
    policy, engines = create_policy(name), fleet()
    picked = [policy.pick(prompt(100, str(number)), engines, 0.0).name for number in range(7)]
    assert picked == ["engine-0", "engine-1", "engine-2"] * 2 + ["engine-0"]


@pytest.mark.parametrize("name", ["soonest", "least-work"])
def test_engines_that_hardly_differ_take_turns(name: str) -> None:
    engines = [Engine(f"engine-{number}", cache_blocks=9, bytes_per_token=1) for number in range(3)]
    engines[0].send("short", prompt(5), 0.0)  # half a millisecond
    engines[1].send("longer", prompt(500), 0.0)
    policy = create_policy(name)
    picked = [policy.pick(prompt(100), engines, 0.0).name for _ in range(3)]
    assert picked == ["engine-0", "engine-2", "engine-2"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_engines_may_come_and_go(name: str) -> None:
    policy, engines = create_policy(name), fleet(4)
    picked = [policy.pick(prompt(100), engines[:number], 0.0) for number in (4, 4, 4, 4, 1, 2, 1, 3, 4)]
    assert all(engine in engines for engine in picked)
    assert picked[4] is picked[6] is engines[0]


@pytest.mark.parametrize("policy", [Soonest(), LeastWork(), RoundRobin()])
def test_without_an_engine_there_is_an_error(policy: Policy) -> None:
    with pytest.raises(ValueError, match="no engine to pick from"):
        policy.pick(prompt(100), [], 0.0)


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with policies of its own."""
    source = (
        "class First:\n"
        "    def pick(self, request, engines, now):\n"
        "        return engines[0]\n"
        "class NotOne:\n"
        "    pass\n"
        "class Fails:\n"
        "    def __init__(self):\n"
        "        raise RuntimeError('no licence')\n"
    )
    module = "other_package_of_policies"
    entries = {
        "first": f"{module}:First",
        "not-one": f"{module}:NotOne",
        "fails": f"{module}:Fails",
        "gone": "module_that_is_not_there:Anything",
    }
    install(tmp_path, monkeypatch, "infinistore.policies", entries, module=module, source=source)


@pytest.mark.usefixtures("other_package")
def test_a_policy_of_another_package_works_by_name() -> None:
    engines = fleet()
    policy = create_policy("first")
    assert [policy.pick(prompt(100), engines, 0.0) for _ in range(2)] == [engines[0]] * 2
    assert policy_names() == [*BUILT_IN, "fails", "first", "gone", "not-one"]
    assert isinstance(create_policy(), Soonest)


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone", "module_that_is_not_there"),
        ("not-one", r"makes a NotOne, which has no method pick\(request, engines, now\)"),
        ("fails", "no licence"),
    ],
)
def test_one_that_cannot_be_used_says_why(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        create_policy(name)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no policy called 'sonest'\. Did you mean 'soonest'\?.*least-work"):
        create_policy("sonest")
